"""The faults that tests/random_faults.py can plant."""

from tests.random_faults import changes_in, folder_tests, near_tests

SOURCE = """\
if not a < b and c is None:
    f(min(a, 3), 0.5, True)
    raise Error(f"{a + 1}")
x = a % 2 + (b) * c
y = "%d" % x
parser.add_argument("--n", default=7)
"""
FAULTS = [
    ("not a < b and c is None", "False"), ("not a < b and c is None", "True"), (" and ", " or "),
    ("f(min(a, 3), 0.5, True)", "pass"), (" + ", " - "), (" % ", " // "),
    (" is ", " is not "), ("not ", ""),
    ("min", "max"), ("0.5", "0.75"), ("True", "False"), (" < ", " <= "), ("3", "4"), ("2", "3")]


def test_faults_are_of_all_kinds_and_can_be_compiled():
    """None is in a message, a flag or a text, or takes one bracket of a pair."""
    source = SOURCE.encode()
    changes = changes_in(source)
    assert sorted((SOURCE[c.start : c.end], c.new) for c in changes) == sorted(FAULTS)
    for start, end, new in changes:
        compile(source[:start] + new.encode() + source[end:], "a.py", "exec")


def test_the_tests_of_a_file_are_those_near_it_and_those_of_its_folder():
    assert near_tests("text/styles.py") == "tests/text/test_prompts.py"
    assert "tests/text/test_tracks.py" in near_tests("text/points.py").split()
    assert folder_tests("text/points.py") == "tests/text tests/weights tests/test_encode.py"
    assert folder_tests("tools/walk/cards.py") == "tests/tools/walk"
    of_model = folder_tests("model.py").split()
    assert "tests/test_model.py" in of_model
    assert "tests/test_readme.py" not in of_model
