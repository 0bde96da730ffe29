"""What every view draws: the sheets of a step, one matrix for each head, with its labels."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from ..results.trace import AXES, Step, Trace
from .escape import visible

# Viridis at five points (Smith & van der Walt 2015); between them colours are mixed.
VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))

PLURAL = {"query": "queries"}


@dataclass(frozen=True, eq=False)
class Sheet:
    """One matrix, in float64 on the CPU. Its axes are named by the letters `down` and `across`.

    `rows` and `columns` are the tokens along them, None where there are only positions. `blocked`
    marks the cells that the mask (or a score of -inf) leaves without weight. `first` holds the
    numbers of the first row and column.
    """

    title: str
    down: str
    across: str
    rows: list[str] | None
    columns: list[str] | None
    values: Tensor
    blocked: Tensor
    first: tuple[int, int] = (0, 0)


def sheets(trace: Trace, step: Step, heads: Sequence[int] | None = None) -> list[Sheet]:
    """The sheets of a step of batch 0, one for each query head in `heads` (None means all).

    A step of key heads gives each key head that those query heads read; a step without heads gives
    one sheet; a step without numbers none. Raises `BadValue` for a head that is not there.
    """
    chosen, group = choose_heads(trace, heads), _group(trace)
    letters, tensor = step.axes.split(), step.tensor.detach().cpu()
    if not tensor.numel():
        return []
    blocked = _blocked(trace, step)
    if "b" in letters:
        at = letters.index("b")
        tensor, blocked = tensor.select(at, 0), blocked.select(at, 0)
        letters.remove("b")
    lead = next((letter for letter in letters if letter in "hg"), "")
    if not lead:
        return [_sheet(trace, "", letters, tensor, blocked)]
    at = letters.index(lead)
    letters.remove(lead)
    which = sorted({head // group for head in chosen}) if lead == "g" else chosen
    return [
        _sheet(
            trace,
            _title(trace, lead, i, group, step.shape[step.axes.split().index(lead)]),
            letters,
            tensor.select(at, i),
            blocked.select(at, i),
        )
        for i in which
    ]


def choose_heads(trace: Trace, heads: Sequence[int] | None) -> list[int]:
    """The query heads asked for, None meaning all. Raises `BadValue` for one that is not there."""
    count = trace.size("h") or 1
    if heads is None:
        return list(range(count))
    if not isinstance(heads, Iterable):
        raise BadType(
            f"heads={heads!r}.",
            "heads are the numbers of those to show, in a list; None means all.",
            f"pass heads=[{heads!r}].",
        )
    chosen = []
    for head in heads:
        number = whole_number(head)
        if number is None or not -count <= number < count:
            raise BadValue(
                f"Head {head!r} was asked for.",
                f"this trace has {count} query head{'s' * (count != 1)}, counted from 0.",
                f"ask for a head from 0 to {count - 1}, or for all of them.",
            )
        chosen.append(number % count)
    return chosen


def span(found: list[Sheet]) -> tuple[float, float]:
    """The range of the finite numbers on some sheets, 0 among them."""
    numbers = [0.0, *(x for sheet in found for x in sheet.values.flatten().tolist())]
    finite = [x for x in numbers if math.isfinite(x)]
    return min(finite), max(finite)


def counted(size: int, letter: str) -> str:
    """The size and the name of an axis, as one says it.

    >>> counted(5, "q"), counted(1, "k")
    ('5 queries', '1 key')
    """
    name = AXES.get(letter, letter)
    return f"{size} {name if size == 1 else PLURAL.get(name, name + 's')}"


def number(x: float, decimals: int) -> str:
    """A number as one writes it on a page.

    >>> number(-0.00001, 4), number(float("-inf"), 4), number(2.5e9, 2)
    ('0.0000', '−∞', '2.50e+09')
    """
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    text = f"{x:.{decimals}e}" if abs(x) >= 1e6 else f"{x:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text


def ends(size: int, most: int) -> list[int | None]:
    """Positions 0 to size - 1, or the first and the last of them around a None.

    >>> ends(3, 4), ends(9, 4)
    ([0, 1, 2], [0, 1, None, 7, 8])
    """
    if size <= most:
        return list(range(size))
    first = (most + 1) // 2
    return [*range(first), None, *range(size - most + first, size)]


def evenly(size: int, most: int) -> list[int]:
    """At most `most` positions (two or more), evenly spaced, with both ends.

    >>> evenly(3, 4), evenly(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if size <= most:
        return list(range(size))
    return [round(i * (size - 1) / (most - 1)) for i in range(most)]


def _sheet(trace: Trace, title: str, letters: list[str], tensor: Tensor, blocked: Tensor) -> Sheet:
    # A lone row of numbers stands upright, so that its labels stay beside it.
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
    return Sheet(title, down, across, rows, columns, tensor.double(), blocked, first)


def _tokens(trace: Trace, letter: str, size: int) -> list[str] | None:
    given = {"q": trace.queries, "k": trace.keys}.get(letter)
    return [visible(token) for token in given] if given and len(given) == size else None


def _blocked(trace: Trace, step: Step) -> Tensor:
    """Where `step` holds nothing because the mask said so: from the step `masked` onwards."""
    names = trace.names
    if "masked" in trace and names.index("masked") < names.index(step.name):
        masked = trace.step("masked")
        if masked.axes == step.axes:
            return masked.tensor.detach().cpu() == -math.inf
    return step.tensor.detach().cpu() == -math.inf


def _group(trace: Trace) -> int:
    return max(1, (trace.size("h") or 1) // (trace.size("g") or trace.size("h") or 1))


def _title(trace: Trace, letter: str, i: int, group: int, size: int) -> str:
    if letter == "h" or group == 1:
        return f"head {trace.number('h', i)}" if size > 1 or trace.first else ""
    between = "and" if group == 2 else "to"
    readers = f"heads {i * group} {between} {(i + 1) * group - 1}"
    return f"key head {i}, read by {readers}" if size > 1 else f"the key head, read by {readers}"
