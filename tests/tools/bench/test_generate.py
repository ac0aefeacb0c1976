"""tools.bench generate: both implementations answer the same, and times are those of the tokens."""

import time
from types import SimpleNamespace

import pytest

from tools.bench import generate


@pytest.mark.extras("transformers", "safetensors")
def test_both_implementations_give_the_same_answers(tiny, bench):
    line, table = bench("generate", "--tokens", 3, "--rounds", 2)
    rows = line["cases"]
    assert list(rows) == ["text", "image of 9 crops", "video of 16 frames"]
    for name, row in rows.items():
        assert f"\n{name} " in table
        assert row["same_tokens"] == 3
        for phase in ("prefill", "decode"):
            assert row[f"{phase}_ours"] > 0
            assert row[f"{phase}_reference"] > 0
            assert row[f"{phase}_ratio"]["min"] <= row[f"{phase}_ratio"]["max"]


def test_different_answers_end_the_run_in_float32_only():
    def answer(tokens):
        def run(on_token):
            for _ in tokens:
                on_token()
            return tokens

        return run

    both = {"ours": answer([5, 6, 7]), "reference": answer([5, 0, 7])}
    prompt = SimpleNamespace(tokens=[1, 2], images=None)
    with pytest.raises(RuntimeError, match="text: the answers differ from token 1 on"):
        generate.bench_prompt("text", prompt, both, 1, must_agree=True)
    assert generate.bench_prompt("text", prompt, both, 1, must_agree=False)["same_tokens"] == 1


def test_the_first_token_is_the_prefill_and_the_median_of_the_others_a_token():
    def answer(on_token):
        for seconds in (0.06, 0.01, 0.02, 0.01):
            time.sleep(seconds)
            on_token()
        return [1, 2, 3, 4]

    timing = generate.time_answer(answer)
    assert timing.tokens == [1, 2, 3, 4]
    assert timing.prefill >= 0.06
    assert 0.01 <= timing.decode < timing.prefill
