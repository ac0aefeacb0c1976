"""Makes small runs of train.py for the tests of this folder, and reads their files."""

import json
import re
import shutil

import train
from training import checkpoint

SMALL = [
    "--stage=1", "--tiny", "--device=cpu", "--batch=2", "--vit=", "--pool_size=4",
    "--model.n_layer=1", "--model.n_embd=32", "--model.n_hidden=64", "--model.vision.n_embd=32",
    "--model.vision.n_hidden=64", "--model.vision.n_layer=1", "--model.vision.feature_layers=0",
    "--data.max_tokens=256", "--train=vit,connector,llm", "--eval_images=0",
]
RECIPE = [*SMALL, "--steps=6", "--save-every=2", "--keep=0", "--response_dropout=0.2"]


def run(out, *flags):
    """Calls train.main in this process -> its exit status; 0 means success."""
    try:
        train.main([*flags, f"--out={out}"])
    except SystemExit as end:
        return end.code
    return 0


def logged(out):
    """-> {step: its last line, without seconds}. A partial last line is skipped."""
    *rows, _ = (out / "log.jsonl").read_bytes().split(b"\n")
    lines = {}
    for line in map(json.loads, rows):
        if "lr" in line:
            line.pop("seconds")
            lines[line["step"]] = line
    return lines


def weights(out):
    return {path.name: path.read_bytes() for path in sorted((out / "model").iterdir())}


def assert_same_run(out, whole):
    """The log and the weights must be bit-identical."""
    assert logged(out) == logged(whole)
    assert weights(out) == weights(whole)


def back_to(whole, out, step):
    """Copies a run as it was after the checkpoint of `step`. The log stays complete."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "model")
    for later in checkpoint.list_steps(out):
        if later > step:
            shutil.rmtree(out / f"step-{later}")
    return out


def sentence(capsys, *words):
    """-> the only message of a run on stderr. It must contain these words and no traceback."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    head = ("train.py: stage ", "train.py: parameters: ", "train.py: steps: ", "train.py: data: ",
            "train.py: picture of ")
    of_a_record = re.compile(r"\.jsonl:\d+: |could not be decoded")
    sentences = [line[10:] for line in text.splitlines() if line.startswith("train.py: ")
                 and not line.startswith(head) and not of_a_record.search(line)]
    assert len(sentences) == 1, text
    assert len(sentences[0]) < 1000
    assert all(word in sentences[0] for word in words), text
    return sentences[0]
