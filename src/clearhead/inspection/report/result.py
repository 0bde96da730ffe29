"""A report: what it holds, and how it prints itself and becomes JSON."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import BadValue
from ...formatting import ShownInNotebook, visible, without_nan
from ...torch_state import loadable
from .findings import NOT_NUMBERS, Head, Layer
from .head_label import LABELS, REPEAT_GROUPS
from .live_model import LiveModel

# What the metrics of effects say.
EFFECTS = {
    "loss": "how much the mean loss of the next token grows, in nats,",
    "turn": "how far the vectors after the last layer turn, as 1 - cosine,",
}


@loadable
@dataclass(frozen=True, eq=False)
class Report(ShownInNotebook):
    """What a model does with a text: `layers`, each with its `heads`. `report` makes it, and views
    draw it. It prints itself, as a table, and shows itself in a notebook.

    `text` is what was read, "" if only its tokens are known; `unknown` are the positions of tokens
    that the model does not know. `guesses` holds for each position the most probable next tokens
    with their probabilities; None if they are not known. `effect_metric` is what the effects of
    heads are measured in: "loss", the mean loss of the next token in nats, which grows where the
    text is read worse; "turn", how far the vectors after the last layer turn, as 1 - cosine, the
    mean over tokens; or the name of a metric; "" if there are no effects. `effects_withheld` says
    why there are none although they were asked for, "" otherwise. With a `model`, the page computes
    other texts by itself. `folder` is where the model's files are, "" if it has none.
    `outputs` is a digest of what every attention call returned, "" if none was taken.
    """

    name: str
    tokens: tuple[str, ...]
    layers: tuple[Layer, ...]
    text: str = ""
    unknown: tuple[int, ...] = ()
    guesses: tuple[tuple[tuple[str, float], ...], ...] | None = None
    effect_metric: str = ""
    effects_withheld: str = ""
    model: LiveModel | None = field(default=None, repr=False)
    folder: str = ""
    outputs: str = ""

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(head for layer in self.layers for head in layer.heads)

    @property
    def about(self) -> str:
        sizes = {"layer": self.layers, "head": self.heads, "token": self.tokens}
        return ", ".join(f"{len(x):,} {name}{'s' * (len(x) != 1)}" for name, x in sizes.items())

    def __getitem__(self, index: tuple[int, int]) -> Head:
        """`report[layer, head]`."""
        layer, head = index
        if not (0 <= layer < len(self.layers) and 0 <= head < len(self.layers[layer].heads)):
            raise BadValue(
                f"Head {head} of layer {layer} was asked for.",
                f"this report has {self.about}, numbered from 0.",
                "ask for one of these, as report[layer, head].",
            )
        return self.layers[layer].heads[head]

    def to_json(self) -> dict[str, Any]:
        """Everything but the maps and traces, as numbers and words for `json.dumps`. NaN and
        infinity are None."""
        layers = [
            {
                "layer": layer.number,
                "module": layer.module,
                "cross_attention": layer.cross_attention,
                "problem": layer.problem,
                "heads": [without_nan(asdict(head), lambda x: None) for head in layer.heads],
            }
            for layer in self.layers
        ]
        return {
            "name": self.name,
            "folder": self.folder,
            "tokens": list(self.tokens),
            "effect_metric": self.effect_metric,
            "effects_withheld": self.effects_withheld,
            "layers": layers,
        }

    def __str__(self) -> str:
        names = [n for n in LABELS if any(n in x.shares for x in self.heads)]
        last = "effect" if self.effect_metric else "keys"  # both would not fit a terminal
        rows = [("layer", "head", "does", "by", "entropy", last, *names)]
        for x in self.heads:
            shares = (f"{x.shares[n]:.2f}" if n in x.shares else "" for n in names)
            number = f"{x.effective:.1f}" if x.effect is None else f"{x.effect:+.3f}"
            numbers = x.share_text, f"{x.entropy:.2f}", number
            rows.append((str(x.layer), str(x.head), x.label, *numbers, *shares))
        table = _columns(rows)
        width = max(80, *map(len, table))
        legend = (part for line in self._legend() for part in textwrap.wrap(line, width))
        return "\n".join([f"{visible(self.name, 200)}: {self.about}", *table, "", *legend])

    def _legend(self) -> list[str]:
        """What the columns and labels mean, as paragraphs."""
        measured = {label for x in self.heads if x.measured for label in x.label.split(" and ")}
        by = "by: the share of its weight on this text"
        shares = (
            "The other columns: the share of its weight on the token before, the next, itself, the "
            "first, and so on"
        )
        if any(name in x.shares for x in self.heads for name in REPEAT_GROUPS):
            shares += (
                "; induction and duplicate, where a token occurred before: on what followed it "
                "then, and on it"
            )
        lines = []
        if measured:
            names = ", ".join(sorted(measured))
            by += f"; for {names} the share of held-out words it was right for"
            lines.append(
                f"The labels {names} were measured on held-out stories and hold for every text; "
                "the others, such as previous token, only say where the weight lies on this text."
            )
        if any(x.label == NOT_NUMBERS for x in self.heads):
            lines.append(
                "NaN: its weights are not numbers, since an input or a weight of the model is NaN "
                "or infinite."
            )
        entropy = "entropy: of its weights, in nats. keys: how many it looks at, exp(entropy)."
        if self.effect_metric:
            caused = EFFECTS.get(self.effect_metric, f"how much {self.effect_metric} changes")
            entropy = f"entropy: of its weights, in nats. effect: {caused} without the head."
        elif self.effects_withheld:
            lines.append(f"No effects. {self.effects_withheld}")
        lines = [f"{by}.", *lines, entropy, f"{shares}."]
        for layer in self.layers:
            if layer.cross_attention:
                lines.append(
                    f"Layer {layer.number}, {layer.module}, looks from one text into another."
                )
        return lines

    def __repr__(self) -> str:
        """A line for each layer: its mean entropy, and how many heads do what."""
        rows = [("layer", "entropy", "heads")]
        for layer in self.layers:
            counts: dict[str, int] = {}
            for head in layer.heads:
                counts[head.label] = counts.get(head.label, 0) + 1
            falling = sorted(counts.items(), key=lambda pair: -pair[1])
            labels = ", ".join(f"{count} {label}" for label, count in falling)
            mean = sum(head.entropy for head in layer.heads) / max(1, len(layer.heads))
            rows.append((str(layer.number), f"{mean:.2f}", labels))
        return "\n".join([f"{visible(self.name, 200)}: {self.about}", *_columns(rows)])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [" ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows]  # fmt: skip
