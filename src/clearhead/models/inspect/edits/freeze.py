"""The edit that replaces weights by those of another run."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....core.errors import BadValue
from ....core.errors.limits import MOST_DENSE_CELLS
from ....core.masks import dense
from ....core.problem.biases import TensorBias
from ....core.problem.nan_safe import weighted_sum
from ....core.problem.problem import Inputs, Problem
from .edit import Edited, EditSite, replaced
from .recorded import FromRecording, call_for, check_columns, heads_in, other_sizes, texts_in


@dataclass(frozen=True, eq=False, repr=False)
class freeze(FromRecording):
    """Replace the weights of the heads by those of another run.

    ``watch(model, exact_rows=[...])`` records that run, and ``exact_rows=range(T)`` records
    complete matrices. The output is o[b, h, q] = sum over k of recorded[b, h, q, k] v[b, h, k],
    with the values v of this run. Queries whose rows were not recorded do not change; if
    `positions` selects one of them, `BadValue` is raised.

    Calls and texts are matched with those of the recording as in `patch`. `watch` records the
    frozen weights; for this it forms a matrix of up to 2^27 cells.

    Args:
        recording: what ``watch(model, exact_rows=[...])`` returned for the other run.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of query heads; -1 is the last, None means all.
        positions: positions of queries in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    Raises `BadValue` for a recording without the layer, its heads, texts or rows, with fewer calls,
    of other sizes, or of texts with different padding.
    """

    stage = 1

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, site: EditSite) -> Tensor:
        weights, queries = self._weights(problem, site)
        v = inputs.v if self.batch is None else inputs.v[self.batch_of(problem)]
        heads = torch.tensor(self.heads_of(problem), device=v.device)
        v = v[:, heads // (problem.H // problem.G)].to(problem.wide)
        weights = weights.to(v.device, v.dtype)
        return replaced(self, out, weighted_sum(weights, v, weights != 0), problem, site, queries)

    def visible_problem(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        """Return a problem with the frozen weights as a bias, since softmax(log w) = w.

        A sink takes 1 minus the sum of the frozen weights. Raises `BadValue` for a call of too many
        cells.
        """
        p = problem
        if p.all_pairs > MOST_DENSE_CELLS:
            rule = f"watch forms a matrix of frozen weights, of at most {MOST_DENSE_CELLS} cells."
            hint = "watch other layers, with layers=, or read the weights from the recording."
            raise BadValue(f"{self!r} was watched in a call of {p.all_pairs} cells.", rule, hint)
        rows, queries = self._weights(problem, site)
        empty = torch.zeros(p.B, p.H, p.Tq, p.Tk, dtype=p.wide, device=p.device)
        weights = replaced(self, empty, rows, problem, site, queries)
        frozen = replaced(self, empty[..., :1], torch.ones(()), problem, site, queries) > 0
        logits = weights.log()
        if p.sinks is not None:
            rest = (1 - weights.sum(-1, keepdim=True)).clamp(min=torch.finfo(p.wide).tiny)
            logits = logits - rest.log() + p.sinks.reshape(-1, 1, 1)
        keep = p.key_ranges.to_bool() if p.masked else torch.ones_like(frozen)
        keep = torch.where(frozen, weights > 0, keep)
        bias = torch.zeros_like(empty)
        if p.bias is not None:
            bias = bias + p.bias.block(p.grid, slice(0, p.Tq), slice(0, p.Tk), bias)
        bias = torch.where(frozen, logits, bias).masked_fill(~keep, 0.0)
        inputs = inputs._replace(q=inputs.q.masked_fill(frozen, 0.0))
        return replace(problem, mask=dense(keep=keep), bias=TensorBias(bias)), inputs

    def _weights(self, problem: Problem, site: EditSite) -> tuple[Tensor, Tensor]:
        """Return the recorded rows of the selected texts and heads, (B|1, n, queries, Tk), and
        their columns in the call, (B|1, queries); -1 if a text has no such row."""
        call = call_for(self, self.recording, site)
        if call.queries is None:
            rule = "frozen weights are exact rows of another run."
            hint = "record them: watch(model, exact_rows=range(T))."
            raise BadValue(f"{self!r} has a recording without rows.", rule, hint)
        rows, Tq = call.statistics["exact_rows"], problem.Tq
        assert isinstance(rows, Tensor)
        if rows.shape[-1] != problem.Tk or max(call.queries, default=0) >= Tq:
            sizes = max(call.queries, default=0) + 1, rows.shape[-1]
            raise other_sizes(self, "Tq, Tk", sizes, (Tq, problem.Tk))
        weights = texts_in(self, call, problem, rows)[:, heads_in(self, call, problem, rows)]
        check_columns(self, call, problem, site)
        batch = self.batch_of(problem)
        recorded, queries = (
            _of_texts(at.rows(call.queries, Tq), batch) for at in (call.at, site.at)
        )
        queries = torch.where(recorded == queries, queries, -1)
        if self.positions is not None:
            exists = torch.zeros(problem.B, Tq + 1, dtype=torch.bool)
            columns = queries.expand(len(batch), -1) % (Tq + 1)  # column Tq takes the -1
            exists[batch] = exists[batch].scatter(1, columns, True)
            missing = self.where(problem, site).any(1).cpu() & ~exists[:, :Tq]
            if bool(missing.any()):
                absent = missing.any(0).nonzero().flatten().tolist()
                gave = f"{self!r} selects queries {absent}, whose rows were not recorded."
                rule = f"frozen weights are exact rows of another run, which has {call.queries}."
                raise BadValue(gave, rule, "record these rows too: watch(model, exact_rows=[...]).")
        return weights, queries


def _of_texts(rows: Tensor, batch: list[int]) -> Tensor:
    return rows if len(rows) == 1 else rows[[b for b in batch if b < len(rows)]]
