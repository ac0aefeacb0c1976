"""The learning rate against the official schedules (tests/conformance/lr_schedule.json)."""

import json
from pathlib import Path

import pytest

from train import learning_rate

CONFORMANCE = Path(__file__).parent / "conformance"
CASES = json.loads((CONFORMANCE / "lr_schedule.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["input"]["name"])
def test_learning_rate_equals_the_official_schedule(case):
    given = case["input"]
    schedule = (given["base_lr"], given["warmup"], given["max_steps"], given["alpha_f"])
    rates = [learning_rate(step, *schedule) for step in given["steps"]]
    assert rates == pytest.approx(case["expected"], rel=1e-9, abs=0)
