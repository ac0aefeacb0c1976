"""tools.cost: the parts add up, a row is counted by hand, and the command prints hours."""

import json

import pytest

from model import PRESETS
from tools import cost
from tools.bench.flops import Work, flops
from tools.bench.stream import ExampleSize
from weights import files


def test_the_parts_of_a_row_add_up_to_the_flops_of_its_work():
    model = files.meta_model(PRESETS["toy"])
    work = Work(patches=300, pooled=120, visual=30, tokens=90, labelled=40, pairs=2500)
    parts = cost.flops_of_parts(model, work)
    assert sum(parts.values()) == flops(model, work, freeze_embedding=True)
    assert all(n > 0 for n in parts.values())
    # forward 4, backward 8 for each pair and number of a query, in every block
    config = model.config
    assert parts["its attention"] == 12 * config.n_layer * 2500 * config.n_head * config.head_dim


def test_the_work_of_a_row_by_hand():
    """An image (BOS and 40 visual tokens) with annotations of 10 and 20, then a text of 30. The
    visual tokens see each other both ways; each annotation sees the trunk and itself."""
    examples = [ExampleSize(71, 2, 41, [10, 20]), ExampleSize(31, 0, 1, [30])]
    work = cost.row_work(examples, stage=1, n_patch=729)
    image = 41 * 42 // 2 + 40 * 39 // 2 + 10 * 41 + 10 * 11 // 2 + 20 * 41 + 20 * 21 // 2
    text = 31 * 32 // 2
    assert work == Work(patches=2 * 729, pooled=160, visual=40, tokens=102, labelled=60,
                        pairs=image + text)


def test_attention_of_one_long_video_costs_more_than_the_decoder_of_the_4b():
    """In stage 3. A row's pairs grow with the square of its length, its matrices do not."""
    model = files.meta_model(PRESETS["4b"])
    work = cost.longest_video_row(3, n_patch=729)
    assert work.tokens == 36864
    assert work.pairs == pytest.approx(1.2e9, rel=0.1)
    parts = cost.flops_of_parts(model, work)
    assert 2 < parts["its attention"] / parts["decoder"] < 3


def test_the_command_prints_hours_and_json(capsys):
    cost.main(["--presets", "4b", "--stages", "1", "3", "--n", "60", "--mfu", "0.4", "0.1"])
    out = capsys.readouterr().out
    assert "4b stage 3" in out
    found = json.loads(out.splitlines()[-1])["stages"]
    for stage in ("4b stage 1", "4b stage 3"):
        forty, ten = found[stage]["hours"]
        assert ten == pytest.approx(4 * forty, rel=1e-3)                  # four digits
        seconds = found[stage]["total"] / (0.4 * 989e12)
        assert forty == pytest.approx(seconds / 3600, rel=1e-3)
