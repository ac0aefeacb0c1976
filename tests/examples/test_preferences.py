"""Compares preference pairs as branches of one tree with the loss in the paper of direct preference
optimisation (DPO), where every answer is a separate sequence."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import data
import packing
import parallel
import train
from examples import preferences
from records.parse import parse
from records.reader import Records
from tests.ranks import run_ranks
from tests.records import samples
from tests.test_parallel import CONFIG, TOKENIZER, VISION, T, crops_of_rank, new_model
from tests.test_parallel import DATA as OF_TREES
from tests.training.processes import ROOT, start, stderr_of
from tests.training.runs import SMALL, back_to, logged, sentence
from training.ranks import Ranks

MEDIA = ROOT / "tests" / "media"
DATA = replace(OF_TREES, prefix_all=False)               # prompts without a length hint
QUESTION = "Where is it?"
LEFT, UNKNOWN = "On the left.", "I cannot say, because I see nothing."
PLAIN = {"type": "qa", "question": "What is it?", "answer": "A cat."}
BETA = 0.3


def text(answer, prompt=QUESTION):
    return {"type": "text", "prompt": prompt, "text": answer}


def pair(chosen=LEFT, rejected=UNKNOWN):
    return [text(chosen), text(rejected)]


def example_of(*annotations, media="chelsea.png", config=DATA, key="0"):
    image = {"path": str(MEDIA / media)}
    record = parse({"id": "0", "image": image, "annotations": list(annotations)})
    record |= {"key": key, "where": "x.jsonl:1", "source": Records(MEDIA / "records.jsonl")}
    return data.encode(record, TOKENIZER, config, VISION, 0, 0)


def new_reference():
    reference = new_model().double()
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.03 * torch.sin(torch.arange(p.numel())).view_as(p))
    return reference


def learn(reference, model, row, ranks=None, cp=1, cp_heads=0):
    """Calls forward_backward with the part of a run that it needs."""
    config = SimpleNamespace(data=replace(DATA, max_tokens=2 * T), model=CONFIG, crop_bucket=1,
                             z_loss=0.0, cp=cp, cp_heads=cp_heads)
    run = SimpleNamespace(config=config, ranks=ranks or Ranks(), device=torch.device("cpu"),
                          dtype=torch.float32)
    batch = preferences.batch_of(run, [row])
    return batch, preferences.forward_backward(reference, BETA, run, model, batch)


# a pair, two pairs with the same prompt and a plain question, a pair that is twice in its record
PACKED = [(pair(), "chelsea.png"), ([*pair(UNKNOWN, LEFT), *pair(), PLAIN], "chelsea.png"),
          (pair() * 2, "coffee.png")]


def packed():
    return [example_of(*annotations, media=media) for annotations, media in PACKED]


def alone(annotation, media):
    """-> the Batch of a separate sequence with its image."""
    example = example_of(annotation, media=media)
    return packing.collate([[example]], len(example.tokens), VISION)


def textbook(model, reference):
    """The sum of -log sigmoid(beta * ..) over the pairs, and the weighted nll of PLAIN."""
    total = 0
    for annotations, media in PACKED:
        for sides in zip(annotations[::2], annotations[1::2], strict=False):
            gains = []
            for side in sides:
                batch = alone(side, media)
                gain = reference(batch)[0].detach() - model(batch)[0]
                gains.append(gain[batch.weights > 0].sum())
            total = total - torch.nn.functional.logsigmoid(BETA * (gains[0] - gains[1]))
    batch = alone(PLAIN, "chelsea.png")
    return total + (batch.weights * model(batch)[0]).sum()


def gradients(model):
    found = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                       for p in model.parameters()])
    model.zero_grad()
    return found


def test_the_gradient_of_packed_pairs_is_that_of_the_textbook():
    model = new_model().double()
    reference = new_reference()
    row = packed()
    batch, losses = learn(reference, model, row)
    ours = gradients(model)
    expected = textbook(model, reference)
    expected.backward()
    assert (batch.weights * losses).sum().item() == pytest.approx(expected.item(), rel=1e-6)
    theirs = gradients(model)
    assert (ours - theirs).norm() < 1e-6 * theirs.norm()
    assert sum(x.weights[x.annotation < 5].sum() for x in row) == pytest.approx(5)


def worker(rank, folder, cp_heads):
    """Saves the gradient of a row that two ranks share, in float64."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = parallel.make_mesh(2, cp_heads=cp_heads)
    model = new_model().double()
    reference = new_reference()
    parallel.share_rows(model, mesh)
    parallel.share_rows(reference, mesh)
    row = crops_of_rank(packed(), rank, 2)
    learn(reference, model, row, Ranks(mesh=mesh, cp=2, cp_rank=rank), 2, cp_heads)
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
    textbook(model, new_reference()).backward()
    theirs = gradients(model)
    assert (torch.load(tmp_path / "found.pt") - theirs).norm() < 1e-6 * theirs.norm()


def test_where_one_answer_does_not_fit_both_go_and_the_rest_stays():
    for sides in (pair(), pair(UNKNOWN, LEFT)):   # the longer answer is rejected, then chosen
        size = len(example_of(*sides).tokens)
        cut = example_of(*sides, config=replace(DATA, max_tokens=size - 1))
        assert cut.weights.any()
        assert preferences.find_pairs(cut) == []
        assert not cut.weights.any()
    config = replace(DATA, max_tokens=len(example_of(*pair(), PLAIN).tokens) - 1)
    found = set()
    for k in range(20):  # which branch does not fit depends on the key of the record
        example = example_of(*pair(), PLAIN, config=config, key=str(k))
        of_plain = example.weights[example.annotation == 3].sum()
        of_questions = example.weights == 0
        pairs = preferences.find_pairs(example)
        assert example.weights.sum() == pytest.approx(len(pairs) + of_plain)
        assert not example.weights[of_questions].any()
        found.add(len(pairs))
    assert found == {0, 1}


def run(out, *flags):
    """-> exit status of the example."""
    try:
        preferences.main(["--beta", "0.3", *flags, "--out", str(out)])
    except SystemExit as end:
        return end.code
    return 0


def write(folder, *annotations):
    records = [samples.image(*(annotations or [*pair(), PLAIN]), image=name)
               for name in ("chelsea.png", "coins.png", "coffee.png", "rocket.jpg")]
    path = samples.write(folder / "x.jsonl", *records)
    return ["--data", str(path), "--media", str(MEDIA)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """-> a run from which others start. It has the other objective of the page."""
    out = tmp_path_factory.mktemp("runs") / "base"
    of_page = {}
    page = (ROOT / "docs" / "preferences.md").read_text()
    exec(page.split("```python")[1].split("```")[0], of_page)
    train.main([*SMALL, "--steps", "1", "--out", str(out)], lambda run: of_page["forward_backward"])
    return out


MISTAKES = [  # annotations, a part of the message, flags
    ([PLAIN], "no record of --data has a preference pair"),
    ([*pair(), text(LEFT), text(LEFT, "Who is it?")], "x.jsonl:1: annotations 3 and 4 are not"),
    ([PLAIN, PLAIN], "annotations 1 and 2 are not a preference pair"),
    ([text(LEFT) | {"weight": 2}, text(UNKNOWN)], "the same prompt and the weight 1"),
    (pair(), "--beta nan: must be above 0", "--beta", "nan"),
    (pair(), "reference model; give it with --init"),
]


@pytest.mark.parametrize("row", MISTAKES)
def test_a_mistake_is_named_before_anything_is_written(base, tmp_path, capsys, row):
    annotations, words, *flags = row
    flags += [] if "--init" in words else ["--init", str(base)]
    flags += write(tmp_path, *annotations)
    assert run(tmp_path / "out", *SMALL, "--steps", "1", *flags) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]


@pytest.mark.parametrize("flags", [
    [], ["--dtype", "bfloat16"], ["--lora", "4"], ["--lora", "4", "--dtype", "bfloat16"]])
def test_a_run_begins_with_log_2(base, tmp_path, flags):
    given = [*SMALL, *write(tmp_path, *pair()), "--init", str(base), *flags, "--batch", "4",
             "--lr.llm=1e-2", "--train=llm", "--steps", "4"]
    assert run(tmp_path / "out", *given) == 0
    lines = logged(tmp_path / "out")
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[4]["loss"] < 0.6


def test_the_reference_is_the_model_of_init_also_in_a_resumed_run(base, tmp_path, capsys):
    flags = [*SMALL, *write(tmp_path), "--steps", "3", "--save-every", "1", "--keep", "0",
             "--lr.llm=1e-2", "--deterministic"]
    whole = tmp_path / "whole"
    assert run(whole, *flags, "--init", str(base)) == 0
    again = back_to(whole, tmp_path / "again", 1)
    assert run(again, *flags, "--resume") == 0
    assert logged(again) == logged(whole)
    again = back_to(whole, tmp_path / "third", 1)
    moved = base.rename(tmp_path / "moved")
    capsys.readouterr()
    assert run(again, *flags, "--resume") == 2
    moved.rename(base)
    sentence(capsys, str(base))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["--cp", "2", "--cp_exchange", "gather"], ["--shard", "2"], []])
def test_two_ranks_log_the_losses_of_one_process(base, tmp_path, layout):
    flags = [*SMALL, *write(tmp_path), "--init", str(base), "--deterministic", "--steps", "3",
             "--lr.llm=1e-2"]
    assert run(tmp_path / "one", *flags) == 0
    flags += [*layout, "--micro-batch", "1", "--beta", "0.3"]
    stderr_of(start(tmp_path / "two", *flags, ranks=2, program="examples/preferences.py"))
    one = logged(tmp_path / "one")
    for step, line in logged(tmp_path / "two").items():
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(one[step][key], rel=1e-3, abs=1e-5), key
