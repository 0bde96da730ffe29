"""Run the Python of the README, and compare what it prints."""

import doctest
import importlib
import pkgutil
import re
from importlib import metadata
from pathlib import Path

import torch

import clearhead as ch
from tests.fresh_process import run_program

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_every_block_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in BLOCKS:
        if ">>>" in block:
            test = doctest.DocTestParser().get_doctest(block, names, "README", "README.md", 0)
            result = doctest.DocTestRunner(verbose=False).run(test, clear_globs=False)
            assert result.attempted and not result.failed
            names.update(test.globs)
        else:
            exec(block, names)
    assert len(BLOCKS) == 7
    assert names["seen"][0].entropy.shape == (1, 4, 5)
    assert names["changed"][0].entropy.shape == (2, 8, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"model.html", "out"}


def test_its_commands_exist():
    """Every command of the shell and of the Makefile that the README names."""
    from clearhead_cli import app

    known = {command.callback.__name__ for command in app.registered_commands}
    named = set(re.findall(r"\.venv/bin/clearhead (\w+)", README))
    assert named and named <= known
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_docstring_examples():
    tried = 0
    for found in pkgutil.walk_packages(ch.__path__, "clearhead."):
        module = importlib.import_module(found.name)
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
