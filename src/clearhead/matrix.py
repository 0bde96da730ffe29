"""The attention matrix as a thing to ask, not to hold: exact rows, columns, blocks and products.

Only the log-sum-exp of each query is kept, O(Tq); everything else is computed when asked for.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from . import online
from .errors import BadValue
from .problem import Inputs, Problem, repeat_heads

STRIP = 256
MOST_CELLS = 2**27


class Matrix:
    """The weights softmax(...) of one question, (B, H, Tq, Tk), computed on demand.

    Weights never carry dropout. Every result has the leading dimensions the question had.
    """

    def __init__(self, problem: Problem, inputs: Inputs):
        self._problem, self._inputs = problem, inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Tq, Tk), without the leading dimensions that the question did not have."""
        p = self._problem
        return (p.B, p.H, p.Tq, p.Tk)[4 - p.rank :]

    @cached_property
    def lse(self) -> Tensor:
        """The natural log-sum-exp of each query's scores, (B, H, Tq); -inf if it sees nothing."""
        return self._lse.reshape(self.shape[:-1])

    def rows(self, queries: int | slice | Sequence[int]) -> Tensor:
        """The exact weights of some queries, (B, H, n, Tk)."""
        picked = _places(queries, self._problem.Tq, "query")
        return self._back([self._block([i], slice(None)) for i in picked], 2)

    def cols(self, keys: int | slice | Sequence[int]) -> Tensor:
        """The exact weights that some keys receive, (B, H, Tq, n)."""
        picked = _places(keys, self._problem.Tk, "key")
        return self._back(
            [self._block(range(self._problem.Tq), slice(i, i + 1)) for i in picked], 3
        )

    def block(self, queries: slice, keys: slice) -> Tensor:
        """The exact weights of a block, (B, H, q, k)."""
        p = self._problem
        rows = _places(queries, p.Tq, "query")
        return self._problem_back(self._block(rows, slice(*keys.indices(p.Tk))))

    def to_dense(self, most: int = MOST_CELLS) -> Tensor:
        """The whole matrix. Raises `BadValue` above `most` cells, unless told a larger number."""
        p = self._problem
        cells = p.B * p.H * p.Tq * p.Tk
        if cells > most:
            raise BadValue(
                f"The matrix has {cells:,} cells ({4 * cells / 1e9:.1f} GB in fp32).",
                f"to_dense writes at most {most:,} cells unless it is told more.",
                f"ask for rows, cols, a block or a product, or say to_dense(most={cells}).",
            )
        return self._problem_back(self._block(range(p.Tq), slice(None)))

    def __matmul__(self, x: Tensor) -> Tensor:
        """A @ x for x of shape (B, G or H, Tk, n): what the weights make of other values."""
        p = self._problem
        x = self._operand(x, p.Tk, "keys", "A @ x")
        parts = [self._block(strip, slice(None)) @ x for strip in self._strips()]
        return self._back(parts, 2)

    @property
    def T(self) -> "Transposed":
        """The transpose: `A.T @ x` sums, for each key, over the queries that look at it."""
        return Transposed(self)

    def _transposed_matmul(self, x: Tensor) -> Tensor:
        p = self._problem
        x = self._operand(x, p.Tq, "queries", "A.T @ x")
        total = x.new_zeros(p.B, p.H, p.Tk, x.shape[-1])
        for strip in self._strips():
            total = total + self._block(strip, slice(None)).transpose(-1, -2) @ x[:, :, strip]
        return self._problem_back(total)

    def __repr__(self) -> str:
        return f"attention matrix {' x '.join(map(str, self.shape))} of {self._problem.describe()}"

    # ------------------------------------------------------------------------------- inside

    @cached_property
    def _lse(self) -> Tensor:
        p = self._problem
        parts = []
        for strip in self._strips():
            scores, _ = self._logits(strip, slice(None))
            none = scores.new_zeros(p.B, p.H, p.Tk, 0)
            rows = online.begin(scores, none, keep=None)
            if p.sinks is not None:
                rows = online.merge(rows, online.sink(p.sinks.to(p.wide).reshape(1, -1, 1), rows))
            parts.append(online.finish(rows)[1])
        return torch.cat(parts, 2) if parts else torch.zeros(p.B, p.H, 0, dtype=p.wide)

    def _strips(self) -> Iterator[range]:
        Tq = self._problem.Tq
        return (range(i, min(i + STRIP, Tq)) for i in range(0, Tq, STRIP))

    def _logits(self, rows: Sequence[int], keys: slice) -> tuple[Tensor, Tensor | None]:
        p = self._problem
        queries = slice(rows[0], rows[-1] + 1) if len(rows) else slice(0, 0)
        q = self._inputs.q[:, :, queries].to(p.wide)
        k = repeat_heads(self._inputs.k[:, :, keys].to(p.wide), p.H)
        return p.logits(q, k, queries, keys)

    def _block(self, rows: Sequence[int], keys: slice) -> Tensor:
        """Consecutive rows against some keys: exp(scores - lse); 0 where a query sees nothing."""
        scores, _ = self._logits(rows, keys)
        lse = self._lse[:, :, rows[0] : rows[-1] + 1] if len(rows) else self._lse[:, :, :0]
        return torch.exp(scores - online.anchor(lse).unsqueeze(-1))

    def _operand(self, x: Tensor, length: int, what: str, call: str) -> Tensor:
        p = self._problem
        four = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) if x.dim() <= 4 else x
        if x.dim() != p.rank or four.shape[1] not in (1, p.G, p.H) or four.shape[2] != length:
            raise BadValue(
                f"{call} got x of shape {tuple(x.shape)} for a matrix {self.shape}.",
                f"x has as many dimensions as the question and one row for each of the {length} "
                f"{what}.",
                f"pass x with second-to-last size {length}.",
            )
        return repeat_heads(four.to(p.wide), p.H)

    def _back(self, parts: list[Tensor], dim: int) -> Tensor:
        if not parts:
            p = self._problem
            shape = [p.B, p.H, p.Tq, p.Tk]
            shape[dim] = 0
            return self._problem_back(torch.zeros(shape, dtype=p.wide, device=p.device))
        return self._problem_back(torch.cat(parts, dim))

    def _problem_back(self, x: Tensor) -> Tensor:
        return self._problem.shape_back(x)


class Transposed:
    """`A.T`, for `A.T @ x` with x of shape (B, H, Tq, n): what each key receives."""

    def __init__(self, matrix: Matrix):
        self._matrix = matrix

    @property
    def T(self) -> Matrix:
        return self._matrix

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, Tq, Tk = self._matrix.shape
        return (*lead, Tk, Tq)

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._matrix._transposed_matmul(x)


def _places(which: int | slice | Sequence[int], size: int, name: str) -> list[int]:
    if isinstance(which, slice):
        return list(range(*which.indices(size)))
    places = [which] if isinstance(which, int) else list(which)
    for i in places:
        if not -size <= i < size:
            raise BadValue(
                f"{name} {i} was asked for, and there are {size}.",
                "positions count from 0 and stay below the size; -1 is the last.",
                f"ask for a {name} from {-size} to {size - 1}.",
            )
    return [i % size for i in places]
