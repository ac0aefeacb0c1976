"""docs/codes.md is what tools.codes makes, and has every code of docs/records.md."""

import re
from pathlib import Path

from tools import codes

DOCS = Path(__file__).parents[2] / "docs"
# Their messages quote the JSON parser, Pillow or ffmpeg, whose words change with the version.
QUOTED = ("E01", "S21", "S23")


def blocks(text):
    """{code: (line of the file, message)}; of the codes in QUOTED without the message."""
    found = re.findall(r"```text\n(.*?)\n\n((\w\d\d) .*?)\n```", text, re.DOTALL)
    return {code: (line, "" if code in QUOTED else message) for line, message, code in found}


def test_the_page_of_examples_is_what_the_code_says():
    made = blocks(codes.page())
    assert made == blocks((DOCS / "codes.md").read_text(encoding="utf-8")), (
        "docs/codes.md is out of date: python -m tools.codes")
    meanings = (DOCS / "records.md").read_text(encoding="utf-8")
    assert [*made] == re.findall(r"^\| ([ESW]\d\d) \|", meanings, re.MULTILINE)
