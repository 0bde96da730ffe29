"""Split a step into panels, which every view draws: one matrix per head, with its labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import BadType, BadValue, as_index, is_iterable
from ..core.formatting import visible
from ..core.functional.trace import Step, Trace


@dataclass(frozen=True, eq=False)
class Panel:
    """One matrix, in float64 on the CPU.

    Attributes:
        down, across: the letters of its axes.
        rows, columns: the tokens along them; None if there are only positions.
        blocked: True for cells without weight, because of the mask or a score of -inf.
        first: the positions of the first row and column.
        is_share: whether the numbers are weights.
        is_part: whether it is a part of a larger matrix.
    """

    title: str
    down: str
    across: str
    rows: list[str] | None
    columns: list[str] | None
    values: Tensor
    blocked: Tensor
    first: tuple[int, int] = (0, 0)
    is_share: bool = False
    is_part: bool = False


def panels(trace: Trace, step: Step, heads: Sequence[int] | None = None) -> list[Panel]:
    """Return the panels of a step of batch 0, one for each query head in `heads` (None means all).

    For a step of key heads, these are the key heads that the query heads read. A step without heads
    has one panel, an empty step none. Raises `BadValue` for a head that does not exist.
    """
    chosen, group = choose_heads(trace, heads), _group(trace)
    letters, tensor = step.axes.split(), step.tensor.detach().cpu()
    if not tensor.numel():
        return []
    blocked = _blocked(trace, step)
    if "b" in letters:
        axis = letters.index("b")
        tensor, blocked = tensor.select(axis, 0), blocked.select(axis, 0)
        letters.remove("b")
    head_axis = next((letter for letter in letters if letter in "hg"), "")
    if not head_axis:
        return [_panel(trace, step, "", letters, tensor, blocked)]
    axis = letters.index(head_axis)
    letters.remove(head_axis)
    count = tensor.shape[axis]
    numbers = sorted({head // group for head in chosen}) if head_axis == "g" else chosen
    titles = (_title(trace, head_axis, i, group, count) for i in numbers)
    parts = ((tensor.select(axis, i), blocked.select(axis, i)) for i in numbers)
    named = zip(titles, parts, strict=True)
    return [_panel(trace, step, title, letters, *part) for title, part in named]


def panel_of(trace: Trace, step: str, head: int, reader: str) -> Panel:
    """Return the panel of one head. Raises `BadValue` for a step without the numbers that `reader`
    needs."""
    drawn = panels(trace, trace.step(step), [head])
    if drawn:
        return drawn[0]
    rule = f"{reader} numbers, and this step has none."
    hint = "explain at least one token of at least one feature."
    raise BadValue(f"The step {step!r} has the shape {trace.step(step).shape}.", rule, hint)


def choose_heads(trace: Trace, heads: Sequence[int] | None) -> list[int]:
    """Return the indices of the query heads in `heads`; None means all.

    Raises `BadValue` for a head that does not exist.
    """
    count = trace.size("h") or 1
    if heads is None:
        return list(range(count))
    if not is_iterable(heads):
        rule = "heads is a list of indices; None means all."
        raise BadType(f"{heads=}.", rule, f"pass heads=[{heads!r}].")
    rule = f"this trace has {count} query head{'s' * (count != 1)}, counted from 0."
    hint = f"pass heads from 0 to {count - 1}, or None for all."
    return [as_index("Head", head, count, rule, hint) for head in heads]


def value_range(drawn: Sequence[Panel]) -> tuple[float, float]:
    """Return the smallest and the largest finite number of some panels, including 0."""
    numbers = [0.0, *(x for panel in drawn for x in panel.values.flatten().tolist())]
    finite = [x for x in numbers if math.isfinite(x)]
    return min(finite), max(finite)


def map_range(drawn: Sequence[Panel]) -> tuple[float, float]:
    """Return the range of maps with few shades: from 0 to the largest number.

    If the numbers are close together, so that all cells would look alike, from the smallest.
    """
    low, high = value_range(drawn)
    values = torch.cat([panel.values[~panel.blocked] for panel in drawn])
    least = float(values.min()) if values.numel() else 0.0
    return (least, high) if high / 2 < least < high else (low, high)


def _panel(
    trace: Trace, step: Step, title: str, letters: list[str], tensor: Tensor, blocked: Tensor
) -> Panel:
    # A vector becomes a column, so that its labels stay beside it.
    while tensor.dim() < 2:
        tensor, blocked, letters = tensor.unsqueeze(-1), blocked.unsqueeze(-1), [*letters, ""]
    while tensor.dim() > 2:
        tensor, blocked, letters = tensor[0], blocked[0], letters[1:]
    down, across = letters[-2:]
    rows, columns = (
        _tokens(trace, letter, size)
        for letter, size in zip(letters[-2:], tensor.shape, strict=True)
    )
    first = trace.number(down, 0), trace.number(across, 0)
    is_share = step.name in ("weights", "dropped")
    is_part = not {down, across}.isdisjoint(trace.first or ())
    return Panel(
        title, down, across, rows, columns, tensor.double(), blocked, first, is_share, is_part
    )


def _tokens(trace: Trace, letter: str, size: int) -> list[str] | None:
    tokens = {"q": trace.queries, "k": trace.keys}.get(letter)
    return [visible(token) for token in tokens] if tokens and len(tokens) == size else None


def _blocked(trace: Trace, step: Step) -> Tensor:
    """Return the cells that the mask blocks, from the step `masked` if it is earlier."""
    names = trace.names
    if "masked" in trace and names.index("masked") < names.index(step.name):
        masked = trace.step("masked")
        if masked.axes == step.axes:
            return masked.tensor.detach().cpu() == -math.inf
    return step.tensor.detach().cpu() == -math.inf


def _group(trace: Trace) -> int:
    """Return the number of query heads that read one key head."""
    return max(1, (trace.size("h") or 1) // (trace.size("g") or trace.size("h") or 1))


def _title(trace: Trace, letter: str, i: int, group: int, count: int) -> str:
    if letter == "h" or group == 1:
        return f"head {trace.number('h', i)}" if count > 1 or trace.first else ""
    between = "and" if group == 2 else "to"
    readers = f"heads {i * group} {between} {(i + 1) * group - 1}"
    return f"key head {i}, read by {readers}" if count > 1 else f"the key head, read by {readers}"
