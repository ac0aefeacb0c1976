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
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from records.errors import warn
from records.mixture import group_rates, sqrt_size
from records.reader import DataError, Records
from stages.recipes import STAGES
from toy import world


class Group(NamedTuple):
    rate: float
    entries: list  # of dicts as in a mix.json; a file with a rate of its own is a group of one


# --------------------------------------------------------------------------------------------------
# mixtures


ENTRY_FIELDS = {
    "path": str, "media": str, "rate": float, "size": float, "sampling_rate": float,
    "split_turns": bool, "style": str, "weight": float,
}
OPTIONS = ("split_turns", "style", "weight")         # of Records
GROUP_FIELDS = {"group": str, "rate": float, "data": list}


def published(mixture, folder):
    """The MIXTURE of a recipe and the folder of its sets -> entries as `read_mix` gives them."""
    groups = []
    for name, group_rate, members in mixture:
        data = []
        for rate, labels in members:
            for label in labels.split():
                set_name, _, size = label.partition(":")
                path = str(Path(folder, set_name, "records.jsonl"))
                data.append({"path": path, "sampling_rate": rate})
                if size:
                    data[-1]["size"] = float(size)
        groups.append({"group": name, "rate": group_rate, "data": data})
    return groups


def read_mix(path):
    """A mix.json -> its entries, with paths that start in its folder; ValueError if it is not one.

    It holds a list of {"path": .., "rate": 1, "media": .., "style": .., ..} with fixed rates and of
    groups {"group": name, "rate": 1, "data": [entries]}, whose members share the group's rate by
    `sqrt_size`, of which they may set "size" and "sampling_rate".
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON: {e}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: a mix is a list of entries")
    return [checked_entry(path, entry) for entry in entries]


def checked_entry(path, entry, in_group=False):
    """An entry of the mix.json at `path`, with whole paths; ValueError if it is not one."""
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: an entry is {json.dumps(entry)[:40]}, not an object")
    is_group = "group" in entry and not in_group
    check_fields(path, entry, GROUP_FIELDS if is_group else ENTRY_FIELDS)
    if is_group:
        if not entry.get("data"):
            raise ValueError(f"{path}: the group '{entry['group']}' has no data")
        return entry | {"data": [checked_entry(path, member, True) for member in entry["data"]]}
    if "path" not in entry:
        raise ValueError(f"{path}: an entry without a path")
    for field in ("rate",) if in_group else ("size", "sampling_rate"):
        if field in entry:
            raise ValueError(f"{path}: '{field}' of {entry['path']} is only allowed "
                             f"{'outside' if in_group else 'in'} a group")
    folder = Path(path).parent
    return entry | {key: str(folder / entry[key]) for key in ("path", "media") if key in entry}


def check_fields(path, entry, kinds):
    """ValueError if a field of the entry is unknown, of another type, or a number not above 0."""
    for key, value in entry.items():
        kind = kinds.get(key)
        fits = isinstance(value, (int, float) if kind is float else kind or ())
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{path}: an entry has '{key}': {json.dumps(value)[:40]}; the fields "
                             f"are {', '.join(kinds)}")
        if kind is float and not (0 < value < math.inf or (key == "size" and value == 0)):
            raise ValueError(f"{path}: '{key}' must be above 0, not {value}")


# --------------------------------------------------------------------------------------------------
# sources


def read_item(item, stage):
    """One word of --data -> its groups; DataError in one sentence."""
    path, rate = item, 1.0
    if "=" in item and not Path(item).exists():
        path, _, text = item.rpartition("=")
        try:
            rate = float(text)
        except ValueError:
            raise DataError(f"--data {item}: the rate '{text}' is not a number") from None
        if not 0 < rate < math.inf:
            raise DataError(f"--data {item}: a rate must be above 0")
    entries = [{"path": path}]
    if Path(path).is_dir():
        entries = published(STAGES[stage].MIXTURE, path)
    elif Path(path).name.endswith("mix.json"):
        try:
            entries = read_mix(path)
        except (OSError, ValueError) as e:
            raise DataError(f"--data {path}: {e}") from None
    total = sum(entry.get("rate", 1) for entry in entries)
    return [Group(rate * entry.get("rate", 1) / total, entry.get("data", [entry]))
            for entry in entries]


def drop_missing(args, groups):
    """The groups without the files that are missing; DataError unless --skip-missing allows it."""
    paths = [entry["path"] for group in groups for entry in group.entries]
    missing = [path for path in paths if not Path(path).exists()]
    if not missing:
        return groups
    if len(args.data) == len(missing) == len(paths):
        raise DataError(f"--data {missing[0]}: no such file")
    for path in missing:
        warn(f"{path}: no such file")
    if not args.skip_missing:
        raise DataError(f"--data: {len(missing)} files of the mixture are missing; --skip-missing "
                        f"trains without them{own_records_hint(args.data)}")
    if len(missing) == len(paths):
        raise DataError(f"--data: none of the {len(missing)} files of the mixture is there")
    left = [Group(group.rate, [e for e in group.entries if Path(e["path"]).exists()])
            for group in groups]
    return [group for group in left if group.entries]


def own_records_hint(items):
    """How to name one's own records, where a folder of them was named like the published sets."""
    for item in items:
        if any(path.suffix in (".jsonl", ".json") for path in Path(item).glob("*")):
            return (f"; {item} is a folder, for the published sets; of records of your own name "
                    "the file")
    return ""


def unique_names(sources, flag="--data"):
    """Puts folders in front of the names of files that have the same one: ids, the order of records
    and the log go by names. DataError for a file that is named twice with the same options."""
    for n_parts in (2, 3, 4, 99):
        counts = Counter(source.name for source in sources)
        for source in sources:
            if counts[source.name] > 1:
                source.name = "/".join(source.path.absolute().parts[-n_parts:]).replace("//", "/")
    for k, source in enumerate(sources):
        same_file = [other for other in sources[:k] if other.path == source.path]
        if any(other.options == source.options for other in same_file):
            raise DataError(f"{flag}: {source.path} is named twice")
        if same_file:  # with other options: records of their own
            source.name += f"#{len(same_file) + 1}"


def open_sources(args, config):
    """What --data and --eval name -> (sources, rates, {name: records to evaluate on}); DataError.

    The records to evaluate on are None for the toy world, which has held-out parts of its own.
    """
    if not args.data:
        if not args.tiny:
            raise DataError("--data: name record files to train on (or --tiny for the toy world, "
                            "which needs none)")
        return *world.mixture(config.seed, config.stage, kinds_name=config.toy_kinds), None
    groups = []
    for item in args.data:
        groups += read_item(item, config.stage)
    sources = []
    weighted = []
    for group in drop_missing(args, groups):
        weights = []
        for entry in group.entries:
            given = {key: entry[key] for key in OPTIONS if key in entry}
            sources.append(Records(entry["path"], entry.get("media", args.media), **given))
            weights.append(sqrt_size(len(sources[-1]), entry.get("size"),
                                     entry.get("sampling_rate")))
        weighted.append((group.rate, weights))
    unique_names(sources)
    eval_sets = [Records(path, args.media) for path in args.eval or ()]
    unique_names(eval_sets, "--eval")
    eval_records = {records.name: list(records) for records in eval_sets}
    return sources, list(chain.from_iterable(group_rates(weighted))), eval_records


# --------------------------------------------------------------------------------------------------
# what the packs of a run depend on


def fingerprint(sources, rates, tokenizer, config):
    """What the packs of a run depend on, as JSON: two runs with the same have the same packs."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        files = b"".join(path.read_bytes() for path in sorted(Path(folder).iterdir()))
    named = zip(sources, rates, strict=True)
    found = {
        "format": 2,
        "data": [[source.name, rate, source.fingerprint] for source, rate in named],
        "tokenizer": hashlib.sha256(files).hexdigest(),
        "seed": config.seed,
        "pool_size": config.pool_size,
        "pack_crops": config.pack_crops,
    }
    found |= {f"data.{key}": value for key, value in dataclasses.asdict(config.data).items()}
    return json.loads(json.dumps(found))


def check_fingerprint(path, theirs, ours):
    """DataError if the file at `path` was made for a run with another fingerprint than ours."""
    differences = []
    for name, value in ours.items():
        if theirs.get(name) != value and name == "data":
            differences.append("the data changed: other record files, or other contents")
        elif theirs.get(name) != value:
            differences.append(f"{name} was {str(theirs.get(name))[:40]} and is {str(value)[:40]}")
    if differences:
        raise DataError(f"{path}: made for another run: {'; '.join(differences)}")
