"""The interface of an engine: it returns why it cannot compute a problem, or computes it."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from ..problem.problem import Inputs, Problem
from ..stats import Partial, Result, Statistic, sweep

NO_BATCHING_RULE = (
    "torch has no batching rules for its steps in a backward pass of is_grads_batched=True"
)


class Answer(NamedTuple):
    """The output (B, H, Tq, Dv) in the dtype of the problem, and the statistics; each is None if it
    was not requested."""

    out: Tensor | None
    stats: Partial | None

    @property
    def output(self) -> Tensor:
        """The output, which must have been requested."""
        assert self.out is not None
        return self.out


class Results(NamedTuple):
    """An `Answer` whose statistics are finished, by name."""

    out: Tensor | None
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

    def answer(
        self,
        problem: Problem,
        inputs: Inputs,
        statistics: tuple[Statistic, ...] = (),
        *,
        output: bool = True,
    ) -> Answer:
        """Compute the output, statistics of the weights, or both, for a problem whose `why_not` is
        empty. The output has the same bits with and without statistics. If the output is not
        requested, the values are not read."""
        return Answer(
            self.compute(problem, inputs) if output else None,
            sweep(problem.without_dropout, inputs, statistics) if statistics else None,
        )

    def results(
        self,
        problem: Problem,
        inputs: Inputs,
        statistics: tuple[Statistic, ...] = (),
        *,
        output: bool = True,
    ) -> Results:
        """Compute as `answer`, and finish the statistics."""
        out, stats = self.answer(problem, inputs, statistics, output=output)
        return Results(out, {} if stats is None else stats.finish())

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        """Compute only the output. An engine defines this method, or `answer` if its kernels also
        compute statistics."""
        raise NotImplementedError
