"""Detect models that count positions from the first column of a left-padded batch."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...nn.token_ids import run
from .copies import fresh


def warn_of_column_positions(model: nn.Module, inputs: Any) -> None:
    """Warn if the model gives a left-padded text other positions than the text alone.

    This happens if no positions are passed and the model looks positions up by column. If there is
    padding on the left, the model runs once more to find out.
    """
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or inputs.get("position_ids") is not None:
        return
    real = mask != 0
    if not (real[:, 1:] & ~real[:, :-1]).any():
        return
    lookups = _Lookups()
    with torch.no_grad(), lookups:
        run(model, fresh(inputs))
    ids = inputs.get("input_ids")
    others = (x for x in lookups.indices if not (isinstance(ids, Tensor) and torch.equal(x, ids)))
    starts = (_first_column(x, real) for x in others)
    first = next((x for x in starts if x is not None), None)
    if first is None:
        return
    hint = "pad on the right, or run each text alone"
    if first == 0 and "position_ids" in inspect.signature(model.forward).parameters:
        count = "(attention_mask.cumsum(-1) - 1).clamp(min=0)"
        if isinstance(ids, Tensor) and ids.shape != mask.shape:  # the others are in a cache
            count += f"[:, -{ids.shape[1]}:]"
        hint = f"pass position_ids={count} in the inputs, or pad on the right"
    warnings.warn(
        f"texts are padded on the left, and without position_ids the {type(model).__name__} counts "
        "positions from the first column, so a padded text has other positions than the text "
        f"alone. The numbers are those of model(**inputs). For those of the texts alone, {hint}.",
        stacklevel=3,
    )


class _Lookups(TorchFunctionMode):
    """Records the indices of all lookups of embeddings and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[Tensor] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        at = args[0] if function is F.embedding else args[-1] if function in _SELECT else None
        if isinstance(at, Tensor):
            self.indices.append(at.detach().clone())
        return function(*args, **(kwargs or {}))


_SELECT = (torch.index_select, Tensor.index_select)


def _first_column(at: Tensor, real: Tensor) -> int | None:
    """Return the position of the first column, if `at` counts columns; None if it does not.

    `at` has shape (T,), (1, T) or (B, T). It counts columns if it grows by 1 over the last T
    columns of `real`, (B, past + T), wherever those are True.
    """
    B, columns = real.shape
    T = at.shape[-1] if at.dim() else 0
    if at.dim() == 1 and T > columns and T % B == 0:  # all rows in one
        T //= B
    if not 2 <= T <= columns or at.numel() not in (T, B * T):
        return None
    real = real[:, columns - T :]
    starts = at.to(real.device).reshape(-1, T) - torch.arange(columns - T, columns).to(real.device)
    starts = starts.expand(B, T)[real]
    return int(starts[0]) if starts.numel() and bool((starts == starts[0]).all()) else None
