"""The scores of some queries of a head, and their weights.

Letters: H heads, G KV heads, Tq queries, Tk keys.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.errors import BadValue
from ...core.functional.matrix import Matrix
from ...core.problem.problem import Inputs, Problem
from .score_paths import ScoreRun


class ScoreRows(NamedTuple):
    """The scores of n queries, (n, Tk) each, in fp64.

    `raw` is scale q . k, `bias` the position bias, `scores` what enters softmax, and `visible` the
    keys that a query may look at.
    """

    raw: Tensor
    bias: Tensor
    scores: Tensor
    visible: Tensor
    sink: Tensor | None

    def weights_of(self, raw: Tensor, p: Problem) -> Tensor:
        """Compute the weights for other values of `raw`; those of a fully masked query are 0."""
        if p.softcap is not None:
            raw = p.softcap * torch.tanh(raw / p.softcap)
        scores = (raw + self.bias).masked_fill(~self.visible, -torch.inf)
        if self.sink is not None:
            scores = torch.cat([scores, self.sink.double().expand(len(scores), 1)], -1)
        weights = scores.softmax(-1)[:, : raw.shape[-1]]
        weights[~self.visible.any(-1)] = 0.0
        return weights


@torch.no_grad()
def score_rows(run: ScoreRun, at: slice, h: int) -> tuple[ScoreRows, Tensor]:
    """Compute the scores and the weights of some queries of a head.

    Raises `BadValue` for NaN, and unless the weights of the first query are those of the call.
    """
    p = run.problem
    raw = p.scale * run.q[0, h, at].double() @ run.k[0, h // (p.H // p.G)].double().T
    keys, size = slice(0, p.Tk), (1, p.H, len(raw), p.Tk)
    bias = raw.new_zeros(()).expand_as(raw)
    visible = torch.ones_like(raw, dtype=torch.bool)
    if p.bias is not None:
        like = torch.empty((), dtype=p.wide, device=raw.device)
        bias = p.bias.block(p.grid, at, keys, like).expand(size)[0, h].double()
        visible = bias > -1e30  # -inf, or the lowest number of the dtype
        bias = bias.masked_fill(~visible, 0.0)
    if p.masked:
        keep = p.key_ranges.to_bool(at, keys).to(raw.device)
        visible = visible & keep.expand(size)[0, h]
    raw = raw.masked_fill(~visible, 0.0)
    scores = raw if p.bias is None else raw + bias
    rows = ScoreRows(raw, bias, scores, visible, None if p.sinks is None else p.sinks[h])
    weights = rows.weights_of(raw, p)
    of_call = Matrix(replace(p, input_dims=4), Inputs(*(x.detach() for x in run.inputs)))
    first = of_call.rows([at.start])[0, h, 0].double()
    missed = float((weights[0] - first).abs().max() + 0 * weights.sum())  # NaN if any weight is
    if not missed <= max(1e-4, 8 * torch.finfo(p.dtype).eps):
        raise BadValue(
            f"The weights of the call differ from the softmax of its scores by {missed:.1g}.",
            "the parts are those of the scores from which the weights follow.",
            "check the inputs for NaN, and call why without edits of this layer.",
        )
    return rows, weights
