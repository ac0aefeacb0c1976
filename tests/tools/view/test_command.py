"""python -m tools.view: rows of a plan, rows of a run, mistakes."""

import hashlib
import json
import re
import subprocess
import sys

import pytest

import train
from tests.tools.view.pages import MEDIA, PHOTOS, ROOT, TOY, shown_row
from tools.view import __main__ as command


def test_the_command_writes_a_page_that_needs_nothing_else(tmp_path):
    out = tmp_path / "p.html"
    words = [sys.executable, "-m", "tools.view", "--stage", "1", *PHOTOS[1:], "--tiny",
             "--row", "1", "--out", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    page = out.read_text(encoding="utf-8")
    assert page == shown_row(*TOY, *PHOTOS, number=1).page
    data = re.compile(r'<script type="application/json".*?</script>', re.DOTALL)
    outside = r'(?:src|href)="(?!data:image/png;base64,)|url\(|@import|https?:'
    assert not re.search(outside, data.sub("", page))


@pytest.mark.parametrize(("flags", "message"), [
    (["nowhere.jsonl", "--stage", "1"], "nowhere.jsonl: no such file"),
    (["--stage", "1"], "--data"),
    (["--stage", "1", "--tiny", "--row", "-1"], "--row -1: must be at least 0"),
    (["--stage", "1", "--tiny", "--rows", "1"], "--rows"),
    (["--stage", "7", "--tiny"], "--stage"),
    (["--stage", "1", "--tiny", "--init", "nowhere"], "nowhere"),
    (["--stage", "1", "--tiny", "--out", "no/such/folder.html"], "no/such/folder.html"),
    (["--stage", "1", *PHOTOS[1:], "--tiny", "--data.max_tokens=20"], "of the last 100 records"),
])
def test_a_mistake_ends_in_one_sentence(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--out", str(tmp_path / "p.html"), *flags])
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.endswith("skipped")]
    assert stop.value.code == 2
    assert len(lines) == 1
    assert lines[0].startswith("tools.view: ")
    assert message in lines[0]
    assert not (tmp_path / "p.html").exists()


def write_records(folder, names):
    lines = []
    for name in names:
        annotations = [{"type": "caption", "text": "an object"}] * 2
        lines.append(json.dumps({"image": name, "annotations": annotations}))
    (folder / "r.jsonl").write_text("\n".join(lines))


def test_a_step_of_a_run_is_shown_as_it_was_trained_on(tmp_path):
    """The rows of --run and --step have the ids that the log hashed, and what the run masked is
    masked."""
    write_records(tmp_path, ("coffee.png", "cut.png", "chelsea.png"))
    for name in ("coffee.png", "chelsea.png"):
        (tmp_path / name).write_bytes((MEDIA / name).read_bytes())
    whole = (MEDIA / "coffee.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[:90_000])
    run = tmp_path / "run"
    train.main(["--stage", "1", "--tiny", "--batch", "2", "--steps", "3",
                "--data", str(tmp_path / "r.jsonl"), "--model.n_layer=1", "--device", "cpu",
                "--vit_steps=0", "--pool_size=3", "--out", str(run)])
    (tmp_path / "cut.png").write_bytes(whole)        # repaired since: the run saw it cut
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    masked = 0
    for step in (1, 2, 3):
        ids = []
        for row in (0, 1):
            packed = command.row_of_run(run, step, row)
            ids += [record["id"] for record in packed.records]
            masked += sum(len(example.tokens) for example in packed.examples if example.mask_reason)
        logged = next(line["ids"] for line in lines if line.get("step") == step)
        assert hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16] == logged
    assert masked == sum(line["masked_tokens"] for line in lines if "loss" in line) > 0

    page = tmp_path / "page.html"
    command.main(["--run", str(run), "--step", "2", "--row", "1", "--out", str(page)])
    packed = command.row_of_run(run, 2, 1)
    assert packed.records[0]["id"] in page.read_text()
    for wrong in (["--step", "4"], ["--step", "1", "--row", "2"], ["--step", "1", "--stage", "1"]):
        with pytest.raises(SystemExit) as refused:
            command.main(["--run", str(run), *wrong, "--out", str(page)])
        assert refused.value.code == 2


def test_a_run_whose_data_has_changed_is_refused(tmp_path, capsys):
    """The log has a hash of the ids of every step."""
    run = tmp_path / "run"
    page = ["--step", "2", "--out", str(tmp_path / "page.html")]
    train.main(["--stage", "1", "--tiny", "--steps", "2", "--batch", "2", "--vit_steps=0",
                "--eval_images=1", "--model.n_layer=1", "--device", "cpu", "--out", str(run)])
    command.main(["--run", str(run), *page])
    with open(run / "skips.jsonl", "w") as skips:    # its last line cut, as by a kill
        skips.write('{"draw": 99999, "reason": "S21"}\n{"dra')
    command.main(["--run", str(run), *page])
    log = (run / "log.jsonl").read_text()
    ids = [json.loads(line)["ids"] for line in log.splitlines()[1:3]]
    (run / "log.jsonl").write_text(log.replace(ids[1], "0" * 16))
    with pytest.raises(SystemExit):
        command.main(["--run", str(run), *page])
    assert "step 2 had other records" in capsys.readouterr().err
