"""What a head does, as data: `Role`, with its evidence."""

from dataclasses import dataclass

from ...core.torch_state import loadable
from .table import NEAR, WINDOWS

NOT_NUMBERS = "NaN"  # the label of a head whose weights are NaN


@loadable
@dataclass(frozen=True)
class Role:
    """A group of keys that holds much of a head's weight, more than chance explains.

    `mass` is the mean weight on these keys, over the `queries` that have a choice between them and
    other keys. `low` to `high` is its 95 % interval, which counts the queries of one word as one.
    `hits` of the queries have their largest weight on these keys, except for keys of other roles,
    and `words` counts their different words. `chance` bounds the probability of this for a head
    whose weights depend only on the words. `name` is the key of `label`, with the first distance
    outside of a window: "window8" for "local window".
    """

    name: str
    label: str
    mass: float
    low: float
    high: float
    chance: float
    hits: int
    queries: int
    words: int

    @property
    def evidence(self) -> str:
        distance = {**WINDOWS, **NEAR}.get(self.name)
        within = f" of {distance}" if distance else ""
        mass = f"{self.label}{within}: {self.mass:.2f} of the weight"
        if self.name == "sink":  # no token
            return f"{mass}."
        different = f", {self.words} different ones" if self.words > 1 else ""
        return (
            f"{mass} (95 % interval {self.low:.2f} to {self.high:.2f}); {self.hits} of "
            f"{self.queries} tokens look there most{different}."
        )
