"""The data of a page: the JSON that Python writes into it, or sends to it, and its script reads.

This is the only description. `make page` writes it as TypeScript to `page/src/schema.d.ts`, against
which the script is checked, as mypy checks the Python that builds the data.

Letters, as everywhere in clearhead: h head, g key head, q query, k key, d feature, v value
feature, e embedding feature, b batch. A position counts from 0. Infinity and NaN are written as
``{"float": "NaN"}`` and read as numbers.
"""

from typing import Literal, TypedDict

from ..colours import Colour

Kind = Literal["f8", "f4", "u4", "i2", "u2", "u1"]

# What computes a page anew: the server that it came from; the notebook's Python, outside of the
# page's frame. In a plain frame nothing is computed, but what is chosen is reported.
Host = Literal["server", "notebook", "frame"]


class Numbers(TypedDict):
    """A tensor: its shape, its dtype as NumPy names it, and its little-endian bytes in base64."""

    stored: list[int]
    kind: Kind
    data: str


class Shades(Numbers):
    """A map of one byte a cell: 0 is masked; else 1 + 254 times the square root of the cell's
    fraction of `top`."""

    top: float


class FineMap(Shades):
    """The larger map of one head."""

    head: int


class StepText(TypedDict):
    """A step of the computation in words. `shape` has every axis, `axes` those that are stored."""

    name: str
    formula: str
    why: str
    axes: list[str]
    shape: list[tuple[str, int]]
    axis_names: dict[str, str]
    kept: dict[str, list[int]]


class Step(StepText, total=False):
    """A step with its numbers, if the page holds them. `kept` has, for each axis that is not stored
    in full, the positions that are. `map` is pooled, of every head."""

    integer: bool
    stored: list[int]
    kind: Kind
    data: str
    map: Numbers | Shades
    fine: FineMap


class Links(TypedDict):
    """The `n` largest weights of each kept query, in units of 1/65535, and their keys."""

    n: int
    weights: Numbers
    keys: Numbers


class Call(TypedDict):
    """One attention call: sizes by letter, the settings that are finite numbers, the steps."""

    size: dict[str, int]
    settings: dict[str, float]
    steps: list[Step]


class Layer(Call, total=False):
    """A call, and what is known of it.

    `queries` and `keys` are words; left out: the tokens of the text; null: unknown, so they are
    numbered. `kept` are the queries with exact rows; left out: all. `first` is the position of
    index 0 of an axis where a larger text was cut. A cell of a map pools `block` positions, or one
    of `bins`. `max_entropy` is that of uniform weights, in nats.
    """

    queries: list[str] | None
    keys: list[str] | None
    kept: list[int]
    first: dict[str, int]
    block: tuple[int, int] | None
    bins: tuple[int, int]
    links: Links
    module: str
    cross_attention: bool
    max_entropy: float


class HeadNumbers(TypedDict):
    """What was measured of a head. `links` are (query, key, weight), `received` (key, mean
    weight). `measured`: on held-out texts, so that the label holds for every text."""

    layer: int
    head: int
    label: str
    number: float
    measured: bool
    entropy: float
    effective: float
    shares: dict[str, float]
    links: list[tuple[int, int, float]]
    received: list[tuple[int, float]]


class Head(HeadNumbers, total=False):
    """The same with `effect`, the change of `effect_metric` without the head; `evidence`, how many
    queries the label rests on; `withheld`, why a head has no label."""

    effect: float
    evidence: str
    withheld: str


class Begin(TypedDict, total=False):
    """Where the page opens; what is left out, it chooses."""

    layer: int
    head: int
    query: int


class Spelling(TypedDict):
    """Of each token its spelling in the vocabulary and its id, and the positions of those that
    touch the token before them, without a space."""

    raw: list[str]
    ids: list[int]
    joined: list[int]


class Reading(TypedDict):
    """What a model did with one text."""

    tokens: list[str]
    layers: list[Layer]


class Snapshot(Reading, total=False):
    """The same, and what is known of it.

    `names` are those of the axes, `name` is the model's. `spelling` is that of the tokens; left
    out: they are words. `text` is what the text field holds; left
    out: the tokens. `about` has the sizes in words. `unknown` are positions of words that the model
    does not know. `guesses` has, for each position, the most probable next words. `heads` has one
    entry for each head of each layer. `effect_metric` is "loss" (in nats), "turn" or a name;
    `effects_withheld` is why there are no effects. `outputs` is a digest of what every attention
    call returned.
    """

    names: dict[str, str]
    name: str
    spelling: Spelling
    text: str
    about: str
    unknown: list[int]
    guesses: list[list[tuple[str, float]]] | None
    heads: list[Head]
    effect_metric: str
    effects_withheld: str
    outputs: str
    begin: Begin


class Rows(TypedDict):
    """A matrix in 16 bits a number: each row as whole numbers of a unit of its own."""

    stored: list[int]
    units: Numbers
    numbers: Numbers


class Model(TypedDict):
    """A model that the page runs by itself: `clearhead.results.live.LiveModel`."""

    words: list[str]
    heads: int
    context: int
    near: int
    longest: int
    why: dict[str, str]
    weights: dict[str, Rows]


class Edit(TypedDict):
    """An edit of attention that a page offers. `label` stands beside its control, `words` say what
    it does, `rule` what a value must be. `default` leaves everything as the model does it."""

    kind: Literal["heads", "number", "whole number", "mask"]
    default: float | list[tuple[int, int]] | None
    label: str
    words: str
    rule: str


class NumberEdit(Edit, total=False):
    """An edit by a number: more than `over`, at least `least`, less than `below`, for `example`.
    Its control is a `slider`, (least, most, step), of powers of two if it `doubles`; else a field,
    in which `placeholder` stands for null."""

    over: float
    least: float
    below: float
    example: float
    slider: tuple[float, float, float]
    doubles: bool
    placeholder: str


class Edits(TypedDict):
    """The values of all edits, as a request has them: `off` are (layer, head)."""

    off: list[tuple[int, int]]
    temperature: float
    scale: float | None
    mask: str | None
    softcap: float | None
    dropout: float
    seed: int


class SuggestedMask(TypedDict):
    """A mask to choose from. Does it change a model whose mask is causal?"""

    mask: str
    words: str
    changes_causal: bool


class Masks(TypedDict):
    """Masks that a page suggests, and the arguments of those that a model in the page reads."""

    suggested: list[SuggestedMask]
    arguments: dict[str, list[str]]


class PageParts(TypedDict):
    """What every page holds besides a snapshot: the points of its colour scales, by scale and
    theme, what it can offer, and what computes it anew."""

    inks: dict[str, dict[str, tuple[Colour, ...]]]
    edits: dict[str, NumberEdit]
    masks: Masks
    host: Host | None


class Page(Snapshot, PageParts, total=False):
    """All that a page holds. With a `model` it reads other texts by itself; `beside` is another
    model's snapshot of the same text, to compare with."""

    model: Model
    beside: Snapshot
