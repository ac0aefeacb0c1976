"""Compares preference pairs as branches of one tree with the loss in the paper of direct preference
optimisation (DPO), where every answer is a separate sequence."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import data
import packing
import parallel
from examples import preferences
from records.parse import parse
from records.reader import Records
from tests import test_parallel
from tests.ranks import run_ranks
from tests.test_parallel import TOKENIZER, VISION, T, new_model
from tests.training.processes import ROOT, start, stderr_of
from tests.training.runs import SMALL, back_to, logged, sentence
from tests.training.runs import run as train
from training.config import RankError
from training.ranks import Ranks

MEDIA = ROOT / "tests" / "media"
DATA = replace(test_parallel.DATA, prefix_all=False)     # prompts without a length hint
QUESTION = "Where is it?"
LEFT, UNKNOWN = "On the left.", "I cannot say, because I see nothing."
PLAIN = {"type": "qa", "question": "What is it?", "answer": "A cat."}
BETA = 0.3


def text(answer, prompt=QUESTION):
    return {"type": "text", "prompt": prompt, "text": answer}


def pair(chosen=LEFT, rejected=UNKNOWN):
    return [text(chosen), text(rejected)]


def example_of(*annotations, media="chelsea.png", config=DATA):
    image = {"path": str(MEDIA / media)}
    record = parse({"id": "0", "image": image, "annotations": list(annotations)})
    record |= {"key": "0", "where": "x.jsonl:1", "source": Records(MEDIA / "records.jsonl")}
    return data.encode(record, TOKENIZER, config, 0, 0)


def objective_of(config=DATA, ranks=None, cp=1, cp_heads=0):
    """-> Preferences with a random reference model, and the part of a run that it needs."""
    found = preferences.Preferences(BETA)
    found.reference = new_model().double()
    with torch.no_grad():
        for p in found.reference.parameters():
            p.add_(0.03 * torch.sin(torch.arange(p.numel())).view_as(p))
    config = SimpleNamespace(data=replace(config, max_tokens=4 * T), crop_bucket=1, z_loss=0.0,
                             cp=cp, cp_heads=cp_heads)
    run = SimpleNamespace(config=config, ranks=ranks or Ranks(), device=torch.device("cpu"),
                          dtype=torch.float32)
    return found, run


def log_p(model, annotation, media):
    batch = packing.collate([[example_of(annotation, media=media)]], T, VISION)
    return -model(batch)[0][batch.weights > 0].sum()


def textbook(model, reference, annotations, media="chelsea.png"):
    """The sum of -log sigmoid(beta * ..) over pairs, and the weighted nll of the last annotation if
    their number is odd. Every answer is a separate sequence with its image."""
    total = 0
    for sides in zip(annotations[::2], annotations[1::2], strict=False):
        chosen, rejected = (log_p(model, side, media) - log_p(reference, side, media).detach()
                            for side in sides)
        total = total - F.logsigmoid(BETA * (chosen - rejected))
    if len(annotations) % 2:
        batch = packing.collate([[example_of(annotations[-1], media=media)]], T, VISION)
        total = total + (batch.weights * model(batch)[0]).sum()
    return total


# a pair, two pairs with the same prompt and a plain question, a pair that is twice in its record
PACKED = [(pair(), "chelsea.png"), ([*pair(UNKNOWN, LEFT), *pair(), PLAIN], "chelsea.png"),
          (pair() * 2, "coffee.png")]


def packed():
    return [example_of(*annotations, media=media) for annotations, media in PACKED]


def textbook_of_packed(model, reference):
    return sum(textbook(model, reference, *of_record) for of_record in PACKED)


def gradients(model):
    found = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                       for p in model.parameters()])
    model.zero_grad()
    return found


def test_the_gradient_of_packed_pairs_is_that_of_the_textbook():
    model = new_model().double()
    learn, run = objective_of()
    row = packed()
    batch, losses = learn(run, model, [row])
    ours = gradients(model)
    expected = textbook_of_packed(model, learn.reference)
    expected.backward()
    assert (batch.weights * losses).sum().item() == pytest.approx(expected.item(), rel=1e-6)
    theirs = gradients(model)
    assert (ours - theirs).norm() < 1e-6 * theirs.norm()
    of_pairs = sum(x.weights[x.annotation < 5].sum() for x in row)
    assert of_pairs == pytest.approx(5)


def worker(rank, folder, cp_heads):
    """Saves the gradient of a row that two ranks share, in float64."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = parallel.make_mesh(2, cp_heads=cp_heads)
    model = new_model().double()
    learn, run = objective_of(DATA, Ranks(mesh=mesh, cp=2, cp_rank=rank), 2, cp_heads)
    parallel.share_rows(model, mesh)
    parallel.share_rows(learn.reference, mesh)
    learn(run, model, [test_parallel.crops_of_rank(packed(), rank, 2)])
    found = gradients(model)
    dist.all_reduce(found)
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("cp_heads", [2, 1])
def test_two_ranks_that_share_a_row_have_the_gradient_of_the_textbook(tmp_path, cp_heads):
    """The ranks exchange heads, or gather keys and values."""
    run_ranks(worker, (str(tmp_path), cp_heads), 2)
    model = new_model().double()
    textbook_of_packed(model, objective_of()[0].reference).backward()
    theirs = gradients(model)
    assert (torch.load(tmp_path / "found.pt") - theirs).norm() < 1e-6 * theirs.norm()


def test_where_one_answer_does_not_fit_both_go_and_the_rest_stays():
    whole = example_of(*pair())
    assert preferences.find_pairs(whole) == [1]
    assert whole.weights.sum() == pytest.approx(1)
    config = replace(DATA, max_tokens=len(whole.tokens) - 1)
    for sides in (pair(), pair(UNKNOWN, LEFT)):   # the longer answer is rejected, then chosen
        cut = example_of(*sides, config=config)
        assert cut.weights.any()
        assert preferences.find_pairs(cut) == []
        assert not cut.weights.any()
    config = replace(DATA, max_tokens=len(example_of(*pair(), PLAIN).tokens) - 1)
    for k in range(20):  # which branch does not fit depends on the key of the record
        example = example_of(*pair(), PLAIN | {"question": f"What is it, {k}?"}, config=config)
        pairs = preferences.find_pairs(example)
        in_pair = (example.annotation > 0) & (example.annotation < 3)
        assert example.weights[in_pair].sum() == pytest.approx(len(pairs))
        assert pairs or not example.weights[in_pair].any()


def test_a_plain_annotation_beside_a_pair_keeps_its_loss():
    both = example_of(*pair(), PLAIN)
    before = both.weights[both.annotation == 3].copy()
    preferences.find_pairs(both)
    assert (both.weights[both.annotation == 3] == before).all()
    assert before.any()


def test_answers_to_different_prompts_are_refused():
    with pytest.raises(RankError, match="annotations 1 and 2 must have the same prompt"):
        preferences.find_pairs(example_of(text(LEFT), text(UNKNOWN, "Who is it?")))


def run(out, *flags):
    """-> exit status of the example."""
    try:
        preferences.main([*flags, "--beta", "0.3", "--out", str(out)])
    except SystemExit as end:
        return end.code
    return 0


def write(folder, *annotations):
    records = [{"image": name, "annotations": annotations or [*pair(), PLAIN]}
               for name in ("chelsea.png", "coins.png", "coffee.png", "rocket.jpg")]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    return ["--data", str(folder / "pairs.jsonl"), "--media", str(MEDIA)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """-> a run from which others start."""
    out = tmp_path_factory.mktemp("runs") / "base"
    assert train(out, *SMALL, "--steps", "1") == 0
    return out


@pytest.mark.parametrize(("flags", "off"), [
    ([], 1e-6), (["--dtype", "bfloat16"], 1e-6), (["--lora", "4"], 1e-6),
    (["--lora", "4", "--dtype", "bfloat16"], 1e-6)])
def test_a_run_begins_with_log_2(base, tmp_path, flags, off):
    given = [*SMALL, *write(tmp_path, *pair()), "--init", str(base), *flags, "--batch", "4",
             "--lr.llm=1e-2", "--lr.connector=1e-2", "--steps", "4"]
    given.remove("--train=vit,connector,llm") if flags else None
    assert run(tmp_path / "out", *given) == 0
    lines = logged(tmp_path / "out")
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=off)
    assert lines[4]["loss"] < 0.6


def test_the_reference_is_the_model_of_init_also_in_a_resumed_run(base, tmp_path, capsys):
    flags = [*SMALL, *write(tmp_path), "--steps", "3", "--save-every", "1", "--keep", "0",
             "--lr.llm=1e-2", "--deterministic"]
    whole = tmp_path / "whole"
    assert run(whole, *flags, "--init", str(base)) == 0
    again = back_to(whole, tmp_path / "again", 1)
    assert run(again, *flags, "--resume") == 0
    assert logged(again) == logged(whole)
    capsys.readouterr()
    assert run(tmp_path / "out", *flags) == 2
    sentence(capsys, "--init")
    again = back_to(whole, tmp_path / "third", 1)
    shutil.move(base, tmp_path / "moved")
    try:
        assert run(again, *flags, "--resume") == 2
        sentence(capsys, str(base))
    finally:
        shutil.move(tmp_path / "moved", base)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["--cp", "2", "--cp_exchange", "gather"], ["--shard", "2"], []])
def test_two_ranks_log_the_losses_of_one_process(base, tmp_path, layout):
    flags = [*SMALL, *write(tmp_path), "--init", str(base), "--deterministic", "--steps", "3",
             "--beta", "0.3", "--lr.llm=1e-2"]
    assert run(tmp_path / "one", *flags) == 0
    flags += [*layout, "--micro-batch", "1"]
    stderr_of(start(tmp_path / "two", *flags, ranks=2, program="examples/preferences.py"))
    one = logged(tmp_path / "one")
    for step, line in logged(tmp_path / "two").items():
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(one[step][key], rel=1e-3, abs=1e-5), key
