"""What was found about every head of a model, as data: what a report holds, and views draw."""

from dataclasses import dataclass, field

from torch import Tensor

from ..errors import BadValue
from .trace import Trace

EVENNESS = ("spread", "sharp", "mixed")  # what a head is called that no group of keys names


@dataclass(frozen=True)
class Link:
    """Query and key by position, and the weight between them."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True)
class Head:
    """One head in numbers; means are over the queries that may look at something.

    `label` says in words what it does and `number` how much: the share of its weight; for "spread",
    "sharp" and "mixed" its entropy as a share of the most it could be. `shares` are of its weight:
    on the token before, the one after, itself, the first, and on punctuation and special tokens
    (the first not among them); and, of the queries alone whose token stood before (at most 1024 of
    them, evenly spaced), on those places ("duplicate") and on what followed them ("induction").
    `effective` is the mean of exp(entropy), how many keys it looks at. `measured` says that label
    and number were found on held-out words, and not on this text.
    """

    layer: int
    head: int
    label: str
    number: float
    entropy: float
    effective: float
    shares: dict[str, float]
    links: tuple[Link, ...] = field(repr=False)
    measured: bool = False

    @property
    def by(self) -> str:
        """`number` where it is a share of weight or of words, and no measure of evenness."""
        return "" if self.label in EVENNESS else f"{self.number:.2f}"


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention call. `map` is (H, rows, cols), pooled as `stats.map` does; `received` (H, Tk).

    `seen` is (rows, cols), where the mask lets anybody look. `most` is the entropy of even weights.
    `weights` and `keys`, (H, kept, n), are the largest weights of the queries in `kept` and where
    they lie (-1: nowhere). `trace` holds every step of the heads in `traced`; None for long texts.
    `module` is the name of the module that asked, "" outside of any; `crosses` says that it looks
    from one text into another. `query_tokens` and `key_tokens` are what the two sides say, None
    where nobody told.
    """

    number: int
    module: str
    crosses: bool
    query_tokens: tuple[str, ...] | None
    key_tokens: tuple[str, ...] | None
    question: str
    queries: int
    key_heads: int
    most: float
    heads: tuple[Head, ...]
    map: Tensor
    seen: Tensor
    received: Tensor
    kept: tuple[int, ...]
    weights: Tensor
    keys: Tensor
    trace: Trace | None = None
    traced: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Findings:
    """What a model does with a text: `layers`, each with its `heads`. `report` finds them."""

    name: str
    tokens: tuple[str, ...]
    layers: tuple[Layer, ...]

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(head for layer in self.layers for head in layer.heads)

    @property
    def about(self) -> str:
        sizes = {"layer": self.layers, "head": self.heads, "token": self.tokens}
        return ", ".join(f"{len(x):,} {name}{'s' * (len(x) != 1)}" for name, x in sizes.items())

    def __getitem__(self, place: tuple[int, int]) -> Head:
        """`report[layer, head]`."""
        layer, head = place
        if not (0 <= layer < len(self.layers) and 0 <= head < len(self.layers[layer].heads)):
            raise BadValue(
                f"Head {head} of layer {layer} was asked for.",
                f"this report has {self.about}, numbered from 0.",
                "ask for one of these, as report[layer, head].",
            )
        return self.layers[layer].heads[head]
