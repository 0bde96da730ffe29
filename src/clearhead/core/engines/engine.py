"""The interface of an engine: it returns why it cannot compute a problem, or computes it."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from ..problem.problem import Inputs, Problem
from ..stats import Partial, Result, Statistics, sweep

NO_BATCHING_RULE = (
    "torch has no batching rules for its steps in a backward pass of is_grads_batched=True"
)


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
        """Compute as `partial`, and finish the statistics."""
        return self.partial(problem, inputs, statistics).finish()

    def answer(self, problem: Problem, inputs: Inputs, statistics: Statistics) -> Results:
        """Compute the output, with the bits of `compute`, and statistics of the weights before
        dropout. An engine whose kernels compute both in one sweep overrides this."""
        out = self.compute(problem, inputs)
        return Results(out, self.statistics(problem.without_dropout, inputs, statistics))
