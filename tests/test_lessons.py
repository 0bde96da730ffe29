"""Run the lessons, compare their figures with the five documents, and check their exercises.

The tags of a cell name its kind. `figure-ID`: its output shows that figure of `figures.json`.
`checker`: it checks an exercise before anybody has tried it. `solution` and `mistake`: it tries the
exercise, and prints what the checker answers.
"""

import asyncio
import json
import math
import re
from pathlib import Path

import jupytext
import numpy as np
import pytest
from jupyter_client import AsyncKernelManager
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

import clearhead as ch
from examples.smollm2 import cached
from examples.storyteller.cast import CHARACTERS
from examples.storyteller.train import Recipe
from lessons import diagrams
from lessons.render import READ, for_a_forge, one_output, page, run
from tests.outputs import difference

FOLDER = Path(__file__).parents[1] / "lessons"
LESSONS = sorted(FOLDER.glob("[0-9][0-9]-*.md"))
CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "data" / "figures.json").read_text())["cases"]
}
NOT_COMPARED = (
    r'xlink:href="data:.*?"|#[0-9a-f]{6}|id="\w+"|#\w+'  # in a figure: pixels, colours, ids
)
NUMBER = re.compile(r"-?(?:inf\b|\d+\.?\d*(?:e[-+]?\d+)?)")


def tags(cell):
    return cell.metadata.get("tags", [])


def figures_of(cell):
    return [tag.removeprefix("figure-") for tag in tags(cell) if tag.startswith("figure-")]


def printed(cell):
    """Return what a cell printed, and the plain text of what it displayed."""
    parts = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)
    return "\n".join(parts)


def rows_of(figure):
    """Return the rows of a figure, (..., columns) to (rows, columns); null means minus infinity."""
    rows = np.array(CASES[figure]["expected"], dtype=float)
    rows = np.where(np.isnan(rows), -math.inf, rows)
    return rows.reshape(-1, rows.shape[-1] if rows.ndim else 1)


def find_row(row, numbers, start, atol):
    """Return the index from `start` on where the numbers of `row` follow one another, or None."""
    for i in range(start, len(numbers) - len(row) + 1):
        if np.allclose(numbers[i : i + len(row)], row, rtol=0, atol=atol):
            return i
    return None


def missing_row(figure, text):
    """Return the first row of a figure that a text does not contain in order, or None."""
    numbers = [float(x) for x in NUMBER.findall(text)]
    start = 0
    for row in rows_of(figure):
        place = find_row(row, numbers, start, CASES[figure]["atol"])
        if place is None:
            return row
        start = place + len(row)
    return None


def decimals_of_diagrams(notebook):
    """Yield each decimal number of a diagram or a table, with what the cells before it printed."""
    so_far = ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            so_far += printed(cell) + "\n"
            continue
        parts = re.findall(r"^```text\n(.*?)^```|^(\|[^\n]*)$", cell.source, re.M | re.S)
        for title, name in diagrams.SHOWN.findall(cell.source):
            parts += [(title, ""), ("\n".join(letters_of(diagrams.DIAGRAMS[name][1])), "")]
        for number in re.findall(r"\d+\.\d+", "\n".join(map("".join, parts))):
            yield number, so_far


def letters_of(parts):
    """Return the words of the elements of a diagram."""
    return [re.sub("<.*?>", "", x) for x in re.findall(r"<text.*?</text>", "\n".join(parts))]


def is_printed(number, text):
    decimals = len(number.partition(".")[2])
    return any(f"{float(x):.{decimals}f}" == number for x in re.findall(r"\d+\.\d+", text))


ODD = """
for attempt in ([1.0, 2.0], (1, 2), "x", 3, 0.5, {}, torch.tensor(1.0), torch.zeros(2, 3, 4, 5)):
    answer = CHECK(lambda *_, **__: attempt) if callable(TRIED) else CHECK(attempt)
    assert isinstance(answer, str) and answer.endswith("."), (attempt, answer)
print("a sentence each time")
"""


def with_odd_attempts(notebook):
    """Add a cell after each checker that passes it attempts of the wrong kind. It must answer them
    in a sentence, and not with a traceback."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if "checker" in tags(cell):
            check, tried = re.search(r"^print\((\w+)\((\w+)\)\)$", cell.source, re.M).groups()
            source = ODD.replace("CHECK", check).replace("TRIED", tried)
            cells.append(new_code_cell(source, metadata={"tags": ["odd"]}))
    notebook.cells = cells
    return notebook


@pytest.fixture(scope="module")
def kernel():
    """Share one kernel between all lessons: to import torch takes as long as half a lesson."""
    manager = AsyncKernelManager(kernel_name="python3")
    yield manager
    asyncio.run(manager.shutdown_kernel(now=True))


LONG = (
    "15-a-real-model", "16-many-machines", "17-what-a-head-carries", "18-why-a-head-looks-there"
)  # fmt: skip


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LONG))
    for path in LESSONS
])  # fmt: skip
def test_lesson(path, kernel):
    before = set(FOLDER.iterdir())
    notebook = with_odd_attempts(jupytext.read(path))
    run(notebook, kernel)
    assert set(FOLDER.iterdir()) == before
    assert "widgets" not in notebook.metadata  # a site would load scripts of another host for them

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        for figure in figures_of(cell):
            row = missing_row(figure, printed(cell))
            assert row is None, f"{figure}: the row {row} is not in\n{printed(cell)}"

    for number, so_far in decimals_of_diagrams(notebook):
        assert is_printed(number, so_far), f"a diagram has {number}, which no cell before it prints"

    answers = {kind: [] for kind in ("checker", "solution", "mistake", "odd")}
    for cell in cells:
        for kind in answers.keys() & tags(cell):
            answers[kind] += printed(cell).splitlines()
    assert len(answers["checker"]) == len(answers["solution"]) == 3 <= len(answers["mistake"])
    for answer in answers["checker"]:
        assert answer.startswith("Not tried yet: "), answer
    for answer in answers["solution"]:
        assert answer.startswith("Right."), answer
    for answer in answers["mistake"]:
        assert answer.endswith(".") and not answer.startswith(("Right", "Not tried")), answer
    assert len(answers["odd"]) == len(answers["checker"])
    for answer in answers["odd"]:
        assert answer == "a sentence each time"

    notebook.cells = [cell for cell in notebook.cells if "odd" not in tags(cell)]
    rendered = page(notebook, path.stem)
    committed = (READ / path.name).read_text("utf-8")
    assert difference(compared(rendered.text), compared(committed)) is None  # render it again
    for file, figure in rendered.figures.items():
        assert same_picture(figure, (READ / "pictures" / file).read_text("utf-8")), file


def compared(page_text):
    """Return a page without outputs that depend on the machine, or on a file that is missing."""
    left_out = "measured" if cached().is_file() else "measured|smollm2"
    return re.sub(rf"<!-- ({left_out}) -->.*?<!-- end -->", "", page_text, flags=re.DOTALL)


def same_picture(figure, committed):
    """Compare words and lines to a unit of a 72nd inch; colours and pixels may be rounded."""
    ours, theirs = (re.sub(NOT_COMPARED, "", x, flags=re.DOTALL) for x in (figure, committed))
    numbers, others = NUMBER.findall(ours), NUMBER.findall(theirs)
    return re.split(NUMBER, ours) == re.split(NUMBER, theirs) and all(
        abs(float(x) - float(y)) < 1 for x, y in zip(numbers, others, strict=True)
    )


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_form_of_a_lesson(path):
    text = path.read_text(encoding="utf-8")
    body, summary, exercises = re.split(r"^## (?:Summary|Exercises)$", text, flags=re.M)
    assert 3 <= len(re.findall(r"[.!?](?=\s)", summary)) <= 5, "three to five sentences"
    assert diagrams.SHOWN.search(body), "no diagram"
    _, *parts = re.split(r"^\*\*(\d\. \w+)\.\*\* ", exercises, flags=re.M)
    assert parts[::2] == ["1. Easy", "2. Middle", "3. Hard"]
    for part in parts[1::2]:
        kinds = re.findall(r"^tags: \[hide-\w+, (\w+)\]$", part, re.M)
        assert kinds == ["checker", "solution", "mistake"]


def test_the_diagrams_are_those_that_the_program_draws():
    titles = diagrams.titles()
    assert [*titles] == [*diagrams.DIAGRAMS]  # in the order of the lessons
    files = {path.stem: path.read_text("utf-8") for path in diagrams.PICTURES.iterdir()}
    assert files == {name: diagrams.svg(titles[name], *diagrams.DIAGRAMS[name]) for name in titles}
    assert all(len(title.split()) >= 8 for title in titles.values())


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_a_phone_shows_a_diagram_with_letters_of_eleven_pixels(name):
    """In a column of 328 pixels, as on a screen of 360. Nothing is beyond an edge."""
    height, parts = diagrams.DIAGRAMS[name]
    sizes = {float(x) for x in re.findall(r'font-size="([\d.]+)"', "".join(parts))}
    assert min({14, *sizes}) * 328 / diagrams.WIDTH >= 11
    for element in re.findall(r"<rect.*?>", "\n".join(parts)):
        x, y, width, tall = (
            float(re.search(rf' {a}="([-\d.]+)"', element)[1])
            for a in ("x", "y", "width", "height")
        )
        assert x >= 0 and x + width <= diagrams.WIDTH and y + tall <= height, element
    for x, y, anchor, text in re.findall(
        r'x="([-\d.]+)" y="([-\d.]+)" text-anchor="(\w+)">(.*?)</text>', "\n".join(parts)
    ):
        length = 7.2 * len(re.sub("<.*?>|&.*?;", "", text))  # a wide letter, as in DejaVu Sans
        start = float(x) - length * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        assert 0 <= start and start + length <= diagrams.WIDTH and float(y) < height, text


def test_what_a_lesson_shows_is_reached_from_its_page():
    text = "[x](../docs/a.md) [y](index.md) ![z](pictures/06-two-methods.svg) [w](07-dropout.md)"
    links = re.findall(r"\((.*?)\)", for_a_forge(text))
    assert links == [
        "../../docs/a.md", "../index.md", "../pictures/06-two-methods.svg", "07-dropout.md"
    ]  # fmt: skip


def test_every_figure_is_shown():
    shown = [f for path in LESSONS for cell in jupytext.read(path).cells for f in figures_of(cell)]
    assert sorted(shown) == sorted(CASES)


def test_a_figure_is_missed():
    text = "[0.14548, 0.2278, 0.2249, 0.1285, 0.1077, 0.1656]"
    assert missing_row("d-sum-normalised-2", text) is None
    assert missing_row("d-sum-normalised-2", text.replace("0.1285", "0.1289")) is not None
    assert missing_row("d-sum-normalised-2", text.replace("0.1285", "")) is not None


def test_the_index_names_every_lesson():
    named = re.findall(r"\(read/(\d\d-[^)#]*\.md)\): ", (FOLDER / "index.md").read_text())
    assert named == [path.name for path in LESSONS]


def test_lesson_14_counts_the_stories_that_the_included_model_read():
    recipe = Recipe()
    text = (FOLDER / "14-what-heads-cause.md").read_text()
    assert f"trained on {recipe.steps * recipe.batch:,} small stories" in text


def test_lessons_14_and_17_name_the_deeds_of_the_characters():
    deeds = {who.noun: {*who.deeds} for who in CHARACTERS}
    for lesson in ("14-what-heads-cause.md", "17-what-a-head-carries.md"):
        text = (FOLDER / lesson).read_text()
        witch, queen = re.search(r"A witch (\*.*?)[.;](.*?)\.", text, re.DOTALL).groups()
        assert {*re.findall(r"\*(\w+)\*", witch)} == deeds["witch"]
        assert {*re.findall(r"\*(\w+)\*", queen)} == deeds["queen"] & deeds["princess"]


def test_the_readme_and_the_site_count_the_lessons():
    words = ("Seventeen", "Eighteen", "Nineteen", "Twenty", "Twenty-one")
    number = words[len(LESSONS) - 17]
    for file in ("README.md", "docs/index.md"):
        assert f"{number} lessons" in (FOLDER.parent / file).read_text().replace("[", ""), file


def test_each_section_of_the_documents_is_two_clicks_from_the_readme():
    """The README links to the index, and the index to a heading of a lesson that names the document
    as one that it covers; what a document says of trained models is in later lessons."""
    assert "](lessons/index.md)" in (FOLDER.parent / "README.md").read_text()
    index = (FOLDER / "index.md").read_text()
    documents = re.findall(r"^### (\w)\. .*?\n(.*?)(?=^#|^```)", index, re.M | re.S)
    assert [letter for letter, _ in documents] == list("abcde")
    for letter, table in documents:
        for row in table.strip().splitlines()[2:]:
            lessons = re.findall(r"\(read/([^)#]+)#[^)]+\)", row)
            assert lessons and row.count("](") == len(lessons), row
            for lesson in lessons:
                opening = (FOLDER / lesson).read_text().split("*Of the [five documents]")
                covers = opening[1].split("*")[0] if len(opening) > 1 else letter
                assert re.search(rf"\b{letter}\b", covers.partition("covers:")[2] or covers), row


def test_a_picture_that_a_forge_does_not_show_is_refused():
    data = {"text/plain": "causal", "text/html": ch.causal._repr_html_()}
    with pytest.raises(SystemExit, match="only 'causal' of a picture"):
        one_output(NotebookNode(output_type="display_data", data=data))


def test_a_page_that_differs_is_noticed():
    assert difference("x\na 0.123 b 3e-07", "x\na 0.124 b 5e-08") is None
    assert difference("x\na 0.123", "x\na 0.128") == ("a 0.123", "a 0.128")
    assert difference("a -0.00", "a 0.00") is None and difference("a -3", "a 3")
    assert difference("a 3", "a 4")
    assert difference("a 0.123", "b 0.123")
    assert difference("a", "a\nb")
    assert compared("a <!-- measured -->3<!-- end --> b") == "a  b"


def test_every_lesson_has_a_page_and_no_page_is_left():
    assert sorted(path.name for path in READ.glob("*.md")) == [path.name for path in LESSONS]
    shown = re.findall(
        r"!\[([^]]+)\]\(pictures/([\w-]+\.svg)\)",
        "".join(path.read_text("utf-8") for path in READ.glob("*.md")),
    )
    assert sorted(file for _, file in shown) == sorted(x.name for x in READ.glob("pictures/*"))
    assert all(len(words.split()) >= 8 for words, _ in shown)
    assert not [path.name for path in READ.glob("*.md") if " at 0x" in path.read_text("utf-8")]
    assert sum(path.stat().st_size for path in READ.rglob("*.*")) < 3e6


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_names_what_it_covers_of_the_documents(path):
    """Both ways: the documents that it names, and those whose sections the index finds in it."""
    line = re.search(r"^\*(?:Of the|This lesson goes beyond the)[^*]*\*$", path.read_text(), re.M)[
        0
    ]
    index = (FOLDER / "index.md").read_text()
    _, *sections = re.split(r"^### ([a-e])\. .*$", index, flags=re.M)
    listed = {a for a, rows in zip(sections[::2], sections[1::2], strict=True) if path.name in rows}
    named = set(re.findall(r"(?<=[ ;])([a-e])(?=,| and [a-e],)", line.replace("\n", " ")))
    assert "beyond" in line or listed <= named
