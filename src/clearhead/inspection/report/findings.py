"""What a report holds of every layer and head of a model, as data."""

from dataclasses import dataclass, field

from torch import Tensor

from ...torch_state import loadable
from ...trace import Trace

# Labels of heads whose weight lies on no group of keys; `NOT_NUMBERS` if the weights are NaN.
NOT_NUMBERS = "NaN"
EVENNESS = ("spread", "sharp", "mixed", NOT_NUMBERS)


@loadable
@dataclass(frozen=True)
class Link:
    """Query and key by position, and the weight between them."""

    query: int
    key: int
    weight: float


@loadable
@dataclass(frozen=True)
class Head:
    """One head in numbers; means are over the queries that may look at something.

    `label` says in words what the head does, and `number` how much: the share of its weight; for
    "spread", "sharp" and "mixed" its entropy divided by the largest possible one. `shares` are of
    its weight: on the token before, the one after, itself, the first, and on punctuation and
    special tokens (without the first). "duplicate" and "induction" are means over those queries
    only whose token occurred before (at most 1024 of them, evenly spaced): the weight on its
    earlier positions, and on the positions right after those. `effective` is the mean of
    exp(entropy), how many keys it looks at. `measured` says that label and number were measured on
    held-out words, not on this text. `evidence` says how many queries the label speaks for, and
    `withheld` why a label that the number alone would give was not given; "" if there is nothing to
    say. `effect` is how much `Report.effect_metric` changes where the head gives nothing; None if
    that was not measured.
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
    evidence: str = ""
    withheld: str = ""
    effect: float | None = None

    @property
    def share_text(self) -> str:
        """`number` as text if it is a share of weight or of words, and not of entropy."""
        return "" if self.label in EVENNESS else f"{self.number:.2f}"


@loadable
@dataclass(frozen=True, eq=False)
class Layer:
    """One attention call.

    `pooled` is (H, rows, cols), as `stats.pooled` computes it; `received` is (H, Tk).
    `allowed` is (rows, cols): the cells of the map where the mask allows anything in some head.
    `max_entropy` is the entropy of uniform weights under the mask. `top_weights` and `top_keys`,
    (H, n_queries, n), are the largest weights of the queries in `kept_queries` and their keys (-1:
    none). `trace` holds every step of the heads in `traced_heads`; None for long texts. `module` is
    the name of the module that called attention, "" outside of any. `query_tokens` and `key_tokens`
    are None where they are not known.
    """

    number: int
    module: str
    cross_attention: bool
    query_tokens: tuple[str, ...] | None
    key_tokens: tuple[str, ...] | None
    problem: str
    queries: int
    key_heads: int
    max_entropy: float
    heads: tuple[Head, ...]
    pooled: Tensor
    allowed: Tensor
    received: Tensor
    kept_queries: tuple[int, ...]
    top_weights: Tensor
    top_keys: Tensor
    trace: Trace | None = None
    traced_heads: tuple[int, ...] = ()
