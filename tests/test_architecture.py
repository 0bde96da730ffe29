"""Check the structure: a room imports only rooms below it, and no files import each other.

A room is a folder or a file of `src/clearhead`, of `core/`, or of `models/`. Inside `core/engines/`
and `views/` siblings do not import each other either, except for shared files. Run this file to
print the map: the imports of each room, its level, and its lines of code.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "clearhead"

# The rooms from the top down, with the most lines of code that each may have. Raise a number only
# with a reason in the commit.
HOUSE = {
    "views": 3590,
    "corpus": 4570,
    "demo": 360,
    "models": 9080,
    "hf": 2080,
    "distributed": 2490,
    "nn": 1020,
    "core": 9880,
}
WINGS = {  # the rooms inside a room, from the top down
    "core": (
        "functional", "engines", "stats", "problem", "masks", "files", "formatting", "torch_state",
        "errors",
    ),
    "models": (
        "report", "why", "roles", "effects", "monitor", "inspect", "weights", "follow", "progress",
    ),
}  # fmt: skip
MOST_ENTRIES, MOST_ARROWS = 9, 30  # of the house, and of each wing
ENTRY_POINTS = {"__init__", "__main__"}
SEPARATE = {("core", "engines"), ("views",)}  # their parts do not import each other
# Files that choose among the parts, and files that combine them.
CHOOSES = {
    ("core", "engines", "choice"),
    ("core", "engines", "parts"),
    ("views", "cells"),
    ("views", "report_files"),
}
COMBINES = {("views", "serve"), ("views", "notebook")}
SHARED = {
    ("core", "engines", "engine"),
    ("core", "engines", "operators"),
    ("core", "engines", "sdpa_backends"),
    ("core", "engines", "step"),
    ("views", "colours"),
    ("views", "load"),
    ("views", "panels"),
}


def parts(path: Path) -> tuple[str, ...]:
    """Return the path of a file in the package: ("masks", "parse"). An `__init__` is its folder."""
    return tuple(p for p in path.relative_to(PACKAGE).with_suffix("").parts if p != "__init__")


@cache
def imports(path: Path) -> frozenset[tuple[str, ...]]:
    """Return the files that a file imports, as `parts`."""
    own = path.relative_to(PACKAGE).with_suffix("").parts
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {
                tuple(a.name.split(".")[1:]) for a in node.names if a.name[:9] == "clearhead"
            }
        if isinstance(node, ast.ImportFrom) and (node.level or node.module == "clearhead"):
            base = own[: len(own) - node.level] if node.level else ()
            module = tuple((node.module or "").split(".")) if node.level and node.module else ()
            imported |= {(*base, *module, a.name) for a in node.names}
    return frozenset(_file(target) for target in imported) - {()}


def _file(target: tuple[str, ...]) -> tuple[str, ...]:
    """Return the file that defines a name, which may itself be a file or a folder."""
    path = PACKAGE.joinpath(*target)
    return target if path.is_dir() or path.with_suffix(".py").exists() else target[:-1]


def rooms() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the rooms of the house, (), and of each wing, from the top down."""
    return {(): tuple(HOUSE), **{(wing,): names for wing, names in WINGS.items()}}


def wrong_imports() -> list[str]:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        mine = parts(path)
        for target in sorted(imports(path)):
            line = f"{'/'.join(mine)} imports {'/'.join(target)}"
            if any(_is_above(target, mine, *wing) for wing in rooms().items()):
                wrong.append(f"{line}, which is above it")
            elif _are_siblings(mine, target):
                wrong.append(f"{line}, its sibling")
    return wrong


def _is_above(
    target: tuple[str, ...], mine: tuple[str, ...], wing: tuple[str, ...], names: tuple[str, ...]
) -> bool:
    """Is `target` in a room of the wing above that of `mine`?"""
    at = len(wing)
    if mine[:at] != wing or target[:at] != wing or not (mine[at:] and target[at:]):
        return False
    here, there = mine[at], target[at]
    return here in names and there in names and names.index(there) < names.index(here)


def _are_siblings(mine: tuple[str, ...], target: tuple[str, ...]) -> bool:
    """Do the files belong to different parts of a room whose parts are separate?"""
    for room in SEPARATE:
        at = len(room)
        if mine[:at] == target[:at] == room and mine[at:] and target[at:]:
            free = mine[: at + 1] in CHOOSES | COMBINES or target[: at + 1] in SHARED
            return mine[at] != target[at] and not free
    return False


def circle(files: Iterable[Path]) -> list[tuple[str, ...]]:
    """Find a circle of files that import each other, or return []."""
    graph = {parts(path): imports(path) - {parts(path)} for path in files}
    done: set[tuple[str, ...]] = set()

    def search(file: tuple[str, ...], path: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done or file not in graph:
            return []
        for target in sorted(graph[file]):
            # A folder's `__init__` exports the names of its files, so its files may import it.
            if target != file[: len(target)] and (cycle := search(target, [*path, file])):
                return cycle
        done.add(file)
        return []

    return next((cycle for file in sorted(graph) if (cycle := search(file, []))), [])


def arrows(wing: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Return the rooms of the house or a wing that each of its rooms imports."""
    names, at = rooms()[wing], len(wing)
    below: dict[str, set[str]] = {name: set() for name in names}
    for path in PACKAGE.rglob("*.py"):
        mine = parts(path)
        if mine[:at] == wing and mine[at:] and mine[at] in names:
            inside = (x[at] for x in imports(path) if x[:at] == wing and x[at:])
            below[mine[at]] |= {*inside} & {*names} - {mine[at]}
    return below


def levels(wing: tuple[str, ...] = ()) -> dict[str, int]:
    """Return the level of each room: one above the highest room that it imports, from 0."""
    below, level = arrows(wing), dict[str, int]()
    for name in reversed(rooms()[wing]):
        level[name] = max((level[other] + 1 for other in below[name]), default=0)
    return level


def lines_of_code(path: Path) -> int:
    """Count the lines of a file with code, without comments, docstrings and blank lines."""
    text = path.read_text()
    if path.suffix != ".py":
        bare = re.sub(r"//.*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
        return sum(bool(line.strip()) for line in bare.splitlines())
    code: set[int] = set()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout | {tokenize.ENDMARKER}:
            code |= {*range(token.start[0], token.end[0] + 1)}
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, scopes) and ast.get_docstring(node, clean=False) is not None:
            code -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(code)


def code_of(*room: str) -> int:
    files = [p for p in PACKAGE.rglob("*.py") if parts(p)[: len(room)] == room]
    return sum(map(lines_of_code, files))


@pytest.mark.parametrize("wing", [(), ("core",), ("models",)])
def test_every_room_is_listed(wing):
    inside = {parts(p)[len(wing) :] for p in PACKAGE.rglob("*.py") if parts(p)[: len(wing)] == wing}
    assert {x[0] for x in inside if x} - ENTRY_POINTS == set(rooms()[wing])
    assert len(rooms()[wing]) <= MOST_ENTRIES
    assert sum(map(len, arrows(wing).values())) <= MOST_ARROWS


def test_rooms_import_only_rooms_below():
    assert not wrong_imports(), "\n".join(wrong_imports())


def test_no_circle_between_files():
    cycle = circle(PACKAGE.rglob("*.py"))
    assert not cycle, " -> ".join("/".join(file) for file in cycle)


def test_no_room_exceeds_its_budget():
    exceeded = {room: code_of(room) for room, most in HOUSE.items() if code_of(room) > most}
    assert not exceeded


def test_the_rules_can_fail(tmp_path, monkeypatch):
    for file, text in {
        "nn.py": "from .hf import masks\n",
        "hf/masks.py": "",
        "core/errors.py": "from .functional.attention import attention\n",
        "core/engines/reference.py": "from .tiled import Tiled\n",
        "core/engines/tiled.py": "",
        "core/masks/__init__.py": "from .mask import Mask\n",
        "core/masks/mask.py": "from .values import start\n",
        "core/masks/values.py": "def start():\n    from . import mask\n",
        "core/functional/attention.py": "",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert wrong_imports() == [
        "core/engines/reference imports core/engines/tiled, its sibling",
        "core/errors imports core/functional/attention, which is above it",
        "nn imports hf/masks, which is above it",
    ]
    assert circle(tmp_path.rglob("*.py")) == [
        ("core", "masks", "mask"),
        ("core", "masks", "values"),
        ("core", "masks", "mask"),
    ]


def test_code_is_counted_without_comments_and_docstrings(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""Words."""\n\n# words\nx = 1  # one\n\n\ndef f():\n    """Words."""\n    y = """\n"""\n'
    )
    assert lines_of_code(file) == 4
    (script := tmp_path / "a.js").write_text("// words\nlet x = 1; /* words\nwords */\n")
    assert lines_of_code(script) == 1


def test_contributing_shows_this_tree():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = re.search(r"    src/clearhead/\n((?:      .*\n)+)", text)
    assert tree is not None
    listed = re.findall(r"^      (\w+)(?:/|\.py) {2,}\S", tree[1], re.MULTILINE)
    assert listed == ["__init__", *HOUSE]


def test_tests_mirror_the_package():
    tests = Path(__file__).parent
    folders = {p.parent.relative_to(tests) for p in tests.rglob("test_*.py")}
    # the tests of src/clearhead_cli, of bench/, and of several packages
    folders -= {Path("cli"), Path("bench"), Path("properties")}
    assert not [folder for folder in folders if not (PACKAGE / folder).is_dir()]


def test_the_shell_starts_without_the_package():
    """`--help` and `--version` do not import torch: clearhead is imported only in functions."""
    for path in (PACKAGE.parent / "clearhead_cli").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            named = {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and not node.level:
                named = {node.module}
            assert not {name for name in named if name.split(".")[0] in ("clearhead", "torch")}


@pytest.mark.outside  # git lists the files
def test_scripts_name_files_that_exist():
    """A file that moved is also moved in shell scripts, the Makefile, workflows and settings."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    folders = "|".join(sorted({name.split("/")[0] for name in names if "/" in name}))
    path = re.compile(rf"(?<![\w./$-])(?:\$root/|\./)?((?:{folders})/[\w./-]*\w)")
    scripts = [n for n in names if Path(n).suffix in (".sh", ".toml", ".yml", ".yaml")]
    for script in [*scripts, "Makefile", ".ci/run", "CMakeLists.txt"]:
        for name in path.findall((ROOT / script).read_text()):
            assert "node_modules" in name or (ROOT / name).exists(), f"{script} names {name}"


def test_nothing_is_called_utils():
    assert not [p for p in PACKAGE.rglob("*") if p.stem in ("utils", "common", "helpers", "misc")]


def print_map() -> None:
    for wing, names in rooms().items():
        below, level = arrows(wing), levels(wing)
        for name in names:
            imported = " ".join(sorted(below[name], key=names.index))
            lines = code_of(*wing, name)
            print(f"{level[name]:2}  {'/'.join((*wing, name)):18} {lines:6,} lines  {imported}")
        count = sum(map(len, below.values()))
        print(f"{len(names)} entries, {max(level.values()) + 1} levels, {count} arrows\n")
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    endings = (".py", ".js", ".css", ".h", ".cpp")
    code = [p for p in map(ROOT.joinpath, names) if p.suffix in endings and p.is_file()]
    for bundle in (
        "page.js",
        "page.css",
        "survey.js",
        "survey.css",
        "training.js",
        "training.css",
        "widget.js",
    ):  # from page/, where its sources are counted
        code.remove(PACKAGE / "views" / "page" / bundle)
    for top in ("src", "kernels", "page", "bench", "examples", "tests"):
        total = sum(lines_of_code(p) for p in code if p.relative_to(ROOT).parts[0] == top)
        print(f"{total:7,} lines of code in {top}/")


if __name__ == "__main__":
    print_map()
