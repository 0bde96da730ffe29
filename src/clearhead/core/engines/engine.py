"""The interface of an engine: it returns why it cannot compute a problem, or computes it.

Each type of device has limits and engines. The numbers for the CPU come from measurements, those
for CUDA from reasons. Other devices, such as MPS, have only engines that call torch.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..problem.problem import Inputs, Problem
from ..stats import Partial, Result, Statistics, key_scores, received, sweep


class Policy(NamedTuple):
    """The engines and limits of a type of device.

    `engines` can compute on it. torch may get a mask written out as a matrix of up to `mask_bytes`,
    and its kernel that is not fused may store weights of up to `weights_bytes`. `reads_values` is
    true if code may read a tensor's values for a decision, which on other devices causes a wait.
    """

    engines: tuple[str, ...]
    mask_bytes: int
    weights_bytes: int
    reads_values: bool = False


# With a mask of more than 256 MB on a CPU, `tiled` takes 0.3 to 1.7 of torch's time.
CPU = Policy(("cpu", "sdpa", "tiled", "steps"), 2**28, 2**30, reads_values=True)
CUDA = Policy(("fused", "sdpa", "triton", "tiled", "steps"), 2**32, 2**26)
META = Policy(("cpu", "sdpa", "triton", "tiled", "steps"), 2**32, 2**30)  # for plans from shapes
OTHERS = Policy(("sdpa", "tiled", "steps"), 2**32, 2**30)
POLICIES = {"cpu": CPU, "cuda": CUDA, "meta": META}


def policy_of(device: torch.device) -> Policy:
    """Return the policy for a device."""
    return POLICIES.get(device.type, OTHERS)


NO_BATCHING_RULE = "torch has no batching rules for its backward pass with is_grads_batched=True"


class Results(NamedTuple):
    """The output (B, H, Tq, Dv) in the dtype of the problem, and statistics of the weights, by
    name."""

    out: Tensor
    stats: dict[str, Result]


class Engine(ABC):
    """One way to compute attention. An engine computes exactly the problem that it receives, or
    declines it; it never calls another engine."""

    name: str

    @property
    @abstractmethod
    def caption(self) -> str:
        """How the engine computes, in a few words."""

    def caption_of(self, problem: Problem) -> str:
        """Return `caption`, and which kernel will compute this problem, if that is known before."""
        return self.caption

    @abstractmethod
    def why_not(self, problem: Problem) -> list[str]:
        """Return the reasons why this engine cannot compute the problem; an empty list if it
        can."""

    def skips_tiles(self, problem: Problem) -> bool:
        """Return whether tiles that the mask leaves empty cost nothing."""
        return False

    # The problems below have an empty `why_not`, and there is at least one statistic.

    @abstractmethod
    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        """Compute the output, (B, H, Tq, Dv)."""

    def partial(self, problem: Problem, inputs: Inputs, statistics: Statistics) -> Partial:
        """Compute statistics of all queries over all keys, to be merged, for a problem without
        dropout. The values are not read."""
        return sweep(problem, inputs, statistics)

    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Statistics
    ) -> dict[str, Result]:
        """Compute as `partial`, and finish the statistics. Some have a pass of their own."""
        merged = tuple(s for s in statistics if not s.own_pass)
        results = self.partial(problem, inputs, merged).finish() if merged else {}
        own = (cast(received, s) for s in statistics if s.own_pass)
        results |= {s.name: key_scores(problem, inputs, s) for s in own}
        return {s.name: results[s.name] for s in statistics}

    def answer(self, problem: Problem, inputs: Inputs, statistics: Statistics) -> Results:
        """Compute the output, with the bits of `compute`, and statistics of the weights before
        dropout. An engine whose kernels compute both in one sweep overrides this."""
        out = self.compute(problem, inputs)
        return Results(out, self.statistics(problem.without_dropout, inputs, statistics))
