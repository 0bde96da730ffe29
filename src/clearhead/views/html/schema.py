"""The data of a page: the JSON that Python writes and the script reads.

This is the only description. `make page` writes it as TypeScript to `page/src/schema.d.ts`, with
which the script is checked; mypy checks the Python that builds the data.

Letters, as everywhere in clearhead: h head, g key head, q query, k key, d feature, v value
feature, e embedding feature, b batch. Positions count from 0. Infinity and NaN are written as
``{"float": "NaN"}`` and read as numbers.
"""

from typing import Literal, TypedDict

from ...models.report.findings import NextToken, Writer  # noqa: F401  # a part of NextToken
from ...models.roles.table import RoleText
from ..colours import Colour

Kind = Literal["f8", "f4", "u4", "i2", "u2", "u1"]

# The program that recomputes a page: the server that it came from, or the notebook's Python,
# outside the page's frame. A plain frame computes nothing, and only reports the selection.
Host = Literal["server", "notebook", "frame"]


class Numbers(TypedDict):
    """A tensor: its shape, its dtype as NumPy names it, and its little-endian bytes in base64."""

    stored: list[int]
    kind: Kind
    data: str


class Shades(Numbers):
    """A map with one byte per cell: 0 if masked, else 1 + 254 sqrt(value / `top`)."""

    top: float


class FineMap(Shades):
    """The larger map of one head."""

    head: int


class StepText(TypedDict):
    """The description of a step. `shape` has all axes, `axes` the stored ones."""

    name: str
    formula: str
    why: str
    axes: list[str]
    shape: list[tuple[str, int]]
    axis_names: dict[str, str]
    kept: dict[str, list[int]]


class Step(StepText, total=False):
    """A step with its numbers, if the page has them.

    `kept` has the stored positions of each axis that is not stored in full. `map` is the pooled map
    of every head. If the step is `computed`, the script computes it from those before it; `spans`
    has the first key that each query may look at, and the one after the last.
    """

    integer: bool
    stored: list[int]
    kind: Kind
    data: str
    computed: bool
    spans: Numbers
    map: Numbers | Shades
    fine: FineMap


class Links(TypedDict):
    """The `n` largest weights of each stored query, and their keys."""

    n: int
    weights: Numbers
    keys: Numbers


class Picture(TypedDict):
    """An image whose patches are the tokens of a layer, row by row, after the first `before`.

    `image` is its index in the `images` of the snapshot. A cell of the map is a token, or a square
    of patches with `block` on a side; null: maps have `bins`. `registers` are the patches that the
    model uses as registers, by their number among the tokens.
    """

    before: int
    rows: int
    columns: int
    image: int
    block: int | None
    registers: list[int]


class Call(TypedDict):
    """One attention call: its sizes by letter, its finite numeric settings, and its steps."""

    size: dict[str, int]
    settings: dict[str, float]
    steps: list[Step]


class LayerNorms(TypedDict, total=False):
    """The norms of the values, |v W_O|, (heads, keys), in units of 1/65535 of the largest; or why
    they are missing."""

    norms: Numbers
    norms_withheld: str


class LayerOrigin(TypedDict, total=False):
    """Why a layer has no step but the weights, if another program computed them."""

    steps_withheld: str


class Layer(Call, LayerNorms, LayerOrigin, total=False):
    """A call with its labels and maps.

    `queries` and `keys` are tokens; missing: the tokens of the text; null: unknown, so they are
    numbered. `kept` are the queries with exact rows; missing: all. `first` is the position of index
    0 of an axis, in a part of a larger text. A cell of a map pools `block` positions, or is one of
    `bins`. `max_entropy` is that of uniform weights, in nats. `part` is that of a model of two
    texts, such as "decoder".
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
    part: str
    max_entropy: float
    picture: Picture


class Head(TypedDict):
    """A head, as in `models.report.findings.Head`; `roles` are the labels of its roles,
    and `masses` the fraction of its weight on the keys of each, with the number of its queries."""

    layer: int
    head: int
    labels: list[str]
    number: float
    measured: bool
    entropy: float
    effective: float
    shares: dict[str, float]
    effect: float | None
    evidence: str
    withheld: str
    roles: list[str]
    masses: list[tuple[float, int]]


class Begin(TypedDict, total=False):
    """The selection with which the page opens; the page chooses missing parts."""

    layer: int
    head: int
    query: int


class Spelling(TypedDict):
    """The spelling of each token in the vocabulary, and its id.

    `joined` are the positions of tokens that follow the token before them without a space.
    """

    raw: list[str]
    ids: list[int]
    joined: list[int]


class Reading(TypedDict):
    """A text with the layers of a model."""

    tokens: list[str]
    layers: list[Layer]


class WhyPart(TypedDict):
    """What a component wrote of a contrast. A head is a pair (layer, head), and `source` the token
    that it read from."""

    name: str
    part: float
    head: tuple[int, int] | None
    source: int | None


class WhySide(TypedDict):
    """The largest parts of the key or of the query, how many others there are and their sum, and
    the sum of all."""

    parts: list[WhyPart]
    others: tuple[int, float]
    total: float


class Why(TypedDict):
    """Why a head looks from a query at a key: `models.why.Why`.

    `sentence` names positions. `frequencies` has the rotary frequencies from the fastest to the
    slowest, and at last what is not rotated. `further` are the changes of the score if the key
    were 1, 2, 4, ... 64 tokens further back.
    """

    layer: int
    head: int
    query: int
    key: int
    against: str
    sentence: str
    weight: float
    score: float
    contrast: float
    softcap: float | None
    wrote_key: WhySide
    wrote_query: WhySide
    frequencies: list[float] | None
    further: list[float] | None
    remarks: list[str]


class Snapshot(Reading, total=False):
    """The same with the results of a report.

    `names` are the names of the axes, `name` is that of the model. `spelling` is that of the
    tokens; missing: they are words. `text` is the content of the text field; missing: the tokens.
    `about` has the sizes in words. `unknown` are positions of unknown words. `guesses` has the most
    probable next words of each position, and `next_token` the heads that write the last one.
    `heads` has an entry for each head of each layer. `effect_metric` is "loss" (in nats), "turn" or
    a name, and `effects_withheld` the reason for missing effects. `outputs` is a digest of the
    outputs of all attention calls. `why` is computed ahead, for the head with which the page opens
    and the heads before it; `why_withheld` is the reason if it could not. `images` have the colours
    of each pixel, (height, width, 3).
    """

    names: dict[str, str]
    name: str
    spelling: Spelling
    text: str
    about: str
    unknown: list[int]
    guesses: list[list[tuple[str, float]]] | None
    next_token: NextToken
    heads: list[Head]
    effect_metric: str
    effects_withheld: str
    outputs: str
    begin: Begin
    why: list[Why]
    why_withheld: str
    images: list[Numbers]


class Rows(TypedDict):
    """A matrix with 24 bits per number: each row as integers, 256 `numbers` + `rest`, times its own
    unit."""

    stored: list[int]
    units: Numbers
    numbers: Numbers
    rest: Numbers


class Model(TypedDict):
    """A model that the page can run: `models.report.live_model.LiveModel`."""

    words: list[str]
    heads: int
    context: int
    near: int
    longest: int
    why: dict[str, str]
    weights: dict[str, Rows]


class Edit(TypedDict):
    """An edit of attention that a page offers.

    `label` is beside its control, `words` describe its effect, and `rule` the valid values. With
    `default`, nothing changes.
    """

    kind: Literal["heads", "number", "whole number", "mask"]
    default: float | list[tuple[int, int]] | None
    label: str
    words: str
    rule: str


class NumberEdit(Edit, total=False):
    """An edit by a number: more than `over`, at least `least`, and less than `below`.

    Its control is a `slider`, (least, most, step), of powers of two if it `doubles`; otherwise a
    field, whose `placeholder` means null.
    """

    over: float
    least: float
    below: float
    example: float
    slider: tuple[float, float, float]
    doubles: bool
    placeholder: str


class Edits(TypedDict):
    """The values of all edits in a request. `off` has pairs (layer, head)."""

    off: list[tuple[int, int]]
    temperature: float
    scale: float | None
    mask: str | None
    softcap: float | None
    dropout: float
    seed: int


class SuggestedMask(TypedDict):
    """A mask to choose from. `changes_causal`: whether it changes a model with a causal mask."""

    mask: str
    words: str
    changes_causal: bool


class Masks(TypedDict):
    """Suggested masks, and the arguments of the masks that a model in the page can read."""

    suggested: list[SuggestedMask]
    arguments: dict[str, list[str]]


class PageParts(TypedDict):
    """The parts of every page besides a snapshot.

    `inks` are the points of the colour scales, by scale and theme; `roles` is the table of roles,
    the most interesting first; `host` is the program that recomputes the page.
    """

    inks: dict[str, dict[str, tuple[Colour, ...]]]
    roles: list[RoleText]
    edits: dict[str, NumberEdit]
    masks: Masks
    host: Host | None


class Ahead(TypedDict):
    """A run without the heads `off`, which write the next token, computed ahead for What if."""

    off: list[tuple[int, int]]
    snapshot: Snapshot


class Page(Snapshot, PageParts, total=False):
    """All data of a page.

    With a `model`, the page can run other texts. `folder` is the model as a shell names it, for the
    command that reads another text. `beside` is another model's snapshot of the same text, for
    comparison.
    """

    model: Model
    folder: str
    ahead: Ahead
    beside: Snapshot


# ---- the page of a survey ------------------------------------------------------------


class SurveyMetric(TypedDict):
    """A metric, and the edges of the bins of its histograms. Has it `examples`?"""

    name: str
    formula: str
    source: str
    version: int
    edges: list[float]
    examples: bool


class SurveyExample(TypedDict):
    """A query with its largest weights. `decile` is 0 to 9, or 10 for the largest values."""

    decile: int
    value: float
    context: int
    query: int
    keys: list[int]
    weights: list[float]


class SurveyDifference(TypedDict):
    """How the mean of texts of a head and metric differs from that of another survey.

    `difference` is `mean` - `other`, with its 95 % interval. `effect` is its size in standard
    deviations of the means of texts, with its interval; None if these do not vary. `q` is its
    p-value over texts, corrected for the number of heads and metrics.
    """

    mean: float
    other: float
    difference: float
    low: float
    high: float
    effect: float | None
    effect_low: float | None
    effect_high: float | None
    q: float
    texts: int


class SurveyNumbers(TypedDict):
    """A metric of all heads, in their order: columns of the table `heads`.

    `mean` is None for a head without a query. `compared` has the differences from another survey,
    and is empty without one.
    """

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    uniform: list[float | None]
    compared: list[SurveyDifference | None]


class SurveyDetail(TypedDict):
    """A metric of one head alone: the rest of its row, histogram without empty bins, examples."""

    sd: float | None
    quantiles: list[float | None]
    queries: int
    texts: int
    bins: list[int]
    counts: list[int]
    examples: list[SurveyExample]


class SurveyToken(TypedDict):
    """A token at one side of a head's links. `token` is an index of `spelling`."""

    side: Literal["query", "key"]
    token: int
    count: int
    lift: float


class SurveyMix(TypedDict):
    """Where the largest weights of the queries of one class are.

    `shares` has the fraction, and the ends of its 95 % interval, of each of `key_kinds`.
    """

    token_class: str
    queries: int
    texts: int
    shares: list[tuple[float, float | None, float | None]]


class SurveyDetails(TypedDict):
    """What the page has of one head alone. `metrics` leaves out those without a query; `mixes` has
    one for each class of tokens, then one for all queries."""

    mixes: list[SurveyMix]
    metrics: dict[str, SurveyDetail]
    tokens: list[SurveyToken]


class SurveyHead(TypedDict):
    """One head.

    `shares` has the fraction of its queries whose largest weight is on each of `key_kinds`.
    `several` names two behaviours of a head that does more than one thing; "" for another head.
    `details` are its `SurveyDetails`, packed, and read when the head is selected.
    """

    layer: int
    head: int
    module: str
    shares: list[float]
    several: str
    details: str


class SurveyContext(TypedDict):
    """A context of an example, and its numbers in the survey. `tokens` index `spelling`; `pixels`
    are the colours of a picture, (height, width, 3)."""

    name: str
    text: int
    context: int
    tokens: list[int]
    pixels: Numbers | None


class SurveyPart(TypedDict):
    """The vectors of one part of a head on their first principal components, (n, 3) or fewer.

    `shares` is the fraction of the variance along each. With `all` false, the examples are those
    whose key is not the first of its context.
    """

    name: str
    all: bool
    size: int
    points: list[list[float]]
    shares: list[float]


class SurveyVectorExample(SurveyExample):
    """An example with the class of the query's token, and the kind of the key."""

    token_class: str
    looks_at: str


class SurveyVectors(TypedDict):
    """The response to the request "vectors" of a survey's page: one head at its examples.

    Contexts and spelling are those of `SurveyPage`, and only of these examples. `why_rotated` is
    why vectors before rotation are missing.
    """

    key_head: int
    parts: list[SurveyPart]
    why_rotated: str | None
    examples: list[SurveyVectorExample]
    contexts: list[SurveyContext]
    spelling: list[str]
    between: str


class SurveyPage(TypedDict):
    """All data of the page of a survey.

    `key_kinds` and `classes` of tokens have their descriptions. `spelling` has the texts of
    tokens, and `between` what is between two tokens of a context. The tokenizer puts `around[0]`
    tokens before the text of each context, and `around[1]` after it.
    `other` names the survey with which it is compared, and `caution` has what is not compared.
    Each of `contexts` is a `SurveyContext`, packed, and read when an example is shown. `grid` has
    the tokens before the patches of pictures, and the rows and columns of these; None for texts.
    """

    inks: dict[str, dict[str, tuple[Colour, ...]]]
    host: Host | None
    other: str | None
    caution: str
    metrics: list[SurveyMetric]
    key_kinds: dict[str, str]
    classes: dict[str, str]
    heads: list[SurveyHead]
    numbers: dict[str, SurveyNumbers]
    contexts: list[str]
    spelling: list[str]
    between: str
    around: tuple[int, int]
    grid: tuple[list[str], int, int] | None


# ---- the page of a training ----------------------------------------------------------


class TrainingPage(TypedDict):
    """All data of the page of a training.

    `heads` are pairs (layer, head), and `values` has each metric, (steps, heads). A finding, or an
    alarm, is a sentence with its metric, an index of `heads` and a step.
    """

    inks: dict[str, dict[str, tuple[Colour, ...]]]
    steps: list[int]
    heads: list[tuple[int, int]]
    values: dict[str, Numbers]
    findings: list[tuple[str, str, int | None, int | None]]
