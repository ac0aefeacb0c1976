"""Compares sampling rates with the official code, and tests mixture files and fingerprints."""

import json
from pathlib import Path

import pytest

from records.errors import DataError
from records.mixture import group_rates, sqrt_size
from records.reader import Records
from tests.records.samples import CAPTION, image, video, write
from tests.training.stream import write_texts
from text.tokenizer import ByteTokenizer
from toy import world
from training.config import parse
from training.sources import fingerprint, list_changes, media_of, open_sources

FOLDER = Path(__file__).parents[1] / "conformance"
CONFORMANCE = json.loads((FOLDER / "sampling_rates.json").read_text())
TINY = ["--stage=1", "--tiny"]


@pytest.mark.parametrize("case", CONFORMANCE["cases"], ids=lambda case: case["input"]["name"])
def test_rates_are_those_of_the_official_code(case):
    sizes = case["input"]["sizes"]
    groups = []
    names = []
    for group in case["input"]["groups"]:
        weights = []
        for d in group["datasets"]:
            weights.append(sqrt_size(sizes[d["name"]], d["root_size_factor"], d["sampling_rate"]))
            names.append(d["name"])
        groups.append((group["rate"], weights))
    rates = [rate for of_group in group_rates(groups) for rate in of_group]
    found = dict(zip(names, rates, strict=True))
    assert found == pytest.approx(case["expected"], rel=1e-12)


def write_records(folder, name, n):
    return write_texts(folder / name, [f"{name} {i}" for i in range(n)])


def opened(*words):
    args, config = parse([*TINY, *map(str, words)])
    return open_sources(args, config, world.mixture(config.seed, config.stage))


def rates_of(*words):
    sources, rates, _ = opened(*words)
    return {str(source.path): rate for source, rate in zip(sources, rates, strict=True)}


def test_rates_on_the_command_line_are_shares(tmp_path):
    a, b = (write_records(tmp_path, name, 3) for name in ("a.jsonl", "b=1.jsonl"))
    assert rates_of("--data", f"{a}=0.6", f"{b}=0.2") == pytest.approx({str(a): 0.75, str(b): 0.25})
    assert rates_of("--data", a, b) == {str(a): 0.5, str(b): 0.5}


def test_images_of_data_in_a_held_out_file_are_told(tmp_path, capsys):
    """However the paths are spelled. Only other images give no warning."""
    rows = {"a.jsonl": ["1.png", "2.png"], "b.jsonl": [f"../{tmp_path.name}/2.png"],
            "c.jsonl": ["3.png"]}
    for name, images in rows.items():
        write(tmp_path / name, *[image(CAPTION, image=path) for path in images])
    a, b, c = (tmp_path / name for name in rows)
    assert media_of(Records(a), 1) == {str(tmp_path / "1.png")}
    opened("--data", a, "--eval", c)
    assert capsys.readouterr().err == ""
    opened("--data", c, a, "--eval", c, b)
    warnings = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in warnings] == [
        f"--eval {path}: 1 of its images and videos are also in --data {source}; its scores say "
        "nothing about new images" for path, source in ((c, c), (b, a))]


def test_a_mix_has_groups_and_fixed_rates_and_says_how_a_file_is_read(tmp_path):
    sizes = {"a.jsonl": 100, "b.jsonl": 400, "c.jsonl": 7}
    a, b, c = (write_records(tmp_path, name, n) for name, n in sizes.items())
    (tmp_path / "mix.json").write_text(json.dumps([
        {"group": "g", "rate": 3, "data": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]},
        {"path": "c.jsonl", "rate": 1, "weight": 0.5, "style": "user_qa"}]))
    expected = {str(a): 0.25, str(b): 0.5, str(c): 0.25}
    assert rates_of("--data", tmp_path / "mix.json") == pytest.approx(expected)
    d = write_records(tmp_path, "d.jsonl", 3)  # half of all, though the rates of the mix sum to 4
    expected = {path: rate / 2 for path, rate in expected.items()}
    shares = rates_of("--data", f"{tmp_path / 'mix.json'}=0.5", f"{d}=0.5")
    assert shares == pytest.approx({**expected, str(d): 0.5})
    record = opened("--data", tmp_path / "mix.json")[0][2][0]
    assert record["weight"] == 0.5
    assert record["annotations"][0]["style"] == "user_qa"


def test_a_run_that_samples_prepared_frames_in_another_way_warns_once_per_source(tmp_path, capsys):
    for name, max_frames in (("a.jsonl", 8), ("b.jsonl", 9)):
        made_for = {"fps": 2, "max_frames": max_frames}
        frames = {"frames": ["1.png"], "fps": 1, "made_for": made_for}
        write(tmp_path / name, *[video(CAPTION, video=frames)] * 3)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    opened("--data", *files, "--data.max_frames=8")
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "b.jsonl: its frames were made with --fps 2 --max-frames 9, but this run" in sentence
    opened("--data", *files, "--data.max_frames=8", "--data.fps=1")
    assert len(capsys.readouterr().err.splitlines()) == 2


WRONG_MIXES = [
    ("{}", r"not a valid mix.json .*: expected a list of entries {\.\.}, found {}"),
    ("[]", r"expected a list of entries {\.\.}, found \[\]"),
    ("3", r"expected a list of entries {\.\.}, found 3"),
    ("[3]", r"expected a list of entries {\.\.}, found \[3\]"),
    ('[{"group": "g", "data": {"path": "a.jsonl"}}]', r"expected a list of .*, found {'path'"),
    ('[{"path": "a.jsonl", "rate": true}]', "'rate' of"),
    ('[{"path": 3}]', "'path' of"),
    ('[{"path": "a.jsonl", "rate": 1, "rate": 2}]', "'rate' occurs 2 times in one entry"),
    (f'[{{"path": "{300 * "x"}"}}]', "--data: no such file: .*xxx; "),
    ('[{"group": "g", "data": [{"path": "a.jsonl", "size": -5}]}]', "'size' of"),
    ('[{"group": "g", "data": [{"path": "a.jsonl", "rate": 2}]}]', "'rate' of"),
    ('[{"rate": 1}]', "'path' of"),
    ('[{"path": "a.jsonl", "rat": 1}]', "'rat' of"),
    ('[{"path": "a.jsonl", "rate": NaN}]', "'rate' of"),
    ('[{"path": "a.jsonl", "rate": 1e308}, {"path": "a.jsonl", "rate": 1e308}]', "'rate' of"),
    ('[{"group": "g", "data": [{"path": "a.jsonl", "sampling_rate": 1e-200}]}]', "'sampling_r"),
    ('[{"group": "g", "data": [{"path": "a.jsonl", "size": 1e300}]}]', "'size' of"),
]


@pytest.mark.parametrize(("mix", "message"), WRONG_MIXES, ids=[m for m, _ in WRONG_MIXES])
def test_a_wrong_mix_is_refused(tmp_path, mix, message):
    write_records(tmp_path, "a.jsonl", 3)
    (tmp_path / "mix.json").write_text(mix)
    with pytest.raises(DataError, match=message):
        opened("--data", tmp_path / "mix.json")


@pytest.mark.parametrize("flag", ["--data", "--eval"])
@pytest.mark.parametrize("name", ["my rows.json", "chats.jsonl"])
def test_a_file_that_is_no_file_of_records_is_refused_with_the_command_to_convert_it(
        tmp_path, monkeypatch, flag, name):
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path, "a.jsonl", 3)
    (tmp_path / name).write_text('{"messages": []}')
    with pytest.raises(DataError, match=r"^[\w .]+: this is not a .jsonl file") as error:
        opened("--data", "a.jsonl", flag, name)
    command = {"my rows.json": "'my rows.json' 'my rows.records.jsonl'",
               "chats.jsonl": "chats.jsonl chats.records.jsonl"}[name]
    assert str(error.value).endswith(f"convert it with: python -m tools.convert {command}")


def test_a_folder_of_photos_and_paths_that_python_does_not_know_are_explained(tmp_path):
    (tmp_path / "photos").mkdir()
    for path, words in ((tmp_path / "photos", "photos: for your own data, give record files"),
                        (r"C:\Users\me\a.jsonl", r"me.a\.jsonl; this is a path of Windows, .* WSL"),
                        ("~/a.jsonl", r"~/a\.jsonl; ~ is not replaced here")):
        with pytest.raises(DataError, match=words):
            opened("--data", path)


def test_the_published_mixture_is_read_from_a_folder_and_says_what_is_missing(tmp_path, capsys):
    """Every missing source is listed once. With --skip-missing, the run continues without them."""
    cap, count, cosyn = (write_records(tmp_path, f"{name}/records.jsonl", n) for name, n in (
        ("pixmo-cap", 10), ("pixmo-count", 100), ("cosyn-point", 800)))
    with pytest.raises(DataError, match=r"--data: no such file: .*; --skip-missing") as error:
        opened("--data", tmp_path)
    text = str(error.value)
    for name in ("pixmo-points-basic", "pixmo-points-high-frequency", "tulu"):
        assert text.count(name) == 1
    found = rates_of("--data", tmp_path, "--skip-missing")
    # a record of PixMo-Count counts twice, so 200 examples are compared with 800
    assert found == pytest.approx({str(cap): 2 / 3, str(count): 1 / 9, str(cosyn): 2 / 9})
    assert "pixmo-points-basic" in capsys.readouterr().err


def test_files_of_one_name_get_their_folders_in_front(tmp_path):
    paths = [write_records(tmp_path, f"{folder}/r.jsonl", 2) for folder in ("a", "b", "b/c")]
    sources, _, _ = opened("--data", *paths)
    assert [source.name for source in sources] == ["a/r.jsonl", "b/r.jsonl", "c/r.jsonl"]
    mix = [{"path": "a/r.jsonl"}, {"path": "a/r.jsonl", "weight": 2}, {"path": "b/r.jsonl"}]
    (tmp_path / "mix.json").write_text(json.dumps(mix))
    sources, _, _ = opened("--data", tmp_path / "mix.json")
    names = [source.name for source in sources]
    assert len(set(names)) == 3
    assert names[1] == names[0] + "#2"


def test_the_toy_world_has_evaluation_records_of_its_own_and_other_data_those_of_eval(tmp_path):
    path = write_records(tmp_path, "a.jsonl", 3)
    assert opened()[2] is None
    assert opened("--data", path)[2] == {}
    twin = write_records(tmp_path, "b/a.jsonl", 2)
    sets = opened("--data", path, "--eval", path, twin)[2]
    assert list(sets) == [f"{tmp_path.name}/a.jsonl", "b/a.jsonl"]
    assert [len(records) for records in sets.values()] == [3, 2]


def test_a_fingerprint_changes_with_what_the_packs_depend_on_and_with_nothing_else(tmp_path):
    path = write_records(tmp_path, "a.jsonl", 3)
    tokenizer = ByteTokenizer(["word"])

    def of(*words, tokenizer=tokenizer):
        args, config = parse([*TINY, f"--data={path}", *words])
        sources, rates, _ = open_sources(args, config)
        return fingerprint(sources, rates, tokenizer, config)

    first = of()
    assert first == json.loads(json.dumps(first))
    assert first == of("--lr.llm=1e-4", "--batch=2", "--steps=7")
    fields = {name: name for name in ("seed", "pool_size", "pack_crops", "data.max_points")}
    for name, field in {**fields, "data.vision": "model.vision.patch"}.items():
        changed = of(f"--{field}=7")
        assert [key for key in first if first[key] != changed[key]] == [name]
        assert list_changes(first, changed).startswith(f"{name} was ")
    other = of(tokenizer=ByteTokenizer(["other"]))
    assert [key for key in first if first[key] != other[key]] == ["tokenizer"]
    path.write_text(path.read_text() + "\n" + path.read_text().splitlines()[0])
    assert list_changes(first, of()) == "data: the files, or their contents, are different"
    assert list_changes(first, first) == ""
    older = {name: value for name, value in first.items() if name != "draws"}
    changes = list_changes(older, first)
    assert changes == "this version of the code makes other random choices"
