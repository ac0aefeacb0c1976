"""Evaluation by several processes, which share the records, gives the scores of one."""

import pytest
import torch
import torch.distributed as dist

import parallel
from evaluation.evaluate import evaluate
from evaluation.report import gather_on_each
from records.reader import Records
from tests.evaluation.small_model import DATA, MEDIA, TOKENIZER, random_model
from tests.ranks import run_ranks
from tests.records.samples import image, video, write
from training.ranks import Ranks
from weights import lora
from weights.files import whole_copy

pytestmark = pytest.mark.slow


def damaged_records(folder):
    """Two records whose media are cut short."""
    (folder / "cut.jpg").write_bytes((MEDIA / "rocket.jpg").read_bytes()[:9000])
    (folder / "cut.mp4").write_bytes((MEDIA / "bigbuckbunny.mp4").read_bytes()[:300_000])
    asked = [{"type": "qa", "question": f"What is {k}?", "answer": "x"} for k in range(3)]
    write(folder / "cut.jsonl", image(*asked, id="a", image="cut.jpg"),
          video(*asked, id="b", video="cut.mp4"))


def answers(folder, model, ranks=None):
    records = [*Records(MEDIA / "records.jsonl"), *Records(folder / "cut.jsonl"),
               next(iter(Records(MEDIA / "films.jsonl")))]
    return evaluate(model, TOKENIZER, DATA, records, max_new=6, ranks=ranks)


def adapted_model():
    model = random_model()
    lora.add_adapters(model, lora.LoraConfig(rank=4))
    lora.init_adapters(model, 0)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            p.data = torch.randn(p.shape, generator=generator)
    return model


def assert_adapters_are_merged(ranks):
    """In what is gathered of a sharded model, to be asked and to be saved."""
    whole = adapted_model()
    wanted = lora.merged(whole, whole.state_dict(), torch.float32)
    model = parallel.parallelize(adapted_model(), ranks.mesh)
    copies = [gather_on_each(model, ranks, torch.device("cpu"), torch.float32),
              whole_copy(model, "cpu", torch.float32, keep=ranks.first)]
    assert (copies[1] is not None) == ranks.first
    for copy in copies[: 1 + ranks.first]:
        found = copy.state_dict()
        assert found.keys() == wanted.keys() == random_model().state_dict().keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def worker(rank, world, folder):
    """Each rank keeps what it found, with weights that were sharded and gathered again."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    ranks = Ranks(rank, world, parallel.make_mesh(1), of_all=dist.group.WORLD)
    model = parallel.parallelize(random_model(), ranks.mesh)
    half = gather_on_each(model, ranks, torch.device("cpu"), torch.bfloat16)
    for ours, theirs in zip(half.parameters(), random_model().parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16))
    whole = gather_on_each(model, ranks, torch.device("cpu"), torch.float32)
    assert_adapters_are_merged(ranks)
    torch.save(answers(folder, whole, ranks), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_scores_of_two_ranks_are_those_of_one(tmp_path):
    """On this machine, with so few questions, no answer differs, and the nll only in rounding."""
    torch.set_num_threads(1)
    damaged_records(tmp_path)
    wanted, predictions = answers(tmp_path, random_model())
    assert wanted["skipped"] == 2
    assert len(predictions) > 12
    run_ranks(worker, (2, tmp_path), 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert found == (wanted, predictions)
