"""Check and read the numbers in masks: counts, document ids, and the position of query 0.

A mask checks them once when it is made, and against the sizes of each call.
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import BadType, BadValue, must_be_strided, whole_number
from ..errors.limits import FARTHEST, MOST_SHOWN_VALUES
from ..torch_state import has_values, is_plain, without_repeats
from .grid import Grid

Ints: TypeAlias = int | Iterable[int] | Tensor
Align: TypeAlias = str | int | Iterable[int] | Tensor | None


def format_numbers(value: object) -> str:
    """Write numbers for a repr; only their shape if they are many, or on the meta device."""
    if isinstance(value, Tensor) and (
        value.numel() > MOST_SHOWN_VALUES or value.device.type == "meta"
    ):
        return f"<{'x'.join(map(str, value.shape))} numbers>"
    if isinstance(value, Tensor):
        value = value[0].tolist() if value.dim() == 2 and value.shape[0] == 1 else value.tolist()
    return repr(value)


def symbol(value: object, name: str) -> str:
    """Write a number for a formula, or ``name[b]`` if each batch has its own."""
    return str(value) if isinstance(value, int) else f"{name}[b]"


def as_integers(value: object, rule: str, name: str) -> Tensor:
    if isinstance(value, Tensor):
        must_be_strided(name, value)
        numbers: Tensor | None = value
    else:
        try:
            listed = tuple(value) if isinstance(value, Iterator) else value
            numbers = torch.as_tensor(listed, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            numbers = None
    empty = numbers is not None and not numbers.numel()  # torch makes an empty list floating
    if (
        numbers is None
        or numbers.dtype == torch.bool
        or (numbers.is_floating_point() and not empty)
        or numbers.is_complex()
    ):
        what = f"={value!r}" if numbers is None else f" with dtype {numbers.dtype}"
        why = f"{name} holds counts of positions or ids of documents, which are whole numbers."
        raise BadType(f"{rule} got {name}{what}.", why, "pass integers.")
    numbers = numbers.long()
    if not empty and has_values(numbers):
        for extreme in (int(numbers.min()), int(numbers.max())):
            must_be_near(f"{rule} got {name}", extreme)
    return owned(numbers)


def owned(x: Tensor) -> Tensor:
    """Copy a tensor, so that a mask does not change when the caller's tensor does.

    The copy is not an inference tensor, because torch does not count changes of those.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return x.clone()
    with torch.inference_mode(False):
        return x.clone()


def must_be_near(name: str, number: int) -> int:
    """Return a position or a count. Raises `BadValue` if sums of such numbers are not exact."""
    if abs(number) > FARTHEST:
        rule = f"positions and counts are at most {FARTHEST}, so that their sums are exact."
        hint = "pass a smaller number, or None where it means no limit."
        raise BadValue(f"{name}={number}.", rule, hint)
    return number


def as_counts(
    value: object, rule: str, name: str, hint: str = "flatten it to one dimension."
) -> int | Tensor:
    """Return `value` as an int or as (B,) ints, and check that none is negative.

    `hint` is the hint of the error for a tensor of more dimensions.
    """
    number = None if isinstance(value, Tensor) else whole_number(value)
    if number is not None:
        counts: int | Tensor = must_be_near(f"{rule} got {name}", number)
        least = number
    else:
        numbers = as_integers(value, rule, name)
        if numbers.dim() == 0 and has_values(numbers):
            return as_counts(int(numbers), rule, name, hint)
        numbers = numbers.reshape(1) if numbers.dim() == 0 else numbers
        if numbers.dim() != 1:
            gave = f"{rule} got {name} of shape {tuple(numbers.shape)}."
            raise BadValue(gave, f"{name} is one number, or one per batch, (B,).", hint)
        least = int(numbers.min()) if has_values(numbers) and numbers.numel() else 0
        counts = numbers
    if least < 0:
        gave, why = f"{rule} got {name}={least}.", f"{name} is a count, so it is 0 or more."
        raise BadValue(gave, why, "pass a number that is not negative.")
    return counts


def largest(counts: object) -> int | None:
    """Return the largest of a mask's counts; None without counts, or if they have no values."""
    if isinstance(counts, Tensor):
        return int(counts.max()) if counts.numel() and has_values(counts) else None
    return counts if isinstance(counts, int) else None


def as_ids(value: object, name: str) -> Tensor:
    """Return document ids as (B or 1, T)."""
    ids = as_integers(value, "documents", name)
    if ids.dim() not in (1, 2):
        rule = "each position belongs to one document: (T,), or (B, T)."
        hint = "pass one id per position."
        raise BadValue(f"documents got {name} of shape {tuple(ids.shape)}.", rule, hint)
    return ids if ids.dim() == 2 else ids.unsqueeze(0)


def as_align(value: object) -> str | int | Tensor | None:
    """Return an alignment: "start", "end", None, or query 0's position, an int or (B,) ints."""
    if value is None:
        return None
    number = None if isinstance(value, Tensor) else whole_number(value)
    if number is not None:
        return must_be_near("A mask got align", number)
    if isinstance(value, str):
        if value in ("start", "end"):
            return value
        rule = "align is 'start' (query 0 at key 0), 'end' (last query at last key) or a position."
        hint = "pass align='start', align='end' or a whole number."
        raise BadValue(f"align={value!r} is unknown.", rule, hint)
    numbers = as_integers(value, "a mask", "align")
    single = numbers.dim() == 0 and has_values(numbers)
    return int(numbers) if single else numbers.reshape(-1)


def shared_offset(align: object, grid: Grid) -> int | None:
    """Return the position of query 0 among the keys; None if each batch has its own."""
    if isinstance(align, Tensor):
        return None
    if align is None or align == "start":
        return 0
    return grid.Tk - grid.Tq if align == "end" else int(align)  # type: ignore[call-overload]  # `as_align` made it an int


def offset_of_batch(align: object, grid: Grid, b: Tensor) -> int | Tensor:
    """Return the position of query 0 among the keys in batch `b`."""
    offset = shared_offset(align, grid)
    return batch_value(align, b) if offset is None else offset


def format_offset(align: object) -> str:
    """Write what a formula adds to q to get its position among the keys."""
    if align is None or align == "start" or (isinstance(align, int) and align == 0):
        return ""
    if isinstance(align, int):
        return f" + {align}" if align > 0 else f" - {-align}"
    return " + Tk - Tq" if align == "end" else " + start[b]"


def query_positions(align: object, grid: Grid, device: torch.device | None) -> Tensor:
    """Return the position of each query among the keys, (B|1, 1, Tq)."""
    q = torch.arange(grid.Tq, device=device).reshape(1, 1, -1)
    offset = shared_offset(align, grid)
    return q + (batch_column(align, device) if offset is None else offset)


def stream_of(device: torch.device | None) -> int | None:
    """Return the current stream of a GPU, because other streams do not wait for its results.

    Returns None on other devices, and under graph capture: the graph is replayed after all earlier
    work.
    """
    if device is None or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)


_copies = WeakTensorKeyDictionary()  # tensors of masks -> their copies on other devices


def to_device(x: Tensor, device: torch.device | None) -> Tensor:
    """Return a mask's tensor on this device.

    The copy is stored as long as the mask exists, because copying from the host waits and cannot be
    captured in a graph. Raises `BadValue` if `x` is a meta tensor and `device` is another one.
    """
    if x.device.type == "meta" and (device is None or device.type != "meta"):
        rule = "a meta tensor has a shape but no numbers."
        hint = "make the mask of tensors with numbers, or pass only meta tensors to attention(...)."
        raise BadValue(f"A mask holds a meta tensor of shape {tuple(x.shape)}.", rule, hint)
    # torch does not count changes of an inference tensor, so a stored copy could be outdated.
    if device is None or x.device == device or not is_plain(x) or x.is_inference():
        return x.to(device)
    version, stream = x._version, stream_of(device)
    by_device = _copies.setdefault(x, {})
    if by_device.get(device, (None,))[0] != version:
        by_device[device] = version, {}
    copies: dict[int | None, Tensor] = by_device[device][1]
    if stream not in copies:
        with torch.inference_mode(False):
            few = without_repeats(x)
            copy = few.to(device) if few is x else few.to(device).expand(x.shape)
        if copy is x or not has_values(copy):
            return copy
        copies[stream] = copies[None] = copy
    return copies[stream]


def batch_value(value: object, b: Tensor) -> int | Tensor:
    """Return the number of batch `b`."""
    if not isinstance(value, Tensor):
        return int(value)  # type: ignore[call-overload]  # an int, by `as_counts`
    return to_device(value, b.device)[b if value.shape[0] > 1 else torch.zeros_like(b)]


def batch_column(value: object, device: torch.device | None) -> Tensor:
    """Return the number of each batch, (B|1, 1, 1)."""
    if isinstance(value, Tensor):
        return to_device(value, device).reshape(-1, 1, 1)
    number: int = value  # type: ignore[assignment]  # an int, by `as_counts`
    return torch.full((1, 1, 1), number, dtype=torch.long, device=device)


def fixed_batch(value: object) -> dict[str, int]:
    """Return the batch size that one number per batch fixes, as an entry of `Mask.sizes`."""
    if isinstance(value, Tensor) and value.shape[0] != 1:
        return {"B": value.shape[0]}
    return {}


def as_4d(x: Tensor) -> Tensor:
    """Add leading dimensions of size 1, up to (B, H, Tq, Tk)."""
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def check_broadcasts(x: Tensor, grid: Grid, gave: str, what: str, example: str) -> None:
    wanted = (grid.B, grid.H, grid.Tq, grid.Tk)
    if any(s != 1 and s != w for s, w in zip(as_4d(x).shape, wanted, strict=True)):
        gave = f"{gave} shape {tuple(x.shape)}; the call has (B, H, Tq, Tk) = {wanted}."
        hint = f"make each dimension that size or 1; {example}."
        raise BadValue(gave, f"{what} broadcasts to (B, H, Tq, Tk).", hint)


def check_batch(rule: object, value: object, grid: Grid) -> None:
    # Two comparisons, because a graph for any B cannot compare tuples of symbolic sizes.
    if isinstance(value, Tensor) and value.shape[0] != 1 and value.shape[0] != grid.B:
        gave = f"{rule!r} has numbers for {value.shape[0]} batches, and there are B={grid.B}."
        hint = f"pass one number, or {grid.B} numbers."
        raise BadValue(gave, "each batch has one number, or all batches have the same.", hint)


def check_align(rule: object, align: object, grid: Grid, name: str) -> None:
    """Raise `BadValue` if `align` is None although Tq != Tk.

    `name` is the name with which the repr of `rule` begins.
    """
    if align is None and grid.Tq != grid.Tk:
        numbers = repr(rule)[len(name) + 1 : -1]
        call = f"{name}({numbers}{', ' if numbers else ''}align="
        why = "if the numbers differ, align= must give the position of the queries."
        end = f"{call}'end') if the last query is at the last key (a cache)"
        hint = f"use {end}, or {call}'start') if query 0 is at key 0 (torch's is_causal)."
        raise BadValue(f"{rule!r} got Tq={grid.Tq} queries and Tk={grid.Tk} keys.", why, hint)
