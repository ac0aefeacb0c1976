r"""docs/codes.md: an example of every code, and what is said about it.

    python -m tools.codes                # writes docs/codes.md anew

Each example is one line of a file of records. `python -m tools.check FILE --decode` reads it beside
a few small files of media made here; the codes of PLANNING, which depend on the limits of a run,
come from the planner of training.
"""

import argparse
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path

from PIL import Image

import data
from records.mixture import Mixture
from records.reader import Records
from text.tokenizer import ByteTokenizer
from tools import check
from training.config import Config
from training.planner import measure

PAGE = Path(__file__).parents[1] / "docs/codes.md"
HEAD = """<!-- Made by `python -m tools.codes`. -->

# An example of every code

[docs/records.md](../docs/records.md#codes) says what each code means and does. Here is, for each, a
line of a file `my.jsonl` and what is said about it.
"""
CAPTION = '"annotations":[{"type":"caption","text":"a cat"}]'
POINTS = '{"type":"point","label":"cat","coords":"percent","points":[%s]}'
BOX = '{"type":"box","label":"cat","coords":"percent","form":"xyxy","boxes":[{"box":[%s]}]}'
TRACK = '{"type":"track","label":"ball","coords":"percent",%s"points":[%s]}'
POINTS_AT_FOUR_TIMES = ",".join(
    f'{{"t":{t},"id":1,"x":4,"y":2}}' for t in (0.5, 0.6, 0.7, 1.0))
CHAT = '{"image":"cat.png","conversations":[%s]}'

EXAMPLES = [
    ("E01", '{"image":"cat.png",' + CAPTION),
    ("E02", '{"annotations":[{"type":"text","text":"half of a pair: \\ud800"}]}'),
    ("E03", '{"image":"cat.png","weight":NaN,' + CAPTION + "}"),
    ("E04", '{"image":"cat.png","image":"dog.png",' + CAPTION + "}"),
    ("E05", '["cat.png","a cat"]'),
    ("E06", '{"image":"cat.png","text":"a cat"}'),
    ("E07", '{"image":"cat.png","annotations":[{"type":"captoin","text":"a cat"}]}'),
    ("E08", '{"id":"1","image":"cat.png",' + CAPTION + '}\n{"id":"1","image":"cat.png",' + CAPTION
     + "}"),
    ("E10", '{"image":"https://a.org/cat.png",' + CAPTION + "}"),
    ("E13", '{"image":"cat.png","images":["cat.png"],' + CAPTION + "}"),
    ("E14", '{"image":"cat.png","video":"film.mp4",' + CAPTION + "}"),
    ("E15", '{"video":["a.mp4","b.mp4"],' + CAPTION + "}"),
    ("E16", '{"audio":"a.mp3",' + CAPTION + "}"),
    ("E20", CHAT % '{"from":"gpt","value":"hi"},{"from":"human","value":"x"}'),
    ("E21", CHAT % '{"from":"human","value":"x"},{"from":"function_call","value":"{}"}'),
    ("E22", '{"messages":[{"role":"user","content":[{"type":"table"}]},'
     '{"role":"assistant","content":"a"}]}'),
    ("E23", '{"messages":[{"role":"user","content":[{"type":"text"}]},'
     '{"role":"assistant","content":"a"}]}'),
    ("E24", CHAT % '{"from":"human","value":"x"},{"from":"gpt","value":"<image>"}'),
    ("E25", '{"conversations":[]}'),
    ("E26", CHAT % ('{"from":"human","value":"<image>Where is the cat?"},'
                    '{"from":"gpt","value":"<box>1, 2, 3</box>"}')),
    ("E30", '{"conversations":[{"from":"human","value":"<image>x"},{"from":"gpt","value":"a"}]}'),
    ("E31", '{"images":["cat.png","cat.png"],"conversations":'
     '[{"from":"human","value":"<image>x"},{"from":"gpt","value":"a"}]}'),
    ("E32", '{"images":["cat.png","cat.png"],"annotations":[%s]}'
     % (POINTS % '{"x":4,"y":2,"image":2}')),
    ("E33", '{"image":"cat.png","annotations":'
     '[{"type":"qa","question":"What is it?","options":["a cat","a dog"],"answer_idx":2}]}'),
    ("E40", '{"video":{"path":"film.mp4","start":5,"end":5},' + CAPTION + "}"),
    ("E41", '{"video":"film.mp4","subtitles":[{"start":3,"end":2,"text":"hello"}],' + CAPTION
     + "}"),
    ("E50", '{"image":"cat.png","annotations":[%s]}' % (TRACK % ("", ""))),
    ("E60", '{"video":"film.mp4","annotations":[%s]}' % (POINTS % '{"x":4,"y":2}')),
    ("E61", '{"images":["cat.png","cat.png"],"annotations":[%s]}' % (POINTS % '{"x":4,"y":2}')),
    ("E62", '{"image":"cat.png","annotations":[%s]}' % (POINTS % '{"x":400,"y":2}')),
    ("E63", '{"video":"film.mp4","annotations":[%s]}'
     % (TRACK % ("", '{"t":1,"id":1,"x":4,"y":2},{"t":1,"id":1,"x":8,"y":2}'))),
    ("E64", '{"video":"film.mp4","annotations":[%s]}'
     % (TRACK % ('"mode":"from_point",', '{"t":1,"id":1,"x":4,"y":2}'))),
    ("E65", '{"image":"cat.png","annotations":[%s]}' % (BOX % "10,10,10,40")),
    ("E66", '{"image":"cat.png","annotations":[%s]}' % (BOX % "40,10,10,40")),
    ("S01", CHAT % '{"from":"human","value":"x"}'),
    ("S10", '{"video":{"path":"film.mp4","start":2,"end":8},"annotations":[%s]}'
     % (POINTS % '{"x":4,"y":2,"t":9}')),
    ("S11", '{"image":"cat.png","annotations":[{"type":"point","label":"cat","coords":"percent",'
     '"count":2,"points":[{"x":4,"y":2}]}]}'),
    ("S13", '{"video":"film.mp4","annotations":[%s]}'
     % (TRACK % ('"fps":12.5,', '{"t":1,"id":1,"x":4,"y":2}'))),
    ("S20", '{"image":"dog.png",' + CAPTION + "}"),
    ("S21", '{"image":"text.png",' + CAPTION + "}"),
    ("S22", '{"image":"huge.png",' + CAPTION + "}"),
    ("S23", '{"video":"text.mp4",' + CAPTION + "}"),
    ("S24", '{"video":{"frames":["cat.png","2.png"],"fps":2},' + CAPTION + "}"),
    ("W01", '{"image":"cat.png","annotations":[%s]}' % (POINTS % '{"x":100.9,"y":2}')),
    ("W02", '{"image":{"path":"cat.png","width":640,"height":480},' + CAPTION + "}"),
    ("W03", '{"image":"cat.png","annotations":[%s]}' % (POINTS % '{"x":0.2,"y":0.9}')),
    ("W05", '{"image":"cat.png","annotations":[{"type":"caption","text":"<image> a cat"}]}'),
    ("W06", '{"image":"clear.png",' + CAPTION + "}"),
    ("W07", '{"image":"cat.png","annotations":[{"type":"caption","text":"a cat<|im_end|>"}]}'),
    ("W08", '{"video":"film.mp4","annotations":[%s]}' % (TRACK % ("", POINTS_AT_FOUR_TIMES))),
]
PLANNING = [
    ("S03", '{"image":"cat.png","annotations":[{"type":"caption","text":"'
     + "a cat on a mat " * 8 + '"}]}'),
    ("S04", '{"image":"cat.png","annotations":[{"type":"caption","text":"a cat","weight":0}]}'),
    ("S12", '{"image":"cat.png","annotations":[%s]}' % (POINTS % '{"x":4,"y":2},{"x":8,"y":2}')),
]
LIMITS = {"max_tokens": 460, "max_points": 1}        # of the examples of PLANNING


def make_media():
    """The files that the examples name, in the working directory; film.mp4 and dog.png are none."""
    Image.new("RGB", (64, 48)).save("cat.png")
    Image.new("RGBA", (64, 48)).save("clear.png")
    for name in ("text.png", "text.mp4"):
        Path(name).write_text("neither an image nor a video")
    Image.new("1", (10_000, 10_000)).save("huge.png")


def message_of_check(code, line):
    """The first line of tools.check with this code, without the place in the file."""
    Path("my.jsonl").write_text(line + "\n")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        check.main(["my.jsonl", "--decode", "--all"])
    found = [text for text in printed.getvalue().splitlines() if f": {code} " in text]
    assert found, f"{code}: {printed.getvalue()}"
    return found[0].partition(": ")[2]


def message_of_planner(code, line):
    """Why the planner skips the record."""
    Path("my.jsonl").write_text(line + "\n")
    mixture = Mixture([Records("my.jsonl")], [1.0], seed=0)
    reason = measure(mixture, ByteTokenizer(), Config(data=data.DataConfig(**LIMITS)), 0).reason
    assert reason.startswith(code), (code, reason)
    return reason


def page():
    """The text of docs/codes.md."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            make_media()
            found = [(line, message_of_check(code, line)) for code, line in EXAMPLES]
            found += [(line, message_of_planner(code, line)) for code, line in PLANNING]
        finally:
            os.chdir(before)
    found.sort(key=lambda example: example[1])
    texts = [f"```text\n{line}\n\n{message}\n```\n" for line, message in found]
    limits = json.dumps(LIMITS)
    return "\n".join([HEAD, *texts, f"The limits of S03, S04 and S12 here: `{limits}`.\n"])


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tools.codes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
