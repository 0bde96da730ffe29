"""Apply one edit at every layer, head or position of a run: the groups of edits of `effects`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..errors import BadValue
from .edits import Edit, path
from .estimate import UneditedCall
from .layers import is_selected

AXES = ("layers", "heads", "positions")


def sweep(
    edit: Edit, over: Sequence[str], calls: Sequence[UneditedCall]
) -> dict[str, tuple[Edit, ...]]:
    """Return the edit at each combination of the axes `over`, by name: "layer 3 position 7".

    An axis that the edit already restricts has only the values that it names. Raises `BadValue` for
    an unknown axis, for a path, and for an edit that selects no layer.
    """
    axes = tuple(over) if isinstance(over, list | tuple) else ()
    if not axes or not set(axes) <= set(AXES) or len(set(axes)) < len(axes):
        raise BadValue(
            f"effects got over={over!r}.",
            f"over lists one or more of {', '.join(map(repr, AXES))}.",
            'pass for example over=("layers", "positions").',
        )
    if edit.needs_runs:
        raise BadValue(
            f"effects got {edit!r} to apply at each of {', '.join(axes)}.",
            "a path has one sender and one receiver.",
            "pass a dict of names and paths, one for each sender.",
        )
    by_layer: dict[int, list[UneditedCall]] = {}
    for call in calls:
        if is_selected(edit.layers, call.site.layer, call.site.module):
            by_layer.setdefault(call.site.layer, []).append(call)
    if not by_layer:
        raise BadValue(
            f"{edit!r} selects no layer.",
            f"the model has layers 0 to {max(call.site.layer for call in calls)}.",
            "change its layers=, or leave them out.",
        )
    parts: list[tuple[dict[str, Any], list[UneditedCall]]] = [
        ({"layers": [layer]}, of_layer) for layer, of_layer in sorted(by_layer.items())
    ]
    if "layers" not in axes:
        parts = [({}, [call for of_layer in by_layer.values() for call in of_layer])]
    groups: dict[str, tuple[Edit, ...]] = {}
    for layer, of_part in parts:
        values: list[list[dict[str, Any]]] = [[layer]]
        if "heads" in axes:
            heads = {h for call in of_part for h in edit.heads_of(call.problem)}
            values.append([{"heads": [h]} for h in sorted(heads)])
        if "positions" in axes:
            values.append([{"positions": [p]} for p in _positions(edit, of_part)])
        for combination in product(*values):
            where = {axis: value for one in combination for axis, value in one.items()}
            name = " ".join(f"{axis[:-1]} {value[0]}" for axis, value in where.items())
            groups[name] = (replace(edit, **where),)
    return groups


def _positions(edit: Edit, calls: Sequence[UneditedCall]) -> Sequence[int]:
    if edit.positions is not None:
        return edit.positions
    return sorted({p for call in calls for p in edit.positions_in(call.problem, call.site)})


def site_of(group: Sequence[Edit]) -> dict[str, Any]:
    """Return the layer, head and position to which all edits of a group are limited.

    That of a path is its sender's. Numbers that count from the end are left out.
    """
    edits = [edit.sender if isinstance(edit, path) else edit for edit in group]
    site = {}
    for axis in AXES:
        named = {getattr(edit, axis) for edit in edits}
        if len(named) == 1 and (one := named.pop()) and len(one) == 1:
            if isinstance(one[0], int) and one[0] >= 0:
                site[axis[:-1]] = one[0]
    return site
