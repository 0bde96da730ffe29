"""The contract: an engine says why it cannot answer, or it answers."""

from abc import ABC, abstractmethod

from torch import Tensor

from ..problem.problem import Inputs, Problem
from ..stats import Partial, Statistic, sweep

NO_BATCHING_RULE = (
    "torch has no batching rules for its steps in a backward pass of is_grads_batched=True"
)


class Engine(ABC):
    """One way to compute attention. An engine computes exactly the problem it is given, or declines
    it; it never calls another engine."""

    name: str

    @property
    @abstractmethod
    def caption(self) -> str:
        """How it answers, in a few words."""

    def caption_of(self, problem: Problem) -> str:
        """`caption`, and what of it answers this problem, where that is known before."""
        return self.caption

    @abstractmethod
    def why_not(self, problem: Problem) -> list[str]:
        """The reasons why this engine cannot answer; an empty list means "I can"."""

    def skips_tiles(self, problem: Problem) -> bool:
        """Do tiles that the mask leaves empty cost nothing?"""
        return False

    @abstractmethod
    def run(self, problem: Problem, inputs: Inputs) -> Tensor:
        """Answer a problem for which `why_not` is empty: (B, H, Tq, Dv), in its dtype."""

    def look(
        self, problem: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]
    ) -> tuple[Tensor, Partial]:
        """The output of `run`, the same bits, and the statistics of its weights."""
        return self.run(problem, inputs), self.count(problem, inputs, statistics)

    def count(self, problem: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]) -> Partial:
        """The statistics alone; the values are not read."""
        return sweep(problem, inputs, statistics)
