"""Which engine computes the output, or only statistics of the weights.

`ENGINES` is the order in which `engine="auto"` tries them, fastest first as measured; the reference
comes last. On a GPU the order depends on the problem (`order_on`), by reasons and not yet by
measurements; FlexAttention answers there by name only. An engine that a caller names computes or
raises an error with its reasons, and never falls back.
"""

from collections.abc import Iterable

from ..errors import BadValue
from ..problem.problem import Inputs, Problem
from ..stats import Partial, Statistic, parse_stats
from .cpu import Cpu
from .engine import Answer, Engine
from .gpu.flex import Flex
from .gpu.triton import Triton
from .reference import Steps
from .sdpa import Sdpa
from .sdpa_backends import Gpu, gpu_of, why_not_torch
from .tiled import Tiled

CORE, SDPA, TILED, STEPS = Cpu(), Sdpa(), Tiled(), Steps()
TRITON, FLEX = Triton(), Flex()
ENGINES: tuple[Engine, ...] = (CORE, SDPA, TILED, STEPS)
BY_NAME: tuple[Engine, ...] = (CORE, SDPA, TRITON, FLEX, TILED, STEPS)


def order(problem: Problem) -> tuple[Engine, ...]:
    """The engines that `auto` asks, first to last."""
    return order_on(problem, gpu_of(problem.device)) if problem.device.type == "cuda" else ENGINES


def order_on(problem: Problem, gpu: Gpu) -> tuple[Engine, ...]:
    """`order` on this GPU. torch's fused kernels come first where they take the problem as it is:
    vendors tune them for each device. What is masked goes to our kernels, which skip what the mask
    leaves empty and keep NaN behind it; torch's would need q, k and v cleaned of NaN first, and any
    mask but a causal one written out. So does a problem for which torch has no fused kernel."""
    if why_not_torch(problem, gpu):
        return TRITON, SDPA, TILED, STEPS
    return SDPA, TRITON, TILED, STEPS


def choose(problem: Problem, engine: str) -> Engine:
    """The engine to use.

    Raises `BadValue` for an unknown name, and if the named engine, or every engine, declines.
    """
    chosen, declined = first_able(problem, engine)
    if chosen is not None:
        return chosen
    said = "; ".join(f"{name} {', '.join(reasons)}" for name, reasons in declined.items())
    if engine == "auto":
        raise BadValue(
            f"No engine can answer this: {problem.describe()}.",
            f"each engine says what it lacks: {said}.",
            "pass smaller or simpler inputs; plan(...) shows what each engine says.",
        )
    raise BadValue(
        f"engine={engine!r} cannot answer this: {problem.describe()}.",
        f"an engine asked for by name never falls back, and this one says: {said}.",
        "leave engine= out, and the fastest engine that can answers; plan(...) shows which.",
    )


def first_able(problem: Problem, engine: str) -> tuple[Engine | None, dict[str, list[str]]]:
    """The first engine that does not decline, or None, and what those before it said."""
    declined: dict[str, list[str]] = {}
    for candidate in order(problem) if engine == "auto" else (named(engine),):
        reasons = candidate.why_not(problem)
        if not reasons:
            return candidate, declined
        declined[candidate.name] = reasons
    return None, declined


def named(engine: object) -> Engine:
    for candidate in BY_NAME:
        if candidate.name == engine:
            return candidate
    names = ", ".join(repr(e.name) for e in BY_NAME)
    raise BadValue(
        f"engine={engine!r} is unknown.",
        f"an engine is 'auto' or one of {names}.",
        "leave engine= out to let clearhead choose.",
    )


def compute_stats(
    problem: Problem, inputs: Inputs, statistics: Iterable[str | Statistic]
) -> Partial:
    """Statistics of all queries on all keys, without the output: by the C++ core or the Triton
    kernels where they can, else tile by tile. Raises what `parse_stats` raises."""
    problem, parsed = problem.without_dropout, parse_stats(statistics, problem.grid)
    counter = next((e for e in (CORE, TRITON) if not e.why_not(problem)), TILED)
    stats = counter.answer(problem, inputs, parsed, output=False).stats
    return stats or Partial.of_all(problem, parsed, None)  # no statistics


def answer(
    engine: Engine, problem: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]
) -> Answer:
    """The output and statistics of its weights. On a GPU the Triton kernels count for the kernels
    of torch, which count nothing: the output has the bits that it has without looking."""
    counted = problem.without_dropout
    if statistics and engine in (SDPA, FLEX) and not TRITON.why_not(counted):
        out = engine.answer(problem, inputs).out
        return Answer(out, TRITON.answer(counted, inputs, statistics, output=False).stats)
    return engine.answer(problem, inputs, statistics)
