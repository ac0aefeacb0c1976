"""A scene of composed photographs as a record: points, counts, questions, captions.

in    Photos, and the objects that it placed in scene i
out   the record, in the format of docs/records.md; the masks of its points

Centres and counts follow from the masks, captions from the words of the kinds.
"""

import numpy as np

from records.mixture import rng_for


def record_of(photos, i, placed, path, languages):
    """The record of scene i: points for every kind in it and for one that is absent, the count of
    one kind, a question, and captions in every language, branches of one message tree.

    A caption lists the kinds, each once, from left to right. One object alone is also named by the
    sentence that lies beside its file.
    """
    rng = rng_for(photos.seed, "questions", photos.part, i)
    ordered = sorted(placed, key=lambda p: p.centre)
    kinds = [p.cut_out.kind for p in ordered]
    absent = sorted(set(photos.names) - set(kinds))
    asked = sorted(set(kinds))
    countable = asked or absent      # a scene may be empty
    counted = countable[int(rng.integers(len(countable)))]
    if absent:
        asked.append(absent[int(rng.integers(len(absent)))])
    annotations = []
    for kind in asked:
        numbers = [k for k, p in enumerate(ordered) if p.cut_out.kind == kind]
        places = [ordered[k].centre for k in numbers]
        annotations.append({"type": "point", "label": kind, "coords": "pixel", "mode": "point",
                            "points": [{"x": x + 0.5, "y": y + 0.5} for x, y in places],
                            "meta": {"objects": numbers}})
    annotations.append({"type": "count", "label": counted, "count": kinds.count(counted)})
    if kinds:
        annotations.append(question_about(kinds, absent, rng))
    annotations += captions_of(photos, kinds, languages)
    if len(ordered) == 1:
        for language, sentence in ordered[0].cut_out.sentences.items():
            if language in languages:
                annotations.append({"type": "caption", "style": f"name_{language}",
                                    "text": sentence})
    return {"id": f"{photos.part}-{i}", "annotations": annotations,
            "image": {"path": path, "width": photos.size, "height": photos.size},
            "meta": {"cut_outs": [p.cut_out.name for p in ordered]}}


def question_about(kinds, absent, rng):
    """A question about the kinds of the objects, given from left to right: which of two is further
    left, where two kinds have one object each; else whether a kind is there, or which comes first.
    """
    alone = [kind for kind in kinds if kinds.count(kind) == 1]
    if len(alone) > 1:
        first, second = rng.permutation(len(alone))[:2].tolist()
        question = f"Is the {alone[first]} left or right of the {alone[second]}?"
        answer = "left" if first < second else "right"
    elif rng.random() < 0.5:
        question = "Which is furthest left?"
        answer = kinds[0]
    else:
        some = absent if absent and rng.random() < 0.5 else kinds
        kind = some[int(rng.integers(len(some)))]
        question = f"Is there any {kind}?"
        answer = "yes" if kind in kinds else "no"
    return {"type": "qa", "question": question, "answer": answer}


def captions_of(photos, kinds, languages):
    """A caption in every language that has words for these kinds: it lists each once, in order."""
    captions = []
    for language in languages:
        nouns = [photos.names[kind].get(language) for kind in dict.fromkeys(kinds)]
        if nouns and all(nouns):
            captions.append({"type": "caption", "style": f"caption_{language}",
                             "text": ", ".join(nouns)})
    return captions


def masks_of(record, placed):
    """{name in masks.npz: (n,S,S) bool}, one for each point of a point annotation, in its order."""
    ordered = sorted(placed, key=lambda p: p.centre)
    arrays = {}
    for k, annotation in enumerate(record["annotations"]):
        if annotation["type"] == "point":
            masks = [ordered[j].mask for j in annotation["meta"]["objects"]]
            size = record["image"]["width"]
            arrays[f"{record['id']}/{k}"] = np.array(masks, dtype=bool).reshape(-1, size, size)
    return arrays
