"""The scores of one query, and the parts of their contrast.

Letters: C components, H heads, G key heads, Tq queries, Tk keys, D head size.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.errors import BadValue
from ...core.functional.matrix import Matrix
from ...core.problem.problem import Inputs, Problem
from ..weights.rotations import Rotary
from .result import Terms
from .score_paths import TOLERANCE, Component, ScoreRun, Side

_AT_ONCE = 16  # features whose gradients are in memory


class ScoreRow(NamedTuple):
    """The scores of one query, (Tk,) each, in fp64.

    `raw` is scale q . k, `bias` the position bias, `scores` what enters softmax, and `visible` the
    keys that the query may look at.
    """

    raw: Tensor
    bias: Tensor
    scores: Tensor
    weights: Tensor
    visible: Tensor
    sink: Tensor | None

    def weights_of(self, raw: Tensor, p: Problem) -> Tensor:
        """Compute the weights for other values of `raw`."""
        if p.softcap is not None:
            raw = p.softcap * torch.tanh(raw / p.softcap)
        scores = (raw + self.bias).masked_fill(~self.visible, -torch.inf)
        if self.sink is None:
            return scores.softmax(-1)
        return torch.cat([scores, self.sink.double().reshape(1)]).softmax(-1)[:-1]


@torch.no_grad()
def score_row(run: ScoreRun, i: int, h: int) -> ScoreRow:
    """Compute the scores of a query of a head."""
    p = run.problem
    g = h // (p.H // p.G)
    raw = p.scale * (run.k[0, g].double() @ run.q[0, h, i].double())
    at, keys = slice(i, i + 1), slice(0, p.Tk)
    bias = torch.zeros_like(raw)
    visible = torch.ones_like(raw, dtype=torch.bool)
    if p.bias is not None:
        like = torch.empty((), dtype=p.wide, device=raw.device)
        bias = p.bias.block(p.grid, at, keys, like).expand(1, p.H, 1, p.Tk)[0, h, 0].double()
        visible = bias > -1e30  # -inf, or the lowest number of the dtype
        bias = bias.masked_fill(~visible, 0.0)
    if p.masked:
        keep = p.key_ranges.to_bool(at, keys).to(raw.device)
        visible = visible & keep.expand(1, p.H, 1, p.Tk)[0, h, 0]
    raw = raw.masked_fill(~visible, 0.0)
    weights = (
        Matrix(replace(p, input_dims=4), Inputs(*(x.detach() for x in run.inputs)))
        .rows([i])[0, h, 0]
        .double()
    )
    row = ScoreRow(raw, bias, raw + bias, weights, visible, None if p.sinks is None else p.sinks[h])
    missed = float((row.weights_of(raw, p) - weights).abs().max())
    if not missed <= max(1e-4, 8 * torch.finfo(p.dtype).eps):
        raise BadValue(
            f"The weights of the call differ from the softmax of its scores by {missed:.1g}.",
            "the parts are those of the scores from which the weights follow.",
            "check the inputs for NaN, and call why without edits of this layer.",
        )
    return row


class SplitRow:
    """The parts of the contrast of one query, which must sum to it."""

    def __init__(self, run: ScoreRun, row: ScoreRow, i: int, h: int, contrast: Tensor) -> None:
        self.run, self.row, self.i, self.h, self.contrast = run, row, i, h, contrast
        p = run.problem
        self.g = h // (p.H // p.G)
        self.q, self.k = (x.detach().double() for x in (run.q[0, h, i], run.k[0, self.g]))
        self.mean_key = torch.where(row.visible.unsqueeze(-1), self.k, 0.0).T @ contrast
        self.to_key, self.to_query = p.scale * self.q, p.scale * self.mean_key
        (by_key,) = self._parts("key", self.to_key[None])
        (queries,) = self._parts("query", self.to_query[None])
        self.total = contrast @ row.scores
        self._must_sum("keys", by_key, row.raw)
        self._must_sum("query", queries, (contrast @ row.raw).reshape(1))
        written = [x for x in range(len(by_key)) if bool(by_key[x].any() or queries[x].any())]
        self.indices = torch.tensor(written, device=by_key.device)
        self.components = [run.components[x] for x in written]
        self.by_key, self.queries = by_key[self.indices], queries[self.indices, 0]
        if p.bias is not None:
            self.components.append(Component("distance", None, None, ""))
            self.by_key = torch.cat([self.by_key, row.bias[None]])
            self.queries = torch.cat([self.queries, (contrast @ row.bias).reshape(1)])
        self.keys = self.by_key @ contrast

    def _direction(self, side: Side, vector: Tensor) -> Tensor:
        """Return the direction whose products with the keys, or the query, are those of a vector,
        (D,), or of one for each key, (Tk, D)."""
        to = torch.zeros_like(self.run.k if side == "key" else self.run.q)
        to[(0, self.g) if side == "key" else (0, self.h, self.i)] = vector.to(to.dtype)
        return to

    def _parts(self, side: Side, vectors: Tensor) -> Tensor:
        """Multiply K vectors by what each component wrote, (K, C, Tk) or (K, C, 1)."""
        at = slice(None) if side == "key" else slice(self.i, self.i + 1)
        parts = self.run.parts(side, [self._direction(side, x) for x in vectors], at)
        return parts.masked_fill(~self.row.visible, 0.0) if side == "key" else parts

    def _must_sum(self, of: str, parts: Tensor, wanted: Tensor) -> None:
        """Raise `BadValue` unless the parts (C, n) sum to the scores (n,)."""
        missed = (parts.sum(0) - wanted).abs() / parts.abs().sum(0).clamp(min=1e-30)
        worst = float(missed.max())
        if not worst <= max(TOLERANCE, 8 * torch.finfo(self.run.problem.dtype).eps):
            raise BadValue(
                f"In the {type(self.run.model).__name__} the parts of the {of} miss a score by "
                f"{worst:.1g} of their absolute sum.",
                "the stream must be a sum of what modules with weights write, position by "
                "position, without a cache.",
                "load the model in float32; if it is, its scores cannot be split.",
            )

    def sources(self, side: Side, layer: int) -> Tensor:
        """Split the parts of an earlier layer's heads by the token that they read from, (H, T)."""
        vector = self.to_query
        if side == "key":
            vector = self.to_key * self.contrast.unsqueeze(-1)
        return self.run.sources(side, self._direction(side, vector), layer)

    def factors(self, side: Side) -> Tensor:
        """Compute what each component wrote of the query, or of the keys' contrast, (C, D)."""
        weights = self.contrast if side == "key" else self.contrast.new_ones(1)
        features = torch.eye(len(self.q), dtype=self.q.dtype, device=self.q.device)
        columns = [
            self._parts(side, some)[:, self.indices] @ weights for some in features.split(_AT_ONCE)
        ]
        return torch.cat(columns).T

    @torch.no_grad()
    def terms(self, rotary: Rotary | None) -> Terms:
        """Split the contrast by the means of queries and keys before rotation; see `Terms`."""
        p, run = self.run.problem, self.run
        at = torch.arange(max(p.Tq, p.Tk), device=self.q.device)

        def means(x: Tensor) -> Tensor:
            x = x.double()
            back = x if rotary is None else rotary.rotated(x, -at[: len(x)])
            mean = back.mean(0).expand_as(x)
            return mean if rotary is None else rotary.rotated(mean, at[: len(x)])

        q, k = means(run.q[0, self.h].detach())[self.i], means(self.k)
        weights = p.scale * self.contrast.masked_fill(~self.row.visible, 0.0)
        of_mean, of_rest = weights @ k, weights @ (self.k - k)
        rest = self.q - q
        bias = float(self.contrast @ self.row.bias)
        return Terms(
            float(q @ of_mean) + bias, float(rest @ of_mean), float(q @ of_rest),
            float(rest @ of_rest),
        )  # fmt: skip

    def frequencies(self, rotary: Rotary | None) -> Tensor | None:
        """Split the contrast by rotary frequency, (r/2 + 1,); the last is what is not rotated."""
        if rotary is None:
            return None
        products = self.to_key * self.mean_key
        r = 2 * len(rotary.frequencies)
        pairs = products[:r].unflatten(0, (-1, 2) if rotary.interleaved else (2, -1))
        summed = pairs.sum(-1 if rotary.interleaved else 0)
        return torch.cat([summed, products[r:].sum().reshape(1)]).float()
