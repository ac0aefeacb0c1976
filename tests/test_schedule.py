"""The learning rate against the official schedules (conformance/lr_schedule.json)."""

import json
from pathlib import Path

import pytest

from train import learning_rate

CASES = json.loads((Path(__file__).parent / "conformance" / "lr_schedule.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["input"]["name"])
def test_learning_rate_equals_the_official_schedule(case):
    c = case["input"]
    rates = [learning_rate(step, c["base_lr"], c["warmup"], c["max_steps"], c["alpha_f"]) for step in c["steps"]]
    assert rates == pytest.approx(case["expected"], rel=1e-9, abs=0)
