"""`plan`: report which engine would compute a call, why others cannot, and what it costs."""

from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor

from ..engines import choice
from ..errors import refuse_keywords
from ..formatting import ShownInNotebook, si
from ..masks import Mask
from ..problem.biases import Bias
from ..problem.blocks import BlockTensor
from ..problem.check import Options, make_problem
from ..problem.problem import Problem
from ..torch_state import loadable

TILE = 256


@loadable
@dataclass(frozen=True, repr=False)
class Plan(ShownInNotebook):
    """The engine that computes a call, the reasons, and the costs, as data that prints as text.

    `flops` counts the two products over the pairs that may look, and `bytes` counts q, k, v and the
    output once. `tiles` counts the 256 x 256 blocks that are full, partial or empty under the mask.
    """

    problem: str
    engine: str | None
    caption: str
    declined: dict[str, list[str]]
    not_needed: tuple[str, ...]
    pairs: int
    all_pairs: int
    flops: int
    bytes: int
    tiles: dict[str, int]
    skips_tiles: bool

    def __repr__(self) -> str:
        share = f"{100 * self.pairs / self.all_pairs:.1f} %" if self.all_pairs else "none"
        answered = f"{self.engine} ({self.caption})" if self.engine else "no engine"
        lines = [self.problem, f"  answered by   {answered}"]
        for name, reasons in self.declined.items():
            lines.append(f"  {name + ' declined':<13} {'; '.join(reasons)}")
        if self.not_needed:
            lines.append(f"  not needed    {', '.join(self.not_needed)} (later in the order)")
        lines.append(f"  pairs         {self.pairs:,} of {self.all_pairs:,} may look ({share})")
        lines.append(f"  arithmetic    {si(self.flops)}FLOP in the two products")
        lines.append(f"  memory        {si(self.bytes)}B in and out at least")
        counts = ", ".join(f"{n} {kind}" for kind, n in self.tiles.items())
        done = "; empty ones are skipped" if self.skips_tiles else "; this engine computes them all"
        lines.append(f"  tiles         {counts} of {TILE} x {TILE}{done if self.engine else ''}")
        return "\n".join(lines)


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> Plan:
    """Report which engine would compute this call, why others cannot, and what the call costs.

    Arguments are those of `attention`; only the mask is computed. A plan also reports that no
    engine can compute the call. Raises as `attention` for an unknown engine or invalid arguments.
    """
    if unknown:
        refuse_keywords(plan, unknown)
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    problem, inputs = make_problem(q, k, v, options)
    planned = plan_of(problem, engine)
    if formats := sorted({x.format for x in inputs if isinstance(x, BlockTensor)}):
        about = f"{planned.problem}; exact for the numbers that {' and '.join(formats)} stores"
        planned = replace(planned, problem=about)
    return planned


def plan_of(problem: Problem, engine: str) -> Plan:
    """Plan a problem that is already checked."""
    chosen, declined = choice.first_capable(problem, engine)
    order = choice.order(problem)
    later = order[order.index(chosen) + 1 :] if chosen and engine == "auto" else ()
    return Plan(
        problem=problem.describe(),
        engine=chosen.name if chosen else None,
        caption=chosen.caption_of(problem) if chosen else "",
        declined=declined,
        not_needed=tuple(e.name for e in later),
        pairs=problem.pairs,
        all_pairs=problem.all_pairs,
        flops=problem.flops,
        bytes=problem.bytes,
        tiles=_count_tiles(problem),
        skips_tiles=chosen is not None and chosen.skips_tiles(problem),
    )


def _count_tiles(problem: Problem) -> dict[str, int]:
    """Count blocks in which the mask allows all, some or no pairs, over all batches and heads."""
    columns = -(-problem.Tk // TILE)
    some, full = problem.key_ranges.count_tiles(TILE)
    return {"full": full, "partial": some - full, "empty": -(-problem.Tq // TILE) * columns - some}
