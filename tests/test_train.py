"""The loop and its command line: what a step is, what a run leaves behind, what a user's mistake costs."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import loader
import pytest
import torch
from PIL import Image

import data
import model
import packing
import train
from text import tokenizer as text
from toy import world as tiny
from training import weights

ROOT = Path(__file__).parent.parent
MEDIA = ROOT / "tests" / "media"
SMALL = ["--stage", "1", "--tiny", "--batch", "4", "--steps", "3", "--eval_images=1", "--model.n_layer=1", "--deterministic",
         "--device", "cpu"]
PHOTOS = ["--data", str(MEDIA / "records.jsonl"), "--media", str(MEDIA)]


def run(out, *flags):
    """train.main in this process -> the lines of its log."""
    train.main([*SMALL, *flags, "--out", str(out)])
    torch.use_deterministic_algorithms(False)
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def steps(lines):
    return [line for line in lines if "loss" in line]


def same(a, b, rel):
    exact = ("step", "weight", "tokens", "loss_tokens", "ids", "examples", "branches", "dropped", "lr", "fill_tokens", "fill_crops")
    for x, y in zip(steps(a), steps(b), strict=True):
        assert [x[k] for k in exact] == [y[k] for k in exact]
        assert x["loss"] == pytest.approx(y["loss"], rel=rel)
        assert x["grad_norms"] == pytest.approx(y["grad_norms"], rel=10 * rel)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "plain"
    return out, run(out)


@pytest.mark.parametrize("micro", ["1", "2"])
def test_accumulation_changes_nothing(plain, tmp_path, micro):
    same(plain[1], run(tmp_path / "a", "--micro-batch", micro), rel=2e-6)


def test_the_same_seed_gives_the_same_run_and_another_gives_another(plain, tmp_path):
    again, other = run(tmp_path / "a"), run(tmp_path / "b", "--seed", "1")
    same(plain[1], again, rel=1e-12)
    assert [line["ids"] for line in steps(plain[1])] != [line["ids"] for line in steps(other)]


def with_bad_images(folder):
    """A record file of which one image is sound, one missing, one no image, one cut short -> the flags that train on it."""
    (folder / "cut.png").write_bytes((MEDIA / "coffee.png").read_bytes()[:90_000])
    (folder / "page.png").write_text("<html>")
    Image.new("RGB", (60, 60)).save(folder / "good.png")
    caption = [{"type": "caption", "text": "a thing"}]
    (folder / "r.jsonl").write_text("\n".join(json.dumps({"image": n, "annotations": caption}) for n in ("cut.png", "page.png", "good.png",
                                                                                                        "gone.png")))
    return ["--data", str(folder / "r.jsonl"), "--data.max_tokens=512"]


@pytest.mark.slow
def test_denormal_numbers_are_zero_on_all_threads(tmp_path):
    code = ("import torch, train; torch.set_num_threads(2); "
            "train.main(['--stage', '1', '--tiny', '--steps', '1', '--vit_steps=0', '--eval_images=1', '--out', "
            f"{str(tmp_path / 'out')!r}]); "
            "print(int((torch.full((4_000_000,), 1e-40) * 1).count_nonzero()))")
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == "0", ran.stderr[-500:]


def test_on_a_gpu_the_cores_of_a_process_decode_ahead(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    assert [train.workers_for(torch.device(name)) for name in ("cpu", "mps", "cuda")] == [0, 0, 8]
    for processes, left in (("8", 3), ("64", 0)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert train.workers_for(torch.device("cuda")) == left


@pytest.mark.slow
def test_decoding_in_worker_processes_changes_nothing(tmp_path):
    """... not even what is reported of images that are missing or cut short, though workers run steps ahead."""
    flags = [*with_bad_images(tmp_path), "--steps", "5", "--pool_size=3"]
    here, workers = run(tmp_path / "a", *flags), run(tmp_path / "b", *flags, "--workers", "2")
    same(here, workers, rel=1e-12)
    dropped = [line["dropped"] for line in steps(here)]
    assert {"S20", "S21"} <= set(dropped[-1]) and dropped[0] != dropped[-1]
    assert (tmp_path / "a" / "skips.jsonl").read_text() == (tmp_path / "b" / "skips.jsonl").read_text()


def test_a_run_leaves_what_the_interface_promises(plain):
    out, lines = plain
    assert {"config", "commit", "versions", "params"} <= set(lines[0])
    assert sum(lines[0]["params"].values()) == sum(p.numel() for p in weights.load(out).parameters())
    wanted = {"step", "loss", "weight", "tokens", "loss_tokens", "lr", "grad_norm", "grad_norms", "fill_tokens", "fill_crops", "examples",
              "branches", "dropped", "ids", "seconds"}
    assert all(wanted <= set(line) for line in steps(lines)) and len(steps(lines)) == 3
    assert {"caption_exact", "point_f1", "count_accuracy", "unseen"} <= set(lines[-1]["eval"])
    assert all((out / name).exists() for name in ("loss.png", "lr.png", "config.json")) and list((out / "samples" / "test").glob("*.png"))


def opened(*flags):
    """What a run with these flags starts from: model, config, an iterator over the rows of its steps."""
    args, config = train.parse([*SMALL, *flags])
    torch.manual_seed(config.seed)
    m, tokenizer, config = train.open_model(args, config)
    sources, rates, _ = train.open_sources(args, config)
    stream = loader.Loader(sources, rates, tokenizer, config)
    return m, config, ([row for rows in micro_batches for row in rows] for _, micro_batches in stream)


def test_the_loss_is_a_weighted_mean_over_the_whole_step(tmp_path):
    """Micro-batches of very different weight: what is logged is the mean over all of them, by torch's own cross entropy."""
    flags = ["--data.sqrt_length=true", "--data.point_weight=0.2", "--vit_steps=0"]
    m, config, steps_of_rows = opened(*flags)
    rows = next(steps_of_rows)
    weight = sum(float(e.weights.sum()) for row in rows for e in row)
    batch = train.packing.collate(rows, config.data.max_tokens, config.data.vision)
    logits = m.logits(batch)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten().clamp(max=logits.shape[-1] - 1), reduction="none")
    expected = float((nll.detach() * batch.weights.flatten()).sum() / weight)
    lines = run(tmp_path / "a", "--micro-batch", "1", "--steps", "1", *flags)
    assert len({round(float(w), 4) for w in batch.weights.unique()}) >= 3
    assert steps(lines)[0]["loss"] == pytest.approx(expected, rel=1e-5) and steps(lines)[0]["weight"] == pytest.approx(weight, rel=1e-6)
    # ... and of each source, which the ids of the toy begin with
    sums, nll = {}, (nll.detach() * batch.weights.flatten()).view(batch.tokens.shape)
    for b, row in enumerate(rows):
        for k, e in enumerate(row):
            name, here = e.id.rpartition("-")[0], batch.doc[b] == k
            sums[name] = sums.get(name, 0) + torch.stack([nll[b][here].sum(), batch.weights[b][here].sum()])
    assert len(sums) > 1
    assert steps(lines)[0]["nll_by_source"] == pytest.approx({name: float(a / w) for name, (a, w) in sums.items()}, rel=1e-5)


def test_three_steps_equal_three_written_by_hand(tmp_path):
    """Logits, torch's own cross entropy and logsumexp, the norm of each group clipped by itself, torch's AdamW: the same weights.

    Adam's first step is the sign of the gradient, which would hide clipping and betas: so three steps, and an eps as large as
    the gradients.
    """
    flags = ["--lr.vit=1e-3", "--lr.connector=2e-3", "--lr.llm=5e-4", "--adam_eps=0.01", "--data.point_weight=0.2", "--vit_steps=0"]
    m, config, steps_of_rows = opened(*flags)
    before = {name: p.detach().clone() for name, p in m.named_parameters()}
    groups = m.parameter_groups()
    optimizer = torch.optim.AdamW([{"params": ps} for ps in groups.values()], betas=(0.9, 0.95), eps=0.01, weight_decay=0)
    lines = steps(run(tmp_path / "a", *flags, "--micro-batch", "2"))
    for step, rows in zip((1, 2, 3), steps_of_rows, strict=False):
        batch = train.packing.collate(rows, config.data.max_tokens, config.data.vision)
        w, logits = batch.weights.flatten(), m.logits(batch).flatten(0, 1)
        targets = batch.targets.flatten().clamp(max=logits.shape[-1] - 1)
        nll, lse = torch.nn.functional.cross_entropy(logits, targets, reduction="none"), logits.logsumexp(-1)
        optimizer.zero_grad()
        ((w * (nll + 1e-4 * lse**2)).sum() / w.sum()).backward()
        norms = {part: float(torch.nn.utils.clip_grad_norm_(ps, 1.0)) for part, ps in groups.items()}
        rates = {part: train.schedule(config, part, step) for part in groups}
        for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
            group["lr"] = rate
        optimizer.step()
        assert lines[step - 1]["lr"] == rates and len(set(rates.values())) == 3 and min(rates.values()) > 0
        assert lines[step - 1]["grad_norms"] == pytest.approx(norms, rel=1e-4)
        assert lines[step - 1]["grad_norm"] == pytest.approx(sum(n**2 for n in norms.values()) ** 0.5, rel=1e-4)
        assert max(norms.values()) > 1.5
    after = dict(weights.load(tmp_path / "a").named_parameters())
    for name, p in m.named_parameters():
        ours, expected = after[name] - before[name], p.detach() - before[name]
        # the norm of what a parameter moved; a bias of the keys does not move at all but for rounding
        assert float((ours - expected).detach().norm()) <= 1e-4 * float(expected.norm()) + 1e-7, name


def test_stages_drop_and_freeze_as_published():
    parse = lambda stage, *flags: train.parse(["--stage", stage, *flags])[1]             # noqa: E731
    one, two, three = parse("1"), parse("2"), parse("3")
    assert [(c.response_dropout, c.residual_dropout) for c in (one, two, three)] == [(0.1, 0.0), (0.0, 0.1), (0.0, 0.1)]
    assert [(c.steps, c.batch, c.data.max_tokens, c.pack_crops) for c in (one, two, three)] == [
        (31_000, 128, 2536, 16), (30_000, 128, 16_384, 128), (2_000, 128, 36_864, 384)]
    assert [c.freeze_embedding for c in (one, two, three, parse("1", "--tiny"))] == [True, True, True, False]
    later = train.Parts(5e-6, 5e-6, 1e-5)
    assert [c.lr for c in (one, two, three)] == [train.Parts(6e-6, 2e-4, 2e-5), later, later]
    assert [c.warmup for c in (one, two, three)] == [train.Parts(2000, 200, 2000), *[train.Parts(200, 200, 200)] * 2]
    assert [c.micro_batch for c in (one, two, three)] == [4, 2, 1]
    assert all((c.betas, c.adam_eps, c.clip, c.z_loss, c.final_lr) == ((0.9, 0.95), 1e-6, 1.0, 1e-4, 0.1) for c in (one, two, three))
    of_data = [(d.sqrt_length, d.sqrt_branches, d.point_weight, d.prefix_all, d.separator) for d in (one.data, two.data, three.data)]
    assert of_data == [(False, False, 1.0, True, "\t"), *[(True, True, 0.2, False, ";")] * 2]
    tiny_two = parse("2", "--tiny")              # the toy's recipe changes sizes and how one asks, not what a stage is
    assert (tiny_two.data.sqrt_length, tiny_two.data.point_weight, tiny_two.data.prefix_all, tiny_two.preset) == (True, 0.2, True, "toy")


def test_a_field_is_parsed_by_its_type_and_one_that_does_not_exist_is_refused():
    with pytest.raises(train.UserError):
        train.override(train.Config(), "data.vision.grdi", 3, "x")
    assert train.override(train.Config(), "model.vision.grid", "9", "x").model.vision.grid == 9
    assert train.override(train.Config(), "betas", "0.8,0.9", "x").betas == (0.8, 0.9)
    assert isinstance(data.DataConfig().vision.feature_layers, tuple)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_embedding_stays_and_the_extra_ones_learn(tmp_path, frozen):
    run(tmp_path / "a", f"--freeze_embedding={frozen}", "--steps", "1", "--warmup.llm=0", "--warmup.connector=0")
    torch.manual_seed(0)
    before, after = model.Molmo2(train.parse(SMALL)[1].model).init_weights(), weights.load(tmp_path / "a")
    assert torch.equal(before.embedding.weight, after.embedding.weight) == frozen
    assert not torch.equal(before.extra.weight, after.extra.weight)


def test_only_the_named_parts_learn(tmp_path):
    run(tmp_path / "a", "--train", "connector", "--steps", "1", "--warmup.connector=0", "--vit_steps=0")
    torch.manual_seed(0)
    before, after = model.Molmo2(train.parse(SMALL)[1].model).init_weights(), weights.load(tmp_path / "a")
    changed = {name for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True) if not torch.equal(a, b)}
    assert changed and all(name.startswith(("vision.pool", "vision.projector", "extra")) for name in changed)


def test_real_photographs_train_and_are_scored(tmp_path):
    lines = run(tmp_path / "a", *PHOTOS, "--eval", str(MEDIA / "records.jsonl"))
    assert all(line["dropped"] == {} and line["branches_dropped"] == 0 for line in steps(lines))     # nothing is too long for the toy
    assert all(4 < line["examples"] < line["branches"] and line["tokens"] <= 4 * 640 for line in steps(lines))      # rows are shared, trees
    assert lines[-1]["eval"]["hits"] == "within 5 % of the diagonal" and lines[-1]["eval"]["n_point"] == 5


def test_a_run_goes_on_from_the_weights_of_another(plain, tmp_path):
    first, second = steps(plain[1]), steps(run(tmp_path / "a", "--init", str(plain[0])))
    assert second[0]["loss"] < first[0]["loss"] - 0.1


def test_a_run_takes_shape_and_tokenizer_of_the_one_it_starts_from(tmp_path):
    """... the geometry of its crops too, in the records and in the scores; here none of the three is the toy's."""
    toy = model.PRESETS["toy"]
    shape = dataclasses.replace(toy, n_layer=1, vision=dataclasses.replace(toy.vision, grid=6, patch=16))
    torch.manual_seed(1)
    old = model.Molmo2(shape).init_weights()
    weights.save(old, tmp_path / "old")
    data.ByteTokenizer(tiny.WORDS[:-1]).save(tmp_path / "old")
    (tmp_path / "old" / "data.json").write_text("{}")
    flags = [flag for flag in SMALL if not flag.startswith("--model.")]
    train.main([*flags, "--steps", "1", "--init", str(tmp_path / "old"), "--out", str(tmp_path / "new"), "--lr.vit=0", "--warmup.vit=0"])
    torch.use_deterministic_algorithms(False)
    config = json.loads((tmp_path / "new" / "config.json").read_text())["config"]
    new = weights.load(tmp_path / "new")
    assert new.config == shape and text.load_tokenizer(tmp_path / "new" / "model", 384).words == tiny.WORDS[:-1]
    assert config["model"]["n_layer"] == 1
    assert config["model"]["vision"]["grid"] == config["data"]["vision"]["grid"] == 6
    assert torch.equal(new.vision.vit.patch.weight, old.vision.vit.patch.weight)       # at a rate of 0: the same weights
    assert not torch.equal(new.norm.weight, old.norm.weight)


def test_a_run_can_go_on_from_the_directory_it_writes_to(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain[0], "runs/stage1-tiny")
    train.main([*SMALL, "--steps", "1", "--init", "runs/stage1-tiny"])
    torch.use_deterministic_algorithms(False)
    assert (tmp_path / "runs/stage1-tiny.old-1/log.jsonl").read_text() == (plain[0] / "log.jsonl").read_text()
    first = steps([json.loads(line) for line in open("runs/stage1-tiny/log.jsonl")])[0]
    assert first["loss"] < steps(plain[1])[0]["loss"] - 0.1


def test_bad_images_are_counted_and_the_run_goes_on(tmp_path):
    lines = run(tmp_path / "a", *with_bad_images(tmp_path))
    assert steps(lines)[-1]["dropped"]["S21"] >= 2 and steps(lines)[-1]["dropped"]["S20"] >= 1
    skips = [json.loads(line) for line in (tmp_path / "a" / "skips.jsonl").read_text().splitlines()]
    assert {s["id"] for s in skips} == {"r.jsonl:1"} and all("S21" in s["reason"] for s in skips)


MISTAKES = [
    (["--stage", "1", "--tiny", "--stpes", "3"], "--steps"),
    (["--stage", "1", "--tiny", "--lr.vot=1"], "did you mean 'vit'"),
    (["--stage", "1", "--tiny", "--max_skip", "0.5"], "written --max_skip=value"),
    (["--stage", "1", "--tiny", "--pool_size=many"], "'many' is no int"),
    (["--stage", "1", "--tiny", "--pool_size=0"], "at least 1"),
    (["--stage", "1", "--tiny", "--data"], "--data"),
    (["--stage", "7"], "--stage"),
    (["--stage", "1"], "--data: name record files"),
    (["--stage", "1", "--tiny", "--batch", "4", "--micro-batch", "3"], "--micro-batch 3"),
    (["--stage", "1", "--tiny", "--train", "vision"], "vit, connector, llm"),
    (["--stage", "1", "--tiny", "--data", "none.jsonl"], "none.jsonl: no such file"),
    (["--stage", "1", "--tiny", "--data", str(MEDIA / "records.jsonl"), "--media", "nowhere"], "--media nowhere"),
    (["--stage", "1", "--tiny", "--data", "r.jsonl=x"], "'x' is no rate"),
    (["--stage", "1", "--tiny", "--init", "nowhere"], "--init nowhere"),
    (["--stage", "1", "--tiny", "--out", "full"], "--out full: not empty"),
    (["--stage", "1", "--tiny", "--data", "empty.jsonl"], "E05"),
    (["--stage", "1", "--tiny", "--data", "wrong.jsonl"], "wrong.jsonl:2: E07"),
    (["--stage", "1", "--tiny", "--data", "outside.jsonl"], "outside.jsonl:1: E62"),
    (["--stage", "1", "--tiny", "--seed", "-1"], "--seed: must be at least 0"),
    (["--stage", "1", "--tiny", "--workers", "-1"], "--workers: must be at least 0"),
    (["--stage", "1", "--uncheckpointed_blocks=-1"], "--keep-blocks: must be at least 0"),
    (["--stage", "1", "--tiny", "--uncheckpointed_blocks=1"], "--uncheckpointed_blocks=1: without activation_checkpointing no block runs again"),
    (["--stage", "1", "--tiny", "--data.max_crops=0"], "--data.max-crops: must be at least 1"),
    (["--stage", "1", "--tiny", "--pool_size=inf"], "'inf' is no int"),
    (["--stage", "1", "--tiny", "--betas=0.9"], "--betas: two numbers"),
    (["--stage", "1", "--tiny", "--model.n_head=3"], "--model: no model has this shape"),
    (["--stage", "1", "--tiny", "--data.vision.grid=3"], "--data.vision.grid=3: geometry"),
    (["--stage", "1", "--tiny", "--data", "good.jsonl", "--eval", "gone.jsonl"], "gone.jsonl: no such file"),
    (["--stage", "1", "--tiny", "--eval", "good.jsonl"], "--eval: only goes with --data"),
    (["--stage", "1", "--tiny", "--media", "full"], "--media: only goes with --data"),
    (["--stage", "1", "--tiny", "--init", ""], "--init"),
    (["--stage", "1", "--tiny", "--data", "unreadable.jsonl"], "unreadable.jsonl:1: S21"),
]


@pytest.mark.parametrize(("flags", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_users_mistake_costs_one_sentence(tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    good = {"annotations": [{"type": "text", "text": "x"}]}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "a.png").write_text("no picture")
    Image.new("RGB", (40, 30)).save(tmp_path / "b.png")
    point = {"type": "point", "label": "l", "coords": "pixel", "points": [{"x": 41, "y": 3}]}
    caption = {"type": "caption", "text": "x"}
    files = {"good": [good], "empty": [], "wrong": [good, {**good, "wieght": 1}],
             "unreadable": [{"image": "a.png", "annotations": [caption]}], "outside": [{"image": "b.png", "annotations": [point]}]}
    for name, records in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    if "--tiny" not in flags:                    # 4 B parameters take a minute and 18 GB: not for a mistake in the command line
        monkeypatch.setattr(model, "Molmo2", lambda config: pytest.fail("a model was made first"))
    with pytest.raises(SystemExit) as end:
        train.main(flags)
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and words in error and "Traceback" not in error
    named = "unreadable" in words or "outside" in words                  # a record that is left out is named before the run is
    assert len(error.splitlines()) == 1 + named
    assert not (tmp_path / "runs").exists()                              # and nothing was written


def test_a_run_without_a_name_moves_the_old_one_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, config = train.parse(["--stage", "1", "--tiny"])
    for n in range(3):
        (train.run_directory(args, config, None) / "mark").write_text(str(n))
    marks = [(tmp_path / "runs" / name / "mark").read_text() for name in ("stage1-tiny", "stage1-tiny.old-1", "stage1-tiny.old-2")]
    assert marks == ["2", "0", "1"]


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_records(tmp_path, capsys, monkeypatch):
    broken = model.Molmo2.nll
    monkeypatch.setattr(model.Molmo2, "nll", lambda self, *a: tuple(x * float("nan") for x in broken(self, *a)))
    with pytest.raises(SystemExit) as end:
        train.main([*SMALL, "--out", str(tmp_path / "a")])
    torch.use_deterministic_algorithms(False)
    assert end.value.code == 1 and "tiny-" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_tools_run_from_the_command_line_on_what_a_run_left(plain, tmp_path):
    toy, drawn, answer = tmp_path / "toy", tmp_path / "drawn", tmp_path / "p.png"
    tiny.export(toy, tiny.World("test"), 3)
    call = lambda *words: subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)   # noqa: E731
    done = call("tools.evaluate", "--model", str(plain[0]), "--data", str(toy / "records.jsonl"), "--masks", str(toy / "masks.npz"),
                "--out", str(tmp_path), "--draw", str(drawn))
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout.splitlines()[-1])
    assert metrics["hits"] == "mask" and metrics["n_caption"] == 3 and list(drawn.glob("*.png"))
    done = call("tools.generate", "--model", str(plain[0]), "--image", str(next(toy.glob("*.png"))), "--prompt", "pointing: any shape",
                "--draw", str(answer), "--json", "--max-new", "9")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] <= 9 and Image.open(answer).size == (3 * tiny.SIZE, 3 * tiny.SIZE)
    for words in (("tools.generate", "--model", "nowhere", "--prompt", "x"),
                  ("tools.evaluate", "--model", str(plain[0]), "--data", "none.jsonl")):
        done = call(*words)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


def test_stage_0_teaches_a_vit_that_starts_from_nothing_and_no_other(plain, tmp_path):
    lines = [json.loads(line) for line in (plain[0] / "stage0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and set(lines[0]["nll"]) == {"colour", "shape", "column", "row"}
    run(tmp_path / "again", "--init", str(plain[0]))
    without = run(tmp_path / "without", "--vit_steps=0")
    assert not any((tmp_path / name / "stage0.jsonl").exists() for name in ("again", "without"))
    assert steps(without)[0]["loss"] != steps(plain[1])[0]["loss"] and steps(without)[0]["ids"] == steps(plain[1])[0]["ids"]
    frozen = run(tmp_path / "frozen", "--train", "connector,llm")        # taught, then left alone
    assert steps(frozen)[0]["loss"] == steps(plain[1])[0]["loss"] and "vit" not in steps(frozen)[0]["grad_norms"]
    assert all(line["grad_norms"]["vit"] > 0 for line in steps(plain[1]))


def test_results_of_a_micro_batch_are_read_once_the_next_has_begun():
    events = []

    def passes():
        for k in range(3):
            events.append(f"begin {k}")
            yield k

    for k in train.behind(passes()):
        events.append(f"read {k}")
    assert events == ["begin 0", "begin 1", "read 0", "begin 2", "read 1", "read 2"] and list(train.behind([7])) == [7]


def test_a_rehearsal_has_the_fullest_shapes_and_changes_nothing(tmp_path, monkeypatch):
    """Full rows, all crops, loss everywhere; the log of the run is the one without, bit for bit."""
    seen, build = [], packing.collate
    monkeypatch.setattr(train, "score", lambda *_: {})                   # what is learned is not the question
    monkeypatch.setattr(packing, "build", lambda *args, **how: (seen.append(build(*args, **how)), seen[-1])[1])
    flags = ["--steps", "2", "--stage", "2"]
    logs = [steps(run(tmp_path / name, *flags, f"--dry_run={name}")) for name in ("false", "true")]
    assert [line["loss"] for line in logs[0]] == [line["loss"] for line in logs[1]]
    full = [batch for batch in seen if batch.ids[0] == "rehearsal"]
    assert len(full) == 2
    for batch in full:
        limits = json.loads((tmp_path / "true" / "config.json").read_text())["config"]
        assert batch.weights.bool().all() and batch.tokens.shape == (limits["micro_batch"], limits["data"]["max_tokens"])
        assert len(batch.unit) == limits["micro_batch"] * limits["pack_crops"]
        others = [b for b in seen if b.ids != batch.ids]
        assert all(len(batch.images) >= len(b.images) and len(batch.pool_src) >= len(b.pool_src) for b in others)


def test_what_does_not_fit_in_the_rehearsal_is_one_sentence(tmp_path, capsys, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.")

    monkeypatch.setattr(train, "passed", full)
    with pytest.raises(SystemExit) as ended:
        train.main([*SMALL, "--vit_steps=0", "--dry_run=true", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 1 and "the fullest batch does not fit: CUDA out of memory" in said[-1] and "Traceback" not in str(said)
