"""What a report holds, and how it prints itself."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import BadValue
from ..trace import Trace
from ..views import html
from ..views.labels import visible
from .label import EVENNESS, LABELS, REPEATS


@dataclass(frozen=True)
class Link:
    """Query and key by position, and the weight between them."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True)
class Head:
    """One head in numbers; means are over the queries that may look at something.

    `label` says in words what it does and `number` how much: the share of its weight for a label
    of `LABELS`; for "spread", "sharp" and "mixed" its entropy as a share of the most it could be.
    `shares` are of its weight: on the token before, the one after, itself, the first, and on
    punctuation and special tokens (the first not among them); and, of the queries alone whose
    token stood before (at most 1024 of them, evenly spaced), on those places ("duplicate") and
    on what followed them ("induction"). `effective` is the mean of exp(entropy), how many keys it
    looks at. `measured` says that label and number were found on held-out words, and not on this
    text.
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
class Report:
    """What a model does with a text: `layers`, each with its `heads`. Prints itself as a table."""

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

    def to_json(self) -> dict[str, Any]:
        """Everything but the maps and traces, as numbers and words for `json.dumps`. What is not
        finite is None."""

        def finite(x: float) -> float | None:
            return x if math.isfinite(x) else None

        def told(head: Head) -> dict[str, Any]:
            links = [
                {"query": x.query, "key": x.key, "weight": finite(x.weight)} for x in head.links
            ]  # fmt: skip
            numbers = {n: finite(x) for n, x in head.__dict__.items() if isinstance(x, float)}
            shares = {name: finite(share) for name, share in head.shares.items()}
            return {**head.__dict__, **numbers, "shares": shares, "links": links}

        layers = [
            {
                "layer": layer.number,
                "module": layer.module,
                "crosses": layer.crosses,
                "question": layer.question,
                "heads": [told(head) for head in layer.heads],
            }
            for layer in self.layers
        ]
        return {"name": self.name, "tokens": list(self.tokens), "layers": layers}

    def __str__(self) -> str:
        names = [n for n in LABELS if any(n in x.shares for x in self.heads)]
        rows = [("layer", "head", "does", "by", "entropy", "keys", *names)]
        for x in self.heads:
            shares = (f"{x.shares[n]:.2f}" if n in x.shares else "" for n in names)
            numbers = x.by, f"{x.entropy:.2f}", f"{x.effective:.1f}"
            rows.append((str(x.layer), str(x.head), x.label, *numbers, *shares))
        table = _columns(rows)
        width = max(80, *map(len, table))
        key = (part for line in self._key() for part in textwrap.wrap(line, width))
        return "\n".join([f"{visible(self.name, 200)}: {self.about}", *table, "", *key])

    def _key(self) -> list[str]:
        """What the columns say."""
        measured = {label for x in self.heads if x.measured for label in x.label.split(" and ")}
        told = "by: the share of its weight on this text"
        if measured:
            names = ", ".join(sorted(measured))
            told += f"; for {names} the share of held-out words it was right for"
        return [
            told + ".",
            "entropy: of its weights, in nats. keys: how many it looks at, exp(entropy).",
            "The other columns: the share of its weight on the token before, the next, itself, the "
            "first, and so on"
            + (
                "; induction and duplicate, where a token stood before: on what followed it then, "
                "and on it."
                if any(name in x.shares for x in self.heads for name in REPEATS)
                else "."
            ),
            *(
                f"Layer {layer.number}, {layer.module}, looks from one text into another."
                for layer in self.layers
                if layer.crosses
            ),
        ]

    def __repr__(self) -> str:
        """A line for each layer: its mean entropy, and how many heads do what."""
        rows = [("layer", "entropy", "heads")]
        for layer in self.layers:
            counts: dict[str, int] = {}
            for head in layer.heads:
                counts[head.label] = counts.get(head.label, 0) + 1
            falling = sorted(counts.items(), key=lambda pair: -pair[1])
            told = ", ".join(f"{count} {label}" for label, count in falling)
            mean = sum(head.entropy for head in layer.heads) / max(1, len(layer.heads))
            rows.append((str(layer.number), f"{mean:.2f}", told))
        return "\n".join([f"{visible(self.name, 200)}: {self.about}", *_columns(rows)])

    def _repr_html_(self) -> str:
        return html.in_notebook(html.report_page(self))


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows]  # fmt: skip
