"""Plans and encoded arrays made ahead, on machines without a GPU (paper: packing).

in    what train.py would train on, and how many packs of it
out   plan.npz: which draws share a row, bytes per example and no pixels; a folder of shards: the examples as the model reads them

    python -m tools.plan --stage 2 --data a.jsonl b.jsonl --packs 4096 --out plan.npz [--cache DIR]
    torchrun --nproc-per-node 32 tools.plan ...                                     # the same plan, made by 32 processes
    python train.py --stage 2 --data a.jsonl b.jsonl --plan plan.npz [--cache DIR]       # the same run as without

Both are tied to the record files, the tokenizer and the config (`purpose`) and refused when any of it has changed. Pictures and
films are not compared: one of another size than was planned is masked, one of the same size goes by what the cache holds.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import zlib
from datetime import timedelta
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from tqdm import tqdm

import data
from parallel import gathered


def purpose(sources, rates, tokenizer, config):
    """What a plan depends on, as JSON would hold it: two runs that agree in it have the same packs."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        words = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(folder).iterdir()))).hexdigest()
    limits = {f.name: getattr(config.data, f.name) for f in dataclasses.fields(config.data)}
    limits["vision"] = dataclasses.asdict(config.data.vision)
    found = {"format": 2, "data": [[s.name, rate, s.fingerprint] for s, rate in zip(sources, rates, strict=True)], "tokenizer": words,
             "seed": config.seed, "pool_size": config.pool_size, "pack_crops": config.pack_crops,
             **{f"data.{name}": value for name, value in limits.items()}}
    return json.loads(json.dumps(found))


def agree(path, theirs, ours):
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if differing:
        said = "; ".join("the data changed since, or are others" if name == "data" else f"{name} was {str(theirs.get(name))[:40]} and is "
                         f"{str(ours[name])[:40]}" for name in differing)
        raise data.DataError(f"{path}: made for another run: {said}")


COLUMNS = ("draws", "tokens", "crops", "came")


class Plan:
    """Packs read from a file, in place of packing.Planner: the same packs, and nothing is measured.

    The file holds draws, sizes and record ids, pack after pack, and what was left out on the way. Like a planner that
    measures, it notes ids {draw: id} and counts in dropped {reason: n} as it goes.
    """

    def __init__(self, path, made_for, packs, ids, dropped):
        try:
            with np.load(path, allow_pickle=False) as file:
                self.of = {name: file[name] for name in (*COLUMNS, "ends", "left_at", "left_why", "made_for", "ids")}
            theirs = json.loads(bytes(self.of.pop("made_for")))
            self.names = bytes(self.of.pop("ids")).decode().split("\0")
            lengths = {len(self.of[name]) for name in COLUMNS} | {len(self.names), int(self.of["ends"][-1])}
            if len(lengths) > 1 or not isinstance(theirs, dict):
                raise ValueError(f"its parts do not belong together: lengths {sorted(lengths)}")
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error) as e:
            raise data.DataError(f"--plan {path}: not a plan that packing.py wrote: {e}") from None
        agree(f"--plan {path}", theirs, made_for)
        have = len(self.of["ends"])
        if have < packs:
            raise data.DataError(f"--plan {path}: holds {have} packs and the run asks for {packs} (--steps times --batch)")
        self.packs, self.last, self.ids, self.dropped = 0, [], ids, dropped

    def __next__(self):
        of, n = self.of, self.packs
        if n == len(of["ends"]):
            raise StopIteration
        start, end = int(of["ends"][n - 1]) if n else 0, int(of["ends"][n])
        self.last = list(zip(*(of[name][start:end].tolist() for name in COLUMNS), strict=True))
        self.ids.update(zip(of["draws"][start:end].tolist(), self.names[start:end], strict=True))
        for why in of["left_why"][slice(*np.searchsorted(of["left_at"], [n, n + 1]))]:
            self.dropped[str(why)] += 1
        self.packs += 1
        return [e[0] for e in self.last]

    def state(self):
        return {"packs": self.packs}

    def restore(self, state):
        self.packs = state["packs"]


FIELDS = {"tokens": np.int32, "targets": np.int32, "weights": np.float32, "pos": np.int32, "branch": np.int32, "bidir": np.int32,
          "images": np.uint8, "unit": np.int32, "pool_src": np.int32, "pool_dst": np.int32}          # as they lie in a shard


def write_shard(folder, examples):
    """[(draw, data.Example), ..], one at a time -> a folder with one file of bytes per field; complete or not there at all."""
    aside, index = folder.with_name(folder.name + ".tmp"), []
    aside.mkdir(parents=True, exist_ok=True)
    files = {name: open(aside / name, "wb") for name in FIELDS}
    try:
        for draw, x in examples:
            arrays = {name: np.zeros(0) if getattr(x, name) is None else getattr(x, name) for name in FIELDS}
            index.append({"draw": draw, "id": x.id, "bad": x.bad, "dropped": x.dropped, "dropped_tokens": x.dropped_tokens,
                          "shapes": {name: None if getattr(x, name) is None else a.shape for name, a in arrays.items()}})
            for name, array in arrays.items():
                files[name].write(np.ascontiguousarray(array, FIELDS[name]).tobytes())
    finally:
        for file in files.values():
            file.close()
    (aside / "index.json").write_text(json.dumps(index))
    aside.rename(folder)


def read_index(shard):
    """-> the entries of a shard that is whole, else None: each names a draw and the shapes of its arrays."""
    try:
        index = json.loads((shard / "index.json").read_text())
        for name, kind in FIELDS.items():
            size = sum(math.prod(entry["shapes"][name]) for entry in index if entry["shapes"][name] is not None)
            if (shard / name).stat().st_size != size * np.dtype(kind).itemsize:
                return None
        return index if {"draw", "id", "bad", "dropped", "dropped_tokens"} <= set.intersection(*map(set, index)) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_head(folder):
    """cache.json of a folder of shards -> what it was made for, its packs, packs per shard; DataError if it is none."""
    try:
        about = json.loads((folder / "cache.json").read_text())
        made_for, packs, shard = about["made_for"], int(about["packs"]), int(about["shard"])
        if not isinstance(made_for, dict) or shard < 1:
            raise ValueError("cache.json says something else")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise data.DataError(f"--cache {folder}: not a cache that packing.py wrote: {e}") from None
    return made_for, packs, shard


class Cache:
    """Example examples by draw, memory-mapped from the shards that `write_shard` wrote."""

    def __init__(self, folder, made_for, packs):
        folder = Path(folder)
        theirs, have, shard = read_head(folder)
        agree(f"--cache {folder}", theirs, made_for)
        indices = {folder / f"{n:06d}": read_index(folder / f"{n:06d}") for n in range(-(-have // shard))}
        broken = [path.name for path, index in indices.items() if index is None]
        if broken or have < packs:
            what = f"shards {', '.join(broken[:5])} are not whole" if broken else f"of {have} packs; the run asks for {packs}"
            raise data.DataError(f"--cache {folder}: {what}; run tools.plan again to complete it")
        self.at, self.shards = {}, {}
        for shard, index in indices.items():
            offset = dict.fromkeys(FIELDS, 0)
            for entry in index:
                self.at[entry["draw"]] = shard, entry, offset
                offset = {name: offset[name] + (math.prod(shape) if shape else 0) for name, shape in entry["shapes"].items()}

    def __getitem__(self, draw):
        shard, entry, offset = self.at[draw]
        if shard not in self.shards:
            self.shards = {shard: {name: np.memmap(shard / name, kind, "r") if (shard / name).stat().st_size else np.zeros(0, kind)
                                   for name, kind in FIELDS.items()}}
        arrays = {}
        for name, shape in entry["shapes"].items():
            part = None if shape is None else self.shards[shard][name][offset[name] : offset[name] + math.prod(shape)].reshape(shape)
            wide = name in ("tokens", "targets", "pos", "pool_src", "pool_dst")
            arrays[name] = part if part is None or not wide else part.astype(np.int64)
        return data.Example(**arrays, **{name: entry[name] for name in ("id", "bad", "dropped", "dropped_tokens")})


# ---------------------------------------------------------------------------------------------------------------
# the command


def in_turns(setup, rank, ranks):
    """-> a function like loader.measure for draws 0, 1, 2 .. in their order; the processes share the work out, all know the results."""
    import loader

    def stream(start=0, chunk=64):
        while True:
            try:
                mine = [loader.measure(setup, draw) for draw in range(start + rank, start + chunk * ranks, ranks)]
            except (data.DataError, OSError) as e:           # told to all, or the others would wait for this one
                mine = str(e)
            parts = gathered(mine)
            if wrong := [part for part in parts if isinstance(part, str)]:
                raise data.DataError(wrong[0])
            yield from (found for turn in zip(*parts, strict=True) for found in turn)
            start += chunk * ranks

    found = stream()
    return lambda draw: next(found)


def command(argv):
    """`plan ..`: packing.py's command line; what it does not know goes to train.py's."""
    import torch.distributed as dist

    import train

    parser = train.Parser(prog="packing.py", allow_abbrev=False, description="Plan the packs of a run ahead.",
                          epilog="All other flags are train.py's: name the data, stage, tokenizer (--init) and seed of the run.")
    parser.add_argument("--packs", type=int, help="how many (default: --steps times --batch)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the plan, an .npz file")
    parser.add_argument("--cache", metavar="DIR", help="also write the encoded examples of these packs there; goes on where it stopped")
    parser.add_argument("--shard", type=int, default=64, help="packs per shard of the cache")
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        args, rest = parser.parse_known_args(argv)
        run, config = train.parse(rest)
        packs = config.steps * config.batch if args.packs is None else args.packs
        if packs < 1 or args.shard < 1:
            raise train.UserError("--packs and --shard: at least 1")
        if Path(args.out).is_dir() or not Path(args.out).parent.is_dir():
            raise train.UserError(f"--out {args.out}: name a file in a folder that exists")
        sources, rates, _ = train.open_sources(run, config)
        tokenizer, config = train.open_tokenizer(run, config)
        if ranks > 1:
            dist.init_process_group("gloo", timeout=timedelta(days=2))            # a shard of films takes its time
        written = write_plan(args, sources, rates, tokenizer, config, packs, rank, ranks)
    except (train.UserError, data.DataError) as e:
        if rank == 0 or not dist.is_initialized():           # later on, all find the same
            print(f"packing.py: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as e:
        print(f"packing.py: {e}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(written))


def write_plan(args, sources, rates, tokenizer, config, packs, rank, ranks):
    """Every process plans everything, from sizes that they measured in turns; the first writes it down. -> what was written."""
    import loader

    about = purpose(sources, rates, tokenizer, config)
    if len({json.dumps(other) for other in gathered(about)}) > 1:
        raise data.DataError("the processes do not see the same record files, tokenizer and config")
    if args.cache and (Path(args.cache) / "cache.json").exists():
        theirs, _, shard = read_head(Path(args.cache))
        agree(f"--cache {args.cache}", theirs, about)
        if shard != args.shard:
            raise data.DataError(f"--cache {args.cache}: its shards hold {shard} packs, not --shard {args.shard}")
    elif args.cache and Path(args.cache).exists() and (not Path(args.cache).is_dir() or any(Path(args.cache).iterdir())):
        raise data.DataError(f"--cache {args.cache}: not empty, and no cache; name another folder")
    gathered(None)                                    # all have looked before the first writes
    left = []

    def noted(draw):
        found = measured(draw)
        if found[3]:
            left.append((stream.planner.packs, f"{stream.source_of(draw)}: {found[3][:3]}"))
        return found

    stream = loader.Loader(sources, rates, tokenizer, config, rank, measured=noted)
    measured = in_turns(stream.setup, rank, ranks)
    planned, ids, ends = [], [], []
    for _ in tqdm(range(packs), unit="pack", desc="plan", disable=rank > 0, mininterval=1):
        next(stream.planner)
        planned += stream.planner.last
        ids += [stream.ids.pop(e[0]) for e in stream.planner.last]
        ends.append(len(planned))
    if rank == 0:
        columns = np.array(planned, np.int64)
        text = lambda s: np.frombuffer(s.encode(), np.uint8)             # noqa: E731
        aside = Path(args.out).with_name(Path(args.out).name + ".tmp")
        with open(aside, "wb") as file:
            np.savez_compressed(file, made_for=text(json.dumps(about)), ids=text("\0".join(ids)), ends=np.array(ends), draws=columns[:, 0],
                                tokens=columns[:, 1], crops=columns[:, 2], came=columns[:, 3],
                                left_at=np.array([at for at, _ in left], np.int64), left_why=np.array([why for _, why in left], str))
        os.replace(aside, args.out)
    if args.cache:
        write_cache(args, stream.setup, planned, ends, about, rank, ranks)
    gathered(None)                                    # none leaves while another may still write
    tokens, crops = (sum(e[k] for e in planned) / packs / limit for k, limit in ((1, config.data.max_tokens), (2, config.pack_crops)))
    return {"out": args.out, "packs": packs, "examples": len(planned), "fill_tokens": round(tokens, 4), "fill_crops": round(crops, 4),
            "longest_wait": max(n - came for n, came in waits(planned, ends)), "dropped": dict(stream.dropped)}


def waits(planned, ends):
    """(pack that an example went into, packs made before it came) of each."""
    return zip(np.repeat(np.arange(len(ends)), np.diff([0, *ends])).tolist(), (e[3] for e in planned), strict=True)


def write_cache(args, setup, planned, ends, about, rank, ranks):
    """Shards of args.shard packs each, shared out over the processes; those that are there already stay."""
    import loader

    folder = Path(args.cache)
    if rank == 0:                                            # first: shards without it would be taken for another run's
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / "cache.json.tmp"
        aside.write_text(json.dumps({"made_for": about, "packs": len(ends), "shard": args.shard}))
        os.replace(aside, folder / "cache.json")
    gathered(None)
    for n in tqdm(range(0, len(ends), args.shard)[rank::ranks], unit="shard", desc="cache", disable=rank > 0, mininterval=1):
        to = folder / f"{n // args.shard:06d}"
        part = planned[ends[n - 1] if n else 0 : ends[min(n + args.shard, len(ends)) - 1]]
        if [entry["draw"] for entry in read_index(to) or ()] == [e[0] for e in part]:
            continue
        shutil.rmtree(to, ignore_errors=True)                # damaged, or the last shard of a shorter plan
        write_shard(to, ((e[0], loader.encode(setup, e[:3])) for e in part))
