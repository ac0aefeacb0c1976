"""tools.bench generate: answers of both sides agree, and times are those of the tokens."""

import argparse
import sys
import time
from types import SimpleNamespace

import pytest

from tools.bench import generate as bench


def parse(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_both_sides_give_the_same_answers(tiny, with_transformers, monkeypatch, capsys):
    rows = bench.run(parse("--tokens", "3", "--rounds", "2"))
    assert list(rows) == ["text", "image of 9 crops", "video of 16 frames"]
    assert [row["crops"] for row in rows.values()] == [0, 9, 16]
    for row in rows.values():
        assert row["same_tokens"] == 3
        for phase in ("prefill", "decode"):
            assert row[phase]["ours"] > 0
            assert row[phase]["theirs"] > 0
            assert row[phase]["ratio"]["min"] <= row[phase]["ratio"]["max"]
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in rows)


def test_different_answers_end_the_run_in_float32_only():
    def sides(theirs):
        def answer(tokens):
            def run(on_token):
                for _ in tokens:
                    on_token()
                return tokens

            return run

        return {"ours": answer([5, 6, 7]), "theirs": answer(theirs)}

    prompt = SimpleNamespace(tokens=[1, 2], images=None)
    with pytest.raises(RuntimeError, match="text: the answers differ from token 1 on"):
        bench.bench_prompt("text", prompt, sides([5, 0, 7]), 1, must_agree=True)
    row = bench.bench_prompt("text", prompt, sides([5, 0, 7]), 1, must_agree=False)
    assert row["same_tokens"] == 1


def test_the_first_token_is_the_prefill_and_the_median_of_the_others_a_token():
    def answer(on_token):
        for seconds in (0.06, 0.01, 0.02, 0.01):
            time.sleep(seconds)
            on_token()
        return [1, 2, 3, 4]

    timing = bench.time_answer(answer)
    assert timing.tokens == [1, 2, 3, 4]
    assert timing.prefill >= 0.06
    assert 0.01 <= timing.decode < timing.prefill


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--tokens 1", "--tokens must be at least 2"), ("--device cuda:99", "--device cuda:99")],
)
def test_mistakes_are_named(flags, message):
    with pytest.raises(ValueError, match=message):
        bench.run(parse(*flags.split()))


def test_a_missing_package_is_named(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        bench.run(parse())
