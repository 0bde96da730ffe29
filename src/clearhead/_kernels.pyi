"""The C++ core (kernels/bind.cpp)."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

NO_DATA: int

def take_tensors(
    tensor: type[Tensor],
    parameter: type[Parameter],
    is_neg: Callable[[Tensor], bool],
    is_grad_enabled: Callable[[], bool],
    new_empty: Callable[..., Tensor],
) -> bool: ...
def sizes(
    q: object, k: object, v: object
) -> tuple[int, int, int, int, int, int, int, int, bool] | None: ...
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    rounding: Tensor | None,
    args: tuple[Any, ...],
) -> int: ...
def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    format: str,
    args: tuple[Any, ...],
) -> int: ...
def block_rows() -> int: ...
def attend_with_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: bool,
    args: tuple[Any, ...],
    rows: int,
    n_top: int,
    top_offsets: Tensor | None,
    top_weights: bool,
    groups: Sequence[tuple[Any, ...]],
    sums: tuple[Any, ...] | None,
) -> tuple[Any, ...]: ...
def logit_scale(q: Tensor, k: Tensor, v: Tensor, args: tuple[Any, ...]) -> float: ...
def sum_weights(
    q: Tensor, k: Tensor, v: Tensor, args: tuple[Any, ...], sums: tuple[Any, ...]
) -> int: ...
def largest_parts(
    q: Tensor, k: Tensor, v: Tensor, args: tuple[Any, ...], parts: tuple[Any, ...]
) -> int: ...
def diverge(
    q: Tensor,
    k: Tensor,
    differences: Tensor,
    args: tuple[Any, ...],
    other: tuple[Any, ...],
    exact: tuple[Any, ...],
    numbers: tuple[Tensor, ...],
) -> int: ...
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    rounding: Tensor | None,
    args: tuple[Any, ...],
    gradients: tuple[Any, ...],
) -> int: ...
def describe(code: int) -> str: ...
def fields() -> dict[str, str]: ...
def dtypes() -> list[str]: ...
def take_pool(library: str) -> bool: ...
def threads_available() -> int: ...
def levels() -> list[tuple[str, str, bool]]: ...
def level() -> str: ...
def choose_level(name: str) -> bool: ...
def has_amx() -> bool: ...
def fma_ceiling(threads: int, seconds: float) -> float: ...
def dot_ceiling(threads: int, seconds: float) -> float: ...
def read_ceiling(address: int, size: int, threads: int, seconds: float) -> float: ...
