"""A training step equals a step that uses torch's own functions, and a run writes its files."""

import json
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.functional import cross_entropy

import model as models
import packing
import train
from evaluation import report
from records.mixture import Mixture
from tests.ranks import first_of_two_ranks
from text.tokenizer import ByteTokenizer, load_tokenizer
from toy import world
from training.config import parse
from training.loader import Ahead, Loader
from training.log import read_log
from training.planner import StepPlanner
from training.ranks import Ranks
from training.setup import find_start, open_model
from training.sources import open_sources
from weights import files

ROOT = Path(__file__).parents[1]
MEDIA = ROOT / "tests" / "media"
WITHOUT_SHAPE = ["--stage=1", "--tiny", "--batch=4", "--steps=3", "--eval_images=0",
                 "--deterministic", "--device=cpu"]
SMALL = [*WITHOUT_SHAPE, "--model.n_layer=1", "--model.n_embd=32", "--model.n_hidden=64",
         "--model.vision.n_embd=32", "--model.vision.n_hidden=64", "--vit="]
PHOTOS = [f"--data={MEDIA}/records.jsonl", f"--media={MEDIA}"]


@pytest.fixture(autouse=True)
def any_algorithm():
    """--deterministic changes the whole process, and all runs here share one process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="module")
def short_answers():
    """Shortens evaluation. After three steps a model never generates EOS, so a caption would have
    2,048 tokens. A run draws no picture."""
    evaluate = report.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "PICTURE_SHARES", ())
        patch.setattr(report, "evaluate", lambda *args, **options: evaluate(
            *args, **options | {"max_new": 4}))
        yield


def log_of(out):
    return read_log(out / "log.jsonl")


def run(out, *flags):
    """Runs train.main in this process -> the lines of its log."""
    train.main([*SMALL, *flags, f"--out={out}"])
    torch.use_deterministic_algorithms(False)
    return log_of(out)


def steps_of(lines):
    return [line for line in lines if "loss" in line]


def opened(*flags):
    """-> the model and config with which a run with these flags starts, and an iterator over the
    rows of its steps."""
    args, config = parse(flags)
    torch.manual_seed(config.seed)
    start, config = find_start(args, config)
    model = open_model(config, start)
    generated = world.mixture(config.seed, config.stage)
    sources, rates, _ = open_sources(args, config, generated)
    mixture = Mixture(sources, rates, config.seed)
    planner = StepPlanner(mixture, start.tokenizer, config)
    loader = Loader(mixture, start.tokenizer, config, planner)
    rows = ([row for rows in micro_batches for row in rows] for _, micro_batches in loader)
    return model, config, rows


def started(out, *flags):
    """-> the Run, the model and the steps of a run with these flags, before its first step."""
    args, config = parse([*SMALL, *flags, f"--out={out}"])
    run, model = train.start_run(args, config, world.mixture(0))
    return run, model, Ahead(train.steps_with_batches(run, train.batch_of))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """-> the directory and the log of a run of three steps, with scores and a picture."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "PICTURE_SHARES", (1,))
        return out, run(out, "--eval_images=1")


CASES = json.loads((ROOT / "tests" / "conformance" / "lr_schedule.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["input"]["name"])
def test_learning_rate_equals_the_official_schedule(case):
    given = case["input"]
    schedule = (given["base_lr"], given["warmup"], given["max_steps"], given["alpha_f"])
    rates = [train.learning_rate(step, *schedule) for step in given["steps"]]
    assert rates == pytest.approx(case["expected"], rel=1e-9, abs=0)


def nll_of(model, batch):
    """-> nll (B*T,) from torch's own cross entropy, logits (B*T,V)."""
    logits = model.logits(batch).flatten(0, 1)
    targets = batch.targets.flatten().clamp(max=logits.shape[-1] - 1)
    return cross_entropy(logits, targets, reduction="none"), logits


def test_the_loss_is_a_weighted_mean_over_the_whole_step(tmp_path):
    """Micro-batches have very different weights. The log contains the mean over all of them."""
    flags = ["--data.sqrt_length=true", "--data.point_weight=0.2"]
    model, config, rows_of_steps = opened(*SMALL, *flags)
    rows = next(rows_of_steps)
    weight = sum(float(x.weights.sum()) for row in rows for x in row)
    batch = packing.collate(rows, config.data.max_tokens, config.model.vision)
    with torch.no_grad():
        weighted = nll_of(model, batch)[0] * batch.weights.flatten()
    expected = float(weighted.sum() / weight)
    assert len({round(float(w), 4) for w in batch.weights.unique()}) >= 3
    (step,) = steps_of(run(tmp_path / "a", "--micro-batch=1", "--steps=1", *flags))
    assert step["loss"] == pytest.approx(expected, rel=1e-5)
    assert step["weight"] == pytest.approx(weight, rel=1e-6)
    # ids of toy examples start with their source, whose mean is logged, too
    sources = [x.id.rpartition("-")[0] for row in rows for x in row]
    assert step["nll_by_source"].keys() == {*sources}
    for name, mean in step["nll_by_source"].items():
        numbers = [number for number, source in enumerate(sources) if source == name]
        mine = torch.isin(batch.example.flatten(), torch.tensor(numbers))
        of_source = weighted[mine].sum() / batch.weights.flatten()[mine].sum()
        assert mean == pytest.approx(float(of_source), rel=1e-5)


def step_by_hand(model, optimizer, batch, config, step):
    """A step with torch's own cross entropy, logsumexp and AdamW. The norm of each group is clipped
    separately -> learning rates and norms by group."""
    weight = batch.weights.flatten()
    nll, logits = nll_of(model, batch)
    optimizer.zero_grad()
    z_loss = 1e-4 * logits.logsumexp(-1) ** 2
    ((weight * (nll + z_loss)).sum() / weight.sum()).backward()
    rates = {}
    norms = {}
    for group in optimizer.param_groups:
        part = group["name"]
        norms[part] = float(torch.nn.utils.clip_grad_norm_(group["params"], 1.0))
        warmup = min(getattr(config.warmup, part), config.steps // 10)
        rates[part] = train.learning_rate(step, getattr(config.lr, part), warmup, config.steps)
        group["lr"] = rates[part]
    optimizer.step()
    return rates, norms


def test_three_steps_equal_three_written_by_hand(tmp_path):
    """The first step of Adam is the sign of the gradient, which would hide clipping and betas.
    Therefore there are three steps, and eps is as large as the gradients."""
    flags = ["--lr.vit=1e-3", "--lr.connector=2e-3", "--lr.llm=5e-4", "--adam_eps=0.01",
             "--data.point_weight=0.2", "--train=vit,connector,llm"]
    model, config, rows_of_steps = opened(*SMALL, *flags)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [{"params": parameters, "name": part}
              for part, parameters in model.parameter_groups().items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=0.01, weight_decay=0)
    lines = steps_of(run(tmp_path / "a", *flags, "--micro-batch=2"))
    assert len(lines) == 3
    for line, rows in zip(lines, rows_of_steps, strict=True):
        batch = packing.collate(rows, config.data.max_tokens, config.model.vision)
        rates, norms = step_by_hand(model, optimizer, batch, config, line["step"])
        assert line["lr"] == rates
        assert len(set(rates.values())) == 3
        assert min(rates.values()) > 0
        assert line["grad_norms"] == pytest.approx(norms, rel=1e-4)
        whole = sum(n**2 for n in norms.values()) ** 0.5
        assert line["grad_norm"] == pytest.approx(whole, rel=1e-4)
        assert max(norms.values()) > 1.5  # so that clipping matters
    after = dict(files.load(tmp_path / "a").named_parameters())
    for name, p in model.named_parameters():
        moved = after[name].detach() - before[name]
        expected = p.detach() - before[name]
        # a bias of keys only changes by rounding
        assert float((moved - expected).norm()) <= 1e-4 * float(expected.norm()) + 1e-7, name


def test_a_group_is_clipped_if_its_norm_is_above_the_limit_and_else_only_divided():
    """Divided by the weight of the step, 2, the norms are 5 and 0.5. The limit is 1."""
    run = SimpleNamespace(config=SimpleNamespace(shard=0, clip=1.0), ranks=Ranks(),
                          device=torch.device("cpu"))
    groups = {part: [torch.nn.Parameter(torch.zeros(2))] for part in ("vit", "llm")}
    groups["vit"][0].grad = torch.tensor([6.0, 8.0])
    groups["llm"][0].grad = torch.tensor([0.6, 0.8])
    squares = train.square_gradients(run, groups)
    norms = train.divide_and_clip(run, groups, squares, 2)
    assert norms == pytest.approx({"vit": 5, "llm": 0.5})
    torch.testing.assert_close(groups["vit"][0].grad, torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(groups["llm"][0].grad, torch.tensor([0.3, 0.4]))


def test_a_step_has_one_sum_over_all_ranks_and_only_its_plan_is_an_object(tmp_path, monkeypatch):
    """The second of two ranks does not exist. Each row has one number, whether it is readable."""
    called = Counter()
    for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier"):
        plain = getattr(dist, name)
        monkeypatch.setattr(dist, name, lambda *args, name=name, plain=plain, **options: (
            called.update([name]) or plain(*args, **options)))
    run, model, steps = started(tmp_path, "--micro-batch=2")
    groups, optimizer = train.build_optimizer(run, model)
    with first_of_two_ranks():
        group = dist.group.WORLD
        run.loader.ranks = replace(run.ranks, of_all=group, of_row=group)
        for step in (1, 2):
            called.clear()
            train.step_once(run, model, groups, optimizer, train.forward_backward, step, steps,
                            train.Stop())
    assert called == {"all_reduce": 1 + run.config.batch, "broadcast_object_list": 1}


def test_a_short_run_warms_up_over_a_tenth_of_it_and_ends_at_its_final_rate():
    _, config = parse(["--stage=1", "--tiny", "--steps=100", "--final_lr=0.3", "--lr.llm=1",
                       "--warmup.llm=60", "--lr.vit=0.5", "--warmup.vit=4", "--train=vit,llm"])
    found = []
    for step in (2, 5, 10, 100):
        rates = train.learning_rates(config, step)
        found.append((rates["vit"], rates["llm"]))
    assert found[0] == pytest.approx((0.25, 0.2))
    assert found[1][1] == pytest.approx(0.5)
    assert found[2][1] == pytest.approx(1)
    assert found[3] == pytest.approx((0.15, 0.3))


def test_the_seconds_of_a_step_are_without_checkpoint_picture_and_evaluation(tmp_path, monkeypatch):
    """A checkpoint is saved before every evaluation except the last."""
    clock = [0]
    saved = []
    lines = []

    def taking(seconds, function=lambda *_: {}):
        def call(*args):
            clock[0] += seconds
            return function(*args)

        return call

    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(train, "forward_backward", taking(1, train.forward_backward))
    save = taking(1000, lambda run, model, optimizer, step, position: saved.append(step))
    monkeypatch.setattr(train.checkpoint, "save", save)
    report = SimpleNamespace(look=taking(10), evaluate_step=taking(100))
    run, model, steps = started(tmp_path, "--micro-batch=2", "--save-every=0")
    log = SimpleNamespace(write=lines.append)
    train.train(run, model, *train.build_optimizer(run, model), train.forward_backward, steps, log,
                report, eval_every=1)
    assert [line["seconds"] for line in lines] == [2, 2, 2]          # two micro-batches, 1 s each
    assert saved == [1, 2]


def test_dropout_has_random_numbers_of_its_own_in_every_step_and_on_every_rank(
        tmp_path, monkeypatch):
    """Compares a random number that is drawn at the start of each step."""
    drawn = []
    forward_backward = train.forward_backward
    monkeypatch.setattr(train, "forward_backward", lambda *args: (
        drawn.append(torch.rand(1).item()), forward_backward(*args))[1])
    report = SimpleNamespace(look=lambda *_: {})
    log = SimpleNamespace(write=lambda line: None)
    for rank in (0, 1):
        run, model, steps = started(tmp_path, "--steps=2", "--save-every=0")
        run = replace(run, ranks=replace(run.ranks, rank=rank))
        train.train(run, model, *train.build_optimizer(run, model), train.forward_backward, steps,
                    log, report)
    assert len({*drawn}) == len(drawn) == 4


@pytest.mark.parametrize(("flag", "learn", "stay"), [
    ("--freeze_embedding=true", ("extra", "norm"), ("embedding",)),
    ("--freeze_embedding=false", ("extra", "embedding"), ()),
    ("--train=connector", ("vision.pool", "vision.projector", "extra"),
     ("vision.vit", "embedding", "blocks", "norm")),
])
def test_only_the_named_parts_learn(tmp_path, flag, learn, stay):
    run(tmp_path / "a", flag, "--steps=1", "--warmup.llm=0", "--warmup.connector=0")
    before = dict(opened(*SMALL)[0].named_parameters())
    after = dict(files.load(tmp_path / "a").named_parameters())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert not [name for name in changed if name.startswith(stay)]
    assert all(any(name.startswith(part) for name in changed) for part in learn)


def test_a_new_model_starts_with_the_vit_of_a_folder_which_is_then_frozen(tmp_path):
    """With --tiny, this folder is toy/weights. --vit= gives random weights."""
    torch.manual_seed(1)
    other = models.Molmo2(models.PRESETS["toy"]).init_weights()
    files.save(other, tmp_path / "other")
    flags = [*WITHOUT_SHAPE, "--model.n_layer=1", "--steps=1", "--batch=1"]
    random = opened(*flags, "--vit=")[0]
    starts = {"": files.load("toy"), f"--vit={tmp_path / 'other'}": other, "--vit=": random}
    for k, (flag, wanted) in enumerate(starts.items()):
        out = tmp_path / str(k)
        train.main([*flags, *flag.split(), f"--out={out}"])
        after = files.load(out)
        for name, p in wanted.vision.vit.named_parameters():
            assert torch.equal(after.get_parameter(f"vision.vit.{name}"), p), (flag, name)
        assert not torch.equal(after.extra.weight, random.extra.weight)
        assert "vit" not in steps_of(log_of(out))[0]["grad_norms"]


def test_a_run_leaves_log_weights_curves_and_samples(plain):
    out, lines = plain
    n_parameters = sum(p.numel() for p in files.load(out).parameters())
    assert sum(lines[0]["params"].values()) == n_parameters
    assert len(steps_of(lines)) == 3
    assert {"caption_exact", "point_f1", "count_accuracy", "unseen"} <= set(lines[-1]["eval"])
    for name in ("loss.png", "config.json"):
        assert (out / name).exists()
    assert list((out / "samples" / "test").glob("*.png"))
    drawn = {path.name for path in (out / "samples").glob("step-*")}
    assert drawn == {"step-3.json", "step-3.png"}
    with Image.open(out / "progress.gif") as progress:
        assert progress.n_frames == 1
        assert os.path.getsize(out / "progress.gif") < 400_000


def test_real_photographs_train_and_are_scored(tmp_path):
    shutil.copy(MEDIA / "records.jsonl", tmp_path / "twin.jsonl")
    sets = [str(MEDIA / "records.jsonl"), str(tmp_path / "twin.jsonl")]
    lines = run(tmp_path / "a", *PHOTOS, "--eval", *sets)
    for line in steps_of(lines):
        assert line["skipped"] == {}
        assert line["branches_dropped"] == 0  # nothing is too long for the toy
        assert 4 < line["examples"] < line["branches"]  # examples share rows, and there are trees
        assert line["tokens"] <= 4 * 640
    assert lines[-1]["eval"]["hits"] == "within 5 % of the diagonal"
    assert lines[-1]["eval"]["n_point"] == 5
    twin, first = lines[-1]["eval"].pop("twin.jsonl"), lines[-1]["eval"]  # it has its own scores
    assert twin.pop("nll")["all"] == first.pop("nll")["all"]
    assert twin == first


def test_a_run_takes_shape_and_tokenizer_of_the_one_it_starts_from(tmp_path):
    """The geometry of the crops is used as well, for records and for scores. Here shape, tokenizer
    and geometry differ from the toy's."""
    old = tmp_path / "old"
    new = tmp_path / "new"
    toy = models.PRESETS["toy"]
    vision = replace(toy.vision, grid=6, patch=16)
    shape = replace(toy, n_layer=1, vision=vision)
    torch.manual_seed(1)
    before = models.Molmo2(shape).init_weights()
    files.save(before, old)
    ByteTokenizer(world.WORDS[:-1]).save(old)
    (old / "data.json").write_text("{}")
    train.main([*WITHOUT_SHAPE, "--steps=1", "--eval_images=1", f"--init={old}",
                f"--out={new}", "--lr.vit=0", "--warmup.vit=0"])
    after = files.load(new)
    assert after.config == shape
    assert load_tokenizer(new / "model", 384).words == world.WORDS[:-1]
    config = json.loads((new / "config.json").read_text())["config"]
    assert config["model"]["n_layer"] == 1
    assert config["model"]["vision"]["grid"] == 6
    # the learning rate of the ViT is 0, so its weights are the same
    assert torch.equal(after.vision.vit.patch.weight, before.vision.vit.patch.weight)
    assert not torch.equal(after.norm.weight, before.norm.weight)


def test_curves_are_drawn_at_every_evaluation_and_at_the_end(plain, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "draw_curves", lambda out: drawn.append(len(log_of(out))))
    monkeypatch.setattr(report, "scores", lambda *_: {"qa_accuracy": 0.5})
    run(tmp_path / "a", f"--init={plain[0]}", "--eval-every=1", "--keep=1")
    assert drawn == [3, 5, 7]                # lines of the log: the head, a step, its scores, ..


def test_a_run_says_what_it_is_about_to_do_and_how_it_has_ended(plain, tmp_path, monkeypatch,
                                                                capsys):
    monkeypatch.chdir(tmp_path)
    out = Path("runs/stage1-tiny")
    monkeypatch.setattr(report, "PICTURE_SHARES", (1,))
    train.main([*SMALL, "--eval_images=1", "--steps=1", f"--init={plain[0]}"])
    assert steps_of(log_of(out))[0]["loss"] < steps_of(plain[1])[0]["loss"] - 0.1
    stdout, stderr = capsys.readouterr()
    stage, parameters, steps, size, _ = [line for line in stderr.splitlines()
                                         if line.startswith("train.py: ")]
    assert re.search(r"stage 1 on cpu \(.*\), float32, processes: 1$", stage)
    assert parameters.endswith("; trained parts: connector, llm")
    assert steps == ("train.py: steps: 1 of 1 remain; a batch has 4 rows of 512 tokens; the "
                     f"run writes to {out}")
    assert re.fullmatch(r"train\.py: data: 4 packs, about \d+ examples in 1 step", size)
    *table, drawn, then = stdout.splitlines()
    assert table[0].split() == ["after", "1", "step", "score", "target"]
    assert f"picture={out}/samples/step-1.png" in stderr
    assert f"{out}/progress.gif" in drawn
    assert then == f"Next: python -m tools.play --model {out}"
    assert json.loads((out / "result.json").read_text())["steps"] == 1
