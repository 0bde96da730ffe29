"""`clearhead survey`: its texts. Its page is opened in `tests/views/test_survey_page.py`."""

import re
from copy import deepcopy

import pytest

import clearhead
from clearhead import demo
from clearhead.corpus import Survey
from examples.stories import write_stories
from examples.storyteller import story
from tests.cli.test_cli import run  # noqa: F401  # a fixture
from tests.corpus.vision import draw, planted, save

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


def test_needles(run, tmp_path):  # noqa: F811
    texts = write_stories(12, tmp_path / "stories.jsonl")
    options = ["--needles", 4, 6, "--context", 40, "--out", tmp_path / "out"]
    code, printed, errors = run("survey", texts, *options)
    assert code == 0, errors
    survey = Survey.open(tmp_path / "out")
    assert survey.manifest.corpus["needles"] == {"count": 4, "tokens": 6}
    rows = survey.query("select layer, head, mean from heads where metric = 'retrieval'").rows
    layer, head, mean = min(rows, key=lambda row: (-row[2], *row[:2]))
    first = printed.splitlines()[1]
    assert first.startswith(f"layer {layer}, head {head}: retrieval {mean:.3f} (")
    (state,) = (tmp_path / "out/states").iterdir()
    heads = tmp_path / "out/tables/heads.parquet"
    content = heads.read_bytes()
    state.unlink()
    code, _, errors = run("survey", "work", tmp_path / "out")  # its metrics are those of the survey
    assert code == 0 and state.exists(), errors
    assert run("survey", "merge", tmp_path / "out")[0] == 0 and heads.read_bytes() == content
    code, printed, _ = run("survey", texts, *options[:-1], tmp_path / "basic", "--metrics", "basic")
    assert code == 0 and printed.count("\n") == 1  # no metric of retrieval


@pytest.mark.filterwarnings("ignore:No text of the survey repeats:UserWarning")
@pytest.mark.parametrize(("context", "recent"), [(100, 64), (40, 16)])
def test_what_can_be_forgotten_is_printed(run, tmp_path, context, recent):  # noqa: F811
    texts = write_stories(12, tmp_path / "stories.jsonl")
    out = tmp_path / "out"
    code, printed, errors = run(
        "survey", texts, "--metrics", "long", "--context", context, "--out", out
    )
    assert code == 0, errors
    if context == 40:
        assert "No text of the survey repeats earlier text" in errors
    heads = Survey.open(out).key_heads(recent)
    kinds = [head.kind() for head in heads]
    assert f"the first 4 and the last {recent} keys (retrieval), " in printed
    for count in (
        f"{kinds.count('retrieval')} of {len(heads)} key heads need more",
        f" {kinds.count('streaming')} do not (streaming), and {kinds.count('undecided')} are",
    ):
        assert count in printed
    most = max(heads, key=lambda head: head.error.mean)
    assert f"layer {most.layer}, key head {most.key_head}: error {most.error.mean:.3f} (" in printed


def test_texts_too_short_to_forget_are_named(run, tmp_path):  # noqa: F811
    code, printed, errors = run(
        "survey", "the queen danced", "--metrics", "long", "--out", tmp_path
    )
    assert code == 0 and "Key heads" not in printed
    assert "which keys can be forgotten is unknown: The survey has no errors of windows." in errors


@pytest.mark.parametrize(
    ("arguments", "gave", "hint"),
    [
        (["--repeats", 0, 5], "--repeats 0 5 was given.", "pass for example --repeats 100 50."),
        (["a b", "--needles", 3, 2], "--needles 3 2 was", "pass for example --needles 100 16."),
        (["--needles", 3, 16], "No text was given.", "pass files or folders"),
        (["--repeats", 3, 9, "--needles", 3, 9], "Both --needles and --repeats", "pass files"),
        (["--repeats", 3, 500], "500 random tokens", "repeat at most 64 tokens, or pass a larger"),
        (["a b", "--context", 1], "--context 1.", "pass for example --context 128."),
        (["a b", "--seed", -1], "--seed -1.", "pass --seed 0."),
        (["a b", "--metrics", "long", "--context", 9], "metrics", "pass --context 21 or more."),
    ],
)
def test_errors_name_options(run, tmp_path, arguments, gave, hint):  # noqa: F811
    code, _, errors = run("survey", *arguments, "--out", tmp_path)
    assert code == 2 and f"Error: {gave}" in errors and f"Hint: {hint}" in errors


def test_another_setting_names_the_option_of_the_folder(run, tmp_path):  # noqa: F811
    assert run("survey", "the queen danced", "--out", tmp_path)[0] == 0
    code, _, errors = run("survey", "the queen danced", "--context", 7, "--out", tmp_path)
    assert code == 2 and "use the same value, or another folder as --out.\n" in errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["compare"], "OUT and OTHER"), (["compare", "a"], "OUT and OTHER"), (["merge"], "OUT")],
)
def test_a_missing_folder_of_a_survey_is_named(run, arguments, expected):  # noqa: F811
    code, _, errors = run("survey", *arguments)
    count = "1 folder" if len(arguments) == 2 else "0 folders"
    assert code != 0 and f"survey {arguments[0]} got {count}." in errors
    assert f"it takes {expected}, the folders of surveys." in errors


def test_the_effects_of_differences_are_printed(run, tmp_path):  # noqa: F811
    """Between float32 and bfloat16, many differences are sure, and none is large."""
    texts = [str(story(3, number)) for number in range(20)]
    rounded = deepcopy(demo.load())
    rounded.module.bfloat16()
    for model, name in ((demo.load(), "a"), (rounded, "b")):
        clearhead.survey(model, texts, out=tmp_path / name)
    code, printed, said = run("survey", "compare", tmp_path / "a", tmp_path / "b")
    assert code == 0 and "the surveys have dtype 'float32' and 'bfloat16'" in said
    sure = re.search(r"(\d+) of 448 numbers .* 0 of these with an effect of 0\.2 or more", said)
    assert sure and int(sure[1]) > 20
    assert len(re.findall(r", effect -?0\.0\d+ \(-?0\.\d+ to -?0\.\d+\), q ", printed)) == 8


def test_pictures(run, tmp_path):  # noqa: F811
    model = save(planted(), tmp_path / "model", (24, 40))
    pictures, out = draw(tmp_path / "pictures", 3), tmp_path / "out"
    code, printed, errors = run("survey", pictures, "--model", model, "--out", out)
    assert code == 0 and (out / "index.html").exists(), errors
    first, *rows = printed.splitlines()
    assert first.endswith("2 heads, 48 tokens of 3 pictures, 3 x 5 patches.")
    # Equal weights of 16 keys: 44 pairs of patches side by side for 15 queries.
    assert "neighbours  L0H0  0.800  (equal weights: 0.183)" in rows
    assert "on_cls      L0H1  1.000  (equal weights: 0.062)" in rows
    (state,) = (out / "states").iterdir()
    state.unlink()
    code, _, errors = run("survey", "work", out, "--model", model)
    assert code == 0 and state.exists(), errors
    code, _, errors = run("survey", pictures, "--model", model, "--out", out, "--plan")
    assert code != 0 and "a plan is of texts alone" in errors
