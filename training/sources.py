"""The record files of a run and the rate of each (paper: data mixture; docs/molmo2.md 9).

in    --data, --media, --eval
out   sources, their rates, which sum to 1, and the records to evaluate on

    --data a.jsonl=0.6 b.jsonl=0.4        fixed rates
    --data mix.json                       a list of entries; see `read_mix`
    --data FOLDER                         the published sets, FOLDER/NAME/records.jsonl

Files in a group share the group's rate by the square root of their sizes.
"""

import dataclasses
import hashlib
import json
import math
import os  # its path functions say no of a name that is too long, where those of Path raise
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path

from records.check import is_kind
from records.errors import DataError, warn
from records.mixture import group_rates, sqrt_size
from records.reader import Records
from training.config import STAGES

# {field of an entry: kind of its value, as of records.check}
OPTIONS = {"style": "text", "weight": "positive"}  # for records.reader.Records
FILE = {"path": "text", "media": "text", **OPTIONS}
FILE_FIELDS = {**FILE, "rate": "positive"}
MEMBER_FIELDS = {**FILE, "size": "0 or positive", "sampling_rate": "positive"}  # in a group
GROUP_FIELDS = {"group": "text", "rate": "positive", "data": "any"}


def published(mixture, folder):
    """The MIXTURE of a recipe, the folder of its sets -> entries as `read_mix` gives them."""
    entries = []
    for group, rate, parts in mixture:
        members = []
        for sampling_rate, labels in parts:
            for label in labels.split():
                name, _, size = label.partition(":")
                path = str(Path(folder, name, "records.jsonl"))
                member = {"path": path, "sampling_rate": sampling_rate}
                members.append(member | ({"size": float(size)} if size else {}))
        entries.append({"group": group, "rate": rate, "data": members})
    return entries


def read_mix(path):
    """A mix.json -> its entries, with paths that start in its folder; DataError if it is not one.

    It holds a list of {"path": .., "rate": 1, "media": .., "style": .., ..} with fixed rates and of
    groups {"group": name, "rate": 1, "data": [entries]}, whose members share the group's rate by
    `sqrt_size`, of which they may set "size" and "sampling_rate".
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        entries = json.loads(text, object_pairs_hook=without_twins)
        return read_entries(Path(path).parent, entries)
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f"{path}: not a mix, a list of entries with paths and rates: {e}") from None


def without_twins(pairs):
    """The (key, value) of a JSON object as a dict; ValueError if a key stands twice."""
    for key, n in Counter(key for key, _ in pairs).items():
        if n > 1:
            raise ValueError(f"'{key:.80}' stands {n} times in one entry; keep one")
    return dict(pairs)


def read_entries(folder, entries, in_group=False):
    """The list of a mix.json or of a group, with whole paths; ValueError if it is wrong."""
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_list or not entries:
        raise ValueError(f"expected a list of entries {{..}}, found {entries!r:.60}")
    return [read_entry(folder, entry, in_group) for entry in entries]


def read_entry(folder, entry, in_group):
    """An entry of a mix.json, with whole paths; ValueError if a field is wrong."""
    if "split_turns" in entry:
        raise ValueError("'split_turns' is now an option of the converter: python -m tools.convert "
                         "FILE OUT.jsonl --split-turns; name OUT.jsonl here without the option")
    is_group = "group" in entry and not in_group
    known = GROUP_FIELDS if is_group else MEMBER_FIELDS if in_group else FILE_FIELDS
    wrong = [name for name, value in entry.items()
             if name not in known or not is_kind(value, known[name])]
    needed = "data" if is_group else "path"
    if needed not in entry:
        wrong.append(needed)
    if wrong:
        raise ValueError(f"'{wrong[0]}' of {json.dumps(entry):.80} is missing, unknown or of a "
                         f"wrong kind or value; the fields are {', '.join(sorted(known))}")
    if is_group:
        return entry | {"data": read_entries(folder, entry["data"], in_group=True)}
    whole = {name: str(folder / entry[name]) for name in ("path", "media") if name in entry}
    return entry | whole


def read_item(item, stage):
    """One word of --data -> [(rate, entries of files), ..]; a file alone is a group of one."""
    path = item
    factor = 1
    if "=" in item and not os.path.exists(item):
        path, _, rate = item.rpartition("=")
        try:
            factor = float(rate)
        except ValueError:
            factor = math.nan
        if not is_kind(factor, "positive"):
            raise DataError(f"--data {item}: the rate '{rate}' is not from 1e-09 to 1e+12")
    entries = [{"path": path}]
    if os.path.isdir(path):
        entries = published(STAGES[stage].MIXTURE, path)
    elif Path(path).name.endswith("mix.json"):
        entries = read_mix(path)
    factor /= sum(entry.get("rate", 1) for entry in entries)
    return [(factor * entry.get("rate", 1), entry.get("data", [entry])) for entry in entries]


def unique_names(sources):
    """Makes the names of files unique, by which ids, the order of records and the log go:
    "folder/name" where two have the same name, then "folder/name#2"."""
    names = [source.name for source in sources]
    seen = Counter()
    for source, name in zip(sources, names, strict=True):
        if names.count(name) > 1:
            name = "/".join(source.path.absolute().parts[-2:])
        seen[name] += 1
        source.name = name if seen[name] == 1 else f"{name}#{seen[name]}"


def check_frames(source, config):
    """Warns once if a source has prepared frames of another sampling than that of the run."""
    if others := source.made_for - {(config.fps, config.max_frames)}:
        fps, max_frames = min(others)
        warn(f"{source.path}: its frames were made with --fps {fps:g} --max-frames {max_frames}, "
             f"and this run has --data.fps={config.fps:g} --data.max_frames={config.max_frames}; "
             "prepare them again with these numbers, or change the flags of the run")


def open_sources(args, config, world):
    """What --data and --eval name -> sources, rates, {name: records to evaluate on}; the last is
    None for the world of the toy, which has held-out parts of its own."""
    if not args.data and not args.tiny:
        raise DataError("--data: name record files to train on (or --tiny for the toy world, which "
                        "needs none)")
    if not args.data:
        return *world.mixture(config.seed, config.stage, kinds_name=config.toy_kinds), None
    groups = [group for item in args.data for group in read_item(item, config.stage)]
    paths = [entry["path"] for _, entries in groups for entry in entries]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        sentence = f"--data: no such file: {', '.join(path[:300] for path in missing)}"
        if missing == paths or not args.skip_missing:
            raise DataError(f"{sentence}; --skip-missing trains on those that are there (a folder "
                            "is for the published sets: name your own files)")
        warn(sentence)
    sources = []
    weighted = []
    for rate, entries in groups:
        weights = []
        for entry in (entry for entry in entries if entry["path"] not in missing):
            given = {name: entry[name] for name in OPTIONS.keys() & entry.keys()}
            source = Records(entry["path"], entry.get("media", args.media), **given)
            check_frames(source, config.data)
            sources.append(source)
            weights.append(sqrt_size(len(source), entry.get("size"), entry.get("sampling_rate")))
        if weights:
            weighted.append((rate, weights))
    unique_names(sources)
    eval_sets = [Records(path, args.media) for path in args.eval or ()]
    unique_names(eval_sets)
    eval_records = {records.name: list(records) for records in eval_sets}
    return sources, list(chain.from_iterable(group_rates(weighted))), eval_records


def fingerprint(sources, rates, tokenizer, config):
    """What the packs of a run depend on, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        files = b"".join(path.read_bytes() for path in sorted(Path(folder).iterdir()))
    found = {f"data.{key}": value for key, value in dataclasses.asdict(config.data).items()
             if key != "trained_crops"}  # of evaluation alone
    found |= {name: getattr(config, name) for name in ("seed", "pool_size", "pack_crops")}
    found["tokenizer"] = hashlib.sha256(files).hexdigest()
    found["data"] = [[source.name, rate, source.fingerprint]
                     for source, rate in zip(sources, rates, strict=True)]
    # the version of the rules by which an example makes its random choices (data.build_tree)
    found["draws"] = 3
    # without --beta pairs are skipped; files older than --beta have no such entry
    found["preferences"] = True if config.beta else None
    # JSON turns tuples into lists, as in a plan or a checkpoint that is read again
    return json.loads(json.dumps(found))


def list_changes(theirs, ours):
    """What differs between two fingerprints or two recipes, in words; "" if nothing does."""
    if "draws" in ours and theirs.get("draws") != ours["draws"]:
        return "this version of the code makes other random choices"
    changes = []
    for name, value in ours.items():
        if theirs.get(name) != value and name in ("data", "base"):
            changes.append(f"{name}: other files, or other contents")
        elif theirs.get(name) != value:
            changes.append(f"{name} was {theirs.get(name)!s:.60} and is {value!s:.60}")
    return "; ".join(changes)
