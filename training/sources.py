"""The record files of a run and their sampling rates (paper: data mixture; docs/molmo2.md 9).

in    --data, --media, --eval
out   sources; their sampling rates, which sum to 1; the records to evaluate on

    --data a.jsonl=0.6 b.jsonl=0.4        fixed sampling rates
    --data mix.json                       a list of entries; see `read_mix`
    --data FOLDER                         the published sets, FOLDER/NAME/records.jsonl

The sampling rate of a group is divided among its files by the square roots of their sizes.
"""

import dataclasses
import hashlib
import json
import math
import os  # os.path.exists is False for a name that is too long, but Path.exists raises
import tempfile
from collections import Counter
from contextlib import suppress
from itertools import chain
from pathlib import Path

from records.check import is_kind
from records.errors import DataError, Unreadable, hint_of_path, warn
from records.mixture import group_rates, sqrt_size
from records.reader import N_CHECKED, Records
from training.config import STAGES

# {field of an entry: kind of its value, as in records.check}
OPTIONS = {"style": "text", "weight": "positive"}  # for records.reader.Records
FILE = {"path": "text", "media": "text", **OPTIONS}
FILE_FIELDS = {**FILE, "rate": "positive"}
MEMBER_FIELDS = {**FILE, "size": "0 or positive", "sampling_rate": "positive"}  # in a group
GROUP_FIELDS = {"group": "text", "rate": "positive", "data": "any"}


def published(mixture, folder):
    """The MIXTURE of a recipe, the folder of its sets -> entries, in the format of `read_mix`."""
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
    """A mix.json -> its entries, with paths that include its folder. DataError if it is invalid.

    The file contains a list of files {"path": .., "rate": 1, "media": .., "style": .., ..} and of
    groups {"group": name, "rate": 1, "data": [entries]}. The rate of a group is divided among its
    files by `sqrt_size`, a function with the arguments "size" and "sampling_rate" of a file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        entries = json.loads(text, object_pairs_hook=without_twins)
        return read_entries(Path(path).parent, entries)
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f"{path}: not a valid mix.json (docs/own_data.md#mixtures): {e}") from None


def without_twins(pairs):
    """The (key, value) pairs of a JSON object -> dict. ValueError if a key occurs twice."""
    for key, n in Counter(key for key, _ in pairs).items():
        if n > 1:
            raise ValueError(f"'{key:.80}' occurs {n} times in one entry; keep one of them")
    return dict(pairs)


def read_entries(folder, entries, in_group=False):
    """-> the entries of a mix.json or of a group, with whole paths. ValueError for an error."""
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_list or not entries:
        raise ValueError(f"expected a list of entries {{..}}, found {entries!r:.60}")
    return [read_entry(folder, entry, in_group) for entry in entries]


def read_entry(folder, entry, in_group):
    """-> an entry of a mix.json, with whole paths. ValueError if a field is wrong."""
    is_group = "group" in entry and not in_group
    known = GROUP_FIELDS if is_group else MEMBER_FIELDS if in_group else FILE_FIELDS
    wrong = [name for name, value in entry.items()
             if name not in known or not is_kind(value, known[name])]
    needed = "data" if is_group else "path"
    if needed not in entry:
        wrong.append(needed)
    if wrong:
        raise ValueError(f"'{wrong[0]}' of {json.dumps(entry):.80} is missing, unknown or has a "
                         f"wrong value; the possible fields are {', '.join(sorted(known))}")
    if is_group:
        return entry | {"data": read_entries(folder, entry["data"], in_group=True)}
    whole = {name: str(folder / entry[name]) for name in ("path", "media") if name in entry}
    return entry | whole


def read_item(item, stage):
    """One value of --data -> [(sampling rate of a group, entries of its files), ..]. A file outside
    of a group is a group of one file."""
    path = item
    factor = 1
    if "=" in item and not os.path.exists(item):
        path, _, rate = item.rpartition("=")
        try:
            factor = float(rate)
        except ValueError:
            factor = math.nan
        if not is_kind(factor, "positive"):
            raise DataError(f"--data {item}: the sampling rate '{rate}' is not a number from "
                            "1e-09 to 1e+12")
    entries = [{"path": path}]
    if os.path.isdir(path):
        entries = published(STAGES[stage].MIXTURE, path)
    elif Path(path).name.endswith("mix.json"):
        entries = read_mix(path)
    factor /= sum(entry.get("rate", 1) for entry in entries)
    return [(factor * entry.get("rate", 1), entry.get("data", [entry])) for entry in entries]


def unique_names(sources):
    """Makes the names of files unique, because ids, the order of records and the log depend on
    them. Files with equal names are called "folder/name", and then "folder/name#2"."""
    names = [source.name for source in sources]
    seen = Counter()
    for source, name in zip(sources, names, strict=True):
        if names.count(name) > 1:
            name = "/".join(source.path.absolute().parts[-2:])
        seen[name] += 1
        source.name = name if seen[name] == 1 else f"{name}#{seen[name]}"


def check_frames(source, config):
    """Warns if frames of a source were prepared with other frame settings than the run has."""
    if others := source.made_for - {(config.fps, config.max_frames)}:
        fps, max_frames = min(others)
        warn(f"{source.path}: its frames were made with --fps {fps:g} --max-frames {max_frames}, "
             f"but this run has --data.fps={config.fps:g} --data.max_frames={config.max_frames}; "
             "prepare the frames again with these numbers, or change the flags of the run")


def media_of(records, n=None):
    """-> the paths of the images and videos of the first n records, or of all. Records with a
    mistake are left out."""
    found = set()
    for i in range(len(records))[:n]:
        with suppress(Unreadable):
            found.update(map(os.path.realpath, records.paths_of(records[i])))
    return found


def check_held_out(sources, eval_sets):
    """Warns if a held-out file has images or videos of the first 1,000 records of a file of
    --data. Then its scores do not show what the model does with new images."""
    held_out = {records.path: media_of(records) for records in eval_sets}
    for source in sources if held_out else ():
        trained = media_of(source, N_CHECKED)
        for path, media in held_out.items():
            if n := len(media & trained):
                warn(f"--eval {path}: {n:,} of its images and videos are also in --data "
                     f"{source.path}; its scores say nothing about new images")


def open_sources(args, config, generated=None):
    """Opens the files of --data and --eval -> sources, sampling rates, {name: records to evaluate
    on}. Without --data, --tiny uses `generated`, which are sources and sampling rates, and the
    last one is None."""
    if not args.data and not args.tiny:
        raise DataError("--data is missing; give record files to train on, or use --tiny to train "
                        "on the toy world, which needs no files")
    if not args.data:
        return *generated, None
    groups = [group for item in args.data for group in read_item(item, config.stage)]
    paths = [entry["path"] for _, entries in groups for entry in entries]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        folder = next(filter(os.path.isdir, args.data), None)
        if missing == paths and folder:
            raise DataError(f"--data {folder}: for your own data, give record files, which python "
                            "-m tools.convert makes; a folder must contain published sets, such "
                            f"as {missing[0]}")
        sentence = f"--data: no such file: {', '.join(path[:300] for path in missing)}"
        if missing == paths or not args.skip_missing:
            hint = hint_of_path(missing[0]) or "; --skip-missing trains on the files that exist"
            raise DataError(f"{sentence}{hint}")
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
    check_held_out(sources, eval_sets)
    eval_records = {records.name: list(records) for records in eval_sets}
    return sources, list(chain.from_iterable(group_rates(weighted))), eval_records


def fingerprint(sources, rates, tokenizer, config):
    """-> everything on which the packs of a run depend, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        files = b"".join(path.read_bytes() for path in sorted(Path(folder).iterdir()))
    found = {f"data.{key}": value for key, value in dataclasses.asdict(config.data).items()
             if key != "trained_crops"}  # only evaluation uses it
    found["data.vision"] = dataclasses.asdict(config.model.vision)  # the sizes of crops
    found |= {name: getattr(config, name) for name in ("seed", "pool_size", "pack_crops")}
    found["tokenizer"] = hashlib.sha256(files).hexdigest()
    found["data"] = [[source.name, rate, source.fingerprint]
                     for source, rate in zip(sources, rates, strict=True)]
    # version of the rules for the random choices of an example (data.build_tree)
    found["draws"] = 3
    # tuples become lists, as in a plan or a checkpoint that is read again
    return json.loads(json.dumps(found))


def list_changes(theirs, ours):
    """-> the differences between two fingerprints or two recipes, in words; "" without any."""
    if "draws" in ours and theirs.get("draws") != ours["draws"]:
        return "this version of the code makes other random choices"
    changes = []
    for name, value in ours.items():
        if theirs.get(name) != value and name in ("data", "base"):
            changes.append(f"{name}: the files, or their contents, are different")
        elif theirs.get(name) != value:
            changes.append(f"{name} was {theirs.get(name)!s:.60} and is {value!s:.60}")
    return "; ".join(changes)
