"""The structure: a room imports only rooms below it, and no two files import each other.

A room is a folder or a file of `src/clearhead`. Inside `engines/` and `explorer/` siblings do not
import each other either, but for what they share. Run this file to print the map: what each room
imports, on which floor it is, and its lines of code.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "clearhead"

# From the top down, each with the most lines of code that it may have. Raise a number only with a
# reason in the commit.
ROOMS = {
    "explorer": 3000,
    "demo": 510,
    "inspection": 5250,  # logit attribution; circuits; recordings as tables and under other names
    "hf": 1630,  # GGUF files, which transformers misreads; output projections; tokens as text
    "distributed": 2530,
    "nn": 1160,
    "functional": 1160,
    "testing": 140,
    "engines": 3290,
    "stats": 1020,  # and numbers per key
    "problem": 790,
    "masks": 1780,
    "trace": 140,
    "results": 140,
    "formatting": 115,  # and tokens, with their spelling in a vocabulary
    "torch_state": 160,
    "errors": 260,
}
MOST_ENTRIES, MOST_FLOORS, MOST_ARROWS = 19, 11, 100
ORDER = tuple(ROOMS)
FACE = {"__init__", "__main__"}
APART = {"engines", "explorer"}  # whose parts do not import each other
# What chooses among the parts, and what brings them together.
CHOOSES = {("engines", "choice"), ("explorer", "cells"), ("explorer", "report_files")}
ABOVE = {("explorer", "serve"), ("explorer", "notebook")}  # they show what their siblings draw
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
    """Where a file is in the package: ("masks", "parse"); a folder's `__init__` is the folder."""
    return tuple(p for p in path.relative_to(HOUSE).with_suffix("").parts if p != "__init__")


def imports(path: Path) -> set[tuple[str, ...]]:
    """The files that a file imports, as `parts`."""
    here = path.relative_to(HOUSE).with_suffix("").parts
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {
                tuple(a.name.split(".")[1:]) for a in node.names if a.name[:9] == "clearhead"
            }
        if isinstance(node, ast.ImportFrom) and (node.level or node.module == "clearhead"):
            base = here[: len(here) - node.level] if node.level else ()
            module = tuple((node.module or "").split(".")) if node.level and node.module else ()
            imported |= {(*base, *module, a.name) for a in node.names}
    return {_file(target) for target in imported} - {()}


def _file(target: tuple[str, ...]) -> tuple[str, ...]:
    """The file that defines a name: the name itself where it is a file or a folder."""
    place = HOUSE.joinpath(*target)
    return target if place.is_dir() or place.with_suffix(".py").exists() else target[:-1]


def wrong_imports() -> list[str]:
    wrong = []
    for path in sorted(HOUSE.rglob("*.py")):
        mine = parts(path)
        if not mine or mine[0] in FACE:
            continue
        for target in sorted(imports(path)):
            line = f"{'/'.join(mine)} imports {'/'.join(target)}"
            if target[0] != mine[0]:
                if target[0] in ORDER and ORDER.index(target[0]) <= ORDER.index(mine[0]):
                    wrong.append(f"{line}, which is above it")
            elif mine[0] in APART and len(mine) > 1 and len(target) > 1:
                free = mine[:2] in CHOOSES | ABOVE or target[:2] in SHARED
                if target[1] != mine[1] and not free:
                    wrong.append(f"{line}, its sibling")
    return wrong


def circle(files: Iterable[Path]) -> list[tuple[str, ...]]:
    """A circle of files that import each other, or nothing."""
    graph = {parts(path): imports(path) - {parts(path)} for path in files}
    done: set[tuple[str, ...]] = set()

    def search(file: tuple[str, ...], path: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done or file not in graph:
            return []
        for target in sorted(graph[file]):
            # A folder's `__init__` hands on the names of its files, so its files do not count it.
            if target != file[: len(target)] and (cycle := search(target, [*path, file])):
                return cycle
        done.add(file)
        return []

    return next((cycle for file in sorted(graph) if (cycle := search(file, []))), [])


def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    below: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in HOUSE.rglob("*.py"):
        if (mine := parts(path)) and mine[0] in ROOMS:
            below[mine[0]] |= {target[0] for target in imports(path)} & ROOMS.keys() - {mine[0]}
    return below


def floors() -> dict[str, int]:
    """The floor of each room: one above the highest room that it imports, from 0."""
    below, floor = arrows(), dict[str, int]()
    for room in reversed(ORDER):
        floor[room] = max((floor[other] + 1 for other in below[room]), default=0)
    return floor


def lines_of_code(path: Path) -> int:
    """The lines of a file that hold code: no comments, docstrings or blank lines."""
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


def code_of(room: str) -> int:
    files = [p for p in HOUSE.rglob("*.py") if parts(p)[:1] == (room,)]
    return sum(map(lines_of_code, files))


def test_every_room_has_its_place():
    entries = {parts(p)[0] for p in HOUSE.rglob("*.py") if parts(p)}
    assert entries - FACE == set(ROOMS)
    assert len(entries | FACE) <= MOST_ENTRIES
    assert max(floors().values()) + 1 <= MOST_FLOORS
    assert sum(map(len, arrows().values())) <= MOST_ARROWS


def test_rooms_import_only_rooms_below():
    assert not wrong_imports(), "\n".join(wrong_imports())


def test_no_circle_between_files():
    cycle = circle(HOUSE.rglob("*.py"))
    assert not cycle, " -> ".join("/".join(file) for file in cycle)


def test_no_room_outgrows_its_budget():
    grown = {room: code_of(room) for room, most in ROOMS.items() if code_of(room) > most}
    assert not grown


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
    monkeypatch.setitem(globals(), "HOUSE", tmp_path)
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
    shown = re.findall(r"^      (\w+)(?:/|\.py) {2,}\S", tree[1], re.MULTILINE)
    assert shown == ["__init__", *ROOMS]


def test_tests_mirror_the_house():
    tests = Path(__file__).parent
    folders = {p.parent.relative_to(tests) for p in tests.rglob("test_*.py")}
    # of src/clearhead_cli, of bench/, and of several packages
    folders -= {Path("cli"), Path("bench"), Path("properties")}
    assert not [folder for folder in folders if not (HOUSE / folder).is_dir()]


def test_the_shell_starts_without_the_house():
    """`--help` and `--version` do not wait for torch: clearhead is imported in functions only."""
    for path in (HOUSE.parent / "clearhead_cli").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            named = {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and not node.level:
                named = {node.module}
            assert not {name for name in named if name.split(".")[0] in ("clearhead", "torch")}


def test_nothing_is_called_utils():
    assert not [p for p in HOUSE.rglob("*") if p.stem in ("utils", "common", "helpers", "misc")]


def print_map() -> None:
    below, floor = arrows(), floors()
    for room in ORDER:
        imported = " ".join(sorted(below[room], key=ORDER.index))
        print(f"{floor[room]:2}  {room:12} {code_of(room):5} lines  {imported}")
    entries, count = len(ROOMS) + len(FACE), sum(map(len, below.values()))
    print(f"{entries} entries, {max(floor.values()) + 1} floors, {count} arrows")
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    endings = (".py", ".js", ".css", ".h", ".cpp")
    code = [p for p in map(ROOT.joinpath, names) if p.suffix in endings and p.is_file()]
    code.remove(HOUSE / "explorer" / "page" / "page.js")  # made from page/
    for top in ("src", "kernels", "page", "bench", "examples", "tests"):
        total = sum(lines_of_code(p) for p in code if p.relative_to(ROOT).parts[0] == top)
        print(f"{total:7,} lines of code in {top}/")


if __name__ == "__main__":
    print_map()
