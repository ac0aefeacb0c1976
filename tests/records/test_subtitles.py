"""Subtitle files are read entry by entry, and what cannot be read is said (docs/convert.md)."""

import itertools
import time
from contextlib import suppress

import pytest

from records.errors import Unreadable
from records.subtitles import read_subtitles

T1 = "00:00:01,000 --> 00:00:02,000\n"
T3 = "00:03.000 --> 01:00:04.500\n"
RED = (1.0, 2.0, "red")
BLUE = (3.0, 3604.5, "blue")
VTT = "WEBVTT\n\n"


def read(folder, content):
    (folder / "a").write_bytes(content.encode())
    return read_subtitles(folder / "a")


# the content of a file, what its entries are, and the numbers in the warning
READ = [
    (f"1\n{T1}red\n\n2\n{T3}blue\n", [RED, BLUE], None),
    (f"\ufeff{VTT}NOTE x\n\n{T1}red\n\nname\n{T3}<v Ann>blue", [RED, BLUE], None),
    (f"WEBVTT - x\nKind: captions\n{T1}red\n\n\n\n{T3}blue", [RED, BLUE], None),
    # entries that no empty line separates
    (f"1\n{T1}red\n2\n{T3}blue\n", [RED, BLUE], None),
    (f"{VTT}{T1}red\n{T3}blue\n", [RED, BLUE], None),
    # a line with a space; an empty line in a text, which ends an entry of WebVTT
    (f"{VTT}{T1} \nred\n \nand\n\n{T3}blue", [(1, 2, "red and"), BLUE], None),
    (f"1\n{T1}red\n\nand\n\n2\n{T3}blue\n", [(1, 2, "red and"), BLUE], None),
    (f"{T1} \n42\n\n{T3}blue", [(1, 2, "42"), BLUE], None),
    (f"{VTT}{T1}\nlost\nname\n{T3}blue", [(1, 2, ""), BLUE], "1 line * line 5"),
    # blocks that are not entries; the author of the second file has removed an entry
    (f"{VTT}STYLE\nx\n\nREGION\nx\n\n{T1}NOTE red\n\nSTYLEX\n{T3}blue",
     [(1, 2, "NOTE red"), BLUE], None),
    (f"{VTT}NOTE\n{T1}red\n\n{T3}blue", [BLUE], "1 line * line 4"),
    # an entry that has lost its times; a number at the end; a text before the first entry
    (f"1\n{T1}red\n\n2\nlost\n\n3\n{T3}blue\n\n4\n", [RED, BLUE], "3 lines * line 5"),
    (f"title\n\n{T1}red\n{T3}blue\n", [RED, BLUE], "1 line * line 1"),
    # each end of a line was written twice
    (f"1\n{T1}red\n\n2\n{T3}blue\n".replace("\n", "\r\r\n"), [RED, BLUE], None),
    # settings; the map of times that shifts nothing
    (f"{T1[:-1]} X1:40 X2:9\nred\n{T3[:-1]}\talign;x\nblue", [RED, BLUE], None),
    (f"WEBVTT\nX-TIMESTAMP-MAP=MPEGTS:0,LOCAL:00:00.000\n\n{T1}red", [RED], None),
    # tags and character references
    (f"{VTT}{T1}if 3 < 4 and 5 > 2 then", [(1, 2, "if 3 < 4 and 5 > 2 then")], None),
    (f"{T1}10:30 -> 11:45\n1:2:3 >> 4:5", [(1, 2, "10:30 -> 11:45 1:2:3 >> 4:5")], None),
    (f"{T1}<3 x<y and y>z", [(1, 2, "<3 x<y and y>z")], None),
    (f"{VTT}{T1}r<00:00:01.600><c>e</c><c.x.y>d</c.x.y><lang en>", [RED], None),
    (f"{T1}{{\\an8}}<i>r</i><font color='red'>e<br />\nd</font>", [(1, 2, "re d")], None),
    (f"{VTT}{T1}a&nbsp;&lt;b&gt; &amp;lt; &lt &#39;", [(1, 2, "a <b> &lt; < '")], None),
    (f"{T1}R&D &amp; ?a&copy=2 &#39;", [(1, 2, "R&D & ?a&copy=2 '")], None),
]


@pytest.mark.parametrize(("content", "entries", "warning"), READ)
def test_a_file_is_read_as_these_entries(content, entries, warning, tmp_path, capsys):
    assert read(tmp_path, content) == entries
    err = capsys.readouterr().err
    if warning:
        n, line = warning.split(" * ")
        assert f"/a: {n} of text or times" in err
        assert err.endswith(f"the first is {line}\n")
    else:
        assert not err


@pytest.mark.parametrize(("content", "sentence"), [
    ("nothing", "no subtitle found"),
    (f"1\n{T1}red\n\n2\n00:00:03,000 --> x\nblue", "line 6: a line with an arrow"),
    (f"1\n{T1}press File --> Open", "line 3: a line with an arrow"),
    (f"1\n{T1}red\n\n2\n00:00:03,000 -> 00:00:04,000\nblue", "line 6: a line with an arrow"),
    ("00:00:01:500 --> 00:00:02:500\nred", "line 1: a line with an arrow"),
    ("-00:00:01,500 --> 00:00:02,500\nred", "line 1: a line with an arrow"),
    (f"{T1[:-1]} red", "and no text: '00:00:01,000 --> 00:00:02,000 red'"),
    ("1\n00:00:04,500 --> 00:00:03,000\nx", r"line 2: the entry at 4\.5 s ends before"),
    (f"WEBVTT\nX-TIMESTAMP-MAP=MPEGTS:900000,LOCAL:00:00.000\n\n{T1}red", "MAP shifts the times"),
])
def test_a_file_that_would_lose_an_entry_is_refused(content, sentence, tmp_path):
    with pytest.raises(Unreadable, match=f"^wrong subtitles: {tmp_path}/a: .*{sentence}"):
        read(tmp_path, content)
    (tmp_path / "a").write_bytes(content.encode("utf-16"))
    with pytest.raises(Unreadable, match=f"^wrong subtitles: {tmp_path}/a: 'utf-8' codec can't"):
        read_subtitles(tmp_path / "a")


def test_all_ways_to_write_times_and_ends_give_the_same_entries(tmp_path):
    forms = itertools.product(
        ("", VTT), ("", "7\n"), ("\n", "\n\n", "\n\n\n"), ("\n", "\r\n", "\r"),
        (",000", ".000", ", 0", ""), (" --> ", "\t-->\t", "-->"))
    for head, number, gap, end, fraction, arrow in forms:
        entries = [f"{number}00:00:0{k}{fraction}{arrow}0:0{k + 1}{fraction}\nword" for k in (1, 3)]
        content = f"{head}{gap.join(entries)}".replace("\n", end)
        assert read(tmp_path, content) == [(1, 2, "word"), (3, 4, "word")], repr(content)


@pytest.mark.parametrize("text", [
    "00:00:00,000 --> ", "<", "<a =", "<v ", "{\\", "1", "1:", "1 : ", "- ", "&#", "\n", "1\n",
    " "])
def test_the_time_does_not_grow_with_the_square_of_the_text(text, tmp_path):
    start = time.process_time()
    for head in ("", VTT, T1, f"{T1}<v "):
        with suppress(Unreadable):
            read(tmp_path, f"{head}{text * 50_000}x")
    assert time.process_time() - start < 10  # about 0.3 s; the square takes minutes
