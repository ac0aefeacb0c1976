"""Reads subtitle files. docs/convert.md has the rules. WebVTT is defined by
https://www.w3.org/TR/webvtt1/. SRT (SubRip) has no specification."""

import html
import re
from pathlib import Path

from records.errors import Unreadable, plural, refuse_pipe, warn

CLOCK = r"((?=\d+\s*[:.,])\d+(?:\s*:\s*\d+){0,2}(?:\s*[.,]\s*\d+)?)"
# Only settings may follow the times: "align:start" in WebVTT, "X1:40 X2:600" in SRT.
TIMING = re.compile(rf"\s*{CLOCK}\s*-->\s*{CLOCK}(?![\d:.,])(?:\s*|.*[:;=].*)$")
# A line that must be a timing line. The second form is two times with a damaged arrow.
ARROW = re.compile(r"-->|^\s*\d+\s*:\s*\d+\s*[:.,][\d:.,\s]*(?:(?:[-–—=]\s*)+>|→)\s*\d+\s*:")
# In WebVTT an empty line ends an entry, but a line with a space does not. In SRT a text may contain
# empty lines. Only a number after an empty line, or the next timing line, ends it.
END_OF_BLOCK = {"WebVTT": r"\n\n", "SRT": r"\n\n(?=\d+[ \t]*(?:\n|$))"}
COMMENT = re.compile(r"\n?(?:NOTE|STYLE|REGION)(?:\s|$)")
# <i>, </i>, <c.red>, <br/>; <00:00:01.600>; <v Ann>, <c.red Ann>; <font color="red">; {\an8}.
# The text "3 < 4 and 5 > 2" has no tag.
TAG = re.compile(r"(?i)</?(?:(?:[a-z][^\s<>]*|\s*\d+:[\d:.]+)\s*/?|\w+\.[^<>]*"
                 r"|(?:[biucv]|lang|ruby|rt)\s[^<>]*|\w+\s[^<>=]*=[^<>]*)>|\{\\[^{}]*\}")
# WebVTT has the character references of HTML. SRT has none, but files that were converted to SRT
# contain &amp; and &#39;. There the semicolon is required: "?a=1&copy=2" is ordinary text.
REFERENCE = {"WebVTT": re.compile(r"&#?\w{1,32};?"), "SRT": re.compile(r"&#?\w{1,32};")}


def read_subtitles(path):
    """An .srt or .vtt file -> [(start, end, text), ..] with times in seconds. A text may be empty.
    Unreadable if a line with an arrow has no two times, so that no entry is lost. Prints a warning
    if other lines cannot be used."""
    try:
        refuse_pipe(path)
        entries, unused = find_entries(Path(path).read_text(encoding="utf-8-sig").rstrip())
    except ValueError as error:  # also a UnicodeDecodeError or a DataError
        raise Unreadable("wrong subtitles", f"{path}: {error}") from None
    if unused:
        warn(f"{path}: {plural(len(unused), 'line')} of text or times cannot be used, because no "
             f"entry contains them; the first is line {unused[0]}")
    return entries


def find_entries(content):
    """The text of a file -> its entries, and the numbers of lines with a text or with times that
    are in no entry."""
    lines = content.split("\n")
    if not any(map(str.strip, lines[1::2])):  # each end of a line was written twice
        content = "\n".join(lines[::2])
    if re.search(r"(?m)^X-TIMESTAMP-MAP.*[1-9]", content):
        raise ValueError("X-TIMESTAMP-MAP shifts the times; change them, and remove this line")
    kind = "WebVTT" if re.match(r"WEBVTT(?:\s|$)", content) else "SRT"
    entries = []
    unused = []
    first = 1  # number of the first line of a block
    for block in re.split(END_OF_BLOCK[kind], content):
        lines = block.split("\n")
        starts = [k for k, line in enumerate(lines) if ARROW.search(line)]
        # Where the entries begin, with their numbers. A number is never a text, even where WebVTT
        # takes it for the last line of the entry above, because no empty line separates the two.
        heads = [k - 1 if k and lines[k - 1].strip().isdecimal() else k for k in starts]
        heads.append(len(lines))
        if kind == "WebVTT" and COMMENT.match(block):
            # By the specification a comment contains no arrow. This entry was removed on purpose.
            unused += [first + k for k in starts]
        else:
            entries += [read_entry(lines[k:end], first + k, kind)
                        for k, end in zip(starts, heads[1:], strict=True)]
            if kind == "WebVTT" and starts:
                heads[0] = starts[0] - 1  # the line above the times is the name of the entry
            if kind == "SRT" or first > 1:  # not the header of WebVTT
                unused += [first + k for k in range(heads[0]) if lines[k].strip()]
        first += len(lines) + 1
    if not entries:
        raise ValueError("no subtitle found; give an .srt or .vtt file")
    return entries, unused


def read_entry(lines, number, kind):
    """A timing line with this number, and the lines of its text -> (start, end, text)."""
    times = TIMING.match(lines[0])
    if not times:
        raise ValueError(f"line {number}: a line with an arrow must contain two times, as in "
                         f"00:00:01,500 --> 00:00:03,000, and no text: {lines[0]!r:.80}")
    start, end = map(to_seconds, times.groups())
    if end < start:
        raise ValueError(f"line {number}: the entry at {start:g} s ends before it starts")
    text = TAG.sub("", "\n".join(lines[1:]))
    text = REFERENCE[kind].sub(lambda match: html.unescape(match[0]), text)
    return start, end, " ".join(text.split())


def to_seconds(clock):
    """"01:02:03,500" or "02:03.500" -> seconds."""
    parts = reversed(re.sub(r"\s", "", clock).replace(",", ".").split(":"))
    return sum(float(part) * 60**k for k, part in enumerate(parts))
