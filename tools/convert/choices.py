"""The layout of multiple-choice questions: options as a list, or in columns A, B, C, ..

    {"image": "9.jpg", "question": "What?", "options": ["cup", "bowl"], "answer": "bowl"}
    {"image": "9.jpg", "hint": "..", "question": "What?", "A": "cup", "B": "bowl", "answer": "B"}
"""

import re
from ast import literal_eval
from itertools import chain
from string import ascii_lowercase, ascii_uppercase

from records.check import is_number, require, short
from records.errors import DataError
from tools.convert.chats import check_plain
from tools.convert.make import MAX_OPTIONS, skip_unless, whole
from tools.convert.tables import read_questions

OPTIONS = ("options", "choices", "candidates")
COLUMNS = (  # forms of the names of columns with one option each
    ascii_uppercase, [f"a{k}" for k in range(10)],
    *([f"{name}_{letter}" for letter in ascii_lowercase] for name in ("choice", "option")))
RIGHT = ("answer", "answer_idx", "answer_index", "correct_answer", "correct_choice_idx",
         "answerKey")
FIELDS = (*OPTIONS, *RIGHT, "hint", *chain.from_iterable(COLUMNS))


def read_choices(row, job):
    """The right option is given by its letter, by its index from 0, or by its text. Unreadable if
    these rules do not agree. Several right options are a list."""
    rest = {key: value for key, value in row.items() if key not in FIELDS}
    letters, options = read_options(row)
    if not options:
        return read_questions(row, job)
    right = [find_right(name, row[name], letters, options, job.path)
             for name in RIGHT if name in row]
    require(right, "the entry", f"it has options, but none of the fields {', '.join(RIGHT)}")
    skip_unless(all(found == right[0] for found in right), "no right option",
                f"{' and '.join(name for name in RIGHT if name in row)} do not agree")
    check_plain(options, "an option", job.args.ignore)
    distinct = list(dict.fromkeys(options))  # an option that is given twice gets one letter
    skip_unless(len(distinct) > 1, "no right option", "it has only one option")
    if "hint" in row:
        rest["question"] = f"{row['hint']}\n{row['question']}"
    head, (qa,) = read_questions({**rest, "answer": "-"}, job)
    places = [distinct.index(options[k]) for k in right[0]]
    qa["turns"][-1] |= {"options": distinct,
                        "answer_idx": places[0] if len(places) == 1 else places}
    del qa["turns"][-1]["answer"]
    return head, [qa]


def read_options(row):
    """-> the letters and the texts of the options."""
    cells = [row[name] for name in OPTIONS if name in row]
    for names in COLUMNS:
        given = [name for name in names if name in row]
        skip_unless(given == [*names[: len(given)]], "an empty option",
                    f"the options are {', '.join(given)}, and one before the last of them is empty")
        columns = {ascii_uppercase[k]: row[name] for k, name in enumerate(given)}
        cells += [columns] if columns else []
    require(len(cells) < 2, "the entry", "it has several lists of options")
    cell = cells[0] if cells else {}
    if isinstance(cell, str):  # a list in a cell of a table
        try:
            cell = literal_eval(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            skip_unless(False, "no options", f"this is not a list: {short(cell)}")
    if isinstance(cell, dict) and cell.keys() == {"label", "text"}:
        cell = dict(zip(cell["label"], cell["text"], strict=True))
    skip_unless(len(cell) <= MAX_OPTIONS, "no right option", "it has more than 26 options")
    if isinstance(cell, list):
        cell = dict(zip(ascii_uppercase, cell, strict=False))
    require(all(isinstance(text, str) or is_number(text) for text in cell.values()), "the entry",
            "its options must be texts")
    options = [str(whole(text)).strip() for text in cell.values()]
    bare = [without_letter(*pair) for pair in zip(cell, options, strict=True)]
    if all(text != option for text, option in zip(bare, options, strict=True)):
        options = bare  # training adds the letters
    return [*cell], options


def without_letter(letter, text):
    """"A. cup" or "(A) cup" -> "cup". Other texts are unchanged."""
    return re.sub(rf"^\(?{re.escape(letter)}[.):]\s*(?=\S)", "", text)


def find_right(name, cell, letters, options, path):
    """The field `name` with a letter, an index or a text, or a list of them -> indices."""
    if isinstance(cell, list):
        found = [find_right(name, each, letters, options, path) for each in cell]
        return sorted(index for each in found for index in each)
    text = str(whole(cell)).strip()
    found = {k for k, letter in enumerate(letters) if text.strip("().:") == letter}
    if not name.endswith(("idx", "index")):
        found |= {k for k, option in enumerate(options)
                  if option in (text, without_letter(letters[k], text))}
    if not found and text == str(len(options)):
        raise DataError(f"{path}: '{name}' is {text}, but there are {text} options. Indices must "
                        "start at 0: subtract 1 from all of them, or correct this one")
    # in a table, an index is a text, too
    is_text = isinstance(cell, str) and text in options and path.suffix not in (".csv", ".tsv")
    is_index = text.isdecimal() and int(text) < len(options)
    if is_index and not is_text and text not in letters:
        found.add(int(text))
    found = {options.index(options[k]) for k in found}  # an option may be given twice
    skip_unless(len(found) == 1, "no right option", f"'{name}' is {short(cell)}, which is not the "
                "letter, the index from 0 or the text of exactly one option")
    return [*found]
