"""The digest of the tables depends on their rows alone."""

import pytest

import clearhead as ch
from clearhead import demo
from clearhead.corpus.connection import connect
from clearhead.corpus.tables import DIGEST, FOLDER, SCHEMA
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


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('{file}')",
        "select * from parquet_schema('{folder}/*.parquet')",
        "select * from glob('{folder}/*')",
        "copy (select 1) to '{folder}/new.csv'",
        "copy (select 1 as layer) to '{table}' (format parquet, use_tmp_file false)",
        "explain analyze copy (select 1 as layer) to '{table}' (format parquet)",
        "attach '{folder}/new.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "create or replace view heads as select 3",
        "select 1; drop view heads",
        "",
    ],
)
def test_a_query_reads_its_tables_and_nothing_else(survey, sql):
    folder = survey.folder / FOLDER
    before, digest = sorted(folder.iterdir()), survey.digest()
    file, table = survey.folder / "manifest.json", folder / "heads.parquet"
    with pytest.raises(
        ch.BadValue, match=r"The query of .* failed: (.|\n)*Rule: a query is one SEL"
    ):
        survey.query(sql.format(folder=folder, file=file, table=table))
    assert sorted(folder.iterdir()) == before and survey.digest() == digest


def test_a_query_may_describe_and_pivot(survey):
    assert len(survey.query("describe heads")) == len(SCHEMA["heads"])
    pivot = "pivot heads on metric in ('first', 'self') using any_value(mean) group by layer, head"
    assert survey.query(pivot).columns == ("layer", "head", "first", "self")
    with pytest.raises(ch.BadValue, match="Table with name clearhead does not exist"):
        survey.query("select * from clearhead")  # not a variable of Python


def test_the_working_folder_may_change(survey, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = ch.Survey.open(".")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert relative.digest() == survey.digest()


def test_the_folder_describes_its_tables(survey):
    text = (survey.folder / "README.md").read_text(encoding="utf-8")
    for name, columns in SCHEMA.items():
        described = survey.query(f"describe {name}").rows
        assert [row[:2] for row in described] == [(c, type) for c, (type, _) in columns.items()]
        path = str(survey.folder / FOLDER / f"{name}.parquet")
        about = dict(
            connect().execute("select key, value from parquet_kv_metadata(?)", [path]).fetchall()
        )
        for column, (type, meaning) in columns.items():
            assert about[column.encode()] == meaning.encode()
            assert f"| `{column}` | {type} | {meaning} |" in text
    for row in survey.metrics.to_pylist():
        assert f"- `{row['metric']}`: {row['formula']}\n" in text
