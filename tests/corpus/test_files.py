"""The files of a survey: any name, damage of any of them, and what belongs to another shard."""

import json
import os
import re
import shutil
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings, strategies as st

import clearhead as ch
from clearhead import demo
from clearhead.corpus import cuts, steps
from clearhead.corpus.basic import Entropy, First
from clearhead.corpus.connection import quoted
from clearhead.corpus.merge import merge
from clearhead.corpus.texts import read_texts

MODEL = demo.load()
TEXTS = ["The owl saw a fox. The fox ran.", "A queen danced in the castle.", "The owl hid."]
FOLDERS = ["states", "corpus", "merged", "."]


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
@pytest.mark.timeout(900)
@given(name=st.text("*?[]{}'\"=%!-^~ .,:;@&$ab1é漢\n\t<>|()#+_", min_size=1, max_size=9))
@settings(max_examples=settings().max_examples // 25)  # a survey each
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


def test_a_renamed_text_has_its_new_name_and_the_same_states(tmp_path):
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    for file, text in zip(files, TEXTS, strict=True):
        file.write_text(text)
    out = tmp_path / "out"
    survey_of(files, out)
    before = {path: path.stat().st_mtime_ns for path in (out / "states").iterdir()}
    files[1] = files[1].rename(tmp_path / "new.txt")
    assert names(survey_of(files, out)) == ["0.txt", "new.txt", "2.txt"]
    assert {path: path.stat().st_mtime_ns for path in (out / "states").iterdir()} == before
    with pytest.raises(ch.BadValue, match="other texts"):
        survey_of([files[0], files[2]], out)
    assert names(ch.Survey.open(out)) == ["0.txt", "new.txt", "2.txt"]


def copied(plain, folder: Path) -> Path:
    return Path(shutil.copytree(plain.folder, folder / "out"))


def exchange(one: Path, other: Path) -> None:
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


def test_exchanged_states_are_computed_again(plain, tmp_path):
    out = copied(plain, tmp_path)
    one, other = sorted((out / "states").iterdir())[:2]
    exchange(one, other)
    with pytest.raises(ch.BadValue, match=rf"lacks 2 of \d shards: .*{one.name}' is missing"):
        merge(out)
    assert ch.Survey.open(out).digest() == plain.digest()  # which reads the tables alone
    with pytest.raises(ch.BadValue, match=rf"{one.name}' is damaged: it is the state of another"):
        plain.compare(ch.Survey(out, plain.manifest))
    assert survey_of(TEXTS, out).digest() == plain.digest()


def test_a_state_of_another_model_is_computed_again(plain, tmp_path):
    """The names of states are by texts, so those of two models are the same."""
    out = tmp_path / "out"
    setup = steps.make_setup(MODEL, metrics=[First(), Entropy(128)], seed=5, shard_tokens=9)
    steps.prepare(setup, TEXTS, out)
    shutil.copytree(plain.folder / "states", out / "states", dirs_exist_ok=True)
    with pytest.raises(ch.BadValue, match="lacks 2 of 2"):
        merge(out)


def test_exchanged_tables_are_refused(plain, tmp_path):
    out = copied(plain, tmp_path)
    exchange(out / "tables/heads.parquet", out / "tables/roles.parquet")
    with pytest.raises(ch.BadValue, match="are not of all its texts"):
        ch.Survey.open(out)


def test_a_changed_token_of_a_shard_is_named(plain, tmp_path):
    out = copied(plain, tmp_path)
    path = min((out / "corpus").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    shutil.rmtree(out / "merged")
    for use in (merge, lambda out: ch.Survey.open(out).context(0, 0)):
        with pytest.raises(
            ch.BadValue, match=rf"{path.name}' is damaged: its contents do not have"
        ):
            use(out)
    path.unlink()
    assert survey_of(TEXTS, out).digest() == plain.digest()
    assert path.exists() and ch.Survey.open(out).context(0, 0)  # it is written again


def test_an_edited_manifest_is_named(plain, tmp_path):
    out = copied(plain, tmp_path)
    path = out / "manifest.json"
    text = path.read_text()
    path.write_text(re.sub(r'"bins": \d+', '"bins": 1000000000', text))
    assert path.read_text() != text
    for use in (merge, ch.Survey.open, lambda out: survey_of(TEXTS, out)):
        with pytest.raises(ch.BadValue, match=r"manifest.json' cannot be read: it was changed"):
            use(out)


def damage(data: bytearray, kind: str, at: int, value: int) -> None:
    at %= len(data)
    if kind == "change":
        data[at] = value
    elif kind == "insert":
        data.insert(at, value)
    elif kind == "delete":
        del data[at]
    else:
        del data[at:]


@given(
    folder=st.sampled_from(FOLDERS),
    number=st.integers(0, 2),
    kind=st.sampled_from(["change", "insert", "delete", "cut"]),
    # Half of the places are in the header, where each byte has a meaning.
    at=st.one_of(st.integers(0, 2000), st.integers(0, 1 << 20)),
    value=st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"{}[],:')),
)
@settings(max_examples=settings().max_examples // 5)
def test_any_damage_is_named_or_changes_nothing(
    plain, tmp_path_factory, folder, number, kind, at, value
):
    out = copied(plain, tmp_path_factory.mktemp("damaged"))
    files = sorted(path for path in (out / folder).iterdir() if path.is_file())
    path = files[number % len(files)]
    data = bytearray(path.read_bytes())
    damage(data, kind, at, value)
    path.write_bytes(data)
    for use in (merge, lambda out: survey_of(TEXTS, out)):
        try:
            use(out)
            assert ch.Survey.open(out).digest() == plain.digest()
        except ch.AttentionError as error:
            assert path.name in str(error)
    shutil.rmtree(out)


def test_runs_with_different_texts_in_one_folder_do_not_mix(plain, tmp_path, monkeypatch):
    """The other run begins while this one computes its shards, and is complete before it."""
    others, work, begun = [*TEXTS, "The fox ran."], steps.work, []

    def with_another(setup, out, **options):
        work(setup, out, **options)
        if not begun:
            begun.append(out)
            survey_of(others, out)

    monkeypatch.setattr(steps, "work", with_another)
    with pytest.raises(ch.BadValue, match=r"Another run has changed the survey in .* since this"):
        survey_of(TEXTS, tmp_path / "out")
    assert len(names(ch.Survey.open(tmp_path / "out"))) == 4


def test_one_of_two_runs_that_begin_at_once_has_the_folder(tmp_path, monkeypatch):
    """The other one is complete when this one has cut its texts."""
    cut = cuts.Cutter.cut

    def while_another_begins(cutter, *arguments):
        monkeypatch.setattr(cuts.Cutter, "cut", cut)
        survey_of(["The fox ran."], tmp_path / "out")
        yield from cut(cutter, *arguments)

    monkeypatch.setattr(cuts.Cutter, "cut", while_another_begins)
    with pytest.raises(ch.BadValue, match="has other texts"):
        survey_of(TEXTS, tmp_path / "out")
    assert len(names(ch.Survey.open(tmp_path / "out"))) == 1


def test_texts_that_a_survey_has_are_not_cut_again(plain, tmp_path, monkeypatch):
    out = copied(plain, tmp_path)
    monkeypatch.setattr(cuts.Cutter, "cut", lambda *arguments: pytest.fail("cut again"))
    for texts in (TEXTS, iter(TEXTS)):
        assert survey_of(texts, out).digest() == plain.digest()
    for texts, options in ((TEXTS[:2], {}), (TEXTS, {"tokens": 10})):
        with pytest.raises(pytest.fail.Exception, match="cut again"):
            survey_of(texts, out, **options)
