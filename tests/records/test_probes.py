"""The cache of what was found about videos: each is probed once, whoever else writes the file."""

import shutil

import pytest

import data
import model
from records import media
from records.media import Unreadable
from records.visual import read_headers
from tests.records.samples import CAPTION
from tests.records.visual_records import VIDEO_PATH, open_records
from text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
CONFIG = data.DataConfig(max_tokens=4096, max_crops=2, max_frames=8, vision=model.TOY_VISION)
RECORD = {"video": "a.mp4", "annotations": [CAPTION]}


@pytest.fixture
def probed(monkeypatch):
    """The names of the videos that were probed, in order."""
    names = []
    probe = media.probe

    def recorded(path):
        names.append(path.name)
        return probe(path)

    monkeypatch.setattr(media, "probe", recorded)
    return names


def test_a_video_is_probed_once_until_its_file_changes(tmp_path, probed):
    shutil.copy(VIDEO_PATH, tmp_path / "a.mp4")
    records = [open_records(tmp_path, RECORD)[0] for _ in range(3)]
    sizes = [data.size(record, TOKENIZER, CONFIG, 0, 0) for record in records]
    assert len(probed) == 1
    assert sizes[0] == sizes[1] == sizes[2]
    notes = tmp_path / ".r.jsonl.probes.jsonl"
    notes.write_text(notes.read_text() + '[["cut')               # a line that a kill cut off
    (tmp_path / "a.mp4").touch()
    data.size(open_records(tmp_path, RECORD)[0], TOKENIZER, CONFIG, 0, 0)
    assert len(probed) == 2


@pytest.mark.parametrize("notes", [
    b"\xff\xfe", b"5", b"null", b"[1,2]", b'[["a",[1],2,1],[1,2,3,4]]', b'[["a",1,2,1],["x"]]',
    b"[" * 9000])
def test_damaged_notes_cost_nothing(tmp_path, notes):
    shutil.copy(VIDEO_PATH, tmp_path / "a.mp4")
    (tmp_path / ".r.jsonl.probes.jsonl").write_bytes(notes + b"\n")
    record = open_records(tmp_path, RECORD)[0]
    n_frames = len(read_headers(record, CONFIG).times)
    assert data.size(record, TOKENIZER, CONFIG, 0, 0)[1] == n_frames


def test_notes_of_two_processes_stand_together_and_a_bad_video_is_probed_once(tmp_path, probed):
    for name in ("x.mp4", "y.mp4"):
        shutil.copy(VIDEO_PATH, tmp_path / name)
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    first, second = (media.Probes(tmp_path / "notes") for _ in range(2))
    first(tmp_path / "x.mp4")
    second(tmp_path / "y.mp4")
    third = media.Probes(tmp_path / "notes")
    expected = (1280, 720, pytest.approx(5.28), pytest.approx(0.04))
    assert third(tmp_path / "x.mp4") == third(tmp_path / "y.mp4") == expected
    assert probed.count("y.mp4") == 1
    assert probed.count("x.mp4") <= 2
    for _ in range(3):
        with pytest.raises(Unreadable, match="S23"):
            third(tmp_path / "bad.mp4")
    assert probed.count("bad.mp4") == 1


def test_notes_that_cannot_be_written_are_done_without(tmp_path):
    (tmp_path / "notes").mkdir()
    assert media.Probes(tmp_path / "notes")(VIDEO_PATH).width == 1280
