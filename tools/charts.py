"""Pictures of a run, drawn with Pillow alone: the loss curve, scores against minutes, a sheet of samples."""

from PIL import Image, ImageDraw

INK, GRID, LINE, FAINT = (40, 40, 40), (225, 225, 225), (200, 30, 90), (240, 170, 195)


def curve(values, path, size=(720, 360)):
    """Loss against steps as a PNG: every step in a faint line, a running mean over it."""
    w, h = size
    left, top, right, bottom = 56, 16, w - 16, h - 36
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    high, n = max(values) * 1.05 or 1.0, len(values)

    def place(step, value):
        return left + (right - left) * step / max(n - 1, 1), bottom - (bottom - top) * value / high

    for k in range(5):
        y = place(0, high * k / 4)[1]
        pen.line([(left, y), (right, y)], fill=GRID)
        pen.text((6, y - 6), f"{high * k / 4:.2f}", fill=INK)
        x = place(n * k / 4, 0)[0]
        pen.text((min(x, right - 30), bottom + 6), str(round(n * k / 4)), fill=INK)
    pen.text((w // 2 - 60, h - 18), f"step (last loss {values[-1]:.3f})", fill=INK)
    mean, smooth = values[0], []
    for value in values:
        mean += 0.05 * (value - mean)
        smooth.append(mean)
    for line, colour, width in ((values, FAINT, 1), (smooth, LINE, 2)):
        if n > 1:
            pen.line([place(step, value) for step, value in enumerate(line)], fill=colour, width=width)
    picture.save(path)


def sheet(pictures, path, columns=4):
    """Picture files, all of a size, side by side in one PNG."""
    images = [Image.open(p) for p in pictures]
    if not images:
        return
    w, h = images[0].size
    page = Image.new("RGB", (columns * (w + 4) - 4, -(-len(images) // columns) * (h + 4) - 4), "white")
    for k, image in enumerate(images):
        page.paste(image, (k % columns * (w + 4), k // columns * (h + 4)))
    page.save(path)


def progress(log, path, begun=0.0, names=("point_f1", "count_accuracy", "caption_exact"), size=(720, 360)):
    """The lines of a log.jsonl, as dicts -> scores against minutes of training as a PNG; nothing where fewer than two were
    taken. begun: seconds of training before the first line."""
    minutes, series = begun / 60, {name: [] for name in names}
    for line in log:
        minutes += line.get("seconds", 0) / 60 if "loss" in line else 0
        for name in names:
            if name in line.get("eval", {}):
                series[name].append((minutes, line["eval"][name]))
    series = {name: points for name, points in series.items() if len(points) > 1}
    if not series:
        return
    w, h = size
    left, top, right, bottom = 56, 16, w - 130, h - 36
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    longest = max(x for points in series.values() for x, _ in points)
    for k in range(5):
        y, x = bottom - (bottom - top) * k / 4, left + (right - left) * k / 4
        pen.line([(left, y), (right, y)], fill=GRID)
        pen.text((24, y - 6), f"{k / 4:.2f}", fill=INK)
        pen.text((x - 8, bottom + 6), f"{longest * k / 4:.1f}", fill=INK)
    pen.text(((left + right) // 2 - 30, h - 18), "minutes", fill=INK)
    labels = []                      # heights taken, so that names of equal scores do not cover each other
    for colour, (name, points) in zip(((200, 30, 90), (30, 90, 200), (30, 140, 60)), series.items(), strict=False):
        places = [(left + (right - left) * x / longest, bottom - (bottom - top) * y) for x, y in points]
        pen.line(places, fill=colour, width=2)
        for x, y in places:
            pen.ellipse([x - 3, y - 3, x + 3, y + 3], fill=colour)
        y = places[-1][1] - 6
        while any(abs(y - other) < 12 for other in labels):
            y += 12
        labels.append(y)
        pen.text((right + 8, y), name, fill=colour)
    picture.save(path)
