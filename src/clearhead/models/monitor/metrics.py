"""Reduce the statistics of attention calls to numbers of each head, which merge exactly.

Letters: B batch, H query heads, Tq queries.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...core.functional.ambient import FollowedCall
from ...core.masks import prefix, window
from ...core.stats import Statistic, mass, parse_stats
from ..inspect.recording import Call

ALMOST_ALL = 0.99  # a query whose largest weight exceeds this is `peaked`
_GROUPS = {"first": prefix(1), "self": window(before=0, after=0)}

# The numbers of a head, in the order in which they are logged. The last two are of gradients.
METRICS = (
    "max", "entropy", "entropy_fraction", "first", "self", "peaked", "output", "grad_q", "grad_k",
)  # fmt: skip


def statistics_for(metrics: tuple[str, ...]) -> tuple[Statistic, ...]:
    """Return the statistics of a call from which metrics follow."""
    needed = ["max"] if {"max", "peaked"} & {*metrics} else []
    needed += ["lse"] if "peaked" in metrics else []
    needed += ["entropy"] if {"entropy", "entropy_fraction"} & {*metrics} else []
    groups = {name: group for name, group in _GROUPS.items() if name in metrics}
    return parse_stats([*needed, *([mass(groups)] if groups else [])])


class HeadSums(NamedTuple):
    """Sums of a layer over the queries of calls, (H, sums), and the largest logits, (H,).

    The columns of `sums` are those of `SUMS`. All are float64, and merge exactly but for rounding.
    """

    largest: Tensor
    sums: Tensor

    @staticmethod
    def empty(heads: int) -> "HeadSums":
        return HeadSums(
            torch.full((heads,), -math.inf, dtype=torch.float64),
            torch.zeros(heads, len(SUMS), dtype=torch.float64),
        )

    def merge(self, other: "HeadSums") -> "HeadSums":
        return HeadSums(torch.maximum(self.largest, other.largest), self.sums + other.sums)

    def numbers(self, metrics: tuple[str, ...]) -> dict[str, list[float]]:
        """Return the metrics of each head. A mean over no query is NaN."""
        of = dict(zip(SUMS, self.sums.unbind(1), strict=True))
        squares = of["output"] / of["queries"]
        every = {
            "max": self.largest,
            "entropy_fraction": of["entropy_fraction"] / of["choices"],
            "output": (squares / squares.mean().clamp(min=1e-300)).sqrt(),
        }
        every |= {name: of[name].sqrt() for name in ("grad_q", "grad_k")}
        for name in ("entropy", "first", "self", "peaked"):
            every[name] = of[name] / of["queries"]
        return {name: every[name].tolist() for name in metrics}


SUMS = (
    "queries", "choices", "entropy", "entropy_fraction", "first", "self", "peaked", "output",
    "grad_q", "grad_k",
)  # fmt: skip


def sums_of_call(call: Call, followed: FollowedCall) -> HeadSums:
    """Reduce a recorded call over its queries, without padding and fully masked queries."""
    p, results = followed.problem, call.statistics
    B, H, Tq = p.B, p.H, p.Tq
    counts = call.at.is_real(Tq).to(p.device).expand(B, H, Tq)
    if call.fully_masked is not None:
        counts = counts & ~call.fully_masked
    queries = counts.double()

    def total(x: Tensor) -> Tensor:
        return x.double().where(counts, 0.0).sum((0, 2))

    sums = {"queries": queries.sum((0, 2))}
    largest = torch.full((H,), -math.inf, dtype=torch.float64, device=p.device)
    if (top := cast(Tensor | None, results.get("max"))) is not None and Tq:
        largest = top.double().where(counts, -math.inf).amax((0, 2))
        if (lse := cast(Tensor | None, results.get("lse"))) is not None:
            sums["peaked"] = total((top - lse).exp() > ALMOST_ALL)
    if (entropy := cast(Tensor | None, results.get("entropy"))) is not None:
        keys = p.key_ranges.keys_per_query() if p.masked else torch.tensor([[[p.Tk]]])
        choices = keys.to(p.device).expand(B, H, Tq).double().log()
        sums["entropy"] = total(entropy)
        sums["choices"] = total(choices > 0)
        sums["entropy_fraction"] = total((entropy / choices).where(choices > 0, 0.0))
    for name, weight in cast(dict[str, Tensor], results.get("mass", {})).items():
        sums[name] = total(weight)
    if call.output is not None:
        norms = torch.linalg.vector_norm(call.output, dim=-1, dtype=torch.float64)
        sums["output"] = total(norms.square())
    columns = [sums.get(name, torch.zeros(H, dtype=torch.float64)).cpu() for name in SUMS]
    return HeadSums(largest.cpu(), torch.stack(columns, 1))
