"""The walk: its committed pages are those that it makes, right solutions pass, wrong ones teach."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import attention
import data
import packing
from tests.test_layout import ROOT
from tests.tools.walk import solutions
from tools.walk import __main__ as command
from tools.walk import boxes, check, examples, first_looks, pages, ranks, swap, whole

DOCS = ROOT / "docs"
SOLUTIONS = Path(solutions.__file__)
DECIMALS = re.compile(r"\d+\.\d{4,}")            # numbers whose last digits a machine may round


# --------------------------------------------------------------------------------------------------
# the pages


def assert_same_text(made, committed, name):
    assert DECIMALS.sub("#", made) == DECIMALS.sub("#", committed), f"{name}: {COMMAND}"
    found = [float(number) for number in DECIMALS.findall(made)]
    assert found == pytest.approx([float(n) for n in DECIMALS.findall(committed)], rel=1e-6)


def assert_same_pixels(made, committed, name):
    """All frames, but for the edges of letters, which another version of FreeType may smooth."""
    pictures = [Image.open(io.BytesIO(content)) for content in (made, committed)]
    assert pictures[0].size == pictures[1].size, f"{name}: {COMMAND}"
    n_frames = [getattr(picture, "n_frames", 1) for picture in pictures]
    assert n_frames[0] == n_frames[1], f"{name}: {COMMAND}"
    for k in range(n_frames[0]):
        for picture in pictures:
            picture.seek(k)
        a, b = (np.asarray(picture.convert("RGB")).astype(int) for picture in pictures)
        assert (abs(a - b).max(2) > 40).mean() < 0.02, f"{name}, frame {k}: {COMMAND}"


COMMAND = "python -m tools.walk makes it anew"


def without_pictures(notebook):
    """A notebook as text without the bytes of its pictures, which are compared by themselves."""
    book = json.loads(notebook)
    for cell in book["cells"]:
        for output in cell.get("outputs", ()):
            output["data"] = sorted(output.get("data", ()))
    return json.dumps(book, indent=1)


@pytest.mark.slow
def test_the_committed_pages_are_those_that_the_walk_makes():
    made = pages.files()
    in_folder = {f"docs/walk/{path.name}" for path in (DOCS / "walk").iterdir() if path.is_file()}
    assert in_folder | {"docs/images/whole.png"} == set(made)
    for name, content in made.items():
        committed = (ROOT / name).read_bytes()
        if name.endswith((".png", ".gif")):
            assert_same_pixels(content, committed, name)
        elif name.endswith(".ipynb"):
            assert_same_text(without_pictures(content), without_pictures(committed), name)
        else:
            assert_same_text(content.decode(), committed.decode(), name)


def test_pictures_that_need_no_model_are_the_committed_ones():
    packs = boxes.plan()
    for name, content in (("images/whole.png", pages.png(whole.picture())),
                          ("walk/rows.png", pages.png(boxes.rows_picture(packs))),
                          ("walk/packing.gif", boxes.animation(packs).data())):
        assert_same_pixels(content, (DOCS / name).read_bytes(), name)


def test_the_text_of_the_source_is_in_the_page_and_the_notebook():
    cells = pages.parse(pages.SOURCE.read_text(encoding="utf-8"))
    page = (DOCS / "walk" / "README.md").read_text(encoding="utf-8")
    book = json.loads((DOCS / "walk" / "walk.ipynb").read_text(encoding="utf-8"))
    assert [cell.source for cell in cells] == ["".join(c["source"]) for c in book["cells"]]
    assert all(cell.source in page for cell in cells)


def test_the_notebook_is_of_nbformat_4_with_all_outputs():
    book = json.loads((DOCS / "walk" / "walk.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in book["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"execution_count", "outputs"}
            assert cell["outputs"], "".join(cell["source"])
        assert set(cell) == wanted
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", ())]
    kinds = [kind for output in outputs for kind in output.get("data", ())]
    assert kinds.count("image/png") == 8 and kinds.count("text/html") == 1
    assert sum(output["output_type"] == "stream" for output in outputs) == 5


def test_a_cell_shows_what_it_prints_and_the_picture_that_its_last_line_gives():
    text = ('Words.\n\n```run\nx = 3\nprint(x)\n```\n\n```run dot A dot.\nfrom PIL import Image\n'
            'Image.new("RGB", (x, 1))\n```\n\n```exercise\ndef f(): ...\n```\n')
    cells = pages.run(pages.parse(text))
    assert [cell.is_code for cell in cells] == [False, True, True, False]
    assert cells[1].printed == "3\n"
    assert Image.open(io.BytesIO(cells[2].files["dot.png"])).size == (3, 1)
    page = pages.markdown(cells)
    assert page.index("![A dot.](dot.png)") < page.index("Image.new")
    assert "```python\ndef f(): ...\n```" in page


def test_solutions_of_a_reader_are_not_written_over(tmp_path, monkeypatch):
    made = {pages.STUBS: b"new", "docs/walk/README.md": b"new"}
    monkeypatch.setattr(pages, "files", lambda: made)
    (tmp_path / "docs" / "walk").mkdir(parents=True)
    (tmp_path / pages.STUBS).write_text("solved")
    assert command.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / pages.STUBS).read_text() == "solved"
    assert (tmp_path / "docs" / "walk" / "README.md").read_text() == "new"


def test_the_row_of_the_walk_is_the_one_that_the_planner_makes():
    row = examples.encode()
    sizes = [data.size(record, examples.TOKENIZER, examples.DATA, examples.SEED, 0)
             for record in examples.RECORDS]
    assert sizes == examples.STREAM[:3]
    assert [len(x.tokens) for x in row] == [tokens for tokens, _ in sizes]
    assert {0, 1, 2} in [{item.index for item in pack.chosen} for pack in boxes.plan()]
    parts = examples.parts_of(row, examples.ROW)
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]


# --------------------------------------------------------------------------------------------------
# the exercises


@pytest.mark.parametrize("name", [name for name in check.TESTS if name != "ulysses"])
def test_a_right_solution_passes_the_first_look(name):
    assert first_looks.FIRST_LOOKS[name](getattr(solutions, name)) is None


def place_of(bidir):
    return torch.arange(bidir.shape[1])


def causal_only(until, bidir):
    place = place_of(bidir)
    return ((place <= place[:, None]) & (place[:, None] < until[:, None]))


def without_the_end_of_visibility(until, bidir):
    place = place_of(bidir)
    same = (bidir[:, :, None] == bidir[:, None]) & (bidir[:, None] != 0)
    return (place <= place[:, None]) | same


def one_place_too_far(until, bidir):
    return attention.allow(until + 1, bidir)


def zero_is_a_group(until, bidir):
    return causal_only(until, bidir) | (bidir[:, :, None] == bidir[:, None])


def transposed(until, bidir):
    return attention.allow(until, bidir).mT


def largest_first(items, tokens, crops, bin_size, per_token, per_crop):
    chosen = []
    for e in sorted(items, key=lambda e: -e.tokens):
        if e.tokens <= tokens and e.crops <= crops:
            chosen.append(e)
            tokens, crops = tokens - e.tokens, crops - e.crops
    return chosen


def tokens_alone(items, tokens, crops, bin_size, per_token, per_crop):
    return packing.best_subset([e._replace(crops=0) for e in items], tokens, crops, 1, 1.0, 0.0)


def every_one(items, tokens, crops, bin_size, per_token, per_crop):
    return items


def without_flat_weights(branch, n_loss, n_branches, config):
    return branch.weight * (2 / max(n_loss, 1) ** 0.5 if config.sqrt_length else 1)


def divides_by_zero(branch, n_loss, n_branches, config):
    if branch.kind in ("point", "count", "track", "caption"):
        return data.token_weight(branch, n_loss, n_branches, config)
    return branch.weight * (2 / n_loss**0.5 / n_branches**0.5 if config.sqrt_length else 1)


def mean_of_the_micro_batch(run, model, rows):
    batch = packing.collate(rows, run.config.data.max_tokens, run.config.data.vision)
    nll, lse = model(batch)
    loss = batch.weights * (nll + run.config.z_loss * lse**2)
    (loss.sum() / batch.weights.sum()).backward()
    return batch, nll


def last_micro_batch_alone(run, model, rows):
    model.zero_grad()
    return solutions.forward_backward(run, model, rows)


def without_z_loss(run, model, rows):
    batch = packing.collate(rows, run.config.data.max_tokens, run.config.data.vision)
    nll, _ = model(batch)
    (batch.weights * nll).sum().backward()
    return batch, nll


def without_token_weights(run, model, rows):
    batch = packing.collate(rows, run.config.data.max_tokens, run.config.data.vision)
    nll, lse = model(batch)
    (nll + run.config.z_loss * lse**2).sum().backward()
    return batch, nll


def returns_nothing(run, model, rows):
    solutions.forward_backward(run, model, rows)


WRONG = [
    ("allow", causal_only, "both ways"),
    ("allow", without_the_end_of_visibility, "different branches"),
    ("allow", one_place_too_far, "must not be allowed"),
    ("allow", zero_is_a_group, "bidir 0 is no group"),
    ("allow", transposed, "comes after the query"),
    ("best_subset", largest_first, "Taking the largest first is not enough"),
    ("best_subset", tokens_alone, "some of the items"),
    ("best_subset", every_one, "both limits count"),
    ("token_weight", without_flat_weights, "Flat weights come first"),
    ("token_weight", divides_by_zero, "count at least one loss token"),
    ("forward_backward", mean_of_the_micro_batch, "divided by its own weight"),
    ("forward_backward", last_micro_batch_alone, "do not call zero_grad"),
    ("forward_backward", without_z_loss, "z-loss is missing"),
    ("forward_backward", without_token_weights, "must be that of the sum"),
    ("forward_backward", returns_nothing, "must return the Batch"),
]


@pytest.mark.parametrize(("name", "mine", "lesson"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_solution_gets_a_sentence_that_teaches(name, mine, lesson):
    assert lesson in first_looks.FIRST_LOOKS[name](mine)


def test_files_that_hold_no_solution_yet(tmp_path, capsys):
    assert command.main(["--check", str(DOCS / "walk" / "mine.py")]) == 0
    assert capsys.readouterr().out.count("not written yet") == 5
    mine = tmp_path / "mine.py"
    for text, lesson in ((None, "where to begin"), ("def f(:", "SyntaxError"),
                         ("x = 1", "none of the functions"),
                         ("def allow(until, bidir):\n    return until.nothing", "AttributeError")):
        if text is not None:
            mine.write_text(text)
        assert command.main(["--check", str(mine)]) == 1
        assert lesson in capsys.readouterr().out


ROUND_THE_WRONG_WAY = """
import torch, torch.distributed as dist, parallel
def ulysses(attend, group):
    cp = dist.get_world_size(group)
    def exchanged(q, k, v, mask):
        def there(x):
            parts = torch.stack(x.chunk(cp, dim=1))
            return torch.cat(list(parallel.AllToAll.apply(parts, group)), dim=1).repeat(1, 2, 1, 1)
        return attend(there(q), there(k), there(v), mask)[:, : q.shape[1]]
    return exchanged
"""


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_ulysses_on_two_processes(tmp_path, monkeypatch, right):
    mine = tmp_path / "mine.py"
    mine.write_text(SOLUTIONS.read_text() if right else ROUND_THE_WRONG_WAY)
    monkeypatch.setenv(swap.FILE, str(mine))
    monkeypatch.setenv(swap.NAME, "ulysses")
    problem = first_looks.look_at_ulysses(swap.load(mine).ulysses)
    assert problem is None if right else "dimension 0 must be the process" in problem


@pytest.mark.slow
def test_right_solutions_pass_the_tests_of_the_project(capsys):
    assert command.main(["--check", str(SOLUTIONS)]) == 0
    assert capsys.readouterr().out.count("all of them pass") == 5


WRONG_FILE = """
import packing, train
def allow(until, bidir):
    return (bidir[:, :, None] == bidir[:, None])
def best_subset(items, *limits):
    return items[:1]
def token_weight(*branch):
    return 1.0
def forward_backward(run, model, rows):
    batch = train.batch_of(run, rows)
    nll, lse = model(batch)
    ((batch.weights * nll).sum() / batch.weights.sum()).backward()
    return batch, nll
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in check.TESTS if name != "ulysses"])
def test_the_tests_of_the_project_see_a_wrong_function(tmp_path, monkeypatch, name):
    mine = tmp_path / "mine.py"
    mine.write_text(WRONG_FILE)
    monkeypatch.setenv(swap.FILE, str(mine))
    monkeypatch.setenv(swap.NAME, name)
    problem = check.run_tests(name)
    assert " fails." in problem
    assert any(lesson in problem for lesson in check.TESTS[name].values()), problem


def test_each_head_of_each_token_is_on_one_process():
    held = torch.tensor([[True, False], [False, True]])
    found = [ranks.Rank([], 0, [], *[x] * 3, 0.0, 0.0) for x in (held, ~held)]
    assert ranks.holder(found, "heads").tolist() == [[0, 1], [1, 0]]
