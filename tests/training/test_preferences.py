"""Compares preference pairs as branches of one tree with the loss in the paper of direct preference
optimisation (DPO), where every answer is a separate sequence."""

import json
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
from records.media import preference_name
from records.parse import parse
from records.reader import Records
from tests import test_parallel
from tests.ranks import run_ranks
from tests.test_parallel import TOKENIZER, VISION, T, new_model
from tests.training.processes import ROOT, start, stderr_of
from tests.training.runs import SMALL, back_to, logged, run, sentence
from training import checkpoint
from training.config import RunError
from training.preferences import objective, read_references
from training.ranks import Ranks
from training.sources import unique_names

MEDIA = ROOT / "tests" / "media"
DATA = replace(test_parallel.DATA, prefix_all=False)     # prompts without a length hint
PAIR = {"type": "preference", "question": "Where is it?", "chosen": "On the left.",
        "rejected": "I cannot say, because I see nothing.", "weight": 0.5}
PLAIN = {"type": "qa", "question": "What is it?", "answer": "A cat."}
CONFIG = SimpleNamespace(beta=0.3, z_loss=0.0)


def record_of(*annotations, media="chelsea.png"):
    image = {"path": str(MEDIA / media)}
    record = parse({"id": "0", "image": image, "annotations": list(annotations)})
    source = Records(MEDIA / "records.jsonl")
    return record | {"key": "0", "where": "x.jsonl:1", "source": source}


def example_of(*annotations, media="chelsea.png", config=DATA):
    return data.encode(record_of(*annotations, media=media), TOKENIZER, config, 0, 0)


def name_of(pair, media="chelsea.png"):
    record = record_of(pair, media=media)
    return preference_name(record, record["annotations"][0])


def run_with(references, ranks=None):
    return SimpleNamespace(config=CONFIG, ranks=ranks or Ranks(), references=references)


def textbook(model, pairs, references, plain, media="chelsea.png"):
    """The sum of -weight * log sigmoid(beta * ..) over pairs, plus the weighted nll of plain
    annotations. Every answer is a separate sequence with its image."""
    total = 0
    for pair, reference in zip(pairs, references, strict=True):
        log_p = []
        for side in ("chosen", "rejected"):
            qa = {"type": "qa", "question": pair["question"], "answer": pair[side]}
            batch = packing.collate([[example_of(qa, media=media)]], T, VISION)
            nll, _ = model(batch)
            log_p.append(-nll[batch.weights > 0].sum())
        margin = CONFIG.beta * ((log_p[0] - reference[0]) - (log_p[1] - reference[1]))
        total = total - pair.get("weight", 1) * F.logsigmoid(margin)
    for annotation in plain:
        batch = packing.collate([[example_of(annotation)]], T, VISION)
        total = total + (batch.weights * model(batch)[0]).sum()
    return total


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                      for p in model.parameters()])


SWAPPED = PAIR | {"chosen": PAIR["rejected"], "rejected": PAIR["chosen"], "weight": 2}


def packed():
    """-> a row with two pairs, a third pair that is twice in its record, and a plain question; the
    references of the pairs."""
    row = [example_of(PAIR), example_of(PLAIN, SWAPPED), example_of(PAIR, PAIR, media="coffee.png")]
    names = name_of(PAIR), name_of(SWAPPED), name_of(PAIR, "coffee.png")
    assert {name for x in row for name in x.pairs} == {*names}
    return row, dict(zip(names, [(-20.0, -31.0), (-33.0, -18.0), (-25.0, -30.0)], strict=True))


def textbook_of_packed(model, references):
    """The loss of packed(), with every answer as a separate sequence."""
    first, second, third = references.values()
    total = textbook(model, [PAIR, SWAPPED], [first, second], [PLAIN])
    return total + 2 * textbook(model, [PAIR], [third], [], media="coffee.png")


def test_the_gradient_of_packed_pairs_is_that_of_the_textbook():
    model = new_model().double()
    row, references = packed()
    batch = packing.collate([row], 4 * T, VISION)
    total, losses, margins = objective(run_with(references), batch, *model(batch))
    expected = textbook_of_packed(model, references)
    assert (batch.weights * losses).sum().item() == pytest.approx(expected.item(), rel=1e-6)
    assert (margins[0] > 0) == (margins[1] < 0)
    ours, theirs = gradients(model, total), gradients(model, expected)
    assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def worker(rank, folder, cp_heads):
    """Saves the gradient of a row that two ranks share, in float64."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = parallel.make_mesh(2, cp_heads=cp_heads)
    model = new_model().double()
    parallel.share_rows(model, mesh)
    row, references = packed()
    batch = packing.collate([test_parallel.crops_of_rank(row, rank, 2)], 4 * T, VISION)
    batch = parallel.cut_for_rank(batch, rank, 2, cp_heads)
    run = run_with(references, Ranks(mesh=mesh))
    found = gradients(model, objective(run, batch, *model(batch))[0])
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
    theirs = gradients(model, textbook_of_packed(model, packed()[1]))
    assert (torch.load(tmp_path / "found.pt") - theirs).norm() < 1e-6 * theirs.norm()


def test_where_one_answer_does_not_fit_both_go_and_the_rest_stays():
    whole = example_of(PAIR)
    weight, answers = whole.pairs[name_of(PAIR)]
    assert weight == 0.5
    assert all((whole.weights[places] > 0).all() for places in answers)
    of_answers = sum(whole.weights[places].sum() for places in answers)
    assert of_answers == pytest.approx(whole.weights.sum())
    assert whole.weights.sum() == pytest.approx(0.5)
    config = replace(DATA, max_tokens=len(whole.tokens) - 1)
    assert not example_of(PAIR, config=config).pairs
    assert example_of(PAIR, config=config).weights.sum() == 0
    for pair in (PAIR, SWAPPED):  # the longer answer is rejected, then chosen
        both = example_of(PLAIN, pair, config=config)
        assert not both.pairs
        assert both.weights.sum() == example_of(PLAIN).weights.sum()


def test_a_plain_annotation_beside_a_pair_keeps_its_loss():
    config = replace(DATA, sqrt_length=True, sqrt_branches=True)
    alone = example_of(PLAIN, config=config).weights.sum()
    both = example_of(PLAIN, PAIR, config=config)
    assert len(both.pairs) == 1
    assert both.weights.sum() - 0.5 == pytest.approx(float(alone), rel=1e-6)


def test_a_pair_has_a_name_of_its_own_in_the_run_and_keeps_it(tmp_path):
    """Also if two files have the same records, and their images have the same names."""
    write(tmp_path)
    names = []
    for _ in range(2):
        sources = [Records(tmp_path / "pairs.jsonl", media) for media in (MEDIA, tmp_path)]
        unique_names(sources)
        names.append([preference_name(record, record["annotations"][1])
                      for source in sources for record in source])
    assert len(set(names[0])) == 8
    assert names[0] == names[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """-> a run from which others start."""
    out = tmp_path_factory.mktemp("runs") / "base"
    assert run(out, *SMALL, "--steps", "1") == 0
    return out


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-5), ("bfloat16", 4e-3)])
def test_a_run_begins_with_margins_of_0(base, tmp_path, dtype, off):
    """Also if two folders have different images with the same name."""
    record = {"image": "x.png", "annotations": [PAIR]}
    files = []
    for name in ("chelsea.png", "coins.png"):
        media = tmp_path / name / "media"
        media.mkdir(parents=True)
        shutil.copy(MEDIA / name, media / "x.png")
        files.append(tmp_path / name / "pairs.jsonl")
        files[-1].write_text(json.dumps(record))
    flags = [*SMALL, "--data", *map(str, files), "--beta", "0.3", "--init", str(base)]
    assert run(tmp_path / "out", *flags, "--dtype", dtype, "--steps", "1", "--batch", "12") == 0
    line = logged(tmp_path / "out")[1]
    assert line["nll_by_source"].keys() == {f"{path.parent.name}/{path.name}" for path in files}
    assert abs(line["margin"]) < off


@pytest.mark.parametrize("text", [
    "null", "[]", "{", "1", '{"a": 1}', '{"a": [1]}', '{"a": [1, "2"]}', '{"a": [NaN, 1]}'])
def test_a_resumed_run_refuses_references_that_are_not_two_numbers_for_each_pair(tmp_path, text):
    (tmp_path / "references.json").write_text(text)
    resumed = SimpleNamespace(out=tmp_path, resume_from=checkpoint.Checkpoint(tmp_path, 1))
    with pytest.raises(RunError, match="the references of preference pairs cannot be read"):
        read_references(resumed)
    assert read_references(SimpleNamespace(resume_from=checkpoint.Checkpoint())) is None


def test_references_belong_to_one_run(base, tmp_path, capsys):
    """--overwrite deletes them, a new run computes them, and a resumed run requires its file."""
    flags = [*SMALL, *write(tmp_path), "--steps", "2", "--save-every", "1", "--lr.llm=1e-2"]
    out = tmp_path / "out"
    out.mkdir()
    (out / "references.json").write_text("{}")           # a file that does not belong to the run
    assert run(out, *flags, "--init", str(base)) == 0
    assert logged(out)[1]["margin"] == pytest.approx(0, abs=1e-4)
    assert run(out, *flags, "--init", str(tmp_path / "out2"), "--overwrite") == 2
    assert run(out, *flags) == 2                          # without --init
    first = (out / "references.json").read_text()
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "step-2")
    (out / "references.json").unlink()
    capsys.readouterr()
    assert run(out, *flags, "--resume") == 1
    assert "the references of preference pairs cannot be read" in capsys.readouterr().err
    (out / "references.json").write_text(first)
    assert run(out, *flags, "--resume") == 0
    checkpoint.delete_run(out)
    assert not (out / "references.json").exists()


def test_without_beta_a_pair_is_refused_with_the_flag(tmp_path):
    write(tmp_path)
    args = ["--data", str(tmp_path / "pairs.jsonl"), "--media", str(MEDIA), "--max_skip=1"]
    assert run(tmp_path / "run", *SMALL, *args, "--steps", "1") == 2
    assert run(tmp_path / "run", *SMALL, *args, "--steps", "1", "--beta", "0.1") == 2


def test_beta_without_any_pair_ends_before_the_first_step(base, tmp_path, capsys):
    capsys.readouterr()
    data_flags = write(tmp_path, PLAIN)
    assert run(tmp_path / "out", *SMALL, *data_flags, "--init", str(base), "--steps", "1") == 2
    sentence(capsys, "--beta: no record of --data has a preference pair")
    assert not (tmp_path / "out" / "log.jsonl").exists()


def write(folder, *annotations):
    records = [{"image": name, "annotations": annotations or [PLAIN, PAIR]}
               for name in ("chelsea.png", "coins.png", "coffee.png", "rocket.jpg")]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    return ["--data", str(folder / "pairs.jsonl"), "--media", str(MEDIA), "--beta", "0.3"]


@pytest.mark.slow
def test_ranks_that_share_rows_log_the_pairs_of_one_process(base, tmp_path):
    """A resumed run uses the references that were computed at its first start."""
    flags = [*SMALL, *write(tmp_path), "--init", str(base), "--deterministic", "--steps", "3",
             "--save-every", "1", "--keep", "0", "--lr.llm=1e-2"]
    assert run(tmp_path / "one", *flags) == 0
    stderr_of(start(tmp_path / "two", *flags, "--cp", "2", "--cp_exchange", "gather", ranks=2))
    one = logged(tmp_path / "one")
    assert one[1]["margin"] == pytest.approx(0, abs=1e-4)
    assert one[3]["margin"] != 0
    assert one[1]["preferences"] == 2
    for step, line in logged(tmp_path / "two").items():
        for key in ("loss", "margin", "grad_norm"):
            assert line[key] == pytest.approx(one[step][key], rel=1e-3, abs=1e-5), key
    again = back_to(tmp_path / "one", tmp_path / "again", 1)
    assert run(again, *flags, "--resume") == 0
    assert logged(again) == one
