"""The digest of the tables depends on their rows alone."""

import pytest

import clearhead as ch
from clearhead import demo
from clearhead.survey.connection import connect
from clearhead.survey.tables import DIGEST, FOLDER
from examples.storyteller import story


@pytest.fixture
def survey(tmp_path):
    return ch.survey(demo.load(), [str(story(3, i)) for i in range(3)], out=tmp_path)


def rewrite(survey, table, select):
    """Write a table again with another codec and other row groups."""
    path = survey.folder / FOLDER / f"{table}.parquet"
    new = path.with_suffix(".new")
    digest = survey.manifest.digest
    connect().execute(
        f"copy ({select} from read_parquet('{path}')) to '{new}' (format parquet, "
        f"compression snappy, row_group_size 4096, kv_metadata {{'{DIGEST}': '{digest} {table}'}})"
    )
    changed = new.read_bytes() != path.read_bytes()
    new.replace(path)
    return changed


def test_the_digest_of_a_survey_depends_on_its_rows_alone(survey):
    before = survey.digest()
    assert rewrite(survey, "examples", "select *")
    assert ch.Survey.open(survey.folder).digest() == before
    assert rewrite(survey, "heads", "select * replace (mean + 1e-12 as mean)")
    assert ch.Survey.open(survey.folder).digest() != before


def test_the_working_folder_may_change(survey, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = ch.Survey.open(".")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert relative.digest() == survey.digest()
