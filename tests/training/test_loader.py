"""The ranks of all layouts receive the same packs, a resumed run continues exactly, and no token is
lost."""

import itertools
import json
import multiprocessing
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data
import model
import packing
import parallel
from records.errors import DataError, RankDataError
from tests.records.samples import CAPTION, image, write
from tests.training.processes import outputs_of, start, stderr_of
from tests.training.runs import SMALL, logged, run
from tests.training.stream import (
    CONFIG,
    TOKENIZER,
    examples_of,
    loader_of,
    planner_of,
    taken,
    write_texts,
)
from training.checkpoint import list_steps
from training.config import parse
from training.loader import Decoder, placeholder, share_packs
from training.log import StepStats, count_rows
from training.planner import CHUNK, StepPlanner, measure_in_order
from training.ranks import Ranks


class Sizes:
    """Measures without records. It cannot read the index 2 * CHUNK + 3."""

    def __getitem__(self, indices):
        found = []
        for index in indices:
            if index == 2 * CHUNK + 3:
                return [*found, OSError("cannot read")]
            found.append(index)
        return found


@pytest.mark.parametrize("n_processes", [0, 2])
def test_examples_are_measured_in_order_until_one_cannot_be_read(n_processes):
    measured = measure_in_order(Sizes(), n_processes, start=5)
    assert [*itertools.islice(measured, 2 * CHUNK - 2)] == [*range(5, 2 * CHUNK + 3)]
    with pytest.raises(OSError, match="cannot read"):
        next(measured)


def test_an_error_of_a_record_ends_what_a_process_has_measured(files, monkeypatch):
    """What was measured before the error is kept."""
    planner = planner_of(files)
    measurer = planner.measurer
    expected = measurer[range(4)]
    (source, *_) = planner.mixture[3]
    read = type(source).__getitem__
    lost = planner.mixture[3][:2]

    def fail(self, i):
        if (self.name, i) == (lost[0].name, lost[1]):
            raise OSError("the file has changed")
        return read(self, i)

    monkeypatch.setattr(type(source), "__getitem__", fail)
    *before, error = measurer[range(9)]
    assert before == expected[:3]
    assert str(error) == "the file has changed"


PROGRAM = """
import json
from dataclasses import replace
import torch
from tests.training.stream import CONFIG, loader_of, taken
from training.ranks import join_ranks

def main():
    ranks = join_ranks(1, torch.device("cpu"))
    found = []
    for workers, micro_batch in ((0, 8 // ranks.world), (3 if ranks.world < 4 else 1, 1)):
        config = replace(CONFIG, workers=workers, micro_batch=micro_batch, steps=4)
        loader = loader_of({files!r}, config, ranks)
        if not ranks.first:
            loader.planner = None
        found.append([(plan.ids, plan.packs, plan.skipped, [[e.id for e in row] for row in rows],
                       [int(e.tokens.sum()) for row in rows for e in row])
                      for plan, rows in taken(loader, 4)])
    of_ranks = ranks.all_gather(found)
    if ranks.first:
        print(json.dumps(of_ranks), flush=True)
    ranks.barrier()
    ranks.leave()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_data_order_is_the_same_on_1_2_and_4_ranks(files, tmp_path):
    """With and without workers and accumulation. Every row is on exactly one rank."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{files!r}", repr(files)))
    runs = []
    for ranks in (1, 2, 4):
        stdout, _ = outputs_of(start(None, ranks=ranks, program=program))
        runs += list(zip(*json.loads(stdout.splitlines()[-1]), strict=True))
    assert len(runs) == 6
    reference = runs[0][0]
    for of_ranks in runs:
        for n, (ids, packs, skipped, rows_of_all, sums_of_all) in enumerate(reference):
            for mine in of_ranks:
                assert mine[n][:3] == [ids, packs, skipped]  # all ranks have the whole plan
                assert len(mine[n][3]) == 8 // len(of_ranks)
            rows = [row for mine in of_ranks for row in mine[n][3]]
            sums = [total for mine in of_ranks for total in mine[n][4]]
            assert Counter(map(tuple, rows)) == Counter(map(tuple, rows_of_all))
            assert sum(map(len, rows)) == len(ids)
            assert Counter(sums) == Counter(sums_of_all)  # the tokens are the same, too
    assert len({tuple(step[0]) for step in reference}) == 4


def test_a_run_that_continues_after_its_last_step_has_no_steps(files):
    """For example, it was killed during its final evaluation. No worker process is started."""
    loader = loader_of(files, replace(CONFIG, workers=2), start=CONFIG.steps)
    assert list(loader) == []
    assert not multiprocessing.active_children()


def test_processes_that_measure_and_decode_end_with_the_last_step(files):
    loader = loader_of(files, replace(CONFIG, workers=2, steps=3))
    n_processes = []
    for _, micro_batches in loader:
        list(micro_batches)
        n_processes.append(len(multiprocessing.active_children()))
    assert n_processes[0] == 3  # one measures, two decode
    assert not multiprocessing.active_children()


def test_every_token_is_trained_on_or_reported(files):
    """Planned tokens equal the tokens of all examples, also of unreadable ones. Tokens of skipped
    branches are counted."""
    config = replace(CONFIG, data=replace(CONFIG.data, max_tokens=330))
    loader = loader_of(files, config)
    total = Counter()
    for plan, rows in taken(loader, 6):
        counts = count_rows(rows)
        items = [item for pack in plan.packs for item in pack]
        assert counts["tokens"] == sum(item.tokens for item in items)
        assert counts["crops"] == sum(item.crops for item in items)
        total.update(counts)
        for x in examples_of(rows):
            total["unreadable"] += bool(x.unreadable)
            total["whole"] += 0 if x.unreadable else len(x.tokens) + x.dropped_tokens
    assert total["unreadable_tokens"] > 0
    assert total["branches_dropped"] > 0
    assert sum(loader.unreadable.counts["a.jsonl"].values()) == total["unreadable"]
    assert total["whole"] == total["tokens"] - total["unreadable_tokens"] + total["tokens_dropped"]


def test_an_image_that_changes_between_plan_and_step_costs_itself_only(files):
    config = replace(CONFIG, data=replace(CONFIG.data, max_crops=4))
    planner = planner_of(files, config)
    plan = next(planner)
    name = next(name for name in plan.ids if name.startswith("a.jsonl"))
    loader = loader_of(files, config, planner=itertools.chain([plan], planner))
    path = Path(files[0]).parent / f"{int(name.split(':')[1]) - 1}.png"
    before = path.read_bytes()
    try:
        Image.new("RGB", (300, 300)).save(path)
        rows = taken(loader, 1)[0][1]
    finally:
        path.write_bytes(before)
    changed = [e for e in examples_of(rows) if e.id == name]
    assert changed
    assert all("planned" in e.unreadable and not e.weights.any() for e in changed)


@pytest.mark.slow
def test_a_file_of_records_that_changes_ends_the_run_in_one_sentence(files, tmp_path):
    path = write_texts(tmp_path / "r.jsonl", ["abc"] * 30)
    loader = loader_of([path], replace(CONFIG, workers=1), rates=[1])
    steps = iter(loader)
    deque(next(steps)[1], maxlen=0)
    write_texts(path, ["abc"] * 31)
    with pytest.raises(RankDataError) as error:
        deque((deque(micro, maxlen=0) for _, micro in steps), maxlen=0)
    assert "changed" in str(error.value)
    assert "Traceback" not in str(error.value)


def test_a_batch_of_unreadable_images_alone_is_trained_through():
    """Without any loss, nll and gradients are finite."""
    torch.manual_seed(0)
    config = parse(SMALL)[1]
    m = model.Molmo2(config.model).init_weights()
    branches = [data.Branch([([5] * 9, True)])]
    text = data.layout([TOKENIZER.bos], [False], branches, config.data)
    unreadable = placeholder("a", 30, 2, config.model.vision, "damaged image: x")
    for row in ([unreadable], [unreadable, text]):
        batch = packing.collate([row], 64, config.model.vision)
        assert len(batch.pool_src) == len(batch.pool_dst) == 1
        assert (batch.pool_src == -1).all()
        nll, _ = m(batch)
        (nll * batch.weights).sum().backward()
        assert torch.isfinite(nll).all()
        assert all(torch.isfinite(p.grad).all() for p in m.parameters() if p.grad is not None)


def test_a_hundred_undecodable_records_in_a_row_stop_the_run(tmp_path):
    Image.effect_noise((60, 40), 90).convert("RGB").save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:3000])
    path = write(tmp_path / "r.jsonl", *[image(CAPTION)] * 20)
    loader = loader_of([path], replace(CONFIG, steps=20), rates=[1])
    words = r"the last 100 of them in a row\. The last one is .*damaged image: "
    with pytest.raises(RankDataError, match=words):
        taken(loader, 20)


def test_the_next_step_is_ready_before_the_cpu_waits_and_its_error_loses_no_step(
        tmp_path, monkeypatch):
    """The packs of step 3 cannot be read. It is planned, and step 2 is logged and saved."""
    events = []
    packs = []
    for owner, name in ((StepPlanner, "__next__"), (parallel, "cut_for_rank"),
                        (StepStats, "all_reduce")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, plain=plain: (
            events.append(name) or plain(*args)))
    decode = Decoder.__getitem__
    monkeypatch.setattr(Decoder, "__getitem__", lambda self, pack: (
        packs.append(pack) or decode(self, pack) if len(packs) < 4 else DataError("planted")))
    flags = [*SMALL, "--micro-batch=2", "--steps=4", "--save-every=1"]
    assert run(tmp_path, *flags) == 2
    first, plan, batch, wait = "__next__", "__next__", "cut_for_rank", "all_reduce"
    assert events == [first, batch, plan, batch, wait, plan, wait]
    assert [*logged(tmp_path)] == [1, 2]
    assert list_steps(tmp_path) == [2, 1]


def test_an_error_of_a_rank_ends_the_ranks_that_share_its_row(files, monkeypatch):
    """Otherwise they would wait for it."""
    monkeypatch.setattr(Ranks, "any_in_row", lambda self, flag: True)
    monkeypatch.setattr(Ranks, "gather_in_row", lambda self, value: [value, DataError("planted")])
    with pytest.raises(RankDataError, match="planted"):
        taken(loader_of(files), 1)


@pytest.mark.parametrize(("micro_batch", "most"), [(1, 1.05), (2, 1.03)])
def test_ranks_of_a_node_get_packs_of_equal_work_at_the_same_time(micro_batch, most):
    """Four nodes of 8 ranks, and 128 packs that differ by a factor of 4 in attention."""
    work = np.random.default_rng(0).uniform(1, 4, 128)
    packs = [[packing.Item(k, int(1000 * n**0.5), 0, 0)] for k, n in enumerate(work)]
    shares = share_packs(packs, 32, 8, micro_batch)
    assert sorted(itertools.chain(*shares)) == [*range(128)]
    of_micro_batches = work[np.array(shares)].reshape(4, 8, -1, micro_batch).sum(3)
    of_nodes = of_micro_batches.max(1).sum(1)  # ranks of a node wait in each micro-batch
    assert of_nodes.max() < most * work.sum() / 32
    assert share_packs(packs, 32, 1, micro_batch) == packing.balance_packs(packs, 32)


@pytest.mark.parametrize(("world", "cp", "shard"), [
    (10, 2, 5), (14, 2, 7), (16, 2, 8), (40, 8, 20)])
def test_every_rank_gets_equally_many_packs_if_a_node_holds_part_of_a_row(files, world, cp, shard):
    """With 5 ranks in a node and --cp 2, two ranks of a node share one row with another node."""
    dp = world // cp
    config = replace(CONFIG, shard=shard, cp=cp)
    loader = loader_of(files, config, Ranks(world=world, dp=dp, cp=cp))
    packs = [[packing.Item(k, 100 + k, 1, 0)] for k in range(4 * dp)]
    shares = share_packs(packs, dp, loader.together, 2)
    assert sorted(itertools.chain(*shares)) == [*range(4 * dp)]
    assert {len(share) for share in shares} == {4}


def test_after_an_error_the_other_rows_of_its_micro_batch_are_taken(files, monkeypatch):
    """The DataLoader may need a plan for them, which all ranks exchange."""
    config = replace(CONFIG, batch=4, micro_batch=4)
    n_decoded = []
    decode = Decoder.__getitem__

    def fail_once(self, pack):
        n_decoded.append(pack)
        return DataError("planted") if len(n_decoded) == 2 else decode(self, pack)

    monkeypatch.setattr(Decoder, "__getitem__", fail_once)
    with pytest.raises(RankDataError, match="planted"):
        taken(loader_of(files, config), 1)
    assert len(n_decoded) == 4


BROKEN = """
import sys
import train

def forward_backward(run, model, batch):
    raise ZeroDivisionError("a mistake in the code")

train.forward_backward = forward_backward
if __name__ == "__main__":
    train.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_traceback_ends_the_process_though_its_decoding_workers_ignore_sigterm(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BROKEN)
    child = start(tmp_path / "out", *SMALL, "--steps=3", "--workers=1", program=program)
    assert stderr_of(child, 1).endswith("ZeroDivisionError: a mistake in the code\n")


PROGRAM_OF_A_USER = """
import multiprocessing, time
import training.loader

def work():
    time.sleep(1)
    print("done", flush=True)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=work).start()
"""


@pytest.mark.slow
def test_processes_of_others_are_not_ended(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM_OF_A_USER)
    stdout, _ = outputs_of(start(None, program=program))
    assert stdout == "done\n"
