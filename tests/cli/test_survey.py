"""`clearhead survey`: what it writes and prints, and its page in a browser."""

import pytest

from clearhead.survey import Survey
from examples.stories import write_stories
from tests.cli.test_cli import run  # noqa: F401  # a fixture
from tests.explorer.conftest import browser  # noqa: F401  # a fixture

pytest.importorskip("duckdb", reason="a survey needs DuckDB")


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A file as `make survey` writes it, with fewer stories."""
    file = tmp_path_factory.mktemp("stories") / "stories.jsonl"
    return write_stories(4, file)


def test_the_page_of_a_survey_opens_in_a_browser(run, stories, browser, tmp_path):  # noqa: F811
    out = tmp_path / "survey"
    code, printed, errors = run("survey", stories, "--out", out)
    assert code == 0 and "storyteller: 16 heads" in printed and f"page     {out}" in errors
    page, problems = browser.new_page(), []
    page.on("pageerror", lambda error: problems.append(error))
    page.on("console", lambda message: problems.append(message.text))
    page.goto((out / "index.html").as_uri())
    assert page.locator("#scatter circle").count() == 16
    assert page.text_content("#head-title") == "Layer 0, head 0"
    assert page.locator("#metrics tbody tr").count() > 20
    assert page.locator("#examples article").count() > 0
    assert problems == []
    page.close()

    code, _, errors = run("survey", "compare", out, out)
    assert code == 0
    numbers = len(Survey.open(out).query("select 1 from heads").rows)
    assert f"0 of {numbers} numbers differ" in errors
    page = browser.new_page()
    page.goto((out / "compare.html").as_uri())
    assert "0 of" in page.text_content("#differences-about")
    page.close()


def test_random_repeats(run, tmp_path):  # noqa: F811
    code, printed, _ = run("survey", "--repeats", 3, 20, "--out", tmp_path)
    assert code == 0 and "120 tokens of 3 texts" in printed
    repeats = {"texts": 3, "tokens": 20}
    assert Survey.open(tmp_path).manifest.corpus["random repeats"] == repeats


@pytest.mark.parametrize("arguments", [[], ["a b", "--repeats", 3, 20]])
def test_texts_or_random_ones_are_needed(run, tmp_path, arguments):  # noqa: F811
    code, _, errors = run("survey", *arguments, "--out", tmp_path / "out")
    assert code != 0 and "Hint: pass files or folders, or --repeats 100 50." in errors
    assert not (tmp_path / "out").exists()
