"""Choose the engine that computes a problem.

`engine="auto"` tries the engines in the order of `ENGINES`: the fastest first, as measured, and the
reference last. On a GPU the order depends on the problem (`order_on`). An engine that a caller
names computes the problem or raises an error with its reasons, and never falls back.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import BadValue
from ..problem.problem import Inputs, Problem
from ..stats import Partial, Result, Statistic, Statistics, lse_alone, mass, parse_stats
from ..torch_state import is_undisturbed
from .cpu import Cpu
from .engine import CPU, Engine, Results
from .gpu.fused import Fused
from .gpu.recorder import do_not_record
from .gpu.replay import MOST_RECORDS, Records, settings
from .gpu.triton import Triton
from .reference import Steps
from .sdpa import Sdpa
from .sdpa_backends import Gpu, gpu_of, why_not_direct, why_not_torch, why_slower
from .tiled import Tiled

CORE, FUSED, SDPA, TRITON = Cpu(), Fused(), Sdpa(), Triton()
TILED, STEPS = Tiled(), Steps()
REPLAYED = FUSED.name, TRITON.name  # the other engines set modes of torch
_chosen: dict[tuple[Any, ...], Engine] = {}
_records = Records()
BY_NAME: tuple[Engine, ...] = (CORE, FUSED, SDPA, TRITON, TILED, STEPS)
ENGINES = tuple(engine for engine in BY_NAME if engine.name in CPU.engines)


def order(problem: Problem) -> tuple[Engine, ...]:
    """Return the engines that `auto` tries, in order."""
    return order_on(problem, gpu_of(problem.device)) if problem.device.type == "cuda" else ENGINES


def order_on(problem: Problem, gpu: Gpu) -> tuple[Engine, ...]:
    """Return `order` for this GPU.

    torch's fused kernels come first for problems that one of them can compute with a causal mask or
    none and without a bias: on an H200, cuDNN takes 0.6 to 0.8 of the Triton kernels' time. In
    other cases the Triton kernels come first. They skip tiles that the mask leaves empty. torch's
    kernels would need the mask written out, and q, k and v cleaned of NaN; a window of 512 took
    cuDNN 20 times as long.
    """
    if why_slower(problem, gpu):
        return TRITON, FUSED, SDPA, TILED, STEPS
    if not why_not_direct(problem, gpu):
        return FUSED, TRITON, SDPA, TILED, STEPS
    if not why_not_torch(problem, gpu):  # with heads of a size that torch fills up
        return SDPA, TRITON, TILED, STEPS
    return TRITON, SDPA, TILED, STEPS


def choose(problem: Problem, engine: str) -> Engine:
    """Return the engine to use.

    Raises `BadValue` if the name is unknown, or if the named engine, or every engine, declines.
    """
    p, kind = problem, _kind(problem, engine)
    sizes = p.B, p.H, p.G, p.Tq, p.Tk, p.D, p.Dv, p.grad
    of = kind and (*kind, *sizes, *settings(p.device, p.dtype))
    if of is not None and of in _chosen:
        return _chosen[of]
    chosen, declined = first_capable(problem, engine)
    if chosen is not None:
        if of is not None:
            if len(_chosen) >= MOST_RECORDS:
                _chosen.clear()
            _chosen[of] = chosen
        return chosen
    listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in declined.items())
    who, rule = f"engine={engine!r} cannot", "an engine that is named never falls back"
    hint = "omit engine= to use the fastest engine that can; plan(...) shows which one."
    if engine == "auto":
        who, rule = "No engine can", "every engine declines"
        hint = "pass smaller or simpler inputs; plan(...) lists the reasons too."
    raise BadValue(f"{who} compute this call: {problem.describe()}.", f"{rule} ({listed}).", hint)


def first_capable(problem: Problem, engine: str) -> tuple[Engine | None, dict[str, list[str]]]:
    """Return the first engine that can compute the problem, or None, and why earlier ones
    cannot."""
    declined: dict[str, list[str]] = {}
    for candidate in order(problem) if engine == "auto" else (named(engine),):
        reasons = candidate.why_not(problem)
        if not reasons:
            return candidate, declined
        declined[candidate.name] = reasons
    return None, declined


def named(engine: object) -> Engine:
    """Return the engine of this name. Raises `BadValue` if there is none."""
    for candidate in BY_NAME:
        if candidate.name == engine:
            return candidate
    names = ", ".join(repr(e.name) for e in BY_NAME)
    rule = f"an engine is 'auto' or one of {names}."
    raise BadValue(f"engine={engine!r} is unknown.", rule, "omit engine= to let clearhead choose.")


def compute_stats(
    problem: Problem, inputs: Inputs, statistics: Iterable[str | Statistic]
) -> Partial:
    """Compute statistics of all queries over all keys, without the output, to be merged.

    The C++ core or the Triton kernels compute them if they can, otherwise `tiled`. Raises what
    `parse_stats` raises.
    """
    problem, parsed = problem.without_dropout, parse_stats(statistics, problem.grid)
    if not parsed:
        return Partial.of_all(problem, parsed, None)
    return _engine_of_stats(problem).partial(problem, inputs, parsed)


def statistics_of(
    problem: Problem, inputs: Inputs, statistics: Iterable[str | Statistic]
) -> dict[str, Result]:
    """Compute finished statistics of all queries over all keys, as `compute_stats` chooses."""
    problem, parsed = problem.without_dropout, parse_stats(statistics, problem.grid)
    return _engine_of_stats(problem).statistics(problem, inputs, parsed) if parsed else {}


def _engine_of_stats(problem: Problem) -> Engine:
    return next((e for e in (CORE, TRITON) if not e.why_not(problem)), TILED)


def counts_with_output(engine: Engine, problem: Problem) -> bool:
    """Return whether `answer` of this engine computes statistics without gradients as
    `statistics_of` does, and in the sweep of the output where its kernels can."""
    return engine in (CORE, FUSED, TRITON) and not problem.records_grad


def answer(engine: Engine, problem: Problem, inputs: Inputs, statistics: Statistics) -> Results:
    """Compute the output and statistics of the weights, or only the output without any.

    torch's kernels compute no statistic but the log-sum-exp, so on a GPU the Triton kernels compute
    them in addition; the output has the same bits as without statistics.
    """
    if not statistics:
        return Results(engine.compute(problem, inputs), {})
    undropped = problem.without_dropout
    alone = engine is FUSED and lse_alone(statistics) and FUSED.returns_lse(problem)
    if engine in (FUSED, SDPA) and not alone and not TRITON.why_not(undropped):
        out = engine.compute(problem, inputs)
        return Results(out, TRITON.statistics(undropped, inputs, statistics))
    return engine.answer(problem, inputs, statistics)


def _kind(p: Problem, engine: str) -> tuple[Any, ...] | None:
    """Return what decides how a call is computed on a GPU (or by Triton's interpreter) besides the
    layouts of its tensors and `settings`; None if more than that decides."""
    if torch.compiler.is_compiling() or (p.device.type != "cuda" and engine not in REPLAYED):
        return None
    if not (p.bias is p.sinks is None and not p.dropout and is_undisturbed()):
        return None
    band = p.mask.band(p.grid)
    return None if band is None else (type(p.mask), *band, p.scale, p.softcap, engine)


def kind_of(p: Problem, engine: str, statistics: Statistics) -> tuple[object, ...] | None:
    """Return what the steps of a call follow from besides the layouts of its tensors, so that a
    later call of this kind may repeat them; None if they follow from more. The tensors in it are
    those of groups of keys, which a repeated call replaces too."""
    if p.grad or torch._C._is_any_autocast_enabled():
        return None
    kind = _kind(p, engine)
    if kind is None:
        return None
    described = [_described(s, p) for s in statistics]
    return None if None in described else (*kind, *described)


def _described(s: Statistic, p: Problem) -> object | None:
    """Return the part of `kind_of` for a statistic."""
    if s.by_layout and s.factors is None and not s.own_pass:
        return s
    if not isinstance(s, mass):
        return None
    groups = s.key_groups(p)
    if not all(group.can_be_stored for group in groups):
        return None
    return mass, *s.groups, *(group.mask for group in groups)


def replay(
    kind: tuple[object, ...], p: Problem, inputs: Inputs, engine: str, statistics: Statistics
) -> tuple[Tensor, dict[str, Result]]:
    """Choose an engine and compute, or repeat the steps of an earlier call."""

    def run(q: Tensor, k: Tensor, v: Tensor, _: object) -> tuple[Tensor, dict[str, Result]]:
        chosen = choose(p, engine)
        if chosen.name not in REPLAYED:
            do_not_record()
        return answer(chosen, p, Inputs(q, k, v), statistics)

    computed: tuple[Tensor, dict[str, Result]] = _records.call(run, (*inputs, kind))
    return computed
