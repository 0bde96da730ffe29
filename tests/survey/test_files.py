"""The files of a survey, and of its texts, have any name."""

import json
import os
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings, strategies as st

import clearhead as ch
from clearhead import demo
from clearhead.survey.basic import Entropy, First
from clearhead.survey.connection import quoted
from clearhead.survey.texts import read_texts

MODEL = demo.load()
TEXTS = ["The owl saw a fox. The fox ran.", "A queen danced in the castle.", "The owl hid."]


def survey_of(texts, out, **options):
    return ch.survey(
        MODEL, texts, out=out, metrics=[First(), Entropy(128)], shard_tokens=9, **options
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return survey_of(TEXTS, tmp_path_factory.mktemp("plain") / "out")


def numbers(survey):
    return survey.query("select layer, head, metric, mean, low from heads order by all").rows


def names(survey):
    return [row[0] for row in survey.query("select name from texts order by text").rows]


def write_parquet(path: Path) -> None:
    rows = ", ".join(f"('{text}')" for text in TEXTS)
    to = quoted(str(path.parent / "rows"))
    duckdb.execute(f"copy (select * from (values {rows}) v(text)) to {to} (format parquet)")
    (path.parent / "rows").rename(path)


# DuckDB reads these in its own way: patterns, columns of partitions, quotes, addresses.
NAMES = [
    "layer=1/head=3/text=x", "a*b", "a?[b]", """it's "a" {b}""", "%41/~/$HOME/#", "-o ünï漢\t",
    "s3:/a\\b",
]  # fmt: skip


def check_name(plain, folder: Path, name: str) -> None:
    """Texts and a survey in files and folders of this name have the tables of `plain`."""
    here, last = folder / name, Path(name).name
    here.mkdir(parents=True)
    files = [here / f"{number}{last}" for number in range(len(TEXTS))]
    for file, text in zip(files, TEXTS, strict=True):
        file.write_text(text)
    parquet = here / f"{last}.parquet"
    write_parquet(parquet)
    for sources in (files, [parquet]):
        survey = survey_of(sources, here / f"out of {len(sources)}")
        assert numbers(survey) == numbers(plain)
        assert len(names(survey)) == len(TEXTS)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_duckdb_would_read_in_its_own_way(plain, tmp_path, name):
    (tmp_path / "axb").mkdir()
    write_parquet(tmp_path / "axb" / "axb.parquet")  # which the pattern a*b matches too
    check_name(plain, tmp_path, name)


@pytest.mark.slow
@given(name=st.text("*?[]{}'\"=%!-^~ .,:;@&$ab1é漢\n\t<>|()#+_", min_size=1, max_size=9))
@settings(max_examples=settings().max_examples // 5)
def test_any_name(plain, tmp_path_factory, name):
    if name.strip("."):
        check_name(plain, tmp_path_factory.mktemp("any"), f"{name}a")


def test_a_name_that_is_not_utf8(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfea.txt"))
    odd.write_text(TEXTS[0])
    write_parquet(Path(f"{odd}.parquet"))
    survey = survey_of(folder, tmp_path / "out")
    assert names(survey) == [r"texts/\xff\xfea.txt"]
    ((left_out, reason),) = survey.manifest.corpus["skipped texts"]
    assert left_out == r"texts/\xff\xfea.txt.parquet" and "is not UTF-8" in reason
    with pytest.raises(
        ch.BadValue, match=r"udcff.*is not UTF-8\.\n  Rule: DuckDB reads and writes"
    ):
        survey_of(TEXTS, Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))


def test_a_pattern_that_cannot_be_of_one_file_is_refused(tmp_path):
    with pytest.raises(ch.BadValue, match=r"has a backslash, and one of \* \? \["):
        survey_of(TEXTS, tmp_path / "a\\b*")
    assert not list(tmp_path.iterdir())


def test_half_of_a_surrogate_pair_is_left_out(tmp_path):
    file = tmp_path / "a.jsonl"
    deep = "[" * 100_000
    file.write_text('{"text": "The owl \\ud800"}\n' + json.dumps({"text": TEXTS[0]}) + f"\n{deep}")
    survey = survey_of([file, "A fox \udc00."], tmp_path / "out")
    assert names(survey) == ["a.jsonl:2"]
    assert survey.manifest.corpus["skipped texts"] == [
        ["a.jsonl:1", "character 8 is half of a surrogate pair"],
        ["a.jsonl:3", "the line is not JSON in UTF-8"],
        ["text 1", "character 6 is half of a surrogate pair"],
    ]


def test_a_parquet_file_that_breaks_off_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file)
    data = bytearray(file.read_bytes())
    data[4:40] = bytes(36)  # rows; the footer is complete
    file.write_bytes(data)
    (text,) = read_texts(file)
    assert text.content is None and "that can be read" in text.reason
