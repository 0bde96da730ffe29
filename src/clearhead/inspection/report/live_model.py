"""A small model as data, for a page that computes it by itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...torch_state import loadable


@loadable
@dataclass(frozen=True, eq=False)
class LiveModel:
    """A decoder of the storyteller's kind: `weights` by the names of its parameters, its `words` by
    number, how many `heads` a layer has, and the longest text, `context`. Distances below `near`
    have a bias each, farther ones share up to `longest`. `why` says of each step what it is for."""

    words: tuple[str, ...]
    heads: int
    context: int
    near: int
    longest: int
    why: Mapping[str, str]
    weights: Mapping[str, Tensor]
