"""The numbers rules are made of: how many, which document, where query 0 stands. Each is checked
when the rule is made, and against the sizes when it is asked about."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from ..torch_state import has_values
from .grid import Grid

Ints: TypeAlias = int | Iterable[int] | Tensor
Align: TypeAlias = str | int | Iterable[int] | Tensor | None


FARTHEST = 2**40  # the largest position, count or distance a rule can hold
MOST_SHOWN = 4096  # numbers that a rule prints one by one


def format_numbers(value: object) -> str:
    """Numbers as they are given, in a rule's own words; only counted where there are many, or none
    yet."""
    if isinstance(value, Tensor) and (value.numel() > MOST_SHOWN or value.device.type == "meta"):
        return f"<{'x'.join(map(str, value.shape))} numbers>"
    if isinstance(value, Tensor):
        value = value[0].tolist() if value.dim() == 2 and value.shape[0] == 1 else value.tolist()
    return repr(value)


def symbol(value: object, name: str) -> str:
    return str(value) if isinstance(value, int) else f"{name}[b]"


def tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def as_integers(value: object, rule: str, name: str) -> Tensor:
    numbers = None
    try:
        numbers = (
            value
            if isinstance(value, Tensor)
            else torch.as_tensor(
                tuple(value) if isinstance(value, Iterator) else value, device="cpu"
            )
        )
    except (TypeError, ValueError, RuntimeError):
        pass  # there are no numbers in it; the rule below says what was wanted
    empty = numbers is not None and not numbers.numel()  # torch makes an empty list floating
    if (
        numbers is None
        or numbers.dtype == torch.bool
        or (numbers.is_floating_point() and not empty)
    ):
        given = f"={value!r}" if numbers is None else f" with dtype {numbers.dtype}"
        raise BadType(
            f"{rule} got {name}{given}.",
            f"{name} counts positions or names documents, in whole numbers.",
            "pass integers.",
        )
    numbers = numbers.long()
    if not empty and has_values(numbers):
        for end in (int(numbers.min()), int(numbers.max())):
            if abs(end) > FARTHEST:
                raise too_far(f"{rule} got {name}={end}.")
    return numbers.clone()  # a rule does not change when the caller's tensor does


def too_far(gave: str) -> BadValue:
    return BadValue(
        gave,
        f"positions and counts stay within {FARTHEST}, so that sums of them are exact.",
        "pass a smaller number, or None where it means no limit.",
    )


def as_counts(
    value: object, rule: str, name: str, way_out: str = "flatten it to one dimension."
) -> int | Tensor:
    """How many: an int, or (B,) ints, none negative. `way_out` is of what has more dimensions."""
    number = None if isinstance(value, Tensor) else whole_number(value)
    if number is not None:
        if abs(number) > FARTHEST:
            raise too_far(f"{rule} got {name}={number}.")
        least: int = number
        found: int | Tensor = number
    else:
        numbers = as_integers(value, rule, name)
        if numbers.dim() == 0 and has_values(numbers):
            return as_counts(int(numbers), rule, name, way_out)
        numbers = numbers.reshape(1) if numbers.dim() == 0 else numbers
        if numbers.dim() != 1:
            raise BadValue(
                f"{rule} got {name} of shape {tuple(numbers.shape)}.",
                f"{name} is one number, or one per batch, (B,).",
                way_out,
            )
        least = int(numbers.min()) if has_values(numbers) and numbers.numel() else 0
        found = numbers
    if least < 0:
        raise BadValue(
            f"{rule} got {name}={least}.",
            f"{name} says how many, so it is 0 or more.",
            "pass a number that is not negative.",
        )
    return found


def as_ids(value: object, name: str) -> Tensor:
    ids = as_integers(value, "documents", name)
    if ids.dim() not in (1, 2):
        raise BadValue(
            f"documents got {name} of shape {tuple(ids.shape)}.",
            "each position belongs to one document: (T,), or (B, T).",
            "give one id per position.",
        )
    return ids if ids.dim() == 2 else ids.unsqueeze(0)


def as_align(value: object) -> str | int | Tensor | None:
    if value is None:
        return None
    number = None if isinstance(value, Tensor) else whole_number(value)
    if number is not None:
        if abs(number) > FARTHEST:
            raise too_far(f"A rule got align={number}.")
        return number
    if isinstance(value, str):
        if value in ("start", "end"):
            return value
        raise BadValue(
            f"align={value!r} is not a corner.",
            "align is 'start' (query 0 stands at key 0), 'end' (the last query stands at the last "
            "key), or the position of query 0.",
            "pass align='start', align='end' or a whole number.",
        )
    numbers = as_integers(value, "a rule", "align")
    one = numbers.dim() == 0 and has_values(numbers)
    return int(numbers) if one else numbers.reshape(-1)


def shared_offset(align: object, grid: Grid) -> int | None:
    """Where query 0 stands among the keys; None if that differs from batch to batch."""
    if isinstance(align, Tensor):
        return None
    if align is None or align == "start":
        return 0
    return grid.Tk - grid.Tq if align == "end" else int(align)  # type: ignore[call-overload]  # checked to be whole when it was made


def offset_of_batch(align: object, grid: Grid, b: Tensor) -> int | Tensor:
    """The same for batch `b`."""
    first = shared_offset(align, grid)
    return batch_value(align, b) if first is None else first


def format_offset(align: object) -> str:
    if align is None or align == "start" or (isinstance(align, int) and align == 0):
        return ""
    if isinstance(align, int):
        return f" + {align}" if align > 0 else f" - {-align}"
    return " + Tk - Tq" if align == "end" else " + start[b]"


def query_positions(align: object, grid: Grid, device: torch.device | None) -> Tensor:
    """The position of each query among the keys, (B|1, 1, Tq)."""
    q = torch.arange(grid.Tq, device=device).reshape(1, 1, -1)
    if isinstance(align, Tensor):
        return q + to_device(align, device).reshape(-1, 1, 1)
    return q + offset_of_batch(align, grid, q)


def to_device(x: Tensor, device: torch.device | None) -> Tensor:
    """What a rule holds, on this device. Raises `BadValue` for a meta tensor wanted elsewhere."""
    if x.device.type == "meta" and (device is None or device.type != "meta"):
        raise BadValue(
            f"A rule holds a meta tensor of shape {tuple(x.shape)}.",
            "meta tensors have shapes and no numbers to compute with.",
            "make the rule of numbers that are there; only attention(...) of meta tensors needs "
            "none.",
        )
    return x.to(device)


def batch_value(value: object, b: Tensor) -> int | Tensor:
    """The number that holds for batch `b`."""
    if not isinstance(value, Tensor):
        return int(value)  # type: ignore[call-overload]  # checked to be whole when the rule was made
    return to_device(value, b.device)[b if value.shape[0] > 1 else torch.zeros_like(b)]


def batch_column(value: object, device: torch.device | None) -> Tensor:
    """The same as (B|1, 1, 1)."""
    if isinstance(value, Tensor):
        return to_device(value, device).reshape(-1, 1, 1)
    return torch.tensor([value], device=device).reshape(-1, 1, 1)


def fixed_batch(value: object) -> dict[str, int]:
    if isinstance(value, Tensor) and value.shape[0] != 1:
        return {"B": value.shape[0]}
    return {}


def as_4d(x: Tensor) -> Tensor:
    """The same with leading dimensions of size 1, (B, H, Tq, Tk)."""
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def check_broadcasts(x: Tensor, grid: Grid, gave: str, what: str, example: str) -> None:
    wanted = (grid.B, grid.H, grid.Tq, grid.Tk)
    if any(s != 1 and s != w for s, w in zip(as_4d(x).shape, wanted, strict=True)):
        raise BadValue(
            f"{gave} shape {tuple(x.shape)}; the question has (B, H, Tq, Tk) = {wanted}.",
            f"{what} broadcasts to (B, H, Tq, Tk).",
            f"give each dimension its size or 1; {example}.",
        )


def check_batch(rule: object, value: object, grid: Grid) -> None:
    # One by one: in a graph for any B, a size is no number that a tuple could hold.
    if isinstance(value, Tensor) and value.shape[0] != 1 and value.shape[0] != grid.B:
        raise BadValue(
            f"{rule!r} speaks of {value.shape[0]} batches, and there are B={grid.B}.",
            "a number per batch comes once for each batch.",
            f"pass one number, or {grid.B} of them.",
        )


def check_align(rule: object, align: object, grid: Grid, name: str) -> None:
    """`name` is what the rule is called; the numbers it has, if any, stand in its own words."""
    if align is None and grid.Tq != grid.Tk:
        numbers = repr(rule)[len(name) + 1 : -1]
        call = f"{name}({numbers}{', ' if numbers else ''}align={{}})"
        raise BadValue(
            f"{rule!r} was asked about Tq={grid.Tq} queries and Tk={grid.Tk} keys.",
            "when the numbers differ, the corner must be named: where do the queries stand?",
            f"{call.format(repr('end'))} if the last query sees the last key (a cache), "
            f"{call.format(repr('start'))} if the first query stands at the first key "
            "(torch's is_causal).",
        )
