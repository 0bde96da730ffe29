"""The edit that takes the weights of another run."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import BadValue
from ...errors.limits import MOST_DENSE_CELLS
from ...masks import dense
from ...problem.biases import TensorBias
from ...problem.nan_safe import weighted_sum
from ...problem.problem import Inputs, Problem
from .edit import Here, replaced
from .recorded import FromRecording, call_for, check_columns, heads_in, other_sizes, texts_in


@dataclass(frozen=True, eq=False, repr=False)
class freeze(FromRecording):
    """The weights of the heads are those of another run, which ``watch(model, exact_rows=[...])``
    recorded: o[b, h, q] = sum over k of recorded[b, h, q, k] v[b, h, k], with the values of this
    run. Queries whose rows were not recorded are left as they are; where `rows` names them, that is
    an error. ``rows=range(T)`` in `watch` records whole matrices.

    Which call and text of the recording serves which of the block is said at `patch`. `watch` sees
    the frozen weights, for which it forms a matrix of up to 2^27 cells.

    Raises `BadValue` for a recording without the layer, its heads, texts or rows, with fewer calls,
    of other sizes, or of texts that are padded otherwise.
    """

    stage = 1

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, here: Here) -> Tensor:
        weights, queries = self._weights(problem, here)
        v = inputs.v if self.batch is None else inputs.v[self.batch_of(problem)]
        heads = torch.tensor(self.heads_of(problem), device=v.device)
        v = v[:, heads // (problem.H // problem.G)].to(problem.wide)
        weights = weights.to(v.device, v.dtype)
        value = weighted_sum(weights, v, weights != 0)
        return replaced(self, out, value, problem, here, queries)

    def visible_problem(
        self, problem: Problem, inputs: Inputs, here: Here
    ) -> tuple[Problem, Inputs]:
        """softmax(log w) = w: the frozen weights as a bias. A sink takes what they leave over."""
        p = problem
        if p.all_pairs > MOST_DENSE_CELLS:
            raise BadValue(
                f"{self!r} was watched in a call of {p.all_pairs} cells.",
                f"frozen weights are shown as a matrix, of at most {MOST_DENSE_CELLS} cells.",
                "watch other layers, with layers=, or record what is frozen instead.",
            )
        rows, queries = self._weights(problem, here)
        empty = torch.zeros(p.B, p.H, p.Tq, p.Tk, dtype=p.wide, device=p.device)
        weights = replaced(self, empty, rows, problem, here, queries)
        frozen = replaced(self, empty[..., :1], torch.ones(()), problem, here, queries) > 0
        logits = weights.log()
        if p.sinks is not None:
            left = (1 - weights.sum(-1, keepdim=True)).clamp(min=torch.finfo(p.wide).tiny)
            logits = logits - left.log() + p.sinks.reshape(-1, 1, 1)
        keep = p.key_ranges.to_bool() if p.masked else torch.ones_like(frozen)
        keep = torch.where(frozen, weights > 0, keep)
        bias = torch.zeros_like(empty)
        if p.bias is not None:
            bias = bias + p.bias.block(p.grid, slice(0, p.Tq), slice(0, p.Tk), bias)
        bias = torch.where(frozen, logits, bias).masked_fill(~keep, 0.0)
        inputs = inputs._replace(q=inputs.q.masked_fill(frozen, 0.0))
        return replace(problem, mask=dense(keep=keep), bias=TensorBias(bias)), inputs

    def _weights(self, problem: Problem, here: Here) -> tuple[Tensor, Tensor]:
        """The recorded rows of the texts and heads named, (B|1, n, queries, Tk), and which queries
        of the call they are, (B|1, queries); -1 where a text has no such row."""
        call = call_for(self, self.recording, here)
        if call.queries is None:
            raise BadValue(
                f"{self!r} was given a recording without rows.",
                "frozen weights are exact rows of another run.",
                "record them: watch(model, exact_rows=range(T)).",
            )
        rows, Tq = call.found["exact_rows"], problem.Tq
        assert isinstance(rows, Tensor)
        if rows.shape[-1] != problem.Tk or max(call.queries, default=0) >= Tq:
            sizes = max(call.queries, default=0) + 1, rows.shape[-1]
            raise other_sizes(self, "Tq, Tk", sizes, (Tq, problem.Tk))
        weights = texts_in(self, call, problem, rows)[:, heads_in(self, call, problem, rows)]
        check_columns(self, call, problem, here)
        batch = self.batch_of(problem)
        recorded, queries = (
            _of_texts(at.rows(call.queries, Tq), batch) for at in (call.at, here.at)
        )
        queries = torch.where(recorded == queries, queries, -1)
        if self.rows is not None:
            held = torch.zeros(problem.B, Tq + 1, dtype=torch.bool)
            held[batch] = held[batch].scatter(1, queries.expand(len(batch), -1) % (Tq + 1), True)
            where = self.where(problem, here)
            assert where is not None
            missing = where.any(1).cpu() & ~held[:, :Tq]
            if bool(missing.any()):
                raise BadValue(
                    f"{self!r} names rows that were not recorded, of queries "
                    f"{missing.any(0).nonzero().flatten().tolist()}.",
                    f"frozen weights are exact rows of another run, which holds {call.queries}.",
                    "record these rows too: watch(model, exact_rows=[...]).",
                )
        return weights, queries


def _of_texts(rows: Tensor, batch: list[int]) -> Tensor:
    return rows if len(rows) == 1 else rows[[b for b in batch if b < len(rows)]]
