"""Marks on an image: rings for predicted points, crosses for true points, the paths of tracks.

in    an image (H,W,3) uint8, points in its pixels
out   PIL images; several of them in a grid, with lines of text, or one above the other
"""

from bisect import bisect_right
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from evaluation.charts import INK

# bright, for photographs; the colours of charts are for white paper
COLOURS = (
    (255, 0, 80), (0, 150, 255), (255, 170, 0), (0, 200, 90), (170, 80, 255), (0, 200, 200),
    (255, 90, 220), (150, 110, 60),
)
BLACK, WHITE = (0, 0, 0), (255, 255, 255)
OVERSAMPLING = 4                         # marks are drawn larger and reduced: Pillow's are jagged
MIN_WIDTH = 288                          # pixels of a drawn image, at least
GRID_HEIGHT, GRID_COLUMNS = 240, 4       # of the images in a grid


class Mark(NamedTuple):
    """A predicted point: a ring with a label beside it. Dashed: the point is at another time."""
    x: float
    y: float
    label: str
    colour: tuple = COLOURS[0]
    dashed: bool = False


class Trail(NamedTuple):
    """The path of an object."""
    colour: tuple
    points: list                         # [(x, y), ..]


def colour_of(object_id):
    """The colour of a track. Ids are numbers from 1, but a model may write anything."""
    name = str(object_id)
    number = int(name) - 1 if name.isdecimal() and len(name) < 18 else sum(map(ord, name))
    return COLOURS[number % len(COLOURS)]


def numbered(points):
    """[(x, y), ..] -> [Mark, ..] with the labels 1, 2, .."""
    return [Mark(x, y, str(number)) for number, (x, y) in enumerate(points, 1)]


def draw_enlarged(image, x, y, r, draw):
    """Draws around (x, y), within 2r, on an enlarged copy of that part, and pastes it reduced.

    draw(pen, at, scale): at(dx, dy) is a place on the pen's canvas, scale its pixels per pixel.
    """
    left, top = int(x - 2 * r), int(y - 2 * r)
    side = int(4 * r) + 2
    tile = image.crop((left, top, left + side, top + side))
    tile = tile.resize((side * OVERSAMPLING, side * OVERSAMPLING), Image.NEAREST)

    def at(dx, dy):
        return (x - left + dx) * OVERSAMPLING, (y - top + dy) * OVERSAMPLING

    draw(ImageDraw.Draw(tile), at, OVERSAMPLING)
    image.paste(tile.reduce(OVERSAMPLING), (left, top))


def draw_ring(image, x, y, r, colour, dashed=False):
    width = max(2, 0.28 * r)

    def draw(pen, at, scale):
        def arcs(radius, fill, line_width):
            box = [*at(-radius, -radius), *at(radius, radius)]
            for start in range(0, 360, 60):
                end = start + (35 if dashed else 61)
                pen.arc(box, start, end, fill=fill, width=round(line_width * scale))

        arcs(r + width / 2, WHITE, 2 * width)        # white around it, to be seen on dark ground
        arcs(r, colour, width)

    draw_enlarged(image, x, y, r, draw)


def draw_cross(image, x, y, r):
    width = max(3, 0.34 * r)

    def draw(pen, at, scale):
        def lines(radius, fill, line_width):
            line_width = round(line_width * scale)
            pen.line([at(-radius, 0), at(radius, 0)], fill=fill, width=line_width)
            pen.line([at(0, -radius), at(0, radius)], fill=fill, width=line_width)

        lines(r + width / 3, WHITE, width * 5 / 3)
        lines(r, BLACK, width)

    draw_enlarged(image, x, y, r, draw)


def draw_marks(image, marks, truth=(), trails=()):
    """(H,W,3) uint8 -> PIL image, at least 288 wide, with a ring for each Mark, a cross for each
    true (x, y), and a line below them for each Trail."""
    scale = max(1, -(-MIN_WIDTH // image.shape[1]))
    size = image.shape[1] * scale, image.shape[0] * scale
    picture = Image.fromarray(image).resize(size, Image.NEAREST)
    r = max(size) // 60 + 3
    pen = ImageDraw.Draw(picture)
    for trail in trails:
        places = [(x * scale, y * scale) for x, y in trail.points]
        pen.line(places, fill=WHITE, width=r // 2, joint="curve")
        pen.line(places, fill=trail.colour, width=r // 3, joint="curve")
    for x, y in truth:
        draw_cross(picture, x * scale, y * scale, r)
    for mark in marks:
        draw_ring(picture, mark.x * scale, mark.y * scale, r, mark.colour, mark.dashed)
    font = ImageFont.load_default(max(11, r * 1.7))
    for mark in marks:
        x, y = mark.x * scale, mark.y * scale
        length = font.getlength(mark.label)
        right = x + r + 3
        left = right if right + length < picture.width else x - r - 3 - length
        pen.text(
            (left, max(y - 1.6 * r, 0)), mark.label, fill=WHITE, font=font,
            stroke_width=max(2, r // 6), stroke_fill=BLACK,
        )
    return picture


# -------------------------------------------------------------------------------------------------
# several images, lines of text


def image_grid(images, labels, height=GRID_HEIGHT, columns=GRID_COLUMNS):
    """PIL images of any sizes, scaled to one height, in rows, each with its label below."""
    scaled = []
    for image in images:
        width = max(1, round(image.width * height / image.height))
        scaled.append(image.resize((width, height), Image.LANCZOS))
    width = max(image.width for image in scaled)
    label_height = height // 10
    font = ImageFont.load_default(label_height * 0.75)
    columns = min(columns, len(scaled))
    n_rows = -(-len(scaled) // columns)
    page_size = columns * width + (columns - 1) * 4, n_rows * (height + label_height)
    page = Image.new("RGB", page_size, "white")
    pen = ImageDraw.Draw(page)
    for k, (image, label) in enumerate(zip(scaled, labels, strict=True)):
        left = k % columns * (width + 4)
        top = k // columns * (height + label_height)
        page.paste(image, (left, top))
        middle = left + image.width / 2, top + height + label_height / 2
        pen.text(middle, label, fill=INK, font=font, anchor="mm")
    return page


def with_text(image, lines):
    """An image with lines of text below it, each cut to its width."""
    width = max(image.width, MIN_WIDTH)
    size = max(12, width // 80)
    font = ImageFont.load_default(size)
    height = image.height + round(len(lines) * size * 1.35) + 6
    page = Image.new("RGB", (width, height), "white")
    page.paste(image, (0, 0))
    pen = ImageDraw.Draw(page)
    for k, line in enumerate(lines):
        # no letter is narrower than a pixel; an answer may be very long
        line = " ".join(line.split())[:width]
        if font.getlength(line) > width - 8:
            line = cut_to_width(line, font, width - 8)
        pen.text((4, image.height + 3 + k * size * 1.35), line, fill=INK, font=font)
    return page


def cut_to_width(line, font, width):
    """As much of the beginning of a line as fits with ".." behind it."""

    def length(n):
        return font.getlength(f"{line[:n]} ..")

    n = bisect_right(range(1, len(line)), width, key=length)
    return f"{line[:n]} .."


def stacked(upper, lower):
    """One image above the other."""
    size = max(upper.width, lower.width), upper.height + lower.height + 8
    page = Image.new("RGB", size, "white")
    page.paste(upper, (0, 0))
    page.paste(lower, (0, upper.height + 8))
    return page


def side_by_side(images):
    """Images of one height in a row."""
    page = Image.new("RGB", (sum(image.width for image in images), images[0].height), "white")
    left = 0
    for image in images:
        page.paste(image, (left, 0))
        left += image.width
    return page


def save_contact_sheet(paths, path, columns=4):
    """Image files side by side in one PNG file, each in a cell of the largest one's size; no file
    where there are none."""
    images = [Image.open(p) for p in paths]
    if not images:
        return
    w = max(image.width for image in images)
    h = max(image.height for image in images)
    n_rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (w + 4) - 4, n_rows * (h + 4) - 4), "white")
    for k, image in enumerate(images):
        sheet.paste(image, (k % columns * (w + 4), k // columns * (h + 4)))
    sheet.save(path)
