"""The stream of steps: the same packs whatever the layout, nothing lost, and what is made ahead is what would be made."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
import loader
import packing
import plans
import train
from records import media

ROOT = Path(__file__).parent.parent
MANY = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TOKENIZER = data.ByteTokenizer()
CONFIG = train.parse(["--stage", "2", "--tiny", "--batch", "8", "--micro-batch", "2", "--steps", "6", "--pool_size=9",
                      "--data.max_tokens=700"])[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two record files, of pictures and of text; of the pictures four are cut short, three missing."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name, n in (("a", 30), ("b", 17)):
        lines = []
        for i in range(n):
            record = {"annotations": [{"type": "qa", "question": "?" * int(rng.integers(1, 60)), "answer": "!" * int(rng.integers(1, 90))}
                                      for _ in range(int(rng.integers(1, 4)))]}
            if name == "a":
                record["image"] = f"{i}.png"
                Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(folder / f"{i}.png")
            lines.append(json.dumps(record))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    for n in (3, 8, 17, 26):
        (folder / f"{n}.png").write_bytes((folder / f"{n}.png").read_bytes()[:3000])
    for n in (5, 14, 23):
        (folder / f"{n}.png").unlink()
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


def stream(files, config=CONFIG, **options):
    return loader.Loader([data.Records(f) for f in files], [0.7, 0.3], TOKENIZER, config, **options)


def taken(stream, n):
    """The first n steps -> [(Step, rows of this rank)]"""
    return [(step, [row for rows in micro for row in rows]) for step, micro in itertools.islice(stream, n)]


PROGRAM = """
import json, os, sys
import torch.distributed as dist
from tests.test_loader import CONFIG, stream, taken, replace

if __name__ == "__main__":
    files, ranks = {files!r}, int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    found = []
    for workers, micro in ((0, 2), (1, 8 // ranks), (3, 1)):
        of = stream(files, replace(CONFIG, workers=workers, micro_batch=micro), rank=dist.get_rank(), ranks=ranks)
        found.append([(step.ids, step.packs, step.dropped, [[e.id for e in row] for row in rows],
                       [int(e.tokens.sum()) for row in rows for e in row]) for step, rows in taken(of, 4)])
    everyone = [None] * ranks
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_data_order_is_the_same_on_1_2_and_4_ranks(files, tmp_path):
    """... each with 0, 1 and 3 workers and another accumulation: by running them. Ranks are disjoint, and miss nothing."""
    (tmp_path / "program.py").write_text(PROGRAM.format(files=files))
    runs = []
    for ranks in (1, 2, 4):
        done = subprocess.run([*MANY, str(ranks), str(tmp_path / "program.py")], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        runs += list(zip(*json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert len(runs) == 9
    reference = runs[0][0]
    for everyone in runs:
        for n, (ids, packs, dropped, rows_of_all, sums_of_all) in enumerate(reference):
            for mine in everyone:
                assert mine[n][:3] == [ids, packs, dropped]                          # every rank knows the whole step
            rows = [row for mine in everyone for row in mine[n][3]]
            sums = [total for mine in everyone for total in mine[n][4]]
            assert Counter(map(tuple, rows)) == Counter(map(tuple, rows_of_all)) and sum(map(len, rows)) == len(ids)
            assert Counter(sums) == Counter(sums_of_all)                             # not names alone: what is in them
            assert {len(mine[n][3]) for mine in everyone} == {8 // len(everyone)}
    assert len({tuple(step[0]) for step in reference}) == 4


def test_a_step_is_resumed_exactly_and_its_skips_with_it(files):
    whole = taken(stream(files), 6)
    assert any(e.bad for _, rows in whole for row in rows for e in row) and whole[-1][0].dropped["a.jsonl: S20"] >= 1
    for n in (1, 4):
        again = stream(files).begin()
        taken(again, 2)                                                  # what it did before is forgotten
        again.restore(json.loads(json.dumps(whole[n - 1][0].state)))
        for (a, rows_a), (b, rows_b) in zip(whole[n:], taken(again, 6 - n), strict=True):
            assert a == replace(b, packs=a.packs) and json.dumps(a.packs) == json.dumps(b.packs)
            assert all(np.array_equal(x.tokens, y.tokens) and np.array_equal(x.weights, y.weights) and x.id == y.id
                       for row, other in zip(rows_a, rows_b, strict=True) for x, y in zip(row, other, strict=True))


@pytest.mark.slow
def test_what_the_first_run_masked_the_second_masks_unseen(files, tmp_path):
    """A file that was repaired meanwhile makes no difference to a resumed run."""
    first = stream(files)
    whole = taken(first, 6)
    assert first.bad
    pictures = [Path(files[0]).parent / f"{n}.png" for n in (3, 8, 17, 26)]
    cut = [picture.read_bytes() for picture in pictures]
    try:
        for picture in pictures:
            Image.new("RGB", (60, 40)).save(picture)
        for workers in (0, 2):
            again = stream(files, replace(CONFIG, workers=workers))
            again.known_bad = {bad["draw"]: bad["reason"] for bad in first.bad}
            for (_, rows), (_, others) in zip(whole, taken(again, 6), strict=True):
                assert [e.bad for row in rows for e in row] == [e.bad for row in others for e in row]
            assert again.bad == first.bad and again.masked == first.masked
    finally:
        for picture, content in zip(pictures, cut, strict=True):
            picture.write_bytes(content)


def test_resuming_at_step_1000000_costs_what_it_costs_at_step_10(files):
    """Counted in records measured: those of the next step, and not one of those before."""
    asked = []

    class Counted(loader.Loader):
        def __init__(self, *args):
            super().__init__(*args)
            self.measured = lambda draw: (asked.append(draw), loader.measure(self.setup, draw))[1]

    def resumed(state):
        again = Counted([data.Records(f) for f in files], [0.7, 0.3], TOKENIZER, CONFIG)
        asked.clear()
        again.restore(state)
        next(iter(again))
        return list(asked)

    state = json.loads(json.dumps(taken(stream(files), 10)[-1][0].state))
    early, far = resumed(state), 20_000_000 - 20_000_000 % 1000
    for entry in state["planner"]["pool"]:                                           # the same place in its block, twenty million draws on
        entry[0] += far
        entry[3] += 8_000_000
    state["ids"] = [[draw + far, name] for draw, name in state["ids"]]
    state["planner"].update(next=state["planner"]["next"] + far, packs=state["planner"]["packs"] + 8_000_000)
    late = resumed(state)
    assert min(late) >= far and abs(len(late) - len(early)) <= 20 and len(early) < 100


def test_every_token_is_trained_on_or_reported(files):
    """Planned tokens are those of the examples, masked ones included; and what was left out of a tree is counted."""
    config = replace(CONFIG, data=replace(CONFIG.data, max_tokens=330))
    of = stream(files, config)
    total = Counter()
    for step, rows in taken(of, 6):
        seen = train.census(rows)
        planned = [e for pack in step.packs for e in pack]
        assert (seen["tokens"], seen["crops"]) == (sum(e[1] for e in planned), sum(e[2] for e in planned))
        total.update(seen)
        for x in (x for row in rows for x in row if not x.bad):
            total["whole"] += len(x.tokens) + x.dropped_tokens
    assert total["masked_tokens"] > 0 and total["branches_dropped"] > 0 and sum(of.masked.values()) == len(of.bad)
    assert total["whole"] == total["tokens"] - total["masked_tokens"] + total["tokens_dropped"]


def test_an_image_that_changes_between_plan_and_step_costs_itself_only(files):
    of = stream(files, replace(CONFIG, data=replace(CONFIG.data, max_crops=4))).begin()
    name = next(name for name in of.first.ids if name.startswith("a.jsonl"))
    picture = Path(files[0]).parent / f"{int(name.split(':')[1]) - 1}.png"
    before = picture.read_bytes()
    try:
        Image.new("RGB", (300, 300)).save(picture)
        rows = taken(of, 1)[0][1]
    finally:
        picture.write_bytes(before)
    changed = [e for row in rows for e in row if e.id == name]
    assert changed and all("planned" in e.bad and not e.weights.any() for e in changed)


def test_a_source_of_which_too_much_is_bad_stops_the_run(tmp_path):
    """More than 1 %, once 1,000 of its records were drawn, and not because of another source; told with the last one's place."""
    good, bad = ({"annotations": [{"type": "text", "text": t}]} for t in ("a", "b" * 5000))
    for name, n in (("few.jsonl", 4), ("many.jsonl", 40)):
        (tmp_path / name).write_text("\n".join(json.dumps(bad if k < n else good) for k in range(1000)))

    def planned(name, **changes):
        sources = [data.Records(tmp_path / name), data.Records(tmp_path / "few.jsonl")]
        of = loader.Loader(sources, [1, 1], TOKENIZER, replace(CONFIG, **changes))
        while of.planner.next < 2500:
            next(of.planner)
        return of

    assert planned("few.jsonl").drawn["few.jsonl"] >= 2500
    said = r"draws of many.jsonl could not be used, more than --max_skip=0.01; the last: .*many.jsonl:\d+: S03"
    with pytest.raises(data.DataError, match=said):
        planned("many.jsonl")
    assert planned("many.jsonl", max_skip=0.08).dropped["many.jsonl: S03"] > 10


# ---------------------------------------------------------------------------------------------------------------
# dealing


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_pack_goes_to_one_rank_and_all_get_as_many(ranks):
    work = np.random.default_rng(ranks).integers(0, 100, (32, 2))
    shares = loader.balance_packs(work, ranks)
    assert sorted(k for share in shares for k in share) == list(range(32)) and {len(share) for share in shares} == {32 // ranks}
    assert shares == loader.balance_packs(work, ranks)


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_rank_is_nearly_the_best_that_any_dealing_allows(seed):
    """Against all ways to deal 8 packs to 2 ranks: crops and attention of the slowest, relative to an even share."""
    work = np.random.default_rng(seed).integers(1, 100, (8, 2)).astype(float)

    def slowest(groups):
        return sum(max(work[list(g)].sum(0)[k] for g in groups) / work.sum(0)[k] * 2 for k in (0, 1))

    best = min(slowest((g, set(range(8)) - set(g))) for g in itertools.combinations(range(8), 4))
    in_order = slowest((range(0, 8, 2), range(1, 8, 2)))
    ours = slowest(loader.balance_packs(work, 2))
    assert ours <= best * 1.08 and (ours <= in_order or in_order < best * 1.08)


def test_packs_without_crops_are_dealt_by_their_attention():
    assert [sum((9, 1, 8, 2)[k] for k in share) for share in loader.balance_packs([(0, 9), (0, 1), (0, 8), (0, 2)], 2)] == [10, 10]


# ---------------------------------------------------------------------------------------------------------------
# made ahead

FLAGS = ["--stage", "2", "--tiny", "--batch", "4", "--pool_size=9", "--data.max_tokens=700", "--vit_steps=0", "--deterministic",
         "--device", "cpu", "--model.n_layer=1", "--steps", "3"]


def mixed(files):
    return ["--data", f"{files[0]}=0.7", f"{files[1]}=0.3"]


def plan(*flags, ranks=1):
    command = [*MANY, str(ranks)] if ranks > 1 else [sys.executable]
    done = subprocess.run([*command, "-m", "tools.plan", *FLAGS, *map(str, flags)], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done


def stream_of(files, *flags, **made):
    """The loader of a run with FLAGS."""
    args, config = train.parse([*FLAGS, *mixed(files), *flags])
    sources, rates, _ = train.open_sources(args, config)
    return loader.Loader(sources, rates, train.open_tokenizer(args, config)[0], config, **made)


def log_of(out, *flags):
    train.main([*FLAGS, *map(str, flags), "--out", str(out)])
    train.torch.use_deterministic_algorithms(False)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def ahead(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    done = plan(*mixed(files), "--packs", 14, "--out", folder / "plan.npz", "--cache", folder / "cache", "--shard", 4)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_run_from_a_plan_or_a_cache_is_the_run_without(files, ahead, tmp_path):
    """Bit for bit: loss, norms, ids, what was dropped and when; and of what was bad, the same report."""
    with_data = mixed(files)
    folder, _ = ahead
    plain = log_of(tmp_path / "a", *with_data)
    assert plan(*with_data, "--out", tmp_path / "exact.npz").returncode == 0         # as many packs as the run takes
    assert plain == log_of(tmp_path / "b", *with_data, "--plan", tmp_path / "exact.npz", "--workers", "2")
    assert plain == log_of(tmp_path / "c", *with_data, "--cache", folder / "cache")
    assert plain == log_of(tmp_path / "d", *with_data, "--plan", folder / "plan.npz", "--cache", folder / "cache")
    skips = {(tmp_path / name / "skips.jsonl").read_text() for name in "abcd"}
    assert len(skips) == 1 and plain[-1]["dropped"]


@pytest.mark.slow
def test_a_plan_and_a_cache_made_by_three_processes_are_those_made_by_one(files, ahead, tmp_path):
    folder, said = ahead
    done = plan(*mixed(files), "--packs", 14, "--out", tmp_path / "plan.npz", "--cache", tmp_path / "cache", "--shard", 4, ranks=3)
    assert done.returncode == 0, done.stderr
    assert {**json.loads(done.stdout.splitlines()[-1]), "out": ""} == {**said, "out": ""}
    one, three = np.load(folder / "plan.npz"), np.load(tmp_path / "plan.npz")
    assert one.files == three.files and all(np.array_equal(one[name], three[name]) for name in one.files)
    shards = sorted(p.relative_to(folder) for p in (folder / "cache").rglob("*") if p.is_file())
    assert len(shards) == 1 + 4 * 11 and all((folder / p).read_bytes() == (tmp_path / p).read_bytes() for p in shards)


def test_a_plan_holds_record_ids_and_no_pixels(files, ahead):
    folder, said = ahead
    file = np.load(folder / "plan.npz")
    ids = bytes(file["ids"]).decode().split("\0")
    mixture = data.Mixture([data.Records(f) for f in files], [0.7, 0.3], 0)
    for draw, name in zip(file["draws"], ids, strict=True):
        source, index, _ = mixture[int(draw)]
        assert mixture.sources[source][index]["id"] == name
    assert said["packs"] == 14 == len(file["ends"]) and said["examples"] == len(ids)
    assert (folder / "plan.npz").stat().st_size < 200 * len(ids) + 3000 and 0.5 < said["fill_tokens"] <= 1


@pytest.mark.parametrize(("flags", "message"), [
    (["--seed", "1"], "seed was 0 and is 1"),
    (["--pool_size=10"], "pool_size was 9 and is 10"),
    (["--data.max_crops=2"], "data.max_crops"),
    (["--pack_crops=9"], "pack_crops was 32 and is 9"), (["--data", "RATES"], "the data changed"),
    (["--model.vision.patch=9"], "data.vision"), (["--model.n_vocab=512"], "tokenizer"),
    (["--steps", "5"], "14 packs"),
])
@pytest.mark.parametrize("what", ["--plan", "--cache"])
def test_a_plan_of_another_run_is_refused(files, ahead, tmp_path, flags, message, what, capsys):
    path = ahead[0] / ("plan.npz" if what == "--plan" else "cache")
    flags = [*flags[:-1], f"{files[0]}=0.5", f"{files[1]}=0.5"] if flags[-1] == "RATES" else [*mixed(files), *flags]
    with pytest.raises(SystemExit) as refused:
        log_of(tmp_path / "a", what, path, *flags)
    assert refused.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "a").exists()


@pytest.mark.parametrize("what", ["--plan", "--cache"])
def test_a_plan_is_refused_when_the_data_changed(files, ahead, tmp_path, what, capsys):
    path = ahead[0] / ("plan.npz" if what == "--plan" else "cache")
    before = Path(files[1]).read_text()
    try:
        Path(files[1]).write_text(before.replace("!", "?", 1))
        with pytest.raises(SystemExit) as refused:
            log_of(tmp_path / "a", *mixed(files), what, path)
    finally:
        Path(files[1]).write_text(before)
    assert refused.value.code == 2 and "the data changed" in capsys.readouterr().err


def test_what_is_no_plan_is_refused(files, ahead, tmp_path, capsys):
    whole = (ahead[0] / "plan.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 no")
    np.savez(tmp_path / "y.npz", a=np.array([{}], object))
    np.save(tmp_path / "z.npy", np.zeros(3))
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    names = ["x.npz", "y.npz", "z.npy", "none.npz", "short.npz"]
    for k in range(30, len(whole) - 30, len(whole) // 12):               # a byte of the content turned round
        names.append(f"flip{k}.npz")
        (tmp_path / names[-1]).write_bytes(whole[:k] + bytes([whole[k] ^ 0xFF]) + whole[k + 1 :])
    flags = [("--plan", name) for name in names]
    for n, head in enumerate(("[]", "{}", '{"made_for": null, "packs": 1, "shard": 1}', "[")):
        (tmp_path / f"c{n}").mkdir()
        (tmp_path / f"c{n}" / "cache.json").write_text(head)
        flags.append(("--cache", f"c{n}"))
    refusals = 0
    for flag, name in flags:
        try:
            args, config = train.parse([*FLAGS, *mixed(files), flag, str(tmp_path / name)])
            sources, rates, _ = train.open_sources(args, config)
            loader.Loader(sources, rates, train.open_tokenizer(args, config)[0], config, plan=args.plan, cache=args.cache)
        except data.DataError as e:
            refusals += name in str(e)
    assert refusals >= len(flags) - 2                                    # a byte between the parts of a zip file may mean nothing
    for flag, name in (("--plan", "x.npz"), ("--cache", "c0")):
        with pytest.raises(SystemExit) as refused:
            log_of(tmp_path / "a", "--data", *files, flag, tmp_path / name)
        assert refused.value.code == 2 and name in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "cut short", "index cut short"])
def test_a_cache_goes_on_where_it_stopped(files, ahead, tmp_path, damage):
    """A shard that is not whole is refused, and written anew by the same command; those that are whole stay."""
    folder, copy = ahead[0] / "cache", tmp_path / "cache"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    if damage == "missing":
        (copy / "000002").rename(copy / "000002.tmp")
        (copy / "000002.tmp" / "images").write_bytes(b"half")
    else:
        part = copy / "000002" / ("images" if damage == "cut short" else "index.json")
        part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(data.DataError, match="000002 are not whole"):
        stream_of(files, cache=copy)
    kept = (copy / "000001" / "images").stat().st_mtime_ns
    plans.command(["plan", *FLAGS, *mixed(files), *map(str, ("--packs", 14, "--out", tmp_path / "p.npz", "--cache", copy, "--shard", 4))])
    assert (copy / "000002" / "images").read_bytes() == (folder / "000002" / "images").read_bytes()
    assert (copy / "000001" / "images").stat().st_mtime_ns == kept and not list(copy.glob("*.tmp"))


def test_encoded_arrays_come_back_as_they_were(tmp_path):
    rng = np.random.default_rng(0)
    config = replace(CONFIG.data, max_crops=2)
    text = data.layout([1, 2, 3], [False] * 3, [data.Branch([([5] * 9, False), ([6] * 4, True)])])
    picture = data.layout([1] * 12, [False] + [True] * 11, [data.Branch([([5] * 9, True)])])
    picture.images = rng.integers(0, 255, (3, config.vision.n_patch, config.vision.n_pixel), np.uint8)
    picture.pool_src = rng.integers(-1, 90, (6, 9))
    picture.unit = np.zeros(3, np.int32)
    picture.pool_dst, picture.id, picture.dropped, picture.dropped_tokens = rng.integers(0, 9, 6), "pic\"ture\n", 2, 17
    wanted = {40: text, 7: picture, 9: data.placeholder("b", 30, 2, config, "S21 why")}
    plans.write_shard(tmp_path / "000000", wanted.items())
    (tmp_path / "cache.json").write_text(json.dumps({"made_for": {}, "packs": 3, "shard": 4}))
    cache = plans.Cache(tmp_path, {}, 3)
    for draw, x in wanted.items():
        for name, value in vars(x).items():
            found = getattr(cache[draw], name)
            assert found is None if value is None else found == value if not isinstance(value, np.ndarray) else (
                found.dtype == value.dtype and np.array_equal(found, value)), name
    a, b = (packing.collate([[wanted[40], wanted[7]]], 64, config.vision), packing.collate([[cache[40], cache[7]]], 64, config.vision))
    assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "images", "pool_src", "pool_dst", "weights"))


# ---------------------------------------------------------------------------------------------------------------
# decoders that go wrong

STUBS = {                            # what ffmpeg does when it is to decode; probing works
    "hangs": "import time; time.sleep(600)",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "eats memory": "hoard = []\nwhile True: hoard.append(bytes(1 << 26))",
    "says nothing": "pass",
    "babbles": "import sys\nwhile True: sys.stdout.buffer.write(b'P7' * 99999)",
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set on Linux only")
@pytest.mark.parametrize("what", STUBS)
def test_a_decoder_that_goes_wrong_costs_its_record_and_no_more(files, tmp_path, monkeypatch, what):
    """The step goes on within the deadline, the record is counted, the order of the rest is that of a run without trouble."""
    import imageio_ffmpeg

    film = ROOT / "tests" / "media" / "bigbuckbunny.mp4"
    real = imageio_ffmpeg.get_ffmpeg_exe()
    lines = [{"id": f"film {k}", "video": {"path": "film.mp4", "start": k, "end": k + 1}, "annotations": [{"type": "caption", "text": "x"}]}
             for k in range(3)]
    lines += [{"id": f"text {k}", "annotations": [{"type": "qa", "question": "?", "answer": "x" * (100 * k + 1)}]} for k in range(5)]
    (tmp_path / "v.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "film.mp4").write_bytes(film.read_bytes())
    config = replace(CONFIG, batch=3, micro_batch=3, data=replace(CONFIG.data, max_frames=2))
    make = lambda: loader.Loader([data.Records(tmp_path / "v.jsonl")], [1], TOKENIZER, config)           # noqa: E731
    sound = taken(make(), 2)
    (tmp_path / "stub.py").write_text(f"#!{sys.executable}\nimport os, sys\n"
                                      f"if 'framecrc' in sys.argv: os.execv({real!r}, [{real!r}, *sys.argv[1:]])\n{STUBS[what]}\n")
    (tmp_path / "stub.py").chmod(0o755)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(tmp_path / "stub.py"))
    monkeypatch.setattr(media, "DEADLINE", 1)
    monkeypatch.setattr(media, "MAX_MEMORY", 1 << 30)
    of = make()
    for (step, rows), (wanted, others) in zip(taken(of, 2), sound, strict=True):
        assert (step.ids, step.packs) == (wanted.ids, wanted.packs)
        for x, y in zip((x for row in rows for x in row), (y for row in others for y in row), strict=True):
            assert x.id == y.id and len(x.tokens) == len(y.tokens)
            assert x.bad.startswith("S23") if "film" in x.id else np.array_equal(x.weights, y.weights)
    assert of.masked["v.jsonl: S23"] == len(of.bad) > 0 and all("film" in bad["id"] for bad in of.bad)


# ---------------------------------------------------------------------------------------------------------------
# what goes wrong on the way


def test_a_batch_of_masked_pictures_alone_is_trained_through(files):
    """... with nothing to learn from, and not a NaN."""
    import torch

    import model

    torch.manual_seed(0)
    m = model.Molmo2(replace(CONFIG.model, n_layer=1)).init_weights()
    text = data.layout([TOKENIZER.bos], [False], [data.Branch([([5] * 9, True)])])
    for row in ([data.placeholder("a", 30, 2, CONFIG.data, "S21")], [data.placeholder("a", 30, 2, CONFIG.data, "S21"), text]):
        batch = packing.collate([row], 64, CONFIG.data.vision)
        assert len(batch.pool_src) == len(batch.pool_dst) == 1 and (batch.pool_src == -1).all()
        nll, _ = m(batch)
        (nll * batch.weights).sum().backward()
        assert torch.isfinite(nll).all() and all(torch.isfinite(p.grad).all() for p in m.parameters() if p.grad is not None)


@pytest.mark.parametrize(("batch", "ranks", "micro"), [(8, 4, 4), (12, 2, 4), (8, 2, 3), (6, 4, 1)])
def test_a_batch_that_does_not_go_evenly_is_refused(files, batch, ranks, micro):
    with pytest.raises(data.DataError, match=rf"{batch}: no multiple of {ranks} ranks"):
        stream(files, replace(CONFIG, batch=batch, micro_batch=micro), ranks=ranks)


def test_a_hundred_unusable_records_in_a_row_stop_planning_after_a_resume_too(tmp_path):
    good, bad = ({"annotations": [{"type": "text", "text": t}]} for t in ("a" * 650, "b" * 5000))
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(good if k < 4 else bad) for k in range(400)))

    class Ordered(data.Records):
        ordered = True                                                   # as they stand: first four that fit

    def make():
        return loader.Loader([Ordered(tmp_path / "r.jsonl")], [1], TOKENIZER, replace(CONFIG, batch=1, micro_batch=1))

    first, seen = make(), []
    first.setup[0].block = 1
    first.measured = lambda draw: (seen.append(draw), loader.measure(first.setup, draw))[1]
    with pytest.raises(data.DataError, match=r"of the last 100 draws no record could be used; the last: .*S03"):
        next(iter(first))
    assert len(seen) == 104
    again = make()
    again.setup[0].block = 1
    state = {"planner": {**again.planner.state(), "next": 64}, "ids": [], "dropped": {}, "drawn": {}, "in_a_row": 60}
    again.restore(state)
    with pytest.raises(data.DataError, match="of the last 100 draws"):
        next(iter(again))
    assert again.planner.next == 103                                     # the draw that broke off


def test_a_hundred_undecodable_records_in_a_row_stop_the_run(tmp_path):
    Image.effect_noise((60, 40), 90).convert("RGB").save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:3000])
    line = {"image": "a.png", "annotations": [{"type": "caption", "text": "x"}]}
    (tmp_path / "r.jsonl").write_text("\n".join([json.dumps(line)] * 20))
    of = loader.Loader([data.Records(tmp_path / "r.jsonl")], [1], TOKENIZER, CONFIG)
    with pytest.raises(loader.RunError, match=r"of the last 100 draws no record could be decoded; the last: .*S21"):
        taken(of, 20)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_worker_that_dies_ends_the_run_with_one_sentence_and_a_trainer_that_dies_leaves_none(files, tmp_path):
    of = iter(stream(files, replace(CONFIG, workers=2)))
    next(of)
    children = [p.pid for p in multiprocessing.active_children()]
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    with pytest.raises(loader.RunError, match="a decoding worker died"):
        deque((deque(micro, maxlen=0) for _, micro in of), maxlen=0)
    program = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.test_loader import CONFIG, stream, replace
import multiprocessing
if __name__ == "__main__":
    of = iter(stream({files!r}, replace(CONFIG, workers=2)))
    next(of)
    print(*(p.pid for p in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""
    (tmp_path / "program.py").write_text(program)
    trainer = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.wait()
    assert len(workers) == 2
    for _ in range(200):
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in workers):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("workers live on without their trainer")


def test_workers_hold_a_bounded_number_of_rows(files, monkeypatch):
    """Two micro-batches and one row per worker, whatever the batch."""
    class Here:                                                          # a pool that notes what it is given
        def __init__(self, *args):
            self.asked = 0
            pools.append(self)

        def submit(self, function, *args):
            self.asked += 1
            example = loader.encode(of.setup, *args)
            return type("Done", (), {"result": lambda self: example})()

        def shutdown(self, **options):
            pass

    pools = []
    monkeypatch.setattr(loader, "ProcessPoolExecutor", Here)
    longest = max(len(pack) for step, _ in taken(stream(files), 6) for pack in step.packs)
    of = stream(files, replace(CONFIG, workers=3))
    rows, given = of._rows(), 0
    for _ in range(30):
        given += len(next(rows)[1])
        assert pools[0].asked - given <= (2 * CONFIG.micro_batch + 3 - 1) * longest
    assert len(pools) == 1 and pools[0].asked > given


def test_ranks_other_than_the_first_keep_quiet_about_what_all_find(files, capsys):
    for rank in (0, 1):
        of = stream(files, rank=rank, ranks=2).begin()
        of.next_step(), of.next_step()
        assert of.dropped and ("S20" in capsys.readouterr().err) == (rank == 0)


def test_the_longest_wait_is_that_of_the_planner(files):
    of, came = stream(files), {}

    def noted(draw):
        came[draw] = of.planner.packs
        return loader.measure(of.setup, draw)

    of.measured, longest = noted, []
    for _ in range(5):
        begun = of.planner.packs
        step = of.next_step()
        longest.append(max(begun + n - came[e[0]] for n, pack in enumerate(step.packs) for e in pack))
        assert step.waited == longest[-1]
    assert max(longest) > 0 and len(set(longest)) > 1


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder in ("s1", "s2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.jsonl").write_text("\n".join(json.dumps({"annotations": [{"type": "text", "text": f"{folder} {i}"}]})
                                                             for i in range(20)))
    args, config = train.parse(["--stage", "1", "--tiny", "--data", *(str(tmp_path / f / "r.jsonl") for f in ("s1", "s2"))])
    sources, rates, _ = train.open_sources(args, config)
    assert [s.name for s in sources] == ["s1/r.jsonl", "s2/r.jsonl"] and sources[1][3]["id"] == "s2/r.jsonl:4"
    mixture = data.Mixture(sources, rates, 0)
    orders = [[index for source, index, _ in (mixture[i] for i in range(1000)) if source == k] for k in (0, 1)]
    assert orders[0][:20] != orders[1][:20]
    again, config = train.parse(["--stage", "1", "--tiny", "--data", *[str(tmp_path / "s1" / "r.jsonl")] * 2])
    with pytest.raises(data.DataError, match="named twice"):
        train.open_sources(again, config)


def test_a_resume_with_a_plan_is_not_one_without(files, ahead):
    state = next(iter(stream_of(files)))[0].state
    with pytest.raises(data.DataError, match="--plan"):
        stream_of(files, plan=ahead[0] / "plan.npz").restore(state)


def test_a_planned_run_is_resumed_exactly(files, ahead):
    whole = taken(stream_of(files, plan=ahead[0] / "plan.npz"), 3)
    again = stream_of(files, plan=ahead[0] / "plan.npz")
    again.restore(json.loads(json.dumps(whole[0][0].state)))
    assert [step.ids for step, _ in taken(again, 2)] == [step.ids for step, _ in whole[1:]]
    assert whole[2][0].dropped == again.dropped


@pytest.mark.parametrize(("flags", "message"), [
    (["--out", "nowhere/plan.npz"], "name a file in a folder"), (["--out", "."], "name a file in a folder"),
    (["--packs", "0"], "at least 1"), (["--cache", "CACHE", "--shard", "3"], "not --shard 3"),
    (["--cache", "CACHE", "--seed", "1"], "seed was 0 and is 1"), (["--cache", "."], "not empty, and no cache"),
])
def test_a_mistake_is_told_before_anything_is_planned(files, ahead, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(ROOT)
    flags = [str(ahead[0] / "cache") if word == "CACHE" else word for word in flags]
    with pytest.raises(SystemExit) as refused:
        plans.command(["plan", *FLAGS, *mixed(files), *(["--out", str(tmp_path / "p.npz")] if "--out" not in flags else []), *flags])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and message in said and "pack/s" not in said


@pytest.mark.parametrize(("annotation", "code"), [
    ({"type": "text", "text": "x" * 5000}, "S03"),
    ({"type": "qa", "weight": 0, "question": "?", "answer": "x"}, "S04"),
    ({"type": "qa", "turns": [{"question": "?", "answer": "x", "weight": 0}]}, "S04"),
    ({"type": "caption", "style": "transcript", "text": "so um"}, "S04"),                # stage 2 reads none
    ({"type": "point", "label": "dots", "coords": "percent", "points": [{"x": k, "y": k} for k in range(61)]}, "S12"),
])
def test_what_is_left_out_is_left_out_for_the_right_reason(files, annotation, code):
    seen = {} if annotation["type"] in ("text", "qa") else {"image": "0.png"}
    path = Path(files[0]).parent / "why.jsonl"
    path.write_text(json.dumps({**seen, "annotations": [annotation]}))
    of = loader.Loader([data.Records(path)], [1], TOKENIZER, CONFIG)
    assert of.measured(0)[2] is None and of.measured(0)[3].startswith(code)


def test_what_one_rank_of_a_group_finds_bad_all_of_it_mask(tmp_path):
    """The third picture of a record is damaged: the rank that decodes it says so, the other masks the record as well; and unseen later."""
    rng = np.random.default_rng(0)
    for k in range(3):
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(tmp_path / f"{k}.png")
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:3000])
    qa = {"annotations": [{"type": "qa", "question": "?", "answer": "!"}]}
    (tmp_path / "r.jsonl").write_text(json.dumps({"images": ["0.png", "1.png", "2.png"], **qa}) + "\n" + json.dumps(qa))
    said, together = {}, threading.Barrier(2)

    def agree(rank, reasons):
        said[rank] = reasons
        together.wait(60)
        merged = [a or b for a, b in zip(said[0], said[1], strict=True)]
        together.wait(60)
        return merged

    def run(rank, known={}):                                              # noqa: B006
        of = loader.Loader([data.Records(tmp_path / "r.jsonl")], [1.0], TOKENIZER, config, part=(rank, 2), agree=partial(agree, rank))
        of.known_bad = known
        return of, taken(of, 2)

    config = replace(CONFIG, batch=2, micro_batch=1)
    with ThreadPoolExecutor(2) as ranks:
        (first, a), (second, b) = ranks.map(run, (0, 1))
        bad = {x["draw"]: x["reason"] for x in first.bad}
        (_, again), _ = ranks.map(partial(run, known=bad), (0, 1))
    assert len(first.bad) > 0 and first.bad == second.bad and first.masked == second.masked == {"r.jsonl: S21": len(first.bad)}
    for (_, rows), (_, others), (_, later) in zip(a, b, again, strict=True):
        for x, y, z in zip(*(itertools.chain(*r) for r in (rows, others, later)), strict=True):
            assert x.id == y.id and np.array_equal(x.weights, y.weights) and bool(x.bad) == bool(y.bad) == x.id.endswith(":1")
            assert np.array_equal(x.weights, z.weights) and (x.images is None or np.array_equal(x.images, z.images))
            if x.bad:
                assert len(x.images) + len(y.images) == len(x.unit) and np.array_equal(x.owner, y.owner) and not x.weights.any()


def test_a_cache_made_ahead_gives_each_rank_of_a_group_its_part(files, ahead):
    plain, cached = (stream_of(files, part=(1, 2), cache=cache) for cache in (None, str(ahead[0] / "cache")))
    compared = 0
    for (_, a), (_, b) in zip(taken(plain, 3), taken(cached, 3), strict=True):
        for x, y in zip(itertools.chain(*a), itertools.chain(*b), strict=True):
            if x.bad != y.bad:                                            # the rank that has the picture found it, and would tell
                assert y.bad and not x.bad and not len(x.images)
            elif x.images is not None:
                assert np.array_equal(x.images, y.images) and np.array_equal(x.owner, y.owner)
                compared += len(x.images)
    assert compared > 0
