"""The reference engine: attention computed one named step at a time.

It defines the correct result. Tests compare every other engine with this one in float64.
It stores every matrix that it names, so use it for short inputs.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors.limits import MOST_STEPS_BYTES
from ..problem import nan_safe
from ..problem.online_softmax import anchor
from ..problem.problem import Inputs, Problem
from ..torch_state import batches_gradients
from .engine import NO_BATCHING_RULE, Engine
from .step import Step

ALL = slice(None)

WHY = {
    "query": "What each query looks for.",
    "key": "What each key is matched by.",
    "value": "What each key contributes to a query that attends to it.",
    "scores": "How well each query matches each key: one dot product per pair.",
    "scaled": "A sum of D products grows like √D; scaling undoes that growth, so that softmax does "
    "not saturate.",
    "capped": "The cap bounds every score, and hardly changes small ones.",
    "biased": "A number for the pair, for example for its distance, is added to its score.",
    "masked": "exp(−∞) is 0, so a masked key gets weight 0.",
    "weights": "exp(x − max) / Σ exp(x − max) is positive and sums to 1. Subtracting max prevents "
    "overflow.",
    "dropped": "Random weights are set to 0, so that no query relies on one key alone.",
    "output": "Each query gets a sum of the values, weighted by its weights.",
}


def steps(problem: Problem, inputs: Inputs) -> Iterator[Step]:
    """Yield every step from Q, K and V to the output, in order, except steps that change
    nothing."""
    p = problem
    q, k, v = p.widen(inputs)
    keep = p.key_ranges.to_bool() if p.masked else None

    # 1. Each token has three vectors: what it looks for, what it is matched by, what it
    #    contributes.
    yield _step("query", "Q", "b h q d", inputs.q)
    yield _step("key", "K", "b g k d", inputs.k)
    yield _step("value", "V", "b g k v", inputs.v)

    # 2. Score how well each query matches each key: one dot product per pair.
    x = nan_safe.scores(q, k, keep)
    yield _step("scores", "Q Kᵀ", "b h q k", x)

    last = "scores"

    # 3. Scale the scores, so that their size does not depend on D; then bound them.
    if p.scale != 1.0:
        x = x * p.scale
        yield _step("scaled", _scale_formula(p), "b h q k", x)
        last = "scaled"
    if p.softcap is not None:
        x = p.softcap * torch.tanh(x / p.softcap)
        yield _step("capped", f"{p.softcap:g} · tanh({last} / {p.softcap:g})", "b h q k", x)
        last = "capped"

    # 4. Add the bias of each pair, and hide the keys that a query may not attend to.
    if p.bias is not None:
        x = x + p.bias.block(p.grid, ALL, ALL, x)
        yield _step("biased", f"{last} + bias", "b h q k", x)
        last = "biased"
    if keep is not None:
        x = x.masked_fill(~keep, float("-inf"))
        yield _step("masked", f"{last} where the mask allows, else −∞", "b h q k", x)
        last = "masked"

    # 5. Turn scores into weights: positive, and each row sums to 1 (a row without keys stays 0).
    weights = _softmax(x, p.sinks)
    sink = "" if p.sinks is None else ", with exp(sink − max) in the sum"
    yield _step("weights", f"softmax({last}){sink}", "b h q k", weights)

    # 6. In training, set random weights to 0 and enlarge the others, so that the mean stays the
    #    same.
    used = weights
    if p.dropout:
        used = F.dropout(weights, p.dropout) if p.seed is None else weights * p.survivors(ALL, ALL)
        formula = f"weights · kept / (1 − {p.dropout:g})" if p.dropout < 1 else "0, all are dropped"
        yield _step("dropped", formula, "b h q k", used)

    # 7. Sum the values, weighted by the weights.
    out = nan_safe.weighted_sum(used, v, keep).to(p.dtype)
    yield _step("output", f"{'dropped' if p.dropout else 'weights'} · V", "b h q v", out)


class Steps(Engine):
    """The reference as an engine: the steps of `explain`, of which only the output is kept."""

    name = "steps"
    caption = "the reference, step by step, in plain torch"

    def why_not(self, problem: Problem) -> list[str]:
        return [NO_BATCHING_RULE] if batches_gradients() else too_large(problem)

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        *_, output = steps(problem, inputs)
        return output.tensor


def too_large(problem: Problem) -> list[str]:
    """Return why the matrices of all steps would take too much memory; empty if they fit."""
    need = 6 * problem.wide.itemsize * problem.all_pairs
    if need <= MOST_STEPS_BYTES:
        return []
    return [
        f"would hold about 6 matrices of {problem.B}x{problem.H}x{problem.Tq}x{problem.Tk} "
        f"({need / 1e9:.1f} GB, more than {MOST_STEPS_BYTES / 1e9:.1f} GB)"
    ]


def _softmax(x: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the softmax of masked scores (B, H, q, k), with the sink in the sum.

    Subtracting the maximum prevents overflow in exp. It cancels, so autograd treats it as a
    constant. A row of only -inf gets weights 0, and so does a cell of -inf in a row with NaN.
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
