"""Define statistics of what a head writes, which `watch` computes from the output of a call."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadValue
from ..masks import Grid
from .statistic import Statistic


@dataclass(frozen=True)
class Varying(Statistic):
    """What a head writes at a query, without the mean of what it writes in the text: squared, and
    divided by the mean square of what it writes.

    With o = z W_O it is |o - mean o|² / mean |o|². Its mean over queries is the fraction of the
    head's squared output that varies, from 0 to 1; the rest is one constant vector. Padding and
    fully masked queries are in no mean, and get 0.
    """

    name, sweep = "varying", "output"
    formula = "|o - mean o|² / mean |o|² over queries, o = z W_O"

    def must_fit(self, grid: Grid) -> None:
        raise BadValue(
            'stats has "varying" outside a model.',
            "what a head writes depends on the output projection of a layer.",
            'use watch(model, stats=["varying"]).',
        )

    def of_output(
        self, out: Tensor, root: Tensor, counts: Tensor, over_ranks: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Compute it, (B, H, Tq), from z (B, H, Tq, Dv) and W_O as a root (H, Dv, Dv).

        `counts`, (B|1, H|1, Tq), is False for queries that are in no mean. The queries may be a
        part of the text; `over_ranks` adds the sums of the other parts.
        """
        counts = counts.to(out.device)
        z = out.masked_fill(~counts.unsqueeze(-1), 0.0)
        n = over_ranks(counts.sum(-1, keepdim=True)).clamp(min=1)
        mean = over_ranks(z.sum(2, keepdim=True)) / n.unsqueeze(-1)
        change = ((z - mean) @ root).square().sum(-1)
        total = over_ranks((z @ root).square().sum((2, 3)).unsqueeze(-1)) / n
        share = change / torch.where(total == 0, 1.0, total)
        return share.masked_fill(~counts, 0.0)
