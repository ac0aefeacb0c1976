"""Which record comes next: rates of sources, and draws (paper: data mixture; spec 9).

in    sources and what is said of their shares: fixed rates, or groups whose members share by the square root of their sizes
out   draw i -> (source, index, epoch), for any i at once

    --data a.jsonl=0.6 b.jsonl=0.4        fixed rates
    --data mix.json                       a list of entries; see `read_mix`
    --data published                      a folder with NAME/records.jsonl of the recipe's mixture (stages/stage1.py, stage2.py)
"""

import dataclasses
import importlib
import json
import math
import sys
import zlib
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np

from records.reader import DataError, Options, Records


def rng_for(seed, *key):
    """A generator for the seed and anything else (numbers or strings): the same on every machine and in every process."""
    return np.random.default_rng([seed, *(zlib.crc32(k.encode()) if isinstance(k, str) else k for k in key)])


# ---------------------------------------------------------------------------------------------------------------
# rates


def share(n, size=None, rate=None):
    """What a source of n records weighs in its group (spec 9.1): the square root of its size, times a rate of its own.

    size None: n. Below 1: that part of n. From 1 on: as if it had so many. 0: as if it had one.
    """
    counted = n if size is None else 1 if size == 0 else n * size if size < 1 else size
    return math.sqrt(counted) * (1 if rate is None else rate)


def rates_of(groups):
    """groups: [(rate, [share, ..]), ..] -> a list of rates per group, all together 1: a group's rate is divided by its members' shares."""
    total = sum(rate for rate, _ in groups)
    return [[rate / total * s / sum(shares) for s in shares] for rate, shares in groups]


def published(mixture, folder):
    """A recipe's MIXTURE and the folder of its sets -> entries as `read_mix` gives them."""
    return [{"group": name, "rate": rate, "data": [{"path": str(Path(folder) / label.split(":")[0] / "records.jsonl"), "sampling_rate": own,
             **({"size": float(label.split(":")[1])} if ":" in label else {})} for own, labels in members for label in labels.split()]}
            for name, rate, members in mixture]


ENTRY = {"path": str, "media": str, "rate": float, "size": float, "sampling_rate": float, "split_turns": bool, "group_by_media": bool,
         "path_prefix_field": str, "style": str, "weight": float, "lenient": bool, "strict": bool}


def read_mix(path):
    """A mix.json -> its entries; ValueError in one sentence if it is none.

    A list of {"path": .., "rate": 1, "media": .., "style": .., ..} with fixed rates, and of groups {"group": name, "rate": 1,
    "data": [entries]}, whose members share the group's rate by the square root of their sizes ("size" and "sampling_rate": see
    `share`). Paths are relative to the file's folder.
    """
    folder = Path(path).parent

    def entry(e, inside):
        if not isinstance(e, dict):
            raise ValueError(f"{path}: an entry is {json.dumps(e)[:40]}, not an object")
        known = {"group": str, "rate": float, "data": list} if "group" in e and not inside else ENTRY
        for key, value in e.items():
            kind = (int, float) if known.get(key) is float else known.get(key)
            if kind is None or not isinstance(value, kind) or (isinstance(value, bool) and known[key] is not bool):
                raise ValueError(f"{path}: '{key}': {json.dumps(value)[:40]} in an entry; there are {', '.join(known)}")
            if known[key] is float and not (0 < value < math.inf or (key == "size" and value == 0)):
                raise ValueError(f"{path}: '{key}' must be above 0, not {value}")
        if "group" in known:
            if not e.get("data"):
                raise ValueError(f"{path}: the group '{e['group']}' has no data")
            return {**e, "data": [entry(member, True) for member in e["data"]]}
        if "path" not in e:
            raise ValueError(f"{path}: an entry without a path")
        misplaced = ({"rate"} if inside else {"size", "sampling_rate"}) & set(e)
        if misplaced:
            raise ValueError(f"{path}: '{min(misplaced)}' of {e['path']} means something only {'outside' if inside else 'in'} a group")
        return {**e, **{key: str(folder / e[key]) for key in ("path", "media") if key in e}}

    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as e:
        raise ValueError(f"{path}: not JSON: {e}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: a mix is a list of entries")
    return [entry(e, False) for e in entries]


# ---------------------------------------------------------------------------------------------------------------
# sources


def name_apart(sources):
    """Files of one name get their folders in front: names stand in ids, in draws and in the log."""
    for parts in (2, 3, 4, 99):
        again = {name for name, n in Counter(s.name for s in sources).items() if n > 1}
        for s in sources:
            if s.name in again:
                s.name = "/".join(s.path.absolute().parts[-parts:]).replace("//", "/")
    for k, s in enumerate(sources):
        again = [other for other in sources[:k] if other.path == s.path]
        if any(other.options == s.options for other in again):
            raise DataError(f"--data: {s.path} is named twice")
        s.name += f"#{len(again) + 1}" * bool(again)         # read in another way: records of their own


def open_sources(args, config):
    """What --data names -> sources, rates, records to evaluate on (None for the toy world); DataError in a sentence."""
    if not args.data:
        if not args.tiny:
            raise DataError("--data: name record files to train on (or --tiny for the toy world, which needs none)")
        from toy import world as tiny

        return *tiny.mixture(config.seed, config.stage), None
    groups = []                      # (rate, entries): a file with a rate of its own is a group of one
    for item in args.data:
        path, rate = item, 1.0
        if "=" in item and not Path(item).exists():
            path, _, text = item.rpartition("=")
            try:
                rate = float(text)
            except ValueError:
                raise DataError(f"--data {item}: '{text}' is no rate") from None
            if not 0 < rate < math.inf:
                raise DataError(f"--data {item}: a rate must be above 0")
        entries = [{"path": path}]
        if Path(path).is_dir():
            entries = published(importlib.import_module(f"stages.stage{config.stage}").MIXTURE, path)
        elif Path(path).name.endswith("mix.json"):
            try:
                entries = read_mix(path)
            except (OSError, ValueError) as e:
                raise DataError(f"--data {path}: {e}") from None
        total = sum(e.get("rate", 1) for e in entries)
        groups += [(rate * e.get("rate", 1) / total, e.get("data", [e])) for e in entries]
    missing = [e["path"] for _, members in groups for e in members if not Path(e["path"]).exists()]
    if missing and len(args.data) == len(missing) == sum(len(members) for _, members in groups):
        raise DataError(f"--data {missing[0]}: no such file")
    if missing:
        print(*(f"{path}: no such file" for path in missing), sep="\n", file=sys.stderr)
        if not args.skip_missing:
            own = [path for path in args.data if Path(path).is_dir() and any(f.suffix in (".jsonl", ".json") for f in Path(path).iterdir())]
            hint = f"; {own[0]} is a folder, for the published sets; of records of your own name the file" if own else ""
            raise DataError(f"--data: {len(missing)} files of the mixture are missing; --skip-missing trains without them{hint}")
    options = [f.name for f in dataclasses.fields(Options)]
    opened = [(rate, [(e, Records(e["path"], e.get("media", args.media), **{k: e[k] for k in options if k in e}))
                      for e in members if Path(e["path"]).exists()]) for rate, members in groups]
    opened = [(rate, members) for rate, members in opened if members]
    if not opened:
        raise DataError(f"--data: none of the {len(missing)} files of the mixture is there")
    shares = [(rate, [share(len(s), e.get("size"), e.get("sampling_rate")) for e, s in members]) for rate, members in opened]
    sources, rates = [s for _, members in opened for _, s in members], [r for group in rates_of(shares) for r in group]
    name_apart(sources)
    return sources, rates, list(Records(args.eval, args.media)) if args.eval else []


# ---------------------------------------------------------------------------------------------------------------
# draws


@lru_cache(maxsize=64)
def _shuffled(n, *key):
    return rng_for(*key).permutation(n)


@lru_cache(maxsize=1024)
def _round_keys(*key):
    return rng_for(*key).integers(1 << 32, size=6, dtype=np.uint64).tolist()


def permute_index(i, n, *key):
    """Where the rng_for permutation of 0..n-1 sends i, without holding the permutation: a Feistel network of six rounds.

    It shuffles the numbers of an even number of bits, of which n may not be one: what lands at n or above goes round again.
    """
    half = max((n - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for k in _round_keys(*key):
            mixed = (right + k) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF           # multiply and fold: every bit reaches every other
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed ^ mixed >> 32) & mask
        i = left << half | right
        if i < n:
            return i


class Mixture:
    """Draw i -> (source, index, epoch), a function of (seed, i) alone: no state, any draw at once.

    Shares are exact: of any first n draws (n a multiple of `block`) source k has its rate's share to within one per
    source before it; inside a block the order is shuffled. Every epoch of a source is a permutation of it (spec 9).
    """

    def __init__(self, sources, rates, seed, block=1000):
        assert len(sources) == len(rates) > 0 and min(rates) > 0, rates
        self.sources, self.seed, self.block = sources, seed, block
        # the first source takes its share of all draws, the next its share of what is left, and so on
        left = np.cumsum(np.array(rates, np.float64)[::-1])[::-1]
        self.shares = (np.array(rates) / left).tolist()

    def __getitem__(self, i):
        block, r = divmod(i, self.block)
        n = block * self.block + int(_shuffled(self.block, self.seed, "block", block)[r])
        for k, share in enumerate(self.shares):
            before, after = math.floor(n * share), math.floor((n + 1) * share)
            if after > before or k == len(self.shares) - 1:
                n = before if k < len(self.shares) - 1 else n
                source = self.sources[k]
                epoch, j = divmod(n, len(source))
                ordered = getattr(source, "ordered", False)               # an endless source that comes as it is
                return k, j if ordered else permute_index(j, len(source), self.seed, source.name, epoch), epoch
            n -= before
