import numpy as np
from PIL import Image

from tools import figures


def test_the_committed_picture_of_the_ablations_shows_the_committed_numbers(tmp_path):
    figures.draw_ablations(tmp_path / "ablate.png")
    drawn, committed = (np.asarray(Image.open(path), int) for path in (
        tmp_path / "ablate.png", figures.ROOT / "docs/images/ablate.png"))
    assert np.abs(drawn - committed).max() <= 8          # letters may differ by a shade


def test_the_film_is_the_answer_about_several_objects_with_most_points_right(
    tmp_path, monkeypatch
):
    def answer(name, ids, track_f1, hota):
        true = [[0.0, k, 10.0 * k, 20.0] for k in ids]
        return {"id": name, "type": "track", "true": true, "track_f1": track_f1, "hota": hota}

    answers = [answer("one object", [1], 1.0, 1.0), answer("some", [1, 2], 0.9, 0.9),
               answer("best", [1, 2], 1.0, 0.8), answer("swapped", [1, 2], 1.0, 0.7),
               {"id": "a question", "type": "qa"}]
    records = [{"id": found["id"]} for found in answers]
    drawn = []

    def draw_prediction(prediction, record):
        drawn.append((prediction["id"], record["id"]))
        return Image.new("RGB", (4, 4))

    monkeypatch.setattr(figures, "evaluation_config", lambda config: config)
    monkeypatch.setattr(figures, "evaluate", lambda *given, **more: (
        {"track_f1": 0.8, "hota": 0.7}, answers))
    monkeypatch.setattr(figures.pictures, "draw_prediction", draw_prediction)
    figures.draw_film((None, None, None), records, tmp_path / "film.png")
    assert drawn == [("best", "best")]
    assert (tmp_path / "film.png").exists()
