"""`clearhead survey`: its texts. Its page is opened in `tests/explorer/test_survey_page.py`."""

import pytest

from clearhead.survey import Survey
from tests.cli.test_cli import run  # noqa: F401  # a fixture

pytest.importorskip("duckdb", reason="a survey needs DuckDB")


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["compare"], "OUT and OTHER"), (["compare", "a"], "OUT and OTHER"), (["merge"], "OUT")],
)
def test_a_missing_folder_of_a_survey_is_named(run, arguments, expected):  # noqa: F811
    code, _, errors = run("survey", *arguments)
    count = "1 folder" if len(arguments) == 2 else "0 folders"
    assert code != 0 and f"survey {arguments[0]} got {count}." in errors
    assert f"it takes {expected}, the folders of surveys." in errors
