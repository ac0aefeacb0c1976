"""Rates against the values of the official code, and what a mix may say."""

import json
from pathlib import Path

import mixture
import pytest

import train
from stages import stage2

CONFORMANCE = json.loads((Path(__file__).parent / "conformance" / "sampling_rates.json").read_text())


@pytest.mark.parametrize("case", CONFORMANCE["cases"], ids=lambda case: case["input"]["name"])
def test_rates_are_those_of_the_official_code(case):
    sizes, groups = case["input"]["sizes"], case["input"]["groups"]
    shares = [(g["rate"], [mixture.share(sizes[d["name"]], d["root_size_factor"], d["sampling_rate"]) for d in g["datasets"]])
              for g in groups]
    found = {d["name"]: r for g, rates in zip(groups, mixture.rates_of(shares), strict=True)
             for d, r in zip(g["datasets"], rates, strict=True)}
    assert found == pytest.approx(case["expected"], rel=1e-12)


def test_the_published_mixture_is_the_official_one():
    """Every set, its group, and its rate if all had 10,000 records."""
    entries = mixture.published(stage2.MIXTURE, "x")
    shares = [(g["rate"], [mixture.share(10_000, e.get("size"), e["sampling_rate"]) for e in g["data"]]) for g in entries]
    found = {(g["group"], Path(e["path"]).parent.name): r for g, rates in zip(entries, mixture.rates_of(shares), strict=True)
             for e, r in zip(g["data"], rates, strict=True)}
    theirs = {(g["name"], d["name"]): d["rate_if_all_sizes_10000"] for g in CONFORMANCE["sft_mixture"]["groups"] for d in g["datasets"]}
    assert found == pytest.approx(theirs, rel=1e-9) and sum(found.values()) == pytest.approx(1)


def records(folder, name, n):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(json.dumps({"annotations": [{"type": "text", "text": f"{name} {i}"}]}) for i in range(n)))


def opened(*words):
    args, config = train.parse(["--stage", "1", "--tiny", *map(str, words)])
    sources, rates, _ = train.open_sources(args, config)
    return {str(s.path): r for s, r in zip(sources, rates, strict=True)}


def test_a_mix_of_groups_and_fixed_rates(tmp_path):
    for name, n in (("a.jsonl", 100), ("b.jsonl", 400), ("c.jsonl", 7)):
        records(tmp_path, name, n)
    (tmp_path / "mix.json").write_text(json.dumps([
        {"group": "g", "rate": 3, "data": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}, {"path": "c.jsonl", "rate": 1}]))
    path = lambda name: str(tmp_path / name)                              # noqa: E731
    assert opened("--data", tmp_path / "mix.json") == pytest.approx({path("a.jsonl"): 0.25, path("b.jsonl"): 0.5, path("c.jsonl"): 0.25})


def test_an_entry_says_how_its_file_is_read(tmp_path):
    records(tmp_path, "a.jsonl", 3)
    (tmp_path / "mix.json").write_text(json.dumps([{"path": "a.jsonl", "weight": 0.5, "style": "user_qa"}]))
    args, config = train.parse(["--stage", "1", "--tiny", "--data", str(tmp_path / "mix.json")])
    source = train.open_sources(args, config)[0][0]
    assert source[0]["weight"] == 0.5 and source[0]["annotations"][0]["style"] == "user_qa"


@pytest.mark.parametrize(("mix", "message"), [
    ("{}", "a list of entries"), ("[", "not JSON"), ("[3]", "not an object"), ('[{"rate": 1}]', "without a path"),
    ('[{"path": "a.jsonl", "rat": 1}]', "'rat'"), ('[{"path": "a.jsonl", "rate": 0}]', "above 0"),
    ('[{"path": "a.jsonl", "size": 3}]', "only in a group"), ('[{"group": "g", "data": []}]', "has no data"),
    ('[{"group": "g", "data": [{"path": "a.jsonl", "rate": 2}]}]', "only outside a group"), ('[{"path": "none.jsonl"}]', "no such file"),
    ('[{"path": "a.jsonl", "strict": 1}]', "'strict'"),
])
def test_a_wrong_mix_is_refused(tmp_path, mix, message, capsys):
    records(tmp_path, "a.jsonl", 3)
    (tmp_path / "mix.json").write_text(mix)
    with pytest.raises(SystemExit) as refused:
        train.main(["--stage", "1", "--tiny", "--data", str(tmp_path / "mix.json"), "--out", str(tmp_path / "out")])
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_the_published_mixture_is_read_from_a_folder_and_says_what_is_missing(tmp_path, capsys):
    """... each source once; and goes on without them only if told to."""
    records(tmp_path, "pixmo-cap/records.jsonl", 10)
    records(tmp_path, "pixmo-count/records.jsonl", 100)
    records(tmp_path, "cosyn-point/records.jsonl", 400)
    with pytest.raises(SystemExit) as refused:
        train.main(["--stage", "1", "--tiny", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and all(said.count(name) == 1 for name in ("pixmo-points-basic", "pixmo-points-high-frequency", "tulu"))
    assert "--skip-missing" in said and "of records of your own" not in said
    records(tmp_path, "mine.jsonl", 3)
    with pytest.raises(SystemExit):
        train.main(["--stage", "1", "--tiny", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert f"{tmp_path} is a folder, for the published sets; of records of your own name the file" in capsys.readouterr().err
    found = opened("--data", tmp_path, "--skip-missing")
    path = lambda name: str(tmp_path / name / "records.jsonl")            # noqa: E731
    assert found == pytest.approx({path("pixmo-cap"): 2 / 3, path("pixmo-count"): 1 / 9, path("cosyn-point"): 2 / 9})
    assert "pixmo-points-basic" in capsys.readouterr().err
