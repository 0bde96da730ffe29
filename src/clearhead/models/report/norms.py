"""The norms |v W_O| of what values write, for the norm-weighted attention of a report's heads."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.functional.ambient import of_all_tokens
from ...core.problem.problem import Inputs, Problem
from ..follow.text_stack import TextStack
from ..weights.value_norms import ValueNorms, norms
from .findings import Layer


class Norms(NamedTuple):
    """The norms of a call, (H, Tk), or None and why they are unknown."""

    norms: Tensor | None
    withheld: str = ""


class NormsOfCalls:
    """Computes the norms of the calls of a model, in whose modules `stack` is."""

    def __init__(self, model: nn.Module, stack: TextStack) -> None:
        self.stack = stack
        self.refused = ""  # why no norm of this model is right
        self._values = ValueNorms(model)

    def of_call(self, problem: Problem, inputs: Inputs) -> Norms:
        """Return the norms of the call of the running module. `expect` receives its output."""
        name = self.stack.running[-1].name if self.stack.running else ""
        try:
            root = self._values.root(name, problem)
        except BadValue as error:
            return Norms(None, _why(error))
        return Norms(of_all_tokens(norms(root, problem, inputs))[0])

    def expect(self, problem: Problem, out: Tensor) -> None:
        """Receive the output of the call whose norms were returned last."""
        self._values.expect(problem, out)

    def verify(self, result: object) -> None:
        """Compare what the running module returns with what the heads of its call write."""
        if self.stack.running:
            self._try(lambda: self._values.verify(self.stack.running[-1].name, result))

    def finish(self) -> None:
        self._try(self._values.must_be_verified)

    def _try(self, verify: Callable[[], None]) -> None:
        try:
            verify()
        except BadValue as error:
            self.refused = _why(error)


def without_norms(layer: Layer, why: str) -> Layer:
    """Return a layer without its norms and what follows from them."""
    heads = tuple(replace(head, norm_weighted={}) for head in layer.heads)
    return replace(layer, heads=heads, value_norms=None, norms_withheld=why)


def _why(error: BadValue) -> str:
    return f"{error.gave} {error.rule[:1].upper()}{error.rule[1:]}"
