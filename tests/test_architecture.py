"""The house: a room imports only the rooms below it, and files import each other in no circle.

A room is a folder or a file of `src/clearhead`. Inside `engines/` and `views/` siblings do not
import each other either, but for what they share. Run this file to print what each room imports.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

HOUSE = Path(__file__).parents[1] / "src" / "clearhead"

# From the top down.
ROOMS = (
    "notebook",
    "serve",
    "report",
    "storyteller",
    "bench",
    "hf",
    "nn",
    "distributed",
    "api",
    "views",
    "testing",
    "engines",
    "stats",
    "problem",
    "masks",
    "results",
    "torch_state",
    "errors",
)
FACE = {"__init__", "__main__"}
APART = {"engines", "views"}  # whose parts do not import each other
CHOOSES = ("engines", "choice")
SHARED = {
    ("engines", "engine"),
    ("engines", "nonfinite"),
    ("engines", "operators"),
    ("engines", "sdpa_backends"),
    ("views", "colours"),
    ("views", "escape"),
    ("views", "format"),
    ("views", "panels"),
    ("views", "png"),
}


def parts(path: Path) -> tuple[str, ...]:
    """Where a file stands in the house: ("masks", "parse"); a folder's face is the folder."""
    return tuple(p for p in path.relative_to(HOUSE).with_suffix("").parts if p != "__init__")


def imports(path: Path) -> set[tuple[str, ...]]:
    """The files that a file imports, as `parts`."""
    here = path.relative_to(HOUSE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(a.name.split(".")[1:]) for a in node.names if a.name[:9] == "clearhead"}
        if isinstance(node, ast.ImportFrom) and (node.level or node.module == "clearhead"):
            base = here[: len(here) - node.level] if node.level else ()
            module = tuple((node.module or "").split(".")) if node.level and node.module else ()
            found |= {(*base, *module, a.name) for a in node.names}
    return {_file(target) for target in found} - {()}


def _file(target: tuple[str, ...]) -> tuple[str, ...]:
    """The file in which a name stands: the name itself where it is a file or a folder."""
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
                if target[0] in ROOMS and ROOMS.index(target[0]) <= ROOMS.index(mine[0]):
                    wrong.append(f"{line}, which stands above it")
            elif mine[0] in APART and mine != CHOOSES and len(mine) > 1 and len(target) > 1:
                if target[1] != mine[1] and target[:2] not in SHARED:
                    wrong.append(f"{line}, its sibling")
    return wrong


def circle(files: Iterable[Path]) -> list[tuple[str, ...]]:
    """A circle of files that import each other, or nothing."""
    graph = {parts(path): imports(path) - {parts(path)} for path in files}
    done: set[tuple[str, ...]] = set()

    def search(file: tuple[str, ...], way: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        if file in way:
            return [*way[way.index(file) :], file]
        if file in done or file not in graph:
            return []
        for target in sorted(graph[file]):
            # A folder's face hands on the names of its files, so its files do not count it.
            if target != file[: len(target)] and (found := search(target, [*way, file])):
                return found
        done.add(file)
        return []

    return next((found for file in sorted(graph) if (found := search(file, []))), [])


def test_every_room_has_its_place():
    assert {parts(p)[0] for p in HOUSE.rglob("*.py") if parts(p)} - FACE == set(ROOMS)


def test_rooms_import_only_rooms_below():
    assert not wrong_imports(), "\n".join(wrong_imports())


def test_no_circle_between_files():
    found = circle(HOUSE.rglob("*.py"))
    assert not found, " -> ".join("/".join(file) for file in found)


def test_the_rules_can_fail(tmp_path, monkeypatch):
    for file, text in {
        "errors.py": "from .api.attention import attention\n",
        "engines/reference.py": "from .tiled import Tiled\n",
        "engines/tiled.py": "",
        "masks/__init__.py": "from .mask import Mask\n",
        "masks/mask.py": "from .values import start\n",
        "masks/values.py": "def start():\n    from . import mask\n",
        "api/attention.py": "",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setitem(globals(), "HOUSE", tmp_path)
    assert wrong_imports() == [
        "engines/reference imports engines/tiled, its sibling",
        "errors imports api/attention, which stands above it",
    ]
    assert circle(tmp_path.rglob("*.py")) == [
        ("masks", "mask"),
        ("masks", "values"),
        ("masks", "mask"),
    ]


def test_contributing_shows_this_tree():
    text = (HOUSE.parents[1] / "CONTRIBUTING.md").read_text()
    tree = re.search(r"    src/clearhead/\n((?:      .*\n)+)", text)
    assert tree is not None
    shown = re.findall(r"^      (\w+)(?:/|\.py) {2,}\S", tree[1], re.MULTILINE)
    assert shown == ["__init__", *ROOMS]


def test_tests_mirror_the_house():
    tests = Path(__file__).parent
    folders = {p.parent.relative_to(tests) for p in tests.rglob("test_*.py")}
    folders -= {Path("cli"), Path("properties")}  # of src/clearhead_cli; of several packages
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


if __name__ == "__main__":
    for room in ROOMS:
        files = [p for p in HOUSE.rglob("*.py") if parts(p)[:1] == (room,)]
        below = {target[0] for p in files for target in imports(p)} - {room}
        print(f"{room:12}", *sorted(below, key=ROOMS.index))
