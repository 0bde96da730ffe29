"""Check the structure: a module imports only modules below it, and no files import each other.

A module is a folder or a file of `src/clearhead`. Inside `engines/` and `explorer/` siblings do not
import each other either, except for shared files. Run this file to print the map: the imports of
each module, its level, and its lines of code.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "clearhead"

# The modules from the top down, with the most lines of code that each may have. Raise a number only
# with a reason in the commit.
BUDGETS = {
    "explorer": 3470,  # the page of a survey, with vectors and links; what heads carry; weights
    "survey": 4090,  # files that know what they are of; budgets, differences, vectors, mixes
    "demo": 475,  # and where its page begins
    "inspection": 7460,  # coverage, digests of user code, hook names, weights, roles, paths
    "hf": 1905,  # GGUF files, each key and token of which is known or refused; projections; caches
    "distributed": 2610,
    "nn": 1145,
    "functional": 1260,  # a look is finished when read; numbers over ranks; weights alone
    "testing": 140,
    "engines": 4760,  # masked NaN; replays; statistics on a GPU; parts; tiles for a bias
    "stats": 1104,  # and numbers per key, or why they cannot be read; what varies; stored groups
    "problem": 765,
    "masks": 1860,  # and groups of keys by id, stored per stream, for the core; positions of keys
    "trace": 140,
    "files": 190,  # results, and files written in one move
    "formatting": 115,  # and tokens, with their spelling in a vocabulary
    "torch_state": 186,  # autocast; recomputing checkpoints of both kinds
    "errors": 265,  # checks of paths and kinds, once for all calls
}
# The 20th entry is survey/, which nothing else could hold.
MOST_ENTRIES, MOST_LEVELS, MOST_ARROWS = 20, 11, 100
ORDER = tuple(BUDGETS)
ENTRY_POINTS = {"__init__", "__main__"}
SEPARATE = {"engines", "explorer"}  # their parts do not import each other
# Files that choose among the parts, and files that combine them.
CHOOSES = {
    ("engines", "choice"),
    ("engines", "parts"),
    ("explorer", "cells"),
    ("explorer", "report_files"),
}
COMBINES = {("explorer", "serve"), ("explorer", "notebook")}
SHARED = {
    ("engines", "devices"),
    ("engines", "engine"),
    ("engines", "nonfinite"),
    ("engines", "operators"),
    ("engines", "sdpa_backends"),
    ("explorer", "colours"),
    ("explorer", "load"),
    ("explorer", "panels"),
    ("explorer", "png"),
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


def wrong_imports() -> list[str]:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        mine = parts(path)
        if not mine or mine[0] in ENTRY_POINTS:
            continue
        for target in sorted(imports(path)):
            line = f"{'/'.join(mine)} imports {'/'.join(target)}"
            if target[0] != mine[0]:
                if target[0] in ORDER and ORDER.index(target[0]) <= ORDER.index(mine[0]):
                    wrong.append(f"{line}, which is above it")
            elif mine[0] in SEPARATE and len(mine) > 1 and len(target) > 1:
                free = mine[:2] in CHOOSES | COMBINES or target[:2] in SHARED
                if target[1] != mine[1] and not free:
                    wrong.append(f"{line}, its sibling")
    return wrong


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


def arrows() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    below: dict[str, set[str]] = {module: set() for module in BUDGETS}
    for path in PACKAGE.rglob("*.py"):
        if (mine := parts(path)) and mine[0] in BUDGETS:
            below[mine[0]] |= {target[0] for target in imports(path)} & BUDGETS.keys() - {mine[0]}
    return below


def levels() -> dict[str, int]:
    """Return the level of each module: one above the highest module that it imports, from 0."""
    below, level = arrows(), dict[str, int]()
    for module in reversed(ORDER):
        level[module] = max((level[other] + 1 for other in below[module]), default=0)
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


def code_of(module: str) -> int:
    files = [p for p in PACKAGE.rglob("*.py") if parts(p)[:1] == (module,)]
    return sum(map(lines_of_code, files))


def test_every_module_is_listed():
    entries = {parts(p)[0] for p in PACKAGE.rglob("*.py") if parts(p)}
    assert entries - ENTRY_POINTS == set(BUDGETS)
    assert len(entries | ENTRY_POINTS) <= MOST_ENTRIES
    assert max(levels().values()) + 1 <= MOST_LEVELS
    assert sum(map(len, arrows().values())) <= MOST_ARROWS


def test_modules_import_only_modules_below():
    assert not wrong_imports(), "\n".join(wrong_imports())


def test_no_circle_between_files():
    cycle = circle(PACKAGE.rglob("*.py"))
    assert not cycle, " -> ".join("/".join(file) for file in cycle)


def test_no_module_exceeds_its_budget():
    exceeded = {
        module: code_of(module) for module, most in BUDGETS.items() if code_of(module) > most
    }
    assert not exceeded


def test_the_rules_can_fail(tmp_path, monkeypatch):
    for file, text in {
        "errors.py": "from .functional.attention import attention\n",
        "engines/reference.py": "from .tiled import Tiled\n",
        "engines/tiled.py": "",
        "masks/__init__.py": "from .mask import Mask\n",
        "masks/mask.py": "from .values import start\n",
        "masks/values.py": "def start():\n    from . import mask\n",
        "functional/attention.py": "",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert wrong_imports() == [
        "engines/reference imports engines/tiled, its sibling",
        "errors imports functional/attention, which is above it",
    ]
    assert circle(tmp_path.rglob("*.py")) == [
        ("masks", "mask"),
        ("masks", "values"),
        ("masks", "mask"),
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
    assert listed == ["__init__", *BUDGETS]


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


def test_nothing_is_called_utils():
    assert not [p for p in PACKAGE.rglob("*") if p.stem in ("utils", "common", "helpers", "misc")]


def print_map() -> None:
    below, level = arrows(), levels()
    for module in ORDER:
        imported = " ".join(sorted(below[module], key=ORDER.index))
        print(f"{level[module]:2}  {module:12} {code_of(module):5} lines  {imported}")
    entries, count = len(BUDGETS) + len(ENTRY_POINTS), sum(map(len, below.values()))
    print(f"{entries} entries, {max(level.values()) + 1} levels, {count} arrows")
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    endings = (".py", ".js", ".css", ".h", ".cpp")
    code = [p for p in map(ROOT.joinpath, names) if p.suffix in endings and p.is_file()]
    code.remove(PACKAGE / "explorer" / "page" / "page.js")  # made from page/
    for top in ("src", "kernels", "page", "bench", "examples", "tests"):
        total = sum(lines_of_code(p) for p in code if p.relative_to(ROOT).parts[0] == top)
        print(f"{total:7,} lines of code in {top}/")


if __name__ == "__main__":
    print_map()
