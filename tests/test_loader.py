"""The stream of steps: the same packs whatever the layout, nothing lost, and what is made ahead is what would be made."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
import loader
import media
import packing
import plans
import train

ROOT = Path(__file__).parent.parent
MANY = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TOKENIZER = data.ByteTokenizer()
CONFIG = train.parse(["--stage", "2", "--tiny", "--batch", "8", "--micro-batch", "2", "--steps", "6", "--pool=9",
                      "--data.max_tokens=700"])[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two record files, of pictures and of text; of the pictures one is cut short, three are missing."""
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
    (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:3000])
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
        again = stream(files)
        again.restore(json.loads(json.dumps(whole[n - 1][0].state)))
        for (a, rows_a), (b, rows_b) in zip(whole[n:], taken(again, 6 - n), strict=True):
            assert a == replace(b, packs=a.packs) and json.dumps(a.packs) == json.dumps(b.packs)
            assert all(np.array_equal(x.tokens, y.tokens) and np.array_equal(x.weights, y.weights) and x.id == y.id
                       for row, other in zip(rows_a, rows_b, strict=True) for x, y in zip(row, other, strict=True))


def test_what_the_first_run_masked_the_second_masks_unseen(files, tmp_path):
    """A file that was repaired meanwhile makes no difference to a resumed run."""
    first = stream(files)
    whole = taken(first, 6)
    assert first.bad
    picture = Path(files[0]).parent / "3.png"
    cut = picture.read_bytes()
    try:
        Image.new("RGB", (60, 40)).save(picture)
        again = stream(files)
        again.known_bad = {bad["draw"]: bad["reason"] for bad in first.bad}
        for (_, rows), (_, others) in zip(whole, taken(again, 6), strict=True):
            assert [e.bad for row in rows for e in row] == [e.bad for row in others for e in row]
        assert again.bad == first.bad
    finally:
        picture.write_bytes(cut)


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
    said = r"records of many.jsonl could not be used, more than --max_skip=0.01; the last: .*many.jsonl:\d+: S03"
    with pytest.raises(data.DataError, match=said):
        planned("many.jsonl")
    assert planned("many.jsonl", max_skip=0.08).dropped["many.jsonl: S03"] > 10


# ---------------------------------------------------------------------------------------------------------------
# dealing


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_pack_goes_to_one_rank_and_all_get_as_many(ranks):
    work = np.random.default_rng(ranks).integers(0, 100, (32, 2))
    shares = loader.deal(work, ranks)
    assert sorted(k for share in shares for k in share) == list(range(32)) and {len(share) for share in shares} == {32 // ranks}
    assert shares == loader.deal(work, ranks)


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_rank_is_nearly_the_best_that_any_dealing_allows(seed):
    """Against all ways to deal 8 packs to 2 ranks: crops and attention of the slowest, relative to an even share."""
    work = np.random.default_rng(seed).integers(1, 100, (8, 2)).astype(float)

    def slowest(groups):
        return sum(max(work[list(g)].sum(0)[k] for g in groups) / work.sum(0)[k] * 2 for k in (0, 1))

    best = min(slowest((g, set(range(8)) - set(g))) for g in itertools.combinations(range(8), 4))
    in_order = slowest((range(0, 8, 2), range(1, 8, 2)))
    ours = slowest(loader.deal(work, 2))
    assert ours <= best * 1.08 and (ours <= in_order or in_order < best * 1.08)


def test_packs_without_crops_are_dealt_by_their_attention():
    assert [sum((9, 1, 8, 2)[k] for k in share) for share in loader.deal([(0, 9), (0, 1), (0, 8), (0, 2)], 2)] == [10, 10]


# ---------------------------------------------------------------------------------------------------------------
# made ahead

FLAGS = ["--stage", "2", "--tiny", "--batch", "4", "--pool=9", "--data.max_tokens=700", "--vit_steps=0", "--deterministic",
         "--device", "cpu", "--model.n_layer=1", "--steps", "3"]


def mixed(files):
    return ["--data", f"{files[0]}=0.7", f"{files[1]}=0.3"]


def plan(*flags, ranks=1):
    command = [*MANY, str(ranks)] if ranks > 1 else [sys.executable]
    done = subprocess.run([*command, "packing.py", "plan", *FLAGS, *map(str, flags)], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done


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
    assert plain == log_of(tmp_path / "b", *with_data, "--plan", folder / "plan.npz")
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
    assert len(shards) == 1 + 4 * 10 and all((folder / p).read_bytes() == (tmp_path / p).read_bytes() for p in shards)


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
    (["--pool=10"], "pool was 9 and is 10"),
    (["--data.max_crops=2"], "data.max_crops"),
    (["--steps", "5"], "holds 14 packs and the run asks for 20"),
])
def test_a_plan_of_another_run_is_refused(files, ahead, tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit) as refused:
        log_of(tmp_path / "a", *mixed(files), "--plan", ahead[0] / "plan.npz", *flags)
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
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 no")
    np.savez(tmp_path / "y.npz", a=np.array([{}], object))
    (tmp_path / "c").mkdir()
    for flag, name in (("--plan", "x.npz"), ("--plan", "y.npz"), ("--plan", "none.npz"), ("--cache", "c")):
        with pytest.raises(SystemExit) as refused:
            log_of(tmp_path / "a", "--data", *files, flag, tmp_path / name)
        assert refused.value.code == 2 and name in capsys.readouterr().err


def test_a_cache_goes_on_where_it_stopped(files, ahead, tmp_path):
    """A shard that was being written counts for nothing; those that are whole are not written again."""
    folder, copy = ahead[0] / "cache", tmp_path / "cache"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    (copy / "000002").rename(copy / "000002.tmp")
    (copy / "000002.tmp" / "images").write_bytes(b"half")
    (copy / "cache.json").unlink()
    kept = (copy / "000001" / "images").stat().st_mtime_ns
    done = plan(*mixed(files), "--packs", 14, "--out", tmp_path / "p.npz", "--cache", copy, "--shard", 4)
    assert done.returncode == 0, done.stderr
    assert (copy / "000002" / "images").read_bytes() == (folder / "000002" / "images").read_bytes()
    assert (copy / "000001" / "images").stat().st_mtime_ns == kept and not list(copy.glob("*.tmp"))


def test_encoded_arrays_come_back_as_they_were(tmp_path):
    rng = np.random.default_rng(0)
    config = replace(CONFIG.data, max_crops=2)
    text = data.layout([1, 2, 3], [False] * 3, [data.Branch([([5] * 9, False), ([6] * 4, True)])])
    picture = data.layout([1] * 12, [False] + [True] * 11, [data.Branch([([5] * 9, True)])])
    picture.images = rng.integers(0, 255, (3, config.vision.n_patch, config.vision.n_pixel), np.uint8)
    picture.pool_src = rng.integers(-1, 90, (6, 9))
    picture.pool_dst, picture.id, picture.dropped, picture.dropped_tokens = rng.integers(0, 9, 6), "pic\"ture\n", 2, 17
    wanted = {40: text, 7: picture, 9: data.blank("b", 30, 2, config, "S21 why")}
    plans.write_shard(tmp_path / "000000", wanted.items())
    (tmp_path / "cache.json").write_text(json.dumps({"made_for": {}, "packs": 3, "shard": 4}))
    cache = plans.Cache(tmp_path, {}, 3)
    for draw, x in wanted.items():
        for name, value in vars(x).items():
            found = getattr(cache[draw], name)
            assert found is None if value is None else found == value if not isinstance(value, np.ndarray) else (
                found.dtype == value.dtype and np.array_equal(found, value)), name
    a, b = (packing.build([[wanted[40], wanted[7]]], 64, config.vision), packing.build([[cache[40], cache[7]]], 64, config.vision))
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
