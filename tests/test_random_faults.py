"""The faults that tests/random_faults.py can plant."""

from tests.random_faults import changes_in

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
    found = [(SOURCE[start:end], new) for start, end, new in changes]
    assert sorted(found) == sorted(FAULTS)
    for start, end, new in changes:
        compile(source[:start] + new.encode() + source[end:], "a.py", "exec")
