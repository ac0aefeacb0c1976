"""Boxes: Molmo2 has no text for them, so they are trained and asked as the points at their centres.

    {"type": "box", "form": "xywh", "boxes": [{"box": [.2, .4, .2, .1]}], ..}
    {"type": "point", "points": [{"x": .3, "y": .45, "box": [.2, .4, .4, .5]}], ..}
"""

import re

from records.errors import InvalidRecord

FORMS = {                            # four numbers -> left, top, right, bottom
    "xyxy": lambda left, top, right, bottom: [left, top, right, bottom],
    "xywh": lambda left, top, w, h: [left, top, left + w, top + h],
    "cxcywh": lambda x, y, w, h: [x - w / 2, y - h / 2, x + w / 2, y + h / 2],
}
# Qwen-VL: <ref>a cup</ref><box>(12,40),(300,420)</box>; InternVL: <box>[[12, 40, 300, 420]]</box>
TAG = r"(?:<ref>([^<]*)</ref>\s*)?<box>([\d\s,()\[\]]*)</box>[\s.,;]*"


def corners_of(entry, form, at):
    """An element of `boxes` -> [left, top, right, bottom]; InvalidRecord if that is no box."""
    left, top, right, bottom = FORMS[form](*entry["box"])
    if right < left or bottom < top:
        raise InvalidRecord("E66", f"the corners of the box {entry['box']} are swapped, or a side "
                            "is negative", at, f"is its form another than {form}?")
    if right == left or bottom == top:
        raise InvalidRecord("E65", f"the box {entry['box']} has no area", at)
    return [left, top, right, bottom]


def as_points(annotation, place=""):
    """A box annotation -> the point annotation that it is trained as; others as they are."""
    if annotation["type"] != "box":
        return annotation
    points = []
    for k, entry in enumerate(annotation["boxes"]):
        box = corners_of(entry, annotation["form"], f"{place}.boxes[{k}]")
        center = {"x": (box[0] + box[2]) / 2, "y": (box[1] + box[3]) / 2}
        points.append(entry | center | {"box": box})
    kept = {key: value for key, value in annotation.items() if key not in ("boxes", "form")}
    return kept | {"type": "point", "points": points}


def from_text(question, text, place):
    """A question and an answer made of <box> tags, in thousandths -> a box annotation."""
    tags = re.findall(TAG, text)
    labels = {label.strip() for label, _ in tags if label.strip()}
    numbers = [[float(n) / 1000 for n in re.findall(r"\d+", inside)] for _, inside in tags]
    only_tags = re.fullmatch(f"(?:{TAG})+", text.strip())
    by_four = all(n and len(n) % 4 == 0 for n in numbers)
    if not only_tags or not by_four or len(labels) > 1 or not isinstance(question, str):
        message = "an answer with <box> must be boxes of one <ref> alone, x1, y1, x2, y2 each"
        raise InvalidRecord("E26", message, place, "in thousandths of the image's sides")
    flat = [number for of_tag in numbers for number in of_tag]
    boxes = [{"box": flat[k : k + 4]} for k in range(0, len(flat), 4)]
    names = {"question": question, "label": labels.pop()} if labels else {"question": question}
    return {"type": "box", **names, "coords": "unit", "form": "xyxy", "boxes": boxes}
