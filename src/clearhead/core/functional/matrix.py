"""`matrix`: compute exact rows, columns, blocks and products of the attention matrix on demand.

A weight is exp(score - max) / sum, with the maximum and the sum of its query over all keys. Only
these two are stored, O(Tq). `A @ x` is attention with x as the values, so an engine computes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from ..engines.choice import choose, compute_stats, named, statistics_of
from ..errors import BadType, BadValue, as_count, as_index, is_iterable, must_be_of, refuse_keywords
from ..errors.limits import MOST_DENSE_CELLS, STRIP_CELLS, SUMMARY_PAIRS
from ..formatting import ShownInNotebook
from ..masks import Mask
from ..masks.values import as_4d
from ..problem import online_softmax
from ..problem.biases import Bias
from ..problem.check import Options, make_problem, must_have_values
from ..problem.nan_safe import weighted_sum
from ..problem.online_softmax import State
from ..problem.problem import Inputs, Problem, repeat_heads
from ..problem.tiles import query_tiles, runs_of
from ..stats import Statistic, TopWeights, map_tensors, pooled, sweep, topk
from ..stats.statistic import finish_rows
from ..torch_state import no_autocast
from .ambient import EditedCall, ambient, must_not_be_sharded, visible

if TYPE_CHECKING:
    import numpy as np

MANY_RUNS = 16  # a separate run of keys costs about as much as this many consecutive keys
Which: TypeAlias = int | slice | Sequence[int]  # positions of queries or keys
ALL = slice(None)


def matrix(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    engine: str = "auto",
    **unknown: NoReturn,
) -> "Matrix":
    """Return the exact weights ``softmax(scale * Q K^T + ...)`` of `attention` as a lazy matrix.

    It has `rows`, `cols`, `block`, `A @ x`, `A.T @ x`, `lse`, `entropy`, `topk` and `pool`. Only
    `to_dense()` and ``np.asarray(A)`` form a tensor of the size Tq x Tk. The weights are those
    before dropout, so `dropout` and `seed` are checked but have no effect. `engine` computes
    `A @ x`, and the formula of the reference all other parts. Other arguments are those of
    `attention`.

    Returns:
        A `Matrix` of shape (B, H, Tq, Tk). Each row sums to 1, or to less with a sink.

    Raises:
        BadValue, BadType: as `attention`; meta tensors; a call inside `distributed.sharded`.
    """
    if unknown:
        refuse_keywords(matrix, unknown)
    must_not_be_sharded("matrix")
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    problem, inputs = make_problem(q, k, k, options)
    must_have_values(problem, "matrix")
    edits: list[EditedCall] = []
    for editor in ambient().editors:
        edits.append(editor.edit_again(problem, inputs))
        problem, inputs = edits[-1].problem, edits[-1].inputs
    problem, inputs = visible(edits, problem, inputs)
    if engine != "auto":
        named(engine)
    return Matrix(problem.without_dropout, inputs, engine)


class Matrix(ShownInNotebook):
    """The weights of one attention call before dropout, (B, H, Tq, Tk), computed on demand.

    Every result has the leading dimensions of q and k, is in fp32 or wider, and has a gradient if
    q or k requires one. The matrix does not copy q and k, so do not change them while it is in use.
    """

    def __init__(self, problem: Problem, inputs: Inputs, engine: str = "auto"):
        self._problem, self._inputs, self._engine = problem, inputs, engine
        self._sums_of_all: State | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Tq, Tk), without the leading dimensions that q and k did not have."""
        p = self._problem
        return (p.B, p.H, p.Tq, p.Tk)[4 - p.input_dims :]

    @property
    def lse(self) -> Tensor:
        """The natural log-sum-exp of each query's scores and its sink, (B, H, Tq).

        It is -inf for a fully masked query without a sink.
        """
        sums = self._sums(slice(0, self._problem.Tq))
        return finish_rows(sums, self._problem.sinks).lse.reshape(self.shape[:-1])

    def rows(self, queries: Which) -> Tensor:
        """Compute the exact weights of some queries, (B, H, n, Tk).

        Raises `BadValue` for a query that does not exist, `BadType` for anything but numbers.
        """
        return self._weights(queries, ALL)

    def cols(self, keys: Which) -> Tensor:
        """Compute the exact weights that some keys receive, (B, H, Tq, n).

        Raises the errors of `rows`.
        """
        return self._weights(ALL, keys)

    def block(self, queries: Which, keys: Which) -> Tensor:
        """Compute the exact weights of some queries on some keys, (B, H, q, k).

        Raises the errors of `rows`.
        """
        return self._weights(queries, keys)

    def entropy(self) -> Tensor:
        """Compute -Σ w log w of each query's weights, in nats, (B, H, Tq); 0 if fully masked."""
        return self._statistic("entropy")

    def topk(self, n: int, by: Tensor | None = None) -> TopWeights:
        """Find the n largest weights of each query, and their keys, (B, H, Tq, n) both.

        Among equal weights the lower key comes first. If a query sees fewer keys, the other entries
        have weight 0 and key -1. With `by`, a number of 0 or more for every key, they are the
        largest products of weight and number. Raises `BadValue` for an n below 1 or above Tk.
        """
        statistic = topk(n, by)
        statistic.must_fit(self._problem.grid)
        return self._statistic(statistic)

    def pool(self, rows: int, cols: int, by: Tensor | None = None) -> Tensor:
        """Compute a map of at most rows x cols, (B, H, rows, cols).

        A cell is the weight that a query puts on a bin of keys, averaged over a bin of queries.
        With `by`, a number for every key, weights are multiplied by it. Raises `BadValue` for
        sizes below 1, and for another number of numbers.
        """
        statistic = pooled(rows, cols, by)
        statistic.must_fit(self._problem.grid)
        return self._statistic(statistic)

    def to_dense(self, most: int = MOST_DENSE_CELLS) -> Tensor:
        """Compute the full matrix. Raises `BadValue` if it has more than `most` cells."""
        p = self._problem
        cells = p.all_pairs
        rule = "most is the largest number of cells that to_dense writes."
        most = as_count("to_dense got most", most, rule, f"pass for example most={cells}.")
        if cells > most:
            gave = f"The matrix has {cells:,} cells ({4 * cells / 1e9:.1f} GB in fp32)."
            rule = f"to_dense writes at most {most:,} cells, its argument most=."
            hint = f"compute rows, cols, a block or a product, or call to_dense(most={cells})."
            raise BadValue(gave, rule, hint)
        return self._weights(ALL, ALL)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        """Return `to_dense()` as a new NumPy array without gradients, for ``np.asarray(A)``."""
        if copy is False:
            rule = "the matrix is computed on demand, so each array of it is new."
            hint = "pass copy=None, or use np.asarray(A)."
            raise BadValue("copy=False was passed for an array of the matrix.", rule, hint)
        return self.to_dense().detach().cpu().numpy().astype(dtype, copy=False)

    def __getitem__(self, which: object) -> NoReturn:
        rule = "the matrix is computed on demand, by the methods rows, cols and block."
        hint = "call one of them, or index A.to_dense()."
        raise BadType(f"The matrix was indexed with {which!r}, or iterated over.", rule, hint)

    def __matmul__(self, x: Tensor) -> Tensor:
        """Compute A @ x for x of shape (B, G or H, Tk, n): attention with x as the values."""
        p = self._problem
        x = self._operand(x, p.Tk, "keys", "A @ x")
        grad = p.grad or (x.requires_grad and torch.is_grad_enabled())
        problem = replace(p, G=p.H, Dv=x.shape[-1], dtype=p.wide, grad=grad)
        # `Matrix` supports second derivatives, which the core does not.
        engine = choose(problem, "tiled" if grad and self._engine == "auto" else self._engine)
        with no_autocast(p.device):
            return p.shape_back(engine.compute(problem, p.widen(self._inputs._replace(v=x))))

    @property
    def T(self) -> "Transposed":
        """The transpose. `A.T @ x` sums, for each key, over the queries that look at it."""
        return Transposed(self)

    def _transposed_matmul(self, x: Tensor) -> Tensor:
        p = self._problem
        x = self._operand(x, p.Tq, "queries", "A.T @ x")
        total = x.new_zeros(p.B, p.H, p.Tk, x.shape[-1])
        for strip in self._strips(slice(0, p.Tq)):
            weights, keep = self._block(strip, slice(0, p.Tk))
            keep = None if keep is None else keep.transpose(-1, -2)
            with no_autocast(p.device):
                total = total + weighted_sum(weights.transpose(-1, -2), x[:, :, strip], keep)
        return p.shape_back(total)

    def __repr__(self) -> str:
        p = self._problem
        size = " x ".join(str(n) for n in self.shape)
        head = f"attention matrix {size} of {p.describe()}"
        if not 0 < p.pairs <= SUMMARY_PAIRS:
            return head
        with torch.no_grad():
            entropy = self.entropy()
        mean, most = float(entropy.mean()), float(entropy.max())
        return f"{head}\n  entropy {mean:.3f} nats on average, at most {most:.3f}"

    # ------------------------------------------------------------------------------ internals

    def _statistic(self, statistic: str | Statistic) -> Any:
        (result,) = statistics_of(self._problem, self._inputs, [statistic]).values()
        return map_tensors(result, self._problem.shape_back)

    def _weights(self, queries: Which, keys: Which) -> Tensor:
        """Compute the weights of some queries on some keys, in their order.

        It computes a block for each run of consecutive keys. For many runs, full rows cost less,
        from which it selects the keys.
        """
        p = self._problem
        columns = _runs(keys, p.Tk, "key")
        positions = [key for column in columns for key in range(column.start, column.stop)]
        rows = []
        for run in _runs(queries, p.Tq, "query"):
            if len(columns) * MANY_RUNS > p.Tk:
                for strip in self._strips(run):
                    rows.append(self._block(strip, slice(0, p.Tk))[0][..., positions])
                continue
            sums = self._sums(run) if len(columns) > 1 else None
            parts = [self._block(run, column, sums)[0] for column in columns]
            rows.append(torch.cat(parts, 3))
        return p.shape_back(torch.cat(rows, 2))

    def _block(
        self, queries: slice, keys: slice, sums: State | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the weights of a block, and return them with the block of the mask.

        A weight is exp(score - max) / sum, or 0 for a fully masked query. `sums` holds max and sum
        of the queries over all keys, if they are known.
        """
        p = self._problem
        scores, keep = self._logits(queries, keys)
        if sums is None and keys == slice(0, p.Tk):
            top = online_softmax.largest(scores)
            sums = State(top, online_softmax.exps(scores, top).sum(-1), {})
        elif sums is None:
            sums = self._sums(queries)
        weights = finish_rows(sums, p.sinks).weight(online_softmax.exps(scores, sums.max.detach()))
        return weights.masked_fill(scores == online_softmax.MASKED, 0.0), keep

    def _sums(self, queries: slice) -> State:
        """Return the maximum and the sum of some queries over all keys.

        Those of all queries are stored, unless they have a gradient, because the first backward
        pass frees their graph.
        """
        p = self._problem
        if self._sums_of_all is not None and not p.records_grad:
            return self._sums_of_all.map(lambda x: x[:, :, queries])
        every = queries == slice(0, p.Tq)
        partial = (
            compute_stats(p, self._inputs, ["lse"])
            if every
            else sweep(p, self._inputs, ["lse"], queries)
        )
        assert partial.rows is not None
        if every and not p.records_grad:
            self._sums_of_all = partial.rows
        return partial.rows

    def _strips(self, queries: slice) -> list[slice]:
        """Return the queries in strips, whose rows have at most about `STRIP_CELLS` cells."""
        p = self._problem
        size = max(1, STRIP_CELLS // max(1, p.B * p.H * p.Tk))
        return query_tiles(range(queries.start, queries.stop), size)

    def _logits(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        p = self._problem
        q, k = self._inputs.q[:, :, queries], self._inputs.k[:, :, keys]
        with no_autocast(p.device):
            return p.logits(q, k, queries, keys)

    def _operand(self, x: Tensor, length: int, what: str, call: str) -> Tensor:
        p = self._problem
        rule = "the attention matrix is multiplied with a tensor."
        must_be_of(Tensor, call, x, rule, "pass torch.as_tensor(x).")
        fits = x.dim() == p.input_dims and x.shape[-2] == length
        if fits:
            B, heads = as_4d(x).shape[:2]
            fits = B in (1, p.B) and heads in (1, p.G, p.H)
        if not fits:
            gave = f"{call} got x of shape {tuple(x.shape)} for a matrix {self.shape}."
            rule = f"x has as many dimensions as q, and one row for each of the {length} {what}."
            raise BadValue(gave, rule, f"pass x with the second-to-last size {length}.")
        return repeat_heads(as_4d(x).to(p.wide), p.H).expand(p.B, -1, -1, -1)


class Transposed:
    """The transpose of a `Matrix`: `A.T @ x`, for x of shape (B, H, Tq, n), sums over queries."""

    def __init__(self, matrix: Matrix):
        self._matrix = matrix

    @property
    def T(self) -> Matrix:
        return self._matrix

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, Tq, Tk = self._matrix.shape
        return (*lead, Tk, Tq)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        """Return the transposed matrix as a new NumPy array without gradients."""
        return self._matrix.__array__(dtype, copy).swapaxes(-1, -2)

    def __repr__(self) -> str:
        return f"the transpose, of shape {self.shape}, of: {self._matrix!r}"

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._matrix._transposed_matmul(x)


def _runs(which: Which, size: int, name: str) -> list[slice]:
    """Split positions into runs of consecutive ones, in their order; none become an empty run."""
    return [slice(r.start, r.stop) for r in runs_of(_positions(which, size, name)) or [range(0)]]


def _positions(which: Which, size: int, name: str) -> Sequence[int]:
    if isinstance(which, slice):
        return range(*which.indices(size))
    one = not is_iterable(which)
    indices: Iterable[Any] = [which] if one else which  # type: ignore[assignment]  # by `one`
    hint = f"pass an int, a slice or a list of ints, from {-size} to {size - 1}."
    return [as_index(name, i, size, hint=hint) for i in indices]
