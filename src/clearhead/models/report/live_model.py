"""A small model as data, with which a page can compute other texts."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...core.torch_state import loadable


@loadable
@dataclass(frozen=True, eq=False)
class LiveModel:
    """A decoder with the architecture of the storyteller.

    Attributes:
        words: its vocabulary, in the order of ids.
        heads: the number of heads of a layer.
        context: the length of the longest text.
        near, longest: distances below `near` have one bias each; distances up to `longest` share
            biases.
        why: the purpose of each step, by name.
        weights: its parameters by name.
    """

    words: tuple[str, ...]
    heads: int
    context: int
    near: int
    longest: int
    why: Mapping[str, str]
    weights: Mapping[str, Tensor]
