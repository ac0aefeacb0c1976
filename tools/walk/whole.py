"""The picture of the whole: record -> tree -> pack -> batch -> model -> loss, with all shapes."""

from PIL import Image

from evaluation.charts import INK, SOFT
from tools.walk.drawing import COLOURS, EMPTY, Canvas, tint
from tools.walk.examples import RECORDS, Reader

WIDE, HIGH = 196, 150                # of a box
GAP = 136                            # between boxes, for the shapes on the arrow
LEFT, TOP, BOTTOM = 8, 8, 248        # of the first box, of the two lines of boxes
BRANCHES = ("video: caption", "video: points", "video: question")
FIELDS = ("tokens", "targets", "weights", "pos", "visible_until", "bidir")
ROW = (("video: trunk", 26), ("video: caption", 17), ("video: points", 28), ("video: question", 17),
       ("photo: trunk", 26), ("photo: caption", 20), ("text", 26), ("padding", 12))


def box_at(column, line):
    return LEFT + column * (WIDE + GAP), (TOP, BOTTOM)[line]


def frame_box(canvas, column, line, title, note):
    x, y = box_at(column, line)
    canvas.box(x, y, WIDE, HIGH, (252, 252, 250), SOFT, 1)
    canvas.text(x + 10, y + 7, title, size=15)
    canvas.text(x + 10, y + HIGH - 18, note, SOFT, size=11)
    return x, y


def draw_strip(canvas, x, y, width, height, strength=0.75):
    """A row of tokens: the runs of ROW side by side."""
    total = sum(part for _, part in ROW)
    for name, part in ROW:
        wide = round(width * part / total)
        canvas.box(x, y, wide - 1, height, tint(COLOURS[name], strength))
        x += wide


def draw_record(canvas):
    x, y = frame_box(canvas, 0, 0, "record", "visual input + annotations")
    for k, pixels in enumerate(Reader().frames(RECORDS[0], [0.0, 0.5])):
        canvas.paste(Image.fromarray(pixels), x + 10 + 52 * k, y + 34, 48, 48)
    canvas.text(x + 118, y + 50, "frames", SOFT, "lm", 11)
    for k, (name, text) in enumerate(zip(BRANCHES, ("caption", "points", "question"), strict=True)):
        canvas.box(x + 10 + 60 * k, y + 92, 56, 22, tint(COLOURS[name], 0.45))
        canvas.text(x + 38 + 60 * k, y + 103, text, anchor="mm", size=11)


def draw_tree(canvas):
    x, y = frame_box(canvas, 1, 0, "message tree", "branches do not see each other")
    canvas.box(x + 10, y + 66, 70, 20, tint(COLOURS["video: trunk"], 0.75))
    canvas.text(x + 45, y + 76, "trunk", anchor="mm", size=11)
    for k, (name, wide) in enumerate(zip(BRANCHES, (60, 84, 50), strict=True)):
        height = y + 34 + 32 * k
        canvas.line([(x + 80, y + 76), (x + 96, height + 10)], SOFT)
        canvas.box(x + 96, height, wide, 20, tint(COLOURS[name], 0.75))
        canvas.text(x + 96 + wide / 2, height + 10, "branch", anchor="mm", size=11)


def draw_pack(canvas):
    x, y = frame_box(canvas, 2, 0, "pack", "examples that share a row")
    names = ("video", "photo", "text")
    for k, (name, wide) in enumerate(zip(names, (92, 60, 24), strict=True)):
        left = x + 10 + (0, 92, 152)[k]
        canvas.text(left + wide / 2, y + 42, name, SOFT, "mm", 11)
    draw_strip(canvas, x + 10, y + 52, WIDE - 20, 22)
    canvas.text(x + 10, y + 84, "tokens: at most max_tokens", size=11)
    canvas.text(x + 10, y + 102, "crops: at most max_crops", size=11)


def draw_batch(canvas):
    x, y = frame_box(canvas, 0, 1, "batch", "one tensor for each field")
    for k, name in enumerate(FIELDS):
        canvas.text(x + 10, y + 36 + 12 * k, name, SOFT, "lm", 10)
        draw_strip(canvas, x + 84, y + 32 + 12 * k, 102, 9, 0.55)
    canvas.text(x + 10, y + 114, "images", SOFT, "lm", 10)
    for k in range(6):
        canvas.box(x + 84 + 17 * k, y + 106, 15, 15, (60, 140, 60))
        canvas.box(x + 87 + 17 * k, y + 110, 6, 6, (200, 30, 30))


def draw_model(canvas):
    x, y = frame_box(canvas, 1, 1, "model", "Molmo2: vision.py, model.py")
    steps = ("ViT, pooling: (M,C)", "added to embeddings: (B,T,C)",
             "blocks under the mask: (B,T,C)")
    for k, text in enumerate(steps):
        canvas.box(x + 10, y + 32 + 32 * k, WIDE - 20, 24, EMPTY, SOFT)
        canvas.text(x + WIDE / 2, y + 44 + 32 * k, text, anchor="mm", size=11)


def draw_loss(canvas):
    x, y = frame_box(canvas, 2, 1, "loss", "one number; then AdamW")
    heights = (0, 0, 0, 0, 8, 8, 0, 10, 10, 10, 0, 34, 34, 0, 0, 22, 22, 0, 16, 16, 16, 0)
    for k, height in enumerate(heights):
        canvas.box(x + 10 + 8 * k, y + 66 - height, 6, height, tint(COLOURS["video: points"], 0.75))
    canvas.line([(x + 10, y + 67), (x + WIDE - 10, y + 67)])
    canvas.text(x + 10, y + 70, "weight w of each token", SOFT, size=10)
    canvas.text(x + WIDE / 2, y + 96, "sum of w · (nll + z · lse^2)", anchor="mm", size=12)
    canvas.line([(x + 24, y + 106), (x + WIDE - 24, y + 106)], INK)
    canvas.text(x + WIDE / 2, y + 117, "sum of w over the step", anchor="mm", size=12)


def draw_arrow(canvas, column, line, above, below):
    """From the box in this column to the next: the function above, the shapes below."""
    x, y = box_at(column, line)
    left, middle = x + WIDE, y + HIGH / 2
    canvas.arrow(left + 4, middle, left + GAP - 5, middle)
    for k, text in enumerate(reversed(above)):
        canvas.text(left + GAP / 2, middle - 14 - 15 * k, text, INK, "mm", 12)
    for k, text in enumerate(below):
        canvas.text(left + GAP / 2, middle + 15 + 15 * k, text, SOFT, "mm", 11)


def draw_elbow(canvas):
    """From the pack, at the right of the first line, to the batch, at the left of the second."""
    x, y = box_at(2, 0)
    end, top = box_at(0, 1)
    middle = (y + HIGH + top) // 2 + 12
    canvas.line([(x + WIDE / 2, y + HIGH + 3), (x + WIDE / 2, middle), (end + WIDE / 2, middle)],
                SOFT, 2)
    canvas.arrow(end + WIDE / 2, middle, end + WIDE / 2, top - 3)
    centre = (x + end + WIDE) / 2
    canvas.text(centre, middle - 26, "packing.collate", INK, "mm")
    shapes = "tokens, targets, weights, pos, visible_until, bidir (B,T)     images (N,P,F)     " \
             "pool_src (M,K)"
    canvas.text(centre, middle - 10, shapes, SOFT, "mm", 11)


def picture():
    canvas = Canvas(LEFT * 2 + 3 * WIDE + 2 * GAP, BOTTOM + HIGH + 32)
    for draw in (draw_record, draw_tree, draw_pack, draw_batch, draw_model, draw_loss):
        draw(canvas)
    draw_arrow(canvas, 0, 0, ["data.encode"], ["tokens, targets,", "weights, mask (T,)",
                                               "images (n,P,F)"])
    draw_arrow(canvas, 1, 0, ["data.size,", "packing.Planner"], ["(tokens, crops) of",
                                                                 "each example"])
    draw_elbow(canvas)
    draw_arrow(canvas, 0, 1, ["model(batch)"], ["tokens, pos (B,T)", "images (N,P,F)",
                                                "mask fields (B,T)"])
    draw_arrow(canvas, 1, 1, ["Molmo2.nll"], ["nll, lse (B,T)"])
    letters = ("B rows   T tokens   N crops (n: of one example)   P patches of a crop   "
               "F numbers of a patch   M visual tokens   K patches that one pools   C width")
    canvas.text(LEFT, BOTTOM + HIGH + 12, letters, SOFT, size=11)
    return canvas.image
