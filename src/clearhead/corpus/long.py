"""The metrics of long contexts, the set `long`: which keys a head can forget, and which it copies.

A cache that forgets keeps the first keys of a context and the recent ones. `outside` is the weight
on the keys that it drops, and `error` how far the output of a head is from the output with weights
on the remaining keys only. Positions stay those of the context.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..core.engines import choice
from ..core.errors import BadValue
from ..core.masks import Mask, induction_keys, prefix, window
from ..core.problem.problem import Inputs, Problem
from ..core.stats import Statistic, topk
from .basic import NEAR, TOP_KEYS
from .metric import YES_OR_NO, Batch, Bins, LayerCall, Mass, Metric, WithoutBaseline
from .reader import Reader

SINKS = 4
WINDOWS = tuple(4**n for n in range(2, 10))
CUE = 4  # tokens that precede a copy


class Outside(Mass):
    """The mass of the keys that are neither among the first `SINKS` nor in the last `size`."""

    source = "Xiao et al. 2023, arXiv 2309.17453"

    def __init__(self, size: int) -> None:
        self.name, self.size = f"outside_{size}", size
        self.formula = f"Σ w over k ≥ {SINKS} with |q - k| ≥ {size}"

    def group(self, batch: Batch) -> Mask:
        return outside(self.size)


class Error(WithoutBaseline):
    """How far the output z of a head is from its output over the other keys alone.

    z' is the output of the same call with the keys of `Outside` masked, so the weights on the
    remaining keys sum to 1 again. The mean is over the queries of `Outside`.
    """

    source = "Xiao et al. 2024, arXiv 2410.10819: the output of a streaming head"
    bins = Bins(1e-4, 10.0, log=True, bounds=(0.0, None))

    def __init__(self, mass: Outside) -> None:
        self.name, self.mass = f"error_{mass.size}", mass
        self.formula = f"|z - z'| / |z|, z' without the keys of {mass.name}"

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        return self.mass.statistics(batch)

    def values(self, call: LayerCall) -> Tensor:
        assert call.problem is not None and call.inputs is not None
        problem, inputs, out = call.problem, call.inputs, call.output
        if out is None or out.dtype != problem.wide:  # so that rounding is not taken for an error
            problem = replace(problem, dtype=problem.wide)
            inputs = Inputs(*(x.to(problem.wide) for x in inputs))
            out = output_of(problem, inputs)
        out = out.reshape(problem.B, problem.H, problem.Tq, problem.Dv)
        near = output_of(
            replace(problem, mask=without_outside(problem.mask, self.mass.size)), inputs
        )
        difference = (out - near).norm(dim=-1)
        return torch.where(difference == 0, 0.0, difference / out.norm(dim=-1))

    def counts(self, uniform: LayerCall) -> Tensor:
        return self.mass.counts(uniform)


class Copied(Mass):
    """The mass of the keys that a copying head looks at: earlier copies of the actual next token.

    A copy is a token with the same `CUE` tokens before it, more than `NEAR` tokens before the
    query. So the mean is over the queries in text that repeats earlier text.
    """

    name, source = "copied", "clearhead"
    formula = f"Σ w over k < q - {NEAR} with x[k - {CUE}] … x[k] = x[q - {CUE - 1}] … x[q + 1]"

    def group(self, batch: Batch) -> Mask:
        return copies(batch)


class Retrieval(WithoutBaseline):
    """Whether the largest weight of a query is on an earlier copy of the actual next token.

    The mean is over the queries of `Copied`. The text has the token; whether the model would
    generate it is not tested.
    """

    name, bins, examples = "retrieval", YES_OR_NO, False
    formula = "1 if the largest w is on a key of copied, else 0"
    source = "Wu et al. 2024, arXiv 2404.15574: retrieval score, of a text that is read"

    def __init__(self, copied: Copied) -> None:
        self.copied = copied

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        return [*self.copied.statistics(batch), topk(TOP_KEYS)]

    def values(self, call: LayerCall) -> Tensor:
        keys: Tensor = call["topk"].keys[..., 0]
        T = keys.shape[-1]
        runs = runs_of(call.batch).unsqueeze(1).expand(keys.shape)
        before = runs.gather(2, (keys - 1).clamp(min=0).long())
        far = (keys > 0) & (torch.arange(T) - keys > NEAR)
        return (far & (before == runs)).float()

    def counts(self, uniform: LayerCall) -> Tensor:
        return self.copied.counts(uniform)


@lru_cache(maxsize=16)  # metrics that read the same group share its mask
def outside(size: int) -> Mask:
    """Return the keys beyond the first `SINKS` and a window of `size`, as a mask."""
    return ~(prefix(SINKS) | window(before=size - 1, after=size - 1))


@lru_cache(maxsize=16)  # layers share a mask, and so its ranges of keys
def without_outside(mask: Mask, size: int) -> Mask:
    """Return a mask without the keys of `outside`."""
    return mask & ~outside(size)


@lru_cache(maxsize=1)
def copies(batch: Batch) -> Mask:
    """Return the keys of `Copied`, as a mask."""
    return induction_keys(runs_of(batch)) & ~window(before=NEAR, after=0)


@lru_cache(maxsize=1)
def runs_of(batch: Batch) -> Tensor:
    """Number the runs of tokens x[q - CUE + 1] … x[q + 1] at each query, (B, T).

    Equal runs have the same number. A query without a complete run has a number of its own.
    """
    B, T = batch.ids.shape
    numbers = torch.arange(B * T).view(B, T)
    if T > CUE:
        runs = batch.ids.unfold(1, CUE + 1, 1)
        _, same = runs.reshape(-1, CUE + 1).unique(dim=0, return_inverse=True)
        numbers[:, CUE - 1 : -1] = B * T + same.view(B, -1)
    return numbers


def output_of(problem: Problem, inputs: Inputs) -> Tensor:
    """Compute the output of a call, (B, H, Tq, Dv), without dropout."""
    problem = problem.without_dropout
    return choice.choose(problem, "auto").compute(problem, inputs)


def long(reader: Reader, context: int) -> list[Metric]:
    """Return what heads have outside some windows, and how far they copy.

    Raises `BadValue` if a context is shorter than the smallest window.
    """
    sizes = [size for size in WINDOWS if SINKS + size < context]
    if not sizes:
        rule = f"'long' measures keys beyond the first {SINKS} and the last {WINDOWS[0]}."
        hint = f"pass context={SINKS + WINDOWS[0] + 1} or more."
        raise BadValue(f"metrics has 'long', and context={context}.", rule, hint)
    masses = [Outside(size) for size in sizes]
    copied = Copied()
    return [*masses, *map(Error, masses), copied, Retrieval(copied)]
