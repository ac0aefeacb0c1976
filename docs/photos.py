"""Draws results of trained models: photos.svg, film.svg and curves.png in docs/images. No test
compares these files, because the results can differ between processors.

    python -m docs.photos runs/five         # photos, film; train runs/five as in docs/own_data.md
    python -m docs.photos runs/tiny/stage2  # curves; train this run with stages/tiny.sh
"""

import base64
import io
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from docs.svg import box, line, page, short, write
from evaluation.evaluate import evaluate
from evaluation.report import draw_curves
from records.errors import plural
from records.reader import Records
from toy.shapes import SIZE
from toy.videos import MovingShapes
from weights import files

ROOT = Path(__file__).parent.parent
MEDIA = ROOT / "tests" / "media"
IMAGES = ROOT / "docs" / "images"
FILMS = {"All objects keep their numbers": 22, "A typical mistake": 2}  # numbers of videos
CURVES = {  # data sources of stage 2 of the toy, and their names in the picture
    "films-train-all-6": "videos", "films-train-tracks-6": "tracks",
    "series-train": "several images", "tiny-train-all": "single images", "tiny-text": "text",
}


def picture(x, y, width, image):
    """(H,W,3) uint8 -> (an <image> element that is `width` units wide, its height in units)."""
    image = Image.fromarray(image)
    height = width * image.height / image.width
    image.thumbnail((2.5 * width, 2.5 * width))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    uri = f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
    tag = f'<image x="{x}" y="{y}" width="{width}" height="{short(height)}" href="{uri}"/>'
    return tag, height


def circle(x, y, radius, kind):
    return f'<circle cx="{short(x)}" cy="{short(y)}" r="{radius}" class="{kind}"/>'


def dot(x, y, number):
    """Draws an object of a track: a coloured circle with its number."""
    return (circle(x, y, 7, "red" if number == 1 else "blue")
            + write(x, y + 4, str(number), "on", "middle"))


def photos(folder):
    """Draws five photographs with the answers of a model that was trained on them -> SVG text."""
    model, tokenizer, config = files.open_model_folder(folder)
    records = [record for record in Records(MEDIA / "records.jsonl", MEDIA) if "images" in record]
    scores, predictions = evaluate(model, tokenizer, config, records, with_nll=False)
    out = []
    y = 8
    for record in records:
        (image,) = record["source"].images(record)
        element, height = picture(8, y, 140, image)
        out.append(element)
        below = y + 10
        for p in (p for p in predictions if p["id"] == record["id"]):
            points = p.get("predicted", [])
            scale = 140 / image.shape[1]
            out += [circle(8 + a * scale, y + b * scale, 5, "ring") for *_, a, b in points]
            prompt = textwrap.fill(p["prompt"], 31)
            answer = plural(len(points), "ring") if points else textwrap.fill(p["text"], 31)
            out += [write(158, below, prompt, "soft"),
                    write(158, below + 14 * (1 + prompt.count("\n")), answer)]
            below += 14 * (prompt + answer).count("\n") + 34
        y = max(y + height + 12, below)
    print(f"{scores['caption_exact']:.0%} of the captions are identical to the training captions")
    return page(round(y), "Five photographs with the answers of the model", out)


def film():
    """Draws videos of the toy world with true and predicted tracks -> SVG text."""
    model, tokenizer, config = files.open_model_folder("toy")
    source = MovingShapes("test", questions="tracks")
    out = []
    top = 0
    for title, number in FILMS.items():
        record = source[number]
        record["annotations"] = [a for a in record["annotations"] if a.get("label") == "any shape"]
        _, (prediction,) = evaluate(model, tokenizer, config, [record], with_nll=False)
        frames = list(source.frames(record, prediction["times"]))
        out.append(write(8, top + 18, title, "title"))
        elements, height = draw_film(top + 22, frames, prediction)
        out += elements
        top += height + 34
    return page(top, "True and predicted tracks", out)


def draw_film(y, frames, prediction):
    """-> elements of one video from y on, their height."""
    times = prediction["times"]
    # like the model, number objects by the time when they come, then from left to right
    first = {}
    for t, name, x, _ in prediction["true"]:
        first.setdefault(name, (t, x))
    numbers = {name: k for k, name in enumerate(sorted(first, key=first.get), 1)}
    true = [(t, numbers[name], x, y) for t, name, x, y in prediction["true"]]
    predicted = [(t, int(name), x, y) for t, name, x, y in prediction["predicted"]]
    width = 344 / len(times)
    out = []
    tracks = {"true": true, "predicted": predicted}
    for top, (title, points) in zip((y + 20, y + 58 + width), tracks.items(), strict=True):
        out.append(write(8, top - 6, title))
        for k, frame in enumerate(frames):
            left = 8 + k * width
            out.append(picture(left, top, width - 3, frame)[0])
            scale = (width - 3) / SIZE
            for t, number, across, down in points:
                if t == times[k]:
                    out.append(dot(left + across * scale, top + down * scale, number))
            middle = left + width / 2
            out.append(write(middle, top + width + 11, f"{times[k]:g} s", "soft", "middle"))
    out += draw_charts(y + 100 + 2 * width, times, tracks)
    return out, round(230 + 2 * width)


def draw_charts(y, times, tracks):
    """Draws x over time. The true tracks are on the left, the predicted tracks on the right."""
    for left, (title, points) in zip((40, 214), tracks.items(), strict=True):
        top = y + 10
        yield write(left, y, f"{title}: x in pixels", "title")
        yield box(left, top, 138, 110, "empty")
        for tick in (0, 50, 100):
            yield write(left - 4, top + 114 - 1.1 * tick, str(tick), "soft", "end")
        for t in times[::2]:
            yield write(left + 10 + 118 * t / times[-1], top + 125, f"{t:g} s", "soft", "middle")
        for kind, number in (("red", 1), ("blue", 2)):
            path = [(left + 10 + 118 * t / times[-1], top + 110 - 1.1 * x)
                    for t, name, x, _ in points if name == number]
            yield line(f"{kind}-line", *path)
            yield from (dot(*place, number) for place in path)


def draw_stage2(run):
    """Draws the loss.png of a run of stage 2 of the toy, with names that readers understand."""
    log = (run / "log.jsonl").read_text(encoding="utf-8")
    for name, words in CURVES.items():
        log = log.replace(f'"{name}":', f'"{words}":')
    with TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "log.jsonl").write_text(log, encoding="utf-8")
        draw_curves(folder)
        (IMAGES / "curves.png").write_bytes((folder / "loss.png").read_bytes())


if __name__ == "__main__":
    run = Path(sys.argv[1])
    if '"films-train-all-6":' in (run / "log.jsonl").read_text(encoding="utf-8"):
        draw_stage2(run)
        print("docs/images/curves.png")
    else:
        for name, text in {"photos": photos(run), "film": film()}.items():
            (IMAGES / f"{name}.svg").write_text(text, encoding="utf-8")
            print(f"docs/images/{name}.svg")
