"""No pattern takes time that grows with the square of a text of a user or a model."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from evaluation.metrics import count_from_text
from evaluation.text_metrics import parse_number, select_option
from text.points import parse_points
from text.styles import MULTIPLE_CHOICE_STYLE
from tools.convert.media import Media
from tools.convert.subtitles import LANGUAGE
from tools.convert.videos import conversations

N = 50_000


def convert_question(question):
    chat = [{"from": "human", "value": question}, {"from": "gpt", "value": "a"}]
    job = SimpleNamespace(path=Path("a.json"), media=Media("none"))
    _, (build,) = conversations({"video": "a.mp4", "conversations": chat}, job)
    return build()["question"]


@pytest.mark.parametrize(("read", "text", "found"), [
    (count_from_text, f"1{' ' * N}x", None),
    (parse_number, f"{'1' * N}x", None),
    (lambda text: select_option(text, ["a", "b"]), f"answer{'!' * N}1", 0),
    (lambda text: parse_points(text, 1, 1), f'<points coords="{"1" * N}">', []),
    (lambda text: parse_points(text, 1, 1), f'<points coords="1 {"1" * N}">', []),
    (lambda text: parse_points(text, 1, 1, True), "<points" * N, []),
    (MULTIPLE_CHOICE_STYLE.fullmatch, f"{'_multiple_choice' * N}!", None),
    (LANGUAGE.search, f"film.de{'_part' * 50} (1)", None),
    (convert_question, f"{' ' * N}x", "x"),
])
def test_the_time_does_not_grow_with_the_square_of_the_text(read, text, found):
    start = time.process_time()
    assert read(text) == found
    assert time.process_time() - start < 3  # about 0.05 s; the square takes more than 10 s


def test_tags_placeholders_and_languages_are_found_beside_others_of_their_kind():
    tags = '<points <tracks coords="2.5 1 100 200"'
    assert [place[:2] for place in parse_points(tags, 1, 1)] == [(2.5, "1")]
    assert convert_question("<image> a\n <b") == "a\n <b"
    ends = ".en", ".zh-Hans_x-y", ".de--x", ".abcd"
    assert [LANGUAGE.sub("", f"a{end}") for end in ends] == ["a", "a", "a.de--x", "a.abcd"]
