"""The rings of the tests, and what every test begins with.

*unit* holds the tests of the core, which need torch alone: those of the folders and files in UNIT
that are not marked `outside` (more than torch is needed) or `slow`. `pytest -m unit` imports no
other file, and fails a test that starts a process or imports a library of OUTSIDE. *all* holds
every test that is not slow.

Small tensors gain nothing from threads, and on a busy machine they lose much. What torch compiles
is kept apart from what others compile, perhaps for another version of the core. A test draws the
same numbers whatever ran before it, so what failed once fails again.
"""

import atexit
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
# What tools write to the root of the tree, beside names that begin with a dot.
OF_TOOLS = {"build", "dist", "out"}
UNIT = {*("core", "nn", "models"), *("test_architecture.py", "test_errors.py", "test_mutations.py")}
BEFORE = pytest.StashKey[set[str]]()
OUTSIDE = {"transformers", "jax", "onnxruntime", "matplotlib", "playwright"}
ALL_OUTSIDE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.outside\b", re.MULTILINE)

torch.set_num_threads(1)
if "PYTEST_XDIST_WORKER" not in os.environ:  # else it is inherited
    _compiled = tempfile.mkdtemp(prefix="clearhead-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled

# Property tests repeat the same cases each time; `make slow` draws many others. A busy machine may
# take long for a case.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", UNTIMED, max_examples=50, derandomize=True)
settings.register_profile("fresh", UNTIMED, max_examples=500, database=None)
settings.load_profile("fixed")

# Python's collector visits every object of torch and of thousands of tests again and again while
# these are created. They stay to the end, so it is off meanwhile, and skips them afterwards.
gc.disable()


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """Where tests begin that count seeds up themselves: at the one of `make slow SEED=...`."""
    return int(request.config.getoption("--hypothesis-seed") or 0)


def only_unit(config: pytest.Config) -> bool:
    return config.option.markexpr == "unit"


def pytest_configure(config: pytest.Config) -> None:
    # numpy, with which Triton's interpreter computes, warns of what a GPU does silently.
    if os.environ.get("TRITON_INTERPRET") == "1":
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
        prepare_language_once()


def prepare_language_once() -> None:
    """Triton's interpreter replaces the functions of its language at each call of a function within
    a kernel, which takes a third of the time; the first call from a file is enough."""
    from triton.runtime import interpreter

    prepared: set[int] = set()

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        if id(self.fn.__globals__) not in prepared:
            prepared.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **keywords)

    interpreter.InterpretedFunction.__call__ = call


def entries() -> set[str]:
    """The names in the root of the tree, empty folders too, which git does not show."""
    names = {path.name for path in TESTS.parent.iterdir()} - OF_TOOLS
    return {name for name in names if not name.startswith(".")}


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[BEFORE] = entries()


def pytest_sessionfinish(session: pytest.Session) -> None:
    left = sorted(entries() - session.stash[BEFORE])
    if left and "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(f"the tests left {', '.join(left)} in the tree", returncode=1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what has no unit test, so that its imports cost nothing."""
    if not only_unit(config) or collection_path == TESTS or TESTS not in collection_path.parents:
        return None
    if collection_path.relative_to(TESTS).parts[0] not in UNIT:
        return True
    is_file = collection_path.suffix == ".py"
    return (is_file and bool(ALL_OUTSIDE.search(collection_path.read_text()))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    imported = OUTSIDE & sys.modules.keys()
    assert not (only_unit(config) and imported), f"a file of unit tests imports {imported}"
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if item.path.relative_to(TESTS).parts[0] in UNIT and not marks & {"outside", "slow"}:
            item.add_marker("unit")
    items.sort(key=limit, reverse=True)  # so that no long test runs alone at the end


def limit(item: pytest.Item) -> float:
    """The seconds that a test has asked for; 0 for the usual limit."""
    mark = item.get_closest_marker("timeout")
    return mark.args[0] if mark else 0


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def needs_torch_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """A unit test starts no process, and imports none of the libraries of OUTSIDE."""
    if not only_unit(request.config):
        yield
        return
    before = OUTSIDE & sys.modules.keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse_process)
        yield
    imported = (OUTSIDE & sys.modules.keys()) - before
    assert not imported, f"a unit test imports {imported}; mark it `outside`"


def refuse_process(*_: object, **__: object) -> None:
    raise AssertionError("a unit test starts a process; mark it `outside`")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
