"""The contents of a report: every layer and head of a model, as data."""

from dataclasses import dataclass, field

from torch import Tensor

from ...torch_state import loadable
from ...trace import Trace

# Labels of heads that no group of keys describes; `NOT_NUMBERS` if the weights are NaN.
NOT_NUMBERS = "NaN"
EVENNESS = ("spread", "sharp", "mixed", NOT_NUMBERS)


@loadable
@dataclass(frozen=True)
class Link:
    """The positions of a query and a key, and the weight between them."""

    query: int
    key: int
    weight: float


@loadable
@dataclass(frozen=True)
class Head:
    """One head in numbers. Means are over the queries that are not fully masked.

    Attributes:
        label: what the head does, in words.
        number: the fraction of its weight that fits the label; for "spread", "sharp" and "mixed"
            its entropy divided by the largest possible entropy.
        effective: the mean of exp(entropy), the effective number of keys.
        shares: the fractions of its weight on the token before, the one after, itself, the first,
            and on punctuation and special tokens (without the first). "duplicate" and "induction"
            are means over queries whose token occurred before (at most 1024, evenly spaced): the
            weight on its earlier positions, and on the positions right after those.
        links: its largest weights.
        measured: whether label and number were measured on held-out words, not on this text.
        evidence: the number of queries that fit the label, as text; "" if not counted.
        withheld: the reason why a label that the number alone suggests was not used; "" if none.
        effect: the change of `Report.effect_metric` if the head outputs 0; None if not measured.
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
        """`number` as text if it is a fraction of weight or of words; "" if of entropy."""
        return "" if self.label in EVENNESS else f"{self.number:.2f}"


@loadable
@dataclass(frozen=True, eq=False)
class Layer:
    """One attention call.

    Attributes:
        module: the name of the module that called attention; "" outside any module.
        query_tokens, key_tokens: None if unknown.
        max_entropy: the entropy of uniform weights under the mask.
        pooled: the attention map, (H, rows, cols), as `stats.pooled` computes it.
        allowed: the cells of the map, (rows, cols), that the mask allows in any head.
        received: the weight that each key receives, (H, Tk).
        kept_queries: the queries whose largest weights are stored.
        top_weights, top_keys: those weights and their keys, (H, n_queries, n); -1 means no key.
        trace: every step of the heads in `traced_heads`; None for long texts.
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
