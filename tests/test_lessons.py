"""Every lesson runs, its exercises tell right from wrong, all figures are shown.

A cell's tags say what it is: `figure-NAME` prints that figure of `data/figures.json`, `check`
judges the exercise above it, which is not filled in, `solution` a right answer and `wrong` some
wrong ones.
"""

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

LESSONS = Path(__file__).parents[1] / "lessons"
NAMES = [path.stem for path in sorted(LESSONS.glob("[0-9]*.md"))]
CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "data" / "figures.json").read_text())["cases"]
}
NUMBER = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf)\b")


@cache
def executed(name):
    """The lesson's code cells after a run, with their tags and what they printed."""
    notebook = jupytext.read(LESSONS / f"{name}.md")
    place = {"metadata": {"path": str(LESSONS)}}
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources=place).execute()
    return [
        (cell.metadata.get("tags", []), printed(cell), cell.source)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def printed(cell):
    texts = (x.get("text") or x.get("data", {}).get("text/plain", "") for x in cell.outputs)
    return "".join(texts)


def rows(value):
    """The rows of a figure, in which null stands for minus infinity."""
    if not isinstance(value, list):
        return [[value]]
    if not isinstance(value[0], list):
        return [[-float("inf") if x is None else x for x in value]]
    return [row for part in value for row in rows(part)]


def shows(text, row, atol):
    """Do the numbers of a row stand in the text, one after another?"""
    numbers = [float(x) for x in NUMBER.findall(text)]
    return any(
        all(a == b or abs(a - b) <= atol for a, b in zip(numbers[i:], row, strict=False))
        for i in range(len(numbers) - len(row) + 1)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_runs_and_its_exercises_judge(name):
    cells = executed(name)
    said = {
        kind: [text for tags, text, _ in cells if kind in tags]
        for kind in ("check", "solution", "wrong")
    }
    assert len(said["check"]) == len(said["solution"]) == len(said["wrong"]) > 0
    assert all(text.startswith("Not tried yet") for text in said["check"])
    assert all(text.strip() == "Right." for text in said["solution"])
    for text in said["wrong"]:
        lines = text.strip().splitlines()
        assert lines and not any(line.startswith(("Right", "Not tried")) for line in lines)
        assert len(set(lines)) == len(lines)  # each mistake is told by its own sentence


@pytest.mark.parametrize("name", NAMES)
def test_its_figures_are_those_of_the_documents(name):
    for tags, text, _ in executed(name):
        for figure in (tag[len("figure-") :] for tag in tags if tag.startswith("figure-")):
            case = CASES[figure]
            for row in rows(case["expected"]):
                assert shows(text, row, case["atol"]), f"{figure}: {row} is not in\n{text}"


def test_every_figure_is_in_a_lesson():
    tagged = re.findall(
        r"figure-([\w-]+)", "".join((LESSONS / f"{name}.md").read_text() for name in NAMES)
    )
    assert sorted(tagged) == sorted(CASES)


def test_a_figure_that_is_not_shown_is_noticed():
    assert shows("a 1.0000, 2.0000\nb 3", [1, 2, 3], 1e-4)
    assert not shows("1.0000, 2.0000, 3", [2, 1], 1e-4)
    assert not shows("1.0", [1, 2], 1e-4)


def test_each_lesson_leads_to_the_next():
    assert [name[:2] for name in NAMES] == [f"{n:02}" for n in range(1, len(NAMES) + 1)]
    for name, following in pairwise(NAMES):
        assert f"({following}.md)" in (LESSONS / f"{name}.md").read_text()
