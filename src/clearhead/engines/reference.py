"""The reference: attention one named step at a time.

It reads as the lesson and defines what every other engine must give. In float64 it is the oracle.
It holds every matrix it names, so it is for short inputs and for truth, not for speed.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import nan_safe
from ..problem.online_softmax import anchor
from ..problem.problem import Inputs, Problem
from ..torch_state import batches_gradients
from ..trace import Step
from .engine import NO_BATCHING_RULE, Engine

MOST_BYTES = 4 * 2**30
ALL = slice(None)

WHY = {
    "query": "What each query is looking for.",
    "key": "What each key offers to be found by.",
    "value": "What each key gives when it is looked at.",
    "scores": "How well each query matches each key: one dot product per pair.",
    "scaled": "A sum of D products grows like √D; scaling takes that back, so that softmax does "
    "not saturate.",
    "capped": "No score may leave the range of the cap; small ones hardly change.",
    "biased": "Something known about the pair is added to its score.",
    "masked": "exp(−∞) is 0, so a blocked key gets no weight at all.",
    "weights": "The softmax exp(x − max) / Σ exp(x − max): positive shares, 1 in all. max only "
    "prevents overflow.",
    "dropped": "Some weights are dropped at random, so that no query leans on one key alone.",
    "output": "Each query takes a mixture of the values, by its weights.",
}


def steps(problem: Problem, inputs: Inputs) -> Iterator[Step]:
    """Every step from Q, K, V to the output, in order, without those that do nothing here."""
    p = problem
    q, k, v = p.widen(inputs)
    keep = p.key_ranges.to_bool() if p.masked else None

    # 1. What each token asks for, what it offers, and what it gives when it is chosen.
    yield _step("query", "Q", "b h q d", inputs.q)
    yield _step("key", "K", "b g k d", inputs.k)
    yield _step("value", "V", "b g k v", inputs.v)

    # 2. How well does each query match each key? One dot product per pair.
    x = nan_safe.scores(q, k, keep)
    yield _step("scores", "Q Kᵀ", "b h q k", x)

    last = "scores"

    # 3. Keep the scores small, whatever the head size.
    if p.scale != 1.0:
        x = x * p.scale
        yield _step("scaled", _scale_formula(p), "b h q k", x)
        last = "scaled"
    if p.softcap is not None:
        x = p.softcap * torch.tanh(x / p.softcap)
        yield _step("capped", f"{p.softcap:g} · tanh({last} / {p.softcap:g})", "b h q k", x)
        last = "capped"

    # 4. What is known about a pair besides its contents: a bias, and who may look at all.
    if p.bias is not None:
        x = x + p.bias.block(p.grid, ALL, ALL, x)
        yield _step("biased", f"{last} + bias", "b h q k", x)
        last = "biased"
    if keep is not None:
        x = x.masked_fill(~keep, float("-inf"))
        yield _step("masked", f"{last} where the mask allows, else −∞", "b h q k", x)
        last = "masked"

    # 5. Scores become weights: positive, and each row sums to 1 (a row without keys stays 0).
    weights = _softmax(x, p.sinks)
    sink = "" if p.sinks is None else ", with exp(sink − max) in the sum"
    yield _step("weights", f"softmax({last}){sink}", "b h q k", weights)

    # 6. In training some weights are dropped, and the others grow to make up for it.
    used = weights
    if p.dropout:
        used = F.dropout(weights, p.dropout) if p.seed is None else weights * p.survivors(ALL, ALL)
        share = f"weights · kept / (1 − {p.dropout:g})" if p.dropout < 1 else "0, all are dropped"
        yield _step("dropped", share, "b h q k", used)

    # 7. The values, mixed by the weights.
    out = nan_safe.weighted_sum(used, v, keep).to(p.dtype)
    yield _step("output", f"{'dropped' if p.dropout else 'weights'} · V", "b h q v", out)


class Steps(Engine):
    """The definition: what `explain` shows, without keeping the steps."""

    name = "steps"
    caption = "the reference, step by step, in plain torch"

    def why_not(self, problem: Problem) -> list[str]:
        return [NO_BATCHING_RULE] if batches_gradients() else too_large(problem)

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        *_, output = steps(problem, inputs)
        return output.tensor


def too_large(problem: Problem) -> list[str]:
    """The reason why the matrices of all steps would not fit in memory; empty if they would."""
    width = torch.empty((), dtype=problem.wide).element_size()
    need = 6 * width * problem.all_pairs
    if need <= MOST_BYTES:
        return []
    return [
        f"would hold about 6 matrices of {problem.B}x{problem.H}x{problem.Tq}x{problem.Tk} "
        f"({need / 1e9:.1f} GB, more than {MOST_BYTES / 1e9:.1f} GB)"
    ]


def _softmax(x: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of masked scores (B, H, q, k), with the sink in the sum.

    Subtracting the maximum keeps exp from overflowing. It cancels, so autograd treats it as a
    constant. A row of only -inf gets weights 0, and so does a cell of -inf in a row that holds NaN.
    """
    every = x
    if sinks is not None:
        extra = sinks.to(x).reshape(1, -1, 1, 1)
        every = torch.cat([x, extra.expand(*x.shape[:3], 1)], -1)
    if not every.shape[-1]:
        return x
    exps = torch.exp(every - anchor(every.detach().amax(-1, keepdim=True)))
    total = exps.sum(-1, keepdim=True)
    weights = exps[..., : x.shape[-1]] / total.masked_fill(total == 0, 1.0)
    return weights.masked_fill(x == float("-inf"), 0.0)


def _step(name: str, formula: str, axes: str, tensor: Tensor) -> Step:
    return Step(name, formula, WHY[name], axes, tensor)


def _scale_formula(p: Problem) -> str:
    if abs(p.scale * p.D**0.5 - 1.0) < 1e-12:
        return f"scores / √{p.D} = scores · {p.scale:.4g}"
    return f"scores · {p.scale:.4g}"
