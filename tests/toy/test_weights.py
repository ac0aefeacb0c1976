"""The toy's weights in the repository: small, and as good as their page says."""

import re
from pathlib import Path

import pytest

import train
from evaluation import report
from evaluation.evaluate import evaluate
from toy import world
from training.log import read_log
from weights import files

MEDIA = Path(__file__).parents[1] / "media"
PAGE = (files.TOY / "README.md").read_text()


@pytest.fixture(scope="module")
def toy():
    return files.open_model_folder("toy")


def stated(name):
    """The score that the page states."""
    return float(re.search(rf"\| {name} \| ([\d.]+) \|", PAGE)[1])


def held_out(kind):
    if kind == "images":
        return world.held_out_images("test", 0, 50, range(1, world.MAX_OBJECTS + 1))
    return [world.SOURCES[name]("test")[i] for name in ("videos", "tracks") for i in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names"), [
    ("images", ("point_f1", "count_accuracy", "caption_exact")),
    ("videos", ("video_point_f1", "track_f1", "qa_accuracy")),
])
def test_the_weights_score_what_their_page_says(toy, kind, names):
    """Up to 0.03 below, because processors round differently."""
    model, tokenizer, config = toy
    found, _ = evaluate(model, tokenizer, config, held_out(kind), report.toy_masks, max_new=384,
                        with_nll=False)
    for name in names:
        assert found[name] >= stated(name) - 0.03, f"{name}: {found[name]}"


def test_the_weights_are_small_and_the_word_toy_is_no_path(tmp_path, monkeypatch):
    assert sum(path.stat().st_size for path in files.TOY.iterdir()) <= 4_000_000
    (tmp_path / "toy").mkdir()
    monkeypatch.chdir(tmp_path)
    assert files.describe("toy").path == files.TOY
    with pytest.raises(FileNotFoundError):
        files.describe("./toy")
    with pytest.raises(FileNotFoundError):
        files.describe(Path("./toy"))


@pytest.mark.slow
def test_five_photographs_are_overfitted_in_200_steps(tmp_path):
    """The command of README.md, scored on the photographs themselves."""
    records = str(MEDIA / "records.jsonl")
    train.main(["--stage", "1", "--tiny", "--init", "toy", "--data", records, "--media", str(MEDIA),
                "--steps", "200", "--eval", records, "--out", str(tmp_path / "photos")])
    scores = read_log(tmp_path / "photos" / "log.jsonl")[-1]["eval"]
    assert [scores[name] for name in ("caption_exact", "point_f1", "count_accuracy")] == [1, 1, 1]
