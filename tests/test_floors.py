"""The house has floors, and a room imports only rooms on lower floors.

Rooms on one floor never import each other. Inside `engines/` and `views/` siblings do not either,
but for what they share (`engine`; `sheet`, `labels`); `cli/`, `masks/`, `nn/`,
`hf/`, `stats/`, `report/`, `storyteller/`, `bench/` are one room in several files.
Run this file to print the floors that CONTRIBUTING shows.
"""

import ast
import re
from pathlib import Path

HOUSE = Path(__file__).parents[1] / "src" / "clearhead"

FLOORS = [
    {"cli"},
    {"report", "bench"},
    {"lesson", "scaling", "hf", "storyteller"},
    {"nn", "compat", "plan", "watch"},
    {"explain", "seen", "seen_files"},
    {"attend", "testing"},
    {"matrix"},
    {"engines"},
    {"ask", "views", "stats"},
    {"listening", "running"},
    {"problem"},
    {"biases"},
    {"masks", "online", "findings", "saturation"},
    {"intervals", "products", "dropout", "trace", "folder"},
    {"errors", "whole", "traced", "words"},
]
FACE = {"__init__", "__main__"}
ONE_ROOM = {"cli", "masks", "nn", "hf", "stats", "report", "storyteller", "bench"}
SHARED = {
    ("engines", "engine"),
    ("views", "sheet"),
    ("views", "labels"),
}


def room(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[tuple[str, ...]]:
    """What a file imports of clearhead, as paths below the house."""
    here = path.relative_to(HOUSE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(a.name.split(".")[1:]) for a in node.names if a.name[:9] == "clearhead"}
        if isinstance(node, ast.ImportFrom) and (node.level or node.module == "clearhead"):
            base = here[: len(here) - node.level] if node.level else ()
            module = tuple((node.module or "").split(".")) if node.level and node.module else ()
            found |= {(*base, *module, a.name) for a in node.names}
    return {f for f in found if f}


def test_every_room_has_a_floor():
    rooms = {room(p) for p in HOUSE.rglob("*.py")}
    assert rooms == set().union(*FLOORS) | FACE


def test_rooms_import_only_lower_floors():
    height = {name: len(FLOORS) - i for i, floor in enumerate(FLOORS) for name in floor}
    wrong = []
    for path in HOUSE.rglob("*.py"):
        ours = room(path)
        if ours in FACE:
            continue
        for target in imports(path):
            theirs = target[0]
            if theirs == ours:
                inside = ours in ONE_ROOM or target[:2] in SHARED or path.stem == "__init__"
                if not inside and target[1:2] != path.relative_to(HOUSE).with_suffix("").parts[1:2]:
                    wrong.append(
                        f"{path.relative_to(HOUSE)} imports its sibling {'.'.join(target)}"
                    )
            elif theirs in height and height[theirs] >= height[ours]:
                wrong.append(f"{path.relative_to(HOUSE)} imports {'.'.join(target)} from above")
    assert not wrong, "\n".join(wrong)


def test_the_rule_can_fail(tmp_path, monkeypatch):
    (tmp_path / "errors.py").write_text("from .attend import attention\n")
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "steps.py").write_text("from .tiled import Tiled\n")
    monkeypatch.setitem(globals(), "HOUSE", tmp_path)
    try:
        test_rooms_import_only_lower_floors()
    except AssertionError as error:
        assert "errors.py imports attend" in str(error) and "sibling engines.tiled" in str(error)
    else:
        raise AssertionError("two wrong imports were not found")


def test_contributing_shows_this_map():
    shown, floor = set(), 0
    for line in (HOUSE.parents[1] / "CONTRIBUTING.md").read_text().splitlines():
        if match := re.fullmatch(r"    ( ?\d+|  )  (\w+) {2,}\S.*", line):
            floor = int(match[1]) if match[1].strip() else floor
            shown.add((floor, match[2]))
    assert shown == {(len(FLOORS) - i, r) for i, floor in enumerate(FLOORS) for r in floor}


def test_nothing_is_called_utils():
    assert not [p for p in HOUSE.rglob("*") if p.stem in ("utils", "common", "helpers", "misc")]


if __name__ == "__main__":
    for i, floor in enumerate(FLOORS):
        print(f"{len(FLOORS) - i:>2}  {'  '.join(sorted(floor))}")
