"""`look`: compute the output of attention and exact statistics of its weights."""

from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..engines.cpu import direct
from ..errors import BadValue, refuse_keywords
from ..files.results import Savable, data_frame
from ..formatting import ShownInNotebook, aligned
from ..masks import Mask
from ..problem.biases import Bias
from ..problem.check import Options, make_problem, must_have_values
from ..problem.problem import Inputs, Problem
from ..stats import (
    DEFAULT_STATISTICS,
    Result,
    Statistic,
    Statistics,
    TopWeights,
    lse_alone,
    map_tensors,
    parse_stats,
)
from ..stats.parse import how_to_request, is_per_query, must_fit
from ..torch_state import loadable
from .ambient import ambient, must_not_be_sharded
from .attention import compute, is_plain_call

if TYPE_CHECKING:
    import pandas


def look(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    stats: Iterable[str | Statistic] = DEFAULT_STATISTICS,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    engine: str = "auto",
    **unknown: NoReturn,
) -> "Look":
    """Compute the output of `attention`, with the same bits, and exact statistics of its weights.

    No tensor of the size Tq x Tk is formed. `stats` names statistics of the masked logits x and the
    weights w = softmax(x):

    =====================  ====================================  ==================
    statistic              what it is                            shape
    =====================  ====================================  ==================
    ``"lse"``              log of the sum of exp(x), and sink    (B, H, Tq)
    ``"max"``              the largest logit x                   (B, H, Tq)
    ``"entropy"``          - sum of w log w over keys, in nats   (B, H, Tq)
    ``"effective"``        exp(entropy), a number of keys        (B, H, Tq)
    `topk(n)`              the n largest w, and their keys       (B, H, Tq, n)
    `mass(groups)`         the sum of w over each group of keys  (B, H, Tq) each
    `weighted(n, groups)`  the sum of w n over each group        (B, H, Tq) each
    ``"received"``         the sum of w over queries, or others  (B, H, Tk)
    ``"drop_error"``       squared error if a key is dropped     (B, H, Tk)
    `pooled(rows, cols)`   w, pooled                             (B, H, rows, cols)
    `exact_rows([...])`    w of some queries                     (B, H, n, Tk)
    =====================  ====================================  ==================

    The first seven need one sweep over the keys, and the sums of w over queries a second one.
    `drop_error` and `received` with arguments have a pass of their own: the largest weight of a
    key, the weight from the last queries, and others. The weights are those before dropout.
    torch.compile breaks its graph at this call, with the same bits, except for ``["lse"]`` alone.
    Other arguments are those of `attention`.

    Args:
        stats: a list of names, and of statistics that take arguments, as in the table. `watch` has
            the same default.

    Returns:
        A `Look`: `.out`, (B, H, Tq, Dv), and one attribute for each statistic.

    Raises:
        BadValue, BadType: as `attention`; `stats` that is not a list; unknown statistics; a `topk`
            or `mass` of more keys than Tk; meta tensors; a call inside `distributed.sharded`.
    """
    if unknown:
        refuse_keywords(look, unknown)
    around = ambient()
    if around.ranks is not None:
        must_not_be_sharded("look")
    statistics = parse_stats(stats)
    if is_plain_call(bias, sinks, dropout, seed, engine, around):
        if (plain := direct.answer_of(q, k, v, statistics, mask, scale, softcap)) is not None:
            return Look(*plain)
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    problem, inputs = make_problem(q, k, v, options)
    must_fit(statistics, problem.grid)
    must_have_values(problem, "look")
    run = _look
    if torch.compiler.is_compiling() and not lse_alone(statistics):
        run = torch.compiler.disable(_look)  # statistics are computed outside the graph
    return run(problem, inputs, engine, statistics)


def _look(problem: Problem, inputs: Inputs, engine: str, statistics: Statistics) -> "Look":
    return Look(*compute(problem, inputs, engine, ambient(), statistics))


class NotRequested(BadValue, AttributeError):
    """The look does not contain this statistic."""


@loadable
class Look(ShownInNotebook, Savable):
    """The output of attention and the requested statistics.

    `look.out` is the output. Every statistic is an attribute under its name: `look.lse`,
    `look.topk.weights`, `look.topk.keys`, `look.mass["sink"]`; `look.names` lists them. All have
    the leading dimensions of the inputs.
    """

    out: Tensor

    def __init__(self, problem: Problem, out: Tensor, results: dict[str, Result]) -> None:
        self.out = problem.shape_back(out)
        self._about: str | Problem = problem
        if torch.compiler.is_compiling():
            # A description with the sizes would compile a graph for each length.
            self._about = "a compiled call"
        if problem.input_dims < 4:
            back = problem.shape_back
            results = {name: map_tensors(x, back) for name, x in results.items()}
        self._set_results(results)

    def _set_results(self, results: dict[str, Result]) -> None:
        self._results = results
        for name, result in results.items():  # reading by `__getattr__` would take 0.6 us more
            setattr(self, name, result)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the statistics."""
        return tuple(self._results)

    @property
    def about(self) -> str:
        """A description of the call."""
        if not isinstance(self._about, str):
            self._about = self._about.describe()
        return self._about

    def __getstate__(self) -> dict[str, object]:
        return {"out": self.out, "_about": self.about, "_results": self._results}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.out, self._about = state["out"], state["_about"]
        self._set_results(state["_results"])

    def __getattr__(self, name: str) -> "Tensor | TopWeights | dict[str, Tensor]":
        results = {} if name.startswith("_") else self._results
        rule = f"a look holds what was requested: {', '.join(['out', *results])}."
        hint = how_to_request(name, ["out", *results])
        raise NotRequested(f"This look has no {name!r}.", rule, hint)

    def __repr__(self) -> str:
        return "\n".join([f"look at {self.about}", *aligned([("", *row) for row in self.table()])])

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with one row per query of each head.

        Its columns are the leading axes, the query, and every statistic with one number per query:
        each group of `mass` and `weighted`, the first key of `topk` with its weight. Raises
        `BadValue` if no such statistic was requested, and `Missing` without pandas.
        """
        columns: dict[str, Tensor] = {}
        for name, result in self._results.items():
            if isinstance(result, TopWeights):
                columns[f"{name} weight"] = result.weights[..., 0]
                columns[f"{name} key"] = result.keys[..., 0]
            elif isinstance(result, dict):
                columns |= {f"{name} {group}": x for group, x in result.items()}
            elif is_per_query(name):
                columns[name] = result
        if not columns:
            rule = "its table has one row per query."
            hint = "request a statistic with one number per query, such as stats=['entropy']."
            raise BadValue(f"This look has {', '.join(self.names) or 'no statistics'}.", rule, hint)
        shape = next(iter(columns.values())).shape
        axes = ("sequence", "head", "query")[-len(shape) :]
        values = {name: x.detach().flatten().tolist() for name, x in columns.items()}
        rows = (dict(zip(axes, index, strict=True)) for index in product(*map(range, shape)))
        return data_frame(
            [{**row, **{n: x[i] for n, x in values.items()}} for i, row in enumerate(rows)]
        )

    def table(self) -> list[tuple[str, str, str]]:
        """Return name, shape and summary of the output and of every statistic."""
        lines = [("out", self.out)]
        for name, result in self._results.items():
            if isinstance(result, TopWeights):
                lines += [(name, result.weights)]
            elif isinstance(result, dict):
                lines += [(f"{name} {group}", part) for group, part in result.items()]
            else:
                lines += [(name, result)]
        return [(name, " x ".join(str(n) for n in x.shape), summary(x)) for name, x in lines]


def summary(x: Tensor) -> str:
    """Write the range and mean of the finite numbers, and how many are not finite."""
    x = x.detach()
    finite = x[torch.isfinite(x)].double()
    if not x.numel():
        return "empty"
    parts = []
    if finite.numel():
        low, mean, high = float(finite.min()), float(finite.mean()), float(finite.max())
        parts.append(f"{low:.4g} to {high:.4g}, mean {mean:.4g}")
    if missing := x.numel() - finite.numel():
        parts.append(f"{missing} not finite")
    return ", ".join(parts)
