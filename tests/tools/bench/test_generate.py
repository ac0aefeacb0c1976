"""tools.bench generate: both implementations answer the same, and times are those of the tokens."""

from types import SimpleNamespace

import pytest

from tools.bench import generate

pytestmark = pytest.mark.slow


@pytest.mark.extras("transformers", "safetensors")
def test_both_implementations_give_the_same_answers(tiny, bench):
    line, table = bench("generate", "--tokens", 3, "--rounds", 2)
    rows = line["cases"]
    assert list(rows) == ["text", "image of 9 crops", "video of 16 frames"]
    for name, row in rows.items():
        assert f"\n{name} " in table
        assert min(row["prefill_ours"], row["prefill_reference"], row["decode_ours"]) > 0
        assert row["decode_ratio"]["min"] <= row["decode_ratio"]["max"]


def test_different_answers_end_the_run_in_float32_only():
    def answer(tokens):
        def run(on_token):
            for _ in tokens:
                on_token()
            return tokens

        return run

    both = {"ours": answer([5, 6, 7]), "reference": answer([5, 0, 7])}
    prompt = SimpleNamespace(tokens=[1, 2], images=None)
    with pytest.raises(RuntimeError, match="text: the answers differ"):
        generate.bench_prompt("text", prompt, both, 1, must_agree=True)
    assert generate.bench_prompt("text", prompt, both, 1, must_agree=False)["tokens"] == 2


def test_the_first_token_is_the_prefill_and_the_median_of_the_others_a_token(monkeypatch):
    clock = iter([0.0, 6.0, 7.0, 9.0, 10.0])
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(clock))
    timing = generate.time_answer(lambda on_token: [on_token() or token for token in (1, 2, 3, 4)])
    assert timing == ([1, 2, 3, 4], 6, 1)
