"""The contract: an engine says why it cannot answer, or it answers."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from ..problem.problem import Inputs, Problem
from ..stats import Partial, Statistic, sweep

NO_BATCHING_RULE = (
    "torch has no batching rules for its steps in a backward pass of is_grads_batched=True"
)


class Answer(NamedTuple):
    """The output, (B, H, Tq, Dv), in the dtype of the problem, and the statistics; None for what
    was not requested."""

    out: Tensor | None
    stats: Partial | None

    @property
    def output(self) -> Tensor:
        """The output of an answer that has one."""
        assert self.out is not None
        return self.out


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

    def answer(
        self,
        problem: Problem,
        inputs: Inputs,
        statistics: tuple[Statistic, ...] = (),
        *,
        output: bool = True,
    ) -> Answer:
        """Answer a problem for which `why_not` is empty: its output, statistics of its weights, or
        both. The output has the same bits with and without statistics; without an output the values
        are not read."""
        return Answer(
            self.compute(problem, inputs) if output else None,
            sweep(problem.without_dropout, inputs, statistics) if statistics else None,
        )

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        """The output alone. An engine defines this, or `answer` if its kernels also count."""
        raise NotImplementedError
