"""Apply one edit at every layer, head or position of a run, and a path from and to every head: the
groups of edits of `effects`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ...core.errors import BadValue
from ..follow.layers import is_selected
from ..inspect.edits import Edit, path
from .estimate import UneditedCall

AXES = ("layers", "heads", "positions")
RECEIVERS = "receivers"  # the axis of paths


def sweep(
    edit: Edit, over: Sequence[str], calls: Sequence[UneditedCall]
) -> dict[str, tuple[Edit, ...]]:
    """Return the edit at each combination of the axes `over`, by name: "L0H7 position 3".

    An axis that the edit already restricts has only the values that it names. The layers, heads and
    positions of a path are those of its sender. Raises `BadValue` for an unknown axis, for an edit
    that selects no layer, and for a path with several ends on an axis that is not listed.
    """
    axes = tuple(over) if isinstance(over, list | tuple) else ()
    known = (*AXES, RECEIVERS) if isinstance(edit, path) else AXES
    if not axes or not set(axes) <= set(known) or len(set(axes)) < len(axes):
        rule = f"over lists one or more of {', '.join(map(repr, known))}."
        hint = 'pass for example over=("layers", "positions").'
        raise BadValue(f"effects got over={over!r}.", rule, hint)
    if isinstance(edit, path):
        return _paths(edit, axes, calls)
    by_layer: dict[int, list[UneditedCall]] = {}
    for call in calls:
        if is_selected(edit.layers, call.site.layer, call.site.module):
            by_layer.setdefault(call.site.layer, []).append(call)
    if not by_layer:
        rule = f"the model has layers 0 to {max(call.site.layer for call in calls)}."
        hint = "change its layers=, or leave them out."
        raise BadValue(f"{edit!r} selects no layer.", rule, hint)
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
            names = [f"{axis[:-1]} {value[0]}" for axis, value in where.items()]
            if "layers" in where and "heads" in where:
                names[:2] = [f"L{where['layers'][0]}H{where['heads'][0]}"]
            groups[" ".join(names)] = (replace(edit, **where),)
    return groups


def _paths(
    edit: path, axes: tuple[str, ...], calls: Sequence[UneditedCall]
) -> dict[str, tuple[Edit, ...]]:
    """Return the path from each sender to each receiver in a later layer."""
    own = [axis for axis in axes if axis != RECEIVERS]
    senders = sweep(edit.sending, own, calls) if own else {"": (edit.sending,)}
    if RECEIVERS not in axes:
        receivers = [edit.one_receiver()]
    elif edit.receivers is None:
        heads = {call.site.layer: edit.head_count(call.problem) for call in calls}
        receivers = [(layer, h) for layer, count in heads.items() for h in range(count)]
    else:
        receivers = list(edit.receivers)
    paths: dict[str, tuple[Edit, ...]] = {}
    for (name, (sender,)), (layer, head) in product(senders.items(), receivers):
        if all(isinstance(sending, int) and sending < layer for sending in sender.layers or ()):
            one = replace(edit, sender=sender, receiver=(layer, head))
            one.ends()
            paths[f"{name} to L{layer}H{head}".strip()] = (one,)
    if not paths:
        rule = "a head reads what heads of earlier layers write."
        hint = "pass receivers in later layers."
        raise BadValue(f"In {edit!r} no sender is in a layer before a receiver.", rule, hint)
    return paths


def _positions(edit: Edit, calls: Sequence[UneditedCall]) -> Sequence[int]:
    if edit.positions is not None:
        return edit.positions
    return sorted({p for call in calls for p in edit.positions_in(call.problem, call.site)})


def must_have_positions(
    groups: Mapping[str, Sequence[Edit]], calls: Sequence[UneditedCall]
) -> None:
    """Raise `BadValue` for an edit whose positions are not in a text of any call of its layers."""
    every = (edit for group in groups.values() for edit in group)
    for edit in (x.sending if isinstance(x, path) else x for x in every):
        if edit.positions is None:
            continue
        own = [x for x in calls if is_selected(edit.layers, x.site.layer, x.site.module)]
        if own and not any(bool(edit.at_positions(x.problem, x.site).any()) for x in own):
            last = max((p for x in own for p in edit.positions_in(x.problem, x.site)), default=-1)
            gave = f"{edit!r} names positions that its layers do not have."
            hint = f"pass positions from 0 to {last}, or from -{last + 1} to -1 from the end."
            raise BadValue(gave, f"the texts have positions 0 to {last}.", hint)


def site_of(group: Sequence[Edit]) -> dict[str, Any]:
    """Return the layer, head and position to which all edits of a group are limited.

    Those of a path are its sender's, and its receiver is added. Numbers that count from the end are
    left out.
    """
    edits = [edit.sending if isinstance(edit, path) else edit for edit in group]
    site: dict[str, Any] = {}
    for axis in AXES:
        named = {getattr(edit, axis) for edit in edits}
        if len(named) == 1 and (one := named.pop()) and len(one) == 1:
            if isinstance(one[0], int) and one[0] >= 0:
                site[axis[:-1]] = one[0]
    receivers = {edit.one_receiver() if isinstance(edit, path) else None for edit in group}
    if len(receivers) == 1 and (receiver := receivers.pop()) is not None:
        site["receiver"] = receiver
    return site
