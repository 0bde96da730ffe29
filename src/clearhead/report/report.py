"""A report: what was found, and how it prints itself."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from ..results.report import Findings, Head
from ..views import html
from ..views.escape import visible
from .head_label import LABELS, REPEATS


class Report(Findings):
    """What a model does with a text: `layers`, each with its `heads`. Prints itself as a table."""

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
    return [" ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows]  # fmt: skip
