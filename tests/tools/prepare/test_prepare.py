"""Published sets: rows of one image, mistakes, and files that are read without pyarrow."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from records.errors import Unreadable
from stages import stage1, stage2
from tests.tools.convert.command import run
from tests.tools.prepare.cases import messages
from tests.tools.prepare.command import prepare, write_parquet
from tools.convert import make
from tools.convert.benchmarks import BENCHMARKS
from tools.convert.flags import parse
from tools.convert.sets import SETS
from training.sources import published

ROOT = Path(__file__).parents[3]


def test_rows_of_one_image_become_one_record_where_it_first_appeared(tmp_path):
    """The rows are anywhere in several files. A second command writes the same bytes."""
    sources = []
    for k in range(2):
        rows = [{"image_url": f"https://example.org/{i % 7}", "question": f"q{i}?",
                 "answer": f"a{i}" if i % 5 else ""} for i in range(k, 40, 2)]
        sources.append(tmp_path / f"train-{k}.jsonl")
        sources[k].write_text("\n".join(map(json.dumps, rows)))
    records, counts = prepare("pixmo-ask-model-anything", sources, tmp_path / "out")
    first_seen = list(dict.fromkeys(i % 7 for k in range(2) for i in range(k, 40, 2) if i % 5))
    assert [int(record["image"]["url"][-1]) for record in records] == first_seen
    for record, k in zip(records, first_seen, strict=True):
        asked = [int(a["question"][1:-1]) for a in record["annotations"]]
        assert sorted(asked) == [i for i in range(40) if i % 7 == k and i % 5]
    assert counts["skipped"] == {"wrong record": 8}
    before = (tmp_path / "out/records.jsonl").read_bytes()
    prepare("pixmo-ask-model-anything", sources, tmp_path / "out")
    assert (tmp_path / "out/records.jsonl").read_bytes() == before


def test_a_row_of_another_shape_is_counted_and_costs_only_itself(tmp_path):
    good = {"image_url": "https://example.org/1", "question": "q?", "answer": "a"}
    changes = [{"image_url": 7}, {"question": "\ud800"}, {"question": ["q"]}, {"image_sha256": 5}]
    lines = [json.dumps(good | change) for change in [{}, *changes]]
    lines.append(json.dumps(good)[:-1] + ', "answer": "the last of two"}')
    source = tmp_path / "rows.jsonl"
    lines += ['{"torn', "7", "null"]
    source.write_bytes("\n".join(lines).encode() + b'\n{"question": "\xff"}')
    records, counts = prepare("pixmo-ask-model-anything", source, tmp_path / "out")
    assert [len(record["annotations"]) for record in records] == [1]
    assert counts["skipped"] == {"no image": 1, "not JSON": 3, "wrong record": 5}


@pytest.mark.extras("pyarrow")
def test_a_damaged_parquet_file_costs_one_sentence(tmp_path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    status, _, err = run(tmp_path / "torn.parquet", tmp_path / "out.jsonl", "--as", "pixmo-cap")
    (sentence,) = err.splitlines()
    assert status == 2
    assert "torn.parquet cannot be used" in sentence


@pytest.mark.extras("pyarrow")
def test_other_columns_of_a_parquet_file_are_read_only_if_the_set_is_not_named(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", [{"messages": messages("a", "b"), "hue": "red"}])
    for flags, value in (["--as", "tulu"], "not read"), ([], "red"):
        status, _, err = run(path, tmp_path / "out.jsonl", "--overwrite", *flags)
        assert status == 0
        assert f"'hue' is not used; it occurs 1 time, for example with the value {value!r}" in err


def test_files_that_are_named_are_all_read_whatever_their_splits(tmp_path):
    files = [tmp_path / "train.jsonl", tmp_path / "validation.jsonl"]
    for file in files:
        file.write_text(json.dumps({"messages": messages(file.stem, "b")}))
    records, _ = prepare("tulu", files, tmp_path / "out")
    asked = [record["annotations"][0]["turns"][0]["question"] for record in records]
    assert asked == ["train", "validation"]


def test_without_pyarrow_json_is_read(tmp_path, monkeypatch):
    """The array of rows in a .json file may be inside an object."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    source = tmp_path / "t.json"
    source.write_text(json.dumps({"name": "t", "data": [{"messages": messages("a", "b")}]}))
    [record], _ = prepare("tulu", source, tmp_path / "out")
    assert record["annotations"][0]["turns"] == [{"question": "a", "answer": "b"}]


def test_the_pages_prepare_every_set_under_the_names_of_the_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("data_sets", "evaluation")
    page = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in names)
    blocks = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    lines = "".join(b for b in blocks if re.search(r"^get \w", b, re.MULTILINE))
    functions = ("get() { echo got $1; }; images() { :; }; python() { :; }; evaluate() { :; }; "
                 "prepare() { echo $@; }\n")
    run = subprocess.run(["bash", "-ec", functions + lines], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    got = {line[1].split("/")[1] for line in lines if line[0] == "got"} | {"ai2d", "DocVQA"}
    lines = [line for line in lines if line[0] != "got"]
    for _, source, *_ in [*lines, ("", "pixmo-points-eval")]:
        Path(source).mkdir(parents=True, exist_ok=True)
    commands = [parse([source, f"{out}/records.jsonl", "--as", name,
                       *(flag.removeprefix("raw/") for flag in flags)], "")
                for name, source, out, *flags in lines]
    assert {one.sources[0].parts[0] for one in commands} <= got
    read = {one.kind for one in commands}
    named = {*re.findall(r"`(?:prepare )?([\w-]+)`", page)}
    assert {*SETS, *BENCHMARKS} <= read | named
    written = {one.out.parent.name for one in commands}
    groups = published([*stage1.MIXTURE, *stage2.MIXTURE], ".")
    missing = Counter(group["group"] for group in groups for member in group["data"]
                      if Path(member["path"]).parent.name not in written)
    assert missing == {"video_academic": 30, "image_academic": 8, "hardcodes": 1}


def test_a_question_has_at_most_as_many_options_as_the_alphabet_has_letters():
    options = [f"option {k}" for k in range(27)]
    assert make.choice("?", "user_qa", options[:26], 25)["answer_idx"] == 25
    with pytest.raises(Unreadable, match="no right option among 2 to 26"):
        make.choice("?", "user_qa", options, 0)
