"""Pictures of a run, drawn with Pillow alone: the loss curve so far."""

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
