"""The contents of a report: every layer and head of a model, as data."""

from dataclasses import dataclass, field

from torch import Tensor

from ...core.functional.trace import Trace
from ...core.torch_state import loadable
from ..follow.picture import Picture
from ..roles.role import Role
from ..roles.table import EVENNESS

REGISTER_NORM, REGISTER_WEIGHT = 3, 4  # the least of a `Register`


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
        roles: what the head does, the leading role first. A head has several roles, one, or none.
        labels: that of the leading role, or those measured on held-out words; without a role
            "spread", "sharp", "mixed" or "NaN". `label` is the same as one string.
        number: the mass of the leading role; without a role its entropy divided by the largest
            possible entropy.
        effective: the mean of exp(entropy), the effective number of keys.
        shares: the fractions of its weight on the token before, the one after, itself, the first,
            and on punctuation and on special tokens (without the first). "duplicate" and
            "induction" are means over queries whose token occurred before (of at most 1024
            queries): the weight on its earlier positions, and on the positions right after those.
        links: its largest weights.
        measured: whether label and number were measured on held-out words, not on this text.
        evidence: what the roles rest on, as text; "" without a role.
        withheld: why a head with much weight on the keys of a role does not have the role; "" if
            it has a role, or no such weight.
        effect: the change of `Report.effect_metric` if the head outputs 0; None if not measured.
        repeated_tokens: scores on random tokens that are repeated, by name; None if not measured.
            "induction" is the mean weight on the token after the earlier copy and "duplicate" that
            on the copy, over the queries that have one. "induction_all" and "duplicate_all" are
            over all queries. "previous" is on the token before.
        norm_weighted: as `shares`, for "previous", "next", "same" and "first", with each weight
            multiplied by ``|v W_O|``, the norm of what the value writes; empty if unknown.
    """

    layer: int
    head: int
    labels: tuple[str, ...]
    number: float
    entropy: float
    effective: float
    shares: dict[str, float]
    links: tuple[Link, ...] = field(repr=False)
    roles: tuple[Role, ...] = ()
    measured: bool = False
    evidence: str = ""
    withheld: str = ""
    effect: float | None = None
    repeated_tokens: dict[str, float] | None = None
    norm_weighted: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return " and ".join(self.labels)

    @property
    def share_text(self) -> str:
        """`number` as text if it is a fraction of weight or of words; "" if of entropy."""
        return "" if self.labels[0] in EVENNESS else f"{self.number:.2f}"


@loadable
@dataclass(frozen=True)
class Writer:
    """A head that writes the logit of the predicted next token, at the last token of the text.

    `part` is what it writes, as in `logit_attribution` with ``center=True``. `key` is the token
    that adds most to it, `from_key`. `without` is the probability of the predicted token if the
    head outputs 0; None if not measured.
    """

    layer: int
    head: int
    part: float
    key: int
    from_key: float
    without: float | None = None


@loadable
@dataclass(frozen=True)
class NextToken:
    """The most probable token after the text, and the heads that write most of its logit.

    `writers` has the heads with the largest parts, ordered by `from_key`. `clearest` is the one of
    them that shows best how the model continues: it looks most at an earlier token, writes a large
    part of the logit from there, and without it the token is less probable. None if no head does,
    or if the token itself is improbable.
    """

    token: str
    probability: float
    writers: tuple[Writer, ...] = field(repr=False)
    clearest: Writer | None = None


@loadable
@dataclass(frozen=True)
class Register:
    """A patch that a model uses as a register, as large vision transformers do (Darcet et al. 2024,
    "Vision transformers need registers"), or a token of a text that it uses as a sink besides the
    first (Sun et al. 2024, "Massive activations in large language models").

    They choose a cut of the norm for each model. Here `norm` is at least 3 in a layer, but not in
    the first one, where it is that of the image or the word itself; and `weight` is at least 4.

    Attributes:
        token: its index among the tokens of the layer, and `name`, such as "patch 2,5".
        norm: the norm of its vector in the residual stream as the layer begins, divided by the
            median over patches, or over the tokens of the text after the first.
        weight: the weight that it receives over all heads, divided by that from uniform weights.
    """

    layer: int
    token: int
    name: str
    norm: float
    weight: float


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
        value_norms: ``|v W_O|`` of each head and key, (H, Tk): the norm of what its value writes.
            None if unknown; then `norms_withheld` is the reason.
        in_decoder: whether the queries are the decoder's text, in a model with cross-attention.
        picture: the image whose patches are queries and keys; None for another call. Then a cell of
            the map is a token, or a square of patches (`block`).
        block: the number of patches on a side of such a square: the least with which the map has at
            most 600 rows, so 1 for a small grid. None for a text, and beside one of more tokens.
        stream_norms: the norm of each token's vector in the residual stream as the layer begins,
            (Tk,); None if unknown, and in cross-attention.
        registers: the patches that are registers in this layer, or tokens that are sinks.
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
    value_norms: Tensor | None = None
    norms_withheld: str = ""
    in_decoder: bool = False
    picture: Picture | None = None
    block: int | None = None
    stream_norms: Tensor | None = None
    registers: tuple[Register, ...] = ()
