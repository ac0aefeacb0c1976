"""Command lines with a mistake: each prints one sentence, exits with status 2, and changes no file.
The packages of requirements-dev.txt are missing here."""

import json
import os
import sys

import pytest

from tests.tools.convert.test_convert import ROW
from tests.tools.test_help import COMMANDS, run

EXTRAS = ("transformers", "tensorboard", "tensorboard.compat.proto.event_pb2", "pyarrow.parquet",
          "safetensors.torch", "yaml")
FILES = {
    "rows.jsonl": json.dumps(ROW), "rows.txt": "{}", "old.jsonl": "old", "other.jsonl": '{"a": 1}',
    "torn.json": '[{"a": 1}', "twice.json": '{"a": 1, "a": 2}', "deep.json": "[" * 100_000,
    "a-held-out.jsonl": json.dumps(ROW), "torn.jsonl": '{"image_url": "http://x.org/1"}\n{"image_',
    "blank.txt": "\n", "a.parquet": "PAR1", "a.npz": "mine", "a.html": "mine", "a.png": "mine",
    "a.gif": "mine", "split/train-00000-of-00001.jsonl": "{}",
    "split/validation-00000-of-00001.jsonl": "{}", "photos/metadata.jsonl": "{}",
    "own/records.jsonl": "mine", "own.urls.txt": "mine", "old.csv": "old", "x.py": "x = 1",
    "torn.py": "def f(:", "made/predictions.jsonl": "{}", "drawn/a-0-x.png": "",
    "taken/predictions.jsonl/a.txt": "", "folder.jsonl/a.txt": "",
    "run/log.jsonl": '{"config": {}}\n',
    "yolo/data.yaml": "names: [eye]", "yolo/labels/1.txt": "", "yolo/images/1.jpg": ""}

MISTAKES = {  # {command: {flags: a part of the sentence}}
    "tools.ablate": {"--only trees,colours": "--only colours: choose from packing, trees"},
    "tools.bench": {
        "run none --peak 1": "none: no log of more than 5 steps",
        "pack --n 0": "argument --n: 0 must be at least 1",
        "attend --tokens 3": "argument --tokens: 3 must be at least 512",
        "step --preset toy --cases image": "pip install -r requirements-dev.txt",
        "attend --device cuda:99": "--device cuda:99 cannot be used"},
    "tools.check": {"--decode": "required: FILE", "rows.jsonl --fps nan": "--fps: nan must be"},
    "tools.convert": {
        "none.jsonl out.jsonl": "none.jsonl: no such file",
        "rows.jsonl out.json": "out.json: the name of a file of records must end in .jsonl",
        "rows.txt out.jsonl": "rows.txt: this is not a known format; --help",
        "torn.json out.jsonl": "torn.json: the file is not JSON: Expecting",
        "deep.json out.jsonl": "deep.json: the file is not JSON",
        "twice.json out.jsonl": "twice.json: the file is not JSON: 'a' occurs twice",
        "rows.jsonl old.jsonl": "old.jsonl exists; give OUT another name, or --overwrite",
        "rows.jsonl folder.jsonl --overwrite": "folder.jsonl exists",
        "rows.jsonl soft.jsonl --overwrite": "soft.jsonl: this file is an input of the command",
        "rows.jsonl hard.jsonl --overwrite": "hard.jsonl: this file is an input of the command",
        "photos photos/metadata.jsonl --overwrite": "metadata.jsonl: this file is an input",
        "a-held-out.jsonl a.jsonl --overwrite --hold-out 0.5": "a-held-out.jsonl: this file is an",
        "rows.jsonl dangling.jsonl": "dangling.jsonl exists",
        "rows.jsonl a.jsonl --hold-out 0.5": "a-held-out.jsonl exists",
        "rows.jsonl out.jsonl --subtitles none": "--subtitles none: there is no such folder",
        "photos old.csv --template": "old.csv exists",
        "photos out.jsonl --template": "--template needs one folder",
        "photos own out.csv --template": "--template needs one folder",
        "other.jsonl own.jsonl --as pixmo-cap": "own.urls.txt exists; give OUT another name",
        "other.jsonl own.jsonl --as pixmo-points-basic --overwrite --exclude own.urls.txt":
            "own.urls.txt: this file is an input of",
        "rows.jsonl out.jsonl --media none": "--media none: there is no such folder",
        "yolo out.jsonl": "data.yaml cannot be used: yaml is needed: pip install -r requirements-e",
        "a.parquet out.jsonl --as tulu": "pip install -r requirements-extras.txt",
        "split out.jsonl --as tulu": "contains the splits train, validation",
        "split out.jsonl --as tulu --split test": "no parquet, json or jsonl file of the split 'te",
        "other.jsonl out.jsonl --as pixmo-points-basic": "and add --exclude raw/pixmo-points-eval",
        "other.jsonl out.jsonl --as pixmo-points-basic --exclude torn.jsonl":
            "must have the URL of an image",
        "other.jsonl out.jsonl --as pixmo-points-basic --exclude blank.txt":
            "must have the URL of an image",
        "other.jsonl out.jsonl --as cosyn-400k": "cosyn-400k needs --type with one of chart"},
    "tools.evaluate": {
        "--model none --data none.jsonl": "none: no such folder",
        "--model none --data rows.jsonl --out made": "made/predictions.jsonl exists; give another",
        "--model none --data rows.jsonl --draw drawn": "drawn/a-0-x.png exists; give another",
        "--model none --data made/predictions.jsonl --out made --overwrite":
            "made/predictions.jsonl: this file is an input of",
        "--model none --data rows.jsonl --out linked --overwrite":
            "linked/predictions.jsonl: this file is an input of",
        "--model none --data rows.jsonl --out taken --overwrite": "taken/predictions.jsonl",
        "--model none --data photos --benchmark countbench":
            "photos OUT.jsonl --as benchmark-countbench",
        "--model toy --data rows.jsonl --top-p 0.9": "--top-p needs a --temperature above 0",
        "--model toy --data rows.jsonl --top-p 1.1": "--top-p: 1.1 must be at most 1",
        "--model toy --data rows.jsonl --temperature nan": "--temperature: nan must be",
        "--model toy --data rows.jsonl --masks a.npz --masks a.npz":
            "--masks has 2 files, but --data has 1"},
    "tools.generate": {
        "--model none --image a.png --prompt x --draw a.txt": "--draw a.txt: give",
        **{f"--model toy {flags}": words for flags, words in {
            "--prompt x --image . --draw b.png --out a.jsonl": "is a folder: give only this one",
            "--prompt x --image . --json --out a.jsonl": "is a folder: give only this one",
            "--chat --image . --out a.jsonl": "is a folder: give only this one",
            "--prompt x --video . --subtitles a.srt --out a.jsonl":
                "is a folder: give only this one",
            "--prompt x --images a.png . --out a.jsonl": "is a folder: give only this one",
            "--prompt x --image a.png --out a.jsonl": "--out needs a folder",
            "--prompt x --frames 3": "--frames needs --video F",
            "--prompt x --subtitles a.srt": "--subtitles needs --video F",
            "--prompt x --start 1": "--start needs --video F",
            "--prompt x --end 1": "--end needs --video F",
            "--prompt x --frames 2049 --video a.mp4": "2049 must be at most 2048",
            "--prompt x --frames 0 --video a.mp4": "0 must be at least 1",
            "--chat --json": "they cannot be used with --chat",
            "--chat --image a.png --draw b.png": "they cannot be used with --chat",
            "--prompt x --image a.png --draw b.gif": "give a .png, .jpg, .jpeg, .webp file in an",
            "--prompt x --video a.mp4 --draw none/a.gif": ".webp, .gif file in an existing folder",
            "--prompt x --image a.png --draw a.png": "this file is an input of",
            "--prompt x --video a.gif --draw a.gif": "this file is an input of",
            "--prompt x --video a.gif --subtitles pipe.npz": "pipe.npz: this is not a regular file",
        }.items()},
        "--model run --prompt x --video": "--video without a file needs --model toy",
        "--model run --prompt x --draw b.png": "--draw needs --image, --images or --video"},
    "tools.hf": {"": "required: COMMAND", "import none out": "none: no such folder"},
    "tools.j_and_f": {"--predicted none.npz --masks none.npz": "none.npz"},
    "tools.memory": {"--stage 3 --preset 4b --gpus 6 --cp 6": "--cp 6: 32 query and 8 kv heads"},
    "tools.plan": {
        "--stage 1 --data none.jsonl --out p.npz": "no such file: none.jsonl",
        "--stage 1 --packs 3": "without --out, --data FILE is required and --packs is not allowed",
        "--stage 1 --data rows.jsonl --out a.npz": "this command has not made this file",
        "--stage 1 --data rows.jsonl --out rows.jsonl": "rows.jsonl: the name must end in .npz",
        "--stage 1 --out p.npz --data pipe.npz": "pipe.npz: this is not a regular file",
        "--stage 1 --data rows.jsonl --out pipe.npz": "pipe.npz: this is not a regular file"},
    "tools.play": {"--model none": "none: no such folder",
                   "--model none --top-p 0.9": "--top-p needs a --temperature above 0"},
    "tools.prepare": {
        "frames none out --max-frames 2049": "2049 must be at most 2048",
        "pixmo-count raw/a raw/b data/c --split train": "now: python -m tools.convert raw/a raw/b "
            "data/c/records.jsonl --split train --as pixmo-count",
        "molmo2-videocounteval raw data": "now: python -m tools.convert raw data/records.jsonl "
            "--as benchmark-molmo2-videocount",
        "track-instruction": "now: python -m tools.convert SOURCE OUT/records.jsonl --as track-"},
    "tools.tensorboard": {"none": "log.jsonl: no such file; RUN is a run directory",
                          "run": "tensorboard is needed: pip install -r requirements-extras.txt"},
    "tools.toy": {"out --n -1": "--n: -1 must be at least 1",
                  "out --what videos --split unseen": "--split unseen needs --what images",
                  "own --n 1": "contains records.jsonl, and tools.toy has not made"},
    "tools.view": {
        "--stage 9 --row 1 --out page.html": "--stage",
        "--stage 1 --tiny": "required: --out",
        "--stage 1 --tiny --row -1 --out page.html": "--row must be at least 0; --run DIR needs",
        "--stage 1 --tiny --step 3 --out page.html": "--step N needs --run DIR",
        "--stage 1 --tiny --out a.html": "this command has not made this file",
        "--stage 1 --tiny --out notes": "the name must end in .html"},
    "tools.vit": {"out --steps 0": "--steps: 0 must be at least 1"},
    "tools.walk": {"--check none.py": "none.py", "--check torn.py": "invalid syntax",
                   "--check x.py": "none of the functions"},
}


def files_below(folder):
    return {path: path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(("command", "flags"), [
    (command, flags) for command in MISTAKES for flags in MISTAKES[command]])
def test_a_mistake_is_one_sentence_and_status_2(command, flags, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for package in EXTRAS:
        monkeypatch.setitem(sys.modules, package, None)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "soft.jsonl").symlink_to("rows.jsonl")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/predictions.jsonl").symlink_to("../rows.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to("rows.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.npz")
    before = files_below(tmp_path)
    assert run(command, flags, monkeypatch) == 2
    stdout, stderr = capsys.readouterr()
    (sentence,) = stderr.splitlines()
    assert sentence.startswith(f"{command}: ")
    assert MISTAKES[command][flags] in sentence
    assert not stdout
    assert files_below(tmp_path) == before


def test_all_commands_are_found():
    assert set(MISTAKES) == set(COMMANDS)
