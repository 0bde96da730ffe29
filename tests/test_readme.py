"""Run the Python of the README, and compare what it prints."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import clearhead as ch
from docs import witch
from tests.fresh_process import run_program

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", README, re.DOTALL)
MOST_WORDS = 700


def test_its_code_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block, output in BLOCKS:
        exec(block, names)
        printed = capsys.readouterr().out
        assert not output or printed == output
    assert len(BLOCKS) == 4 and BLOCKS[0][1]
    assert names["changed"].shape == (1, 14, 286)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_its_first_picture_is_what_the_code_draws():
    """`python -m docs.witch` writes it. Its numbers are also in the alt text."""
    assert witch.PICTURE.read_text("utf-8") == witch.draw()
    *_, weight, chances = witch.measure()
    caption = re.search(r"!\[(.*?)\]\(docs/pictures/witch.svg\)", README)[1]
    numbers = [f"{weight:.3f}", *(f"{100 * x:.0f}" for x in chances[-1][1:])]
    assert re.findall(r"\d+(?:\.\d+)?", caption)[2:] == numbers  # after head and layer


def test_it_is_short_and_results_come_before_limits():
    assert len(README.split()) <= MOST_WORDS
    order = ["witch.svg", "```python", "**Three numbers**", "make look", "## Who", "## Limits"]
    places = [README.index(part) for part in order]
    assert places == sorted(places)


def test_its_numbers_are_those_of_the_benchmarks():
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    for row in (
        "| forward of 4096 tokens | 1.19 | 1.77 |",
        '| `"entropy"` | 1.42 | 1.10 | 1.00 | 1.01 |',
        "| `attention` again | 0.99 | 1.00 | 0.99 | 1.02 |",  # the error
        "| memory of the report, at its peak | 1.2 GB |",
        "| memory that 64 attention matrices would need | 275 GB |",
        "| forward of 64 tokens | 1.00 | 1.04 |",
    ):
        assert row in benchmarks
    for number in ("**1 %**", "**1.2 GB**", "275 GB", "**1.77 times**", "1.19"):
        assert number in README


def test_its_commands_exist():
    """Every command of the shell and of the Makefile that the README names."""
    from clearhead_cli import app

    known = {command.callback.__name__ for command in app.registered_commands}
    named = set(re.findall(r"^ +(?:\.venv/bin/)?clearhead (\w+)", README, re.MULTILINE))
    assert named <= known
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_its_extras_exist():
    known = set(metadata.metadata("clearhead").get_all("Provides-Extra"))
    named = re.findall(r"pip install '\.\[([\w,]+)\]'", README)
    assert named and {extra for extras in named for extra in extras.split(",")} <= known


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_two_commands_run(tmp_path):
    """As the Makefile has them, in this environment and not in `.venv`; of the tests one runs."""
    targets = re.findall(r"^ {4}make (\w+)", README, re.MULTILINE)
    assert targets == ["look", "test"]
    outer = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    one = {"PYTEST_ADDOPTS": f"{__file__}::{test_the_version_is_one.__name__}"}
    printed = {}
    for target, folder in zip(targets, (tmp_path, ROOT), strict=True):
        command = ["make", "-f", ROOT / "Makefile", "-o", f".venv/{target}", target]
        command.append(f"BIN={Path(sys.executable).parent}")
        done = subprocess.run(
            command, cwd=folder, env=outer | one, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed[target] = done.stdout
    assert "storyteller: 2 layers, 16 heads" in printed["look"]
    written = {path.name for path in tmp_path.glob("out/*")}
    assert written >= {"storyteller.html", "storyteller-maps.png"}
    assert "1 passed" in printed["test"]


def test_docstring_examples():
    tried = 0
    for found in pkgutil.walk_packages(ch.__path__, "clearhead."):
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as missing:
            assert missing.name == "kvpress", found.name  # the only one that no test installs
            continue
        result = doctest.testmod(module)
        assert not result.failed, found.name
        tried += result.attempted
    assert tried


def test_importing_is_light():
    """Optional parts are imported when they are used, not before."""
    script = (
        "import sys, clearhead; heavy = set(sys.modules) & "
        "{'transformers', 'matplotlib', 'jax', 'onnx', 'torch._dynamo', "
        "'torch.distributed.tensor', 'rich', 'networkx', 'clearhead.views'}; "
        "assert not heavy, heavy"
    )
    done = run_program(script)
    assert done.returncode == 0, done.stderr


def test_the_version_is_one():
    assert metadata.version("clearhead") == ch.__version__
