"""The result of `report`: its data, its printed table, and its JSON."""

import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.errors import BadValue, as_count
from ...core.files.results import Savable, data_frame
from ...core.formatting import ShownInNotebook, aligned, spelled, visible, without_nan
from ...core.torch_state import loadable
from ..roles.role import NOT_NUMBERS
from ..roles.table import LABELS, ROLES_OF_KEYS
from .findings import Head, Layer, NextToken, Register, Writer
from .live_model import LiveModel

if TYPE_CHECKING:
    import pandas

# Descriptions of the metrics of effects, for the legend.
EFFECTS = {
    "loss": "how much the mean loss of the next token grows, in nats,",
    "turn": "how far the vectors after the last layer turn, as 1 - cosine,",
}


@loadable
@dataclass(frozen=True, eq=False)
class Report(ShownInNotebook, Savable):
    """What a model does with a text, in `layers` with `heads`. Returned by `clearhead.report`.

    It prints as a table and has a notebook view.

    Attributes:
        text: the text; "" if only its tokens are known.
        unknown: the positions of tokens that are not in the model's vocabulary.
        guesses: the most probable next tokens of each position, with probabilities; None if
            unknown.
        effect_metric: the metric of the heads' effects. "loss" is the mean next-token loss in nats,
            which increases if the model predicts the text worse. "turn" is how far the vectors
            after the last layer turn, as 1 - cosine, the mean over tokens. Otherwise it is the name
            of a metric, or "" if there are no effects.
        effects_withheld: why requested effects are missing; "" otherwise.
        next_token: the predicted next token and the heads that write it; None if not requested.
        next_token_withheld: why the requested `next_token` is missing; "" otherwise.
        begin: the layer, the head and the query that the model itself shows first; None if it
            names none.
        model: a model with which the page computes other texts.
        folder: the folder of the model's files, or its name on the hub; "" if it has none.
        outputs: a digest of the outputs of every attention call; "" if not computed.
    """

    name: str
    tokens: tuple[str, ...]
    layers: tuple[Layer, ...]
    text: str = ""
    unknown: tuple[int, ...] = ()
    guesses: tuple[tuple[tuple[str, float], ...], ...] | None = None
    effect_metric: str = ""
    effects_withheld: str = ""
    next_token: NextToken | None = None
    next_token_withheld: str = ""
    begin: tuple[int, int, int] | None = None
    model: LiveModel | None = field(default=None, repr=False)
    folder: str = ""
    outputs: str = ""

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(head for layer in self.layers for head in layer.heads)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The heads that write the predicted next token; none if that was not requested."""
        return () if self.next_token is None else self.next_token.writers

    def registers_of(self, layer: Layer) -> tuple[Register, ...]:
        """Return the patches of a layer's image that are registers in any layer, or the tokens of
        its text that are sinks, each as in the layer where it receives most weight."""
        text = layer.picture, layer.in_decoder
        layers = (x for x in self.layers if (x.picture, x.in_decoder) == text)
        registers = sorted((x for own in layers for x in own.registers), key=lambda x: x.weight)
        most = {x.token: x for x in registers}
        return tuple(most[token] for token in sorted(most))

    def weights_on_image(self, layer: int, head: int | None = None) -> Tensor:
        """Return the weights of each query on the patches of an image, (T, rows, columns).

        Their sum over the patches is the fraction of its weight that is on the image. None for
        `head` is the mean over heads. In a vision-language model, tokens after the image are words.
        Beyond 600 tokens, the patches of a block (`Layer.block`) share their weight evenly, and as
        queries have the mean of the block.

        Raises `BadValue` for a head that does not exist, for a layer without an image, and for one
        with 600 other tokens, whose map has no blocks.
        """
        self[layer, head or 0]
        own = self.layers[layer]
        if own.picture is None or own.block is None:
            has = "no image" if own.picture is None else f"an image and {own.queries} tokens"
            rule = "its queries and keys are the patches of one image, and fewer than 600 others."
            hint = "pass the report of a vision model; heads of a text are drawn by plot.head."
            raise BadValue(f"Layer {layer} has {has}.", rule, hint)
        picture, maps = own.picture, own.pooled
        cells = picture.cells(own.block)
        of_queries = (maps.mean(0) if head is None else maps[head]) / cells.bincount()
        of_queries = of_queries[cells][:, cells[picture.patches]]
        return of_queries.unflatten(1, (picture.rows, picture.columns))

    @property
    def about(self) -> str:
        sizes = {"layer": self.layers, "head": self.heads, "token": self.tokens}
        return ", ".join(f"{len(x):,} {name}{'s' * (len(x) != 1)}" for name, x in sizes.items())

    def part_of(self, layer: Layer) -> str:
        """Return "encoder", "decoder" or "cross-attention"; "" if unknown, or for one text."""
        decoder = [x for x in self.layers if x.in_decoder or x.cross_attention]
        if layer in decoder:
            return "cross-attention" if layer.cross_attention else "decoder"
        # It is unknown where a decoder begins whose first known call is cross-attention.
        return "encoder" if decoder and not decoder[0].cross_attention else ""

    def map_heads(self, change: Callable[[Head], Head]) -> "Report":
        """Return the report with each head replaced by ``change(head)``."""
        layers = (replace(x, heads=tuple(map(change, x.heads))) for x in self.layers)
        return replace(self, layers=tuple(layers))

    def __getitem__(self, index: tuple[int, int]) -> Head:
        """Return a head: ``report[layer, head]``."""
        layer, head = index
        rule = f"this report has layers 0 to {len(self.layers) - 1}."
        if 0 <= layer < len(self.layers):
            heads = self.layers[layer].heads
            if 0 <= head < len(heads):
                return heads[head]
            rule = f"layer {layer} has heads 0 to {len(heads) - 1}."
        gave = f"Head {head} of layer {layer} was requested."
        raise BadValue(gave, rule, "use an existing head, as report[layer, head].")

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one row per head: where it is, its label, its roles with their masses, its
        numbers, the fraction of its weight and of what it carries from each group of keys, and
        its scores on repeated tokens."""
        rows = []
        for layer in self.layers:
            for head in layer.heads:
                parts = ("labels", "shares", "links", "roles", "repeated_tokens", "norm_weighted")
                row = {name: x for name, x in vars(head).items() if name not in parts}
                row["label"] = head.label
                roles = "; ".join(f"{role.label} {role.mass:.4f}" for role in head.roles)
                scores = head.repeated_tokens or {}
                repeated = {f"repeated_{name}": x for name, x in scores.items()}
                by_norm = {f"norm_weighted_{name}": x for name, x in head.norm_weighted.items()}
                numbers = {**head.shares, **by_norm, **repeated}
                rows.append({"module": layer.module, **row, "roles": roles, **numbers})
        return rows

    def to_pandas(self) -> "pandas.DataFrame":
        """Return `as_rows` as a table. Raises `Missing` without pandas."""
        return data_frame(self.as_rows())

    def to_json(self) -> dict[str, Any]:
        """Return the report without maps and traces, for `json.dumps`; NaN and inf are None."""
        layers = [
            {
                "layer": layer.number,
                "module": layer.module,
                "cross_attention": layer.cross_attention,
                "problem": layer.problem,
                "registers": [asdict(register) for register in layer.registers],
                "heads": [
                    {"label": head.label, **without_nan(asdict(head), lambda x: None)}
                    for head in layer.heads
                ],
            }
            for layer in self.layers
        ]
        return {
            "name": self.name,
            "folder": self.folder,
            "tokens": list(self.tokens),
            **spelled(self.tokens),
            "effect_metric": self.effect_metric,
            "effects_withheld": self.effects_withheld,
            "next_token": None if self.next_token is None else asdict(self.next_token),
            "next_token_withheld": self.next_token_withheld,
            "layers": layers,
        }

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Write the table of all heads, with lines of at most `width` characters if possible.

        None does not limit them. Raises `BadValue` or `BadType` for another width than 1 or more.
        """
        if width is not None:
            width = as_count("width", width, "width is a number of characters.", "pass 80.", 1)
        # A column of zeros is left out: with a causal mask no weight is on the next token.
        names = [n for n in LABELS if any(not x.shares.get(n, 0.0) < 0.005 for x in self.heads)]
        last = "effect" if self.effect_metric else "keys"  # both would not fit a terminal
        by_norm = any(x.norm_weighted for x in self.heads)
        rows = [("head", "role", "score", "entropy", last, *names, *["by norm"] * by_norm)]
        for x in self.heads:
            shares = (f"{x.shares[n]:.2f}" if n in x.shares else "" for n in names)
            number = f"{x.effective:.1f}" if x.effect is None else f"{x.effect:+.3f}"
            numbers = x.share_text, f"{x.entropy:.2f}", number
            first = f"{x.norm_weighted['first']:.2f}" if x.norm_weighted else ""
            rows.append((f"L{x.layer}H{x.head}", x.label, *numbers, *shares, *[first] * by_norm))
        table = aligned(rows, " ", width)
        wrap = min(width or sys.maxsize, max(80, *map(len, table)))
        legend = (part for line in self._legend(names) for part in textwrap.wrap(line, wrap))
        return "\n".join([f"{visible(self.name, 200)}: {self.about}", *table, "", *legend])

    def _legend(self, names: Sequence[str]) -> list[str]:
        """Return an explanation of the columns, of these fractions, and of roles, as paragraphs."""
        measured = {label for x in self.heads if x.measured for label in x.labels}
        score = "score: the fraction of its weight on this text"
        means = {x["name"]: x["means"].removeprefix("of its weight ") for x in ROLES_OF_KEYS}
        shares = "; ".join(f"{name} {means[name]}" for name in names)
        lines = []
        if measured:
            measured_names = ", ".join(sorted(measured))
            score += f"; for {measured_names} the fraction of held-out words for which it was right"
            lines.append(
                f"The roles {measured_names} were measured on held-out stories and apply to every "
                "text; the others, such as previous token, describe the weights on this text only."
            )
        if any(x.label == NOT_NUMBERS for x in self.heads):
            lines.append(
                "NaN: its attention weights are NaN, because an input or a weight of the model is "
                "NaN or infinite."
            )
        entropy = "entropy: of its weights, in nats. keys: how many it looks at, exp(entropy)."
        if self.effect_metric:
            caused = EFFECTS.get(self.effect_metric, f"how much {self.effect_metric} changes")
            entropy = f"entropy: of its weights, in nats. effect: {caused} without the head."
        elif self.effects_withheld:
            lines.append(f"No effects. {self.effects_withheld}")
        lines = [
            f"{score}.",
            *lines,
            entropy,
            *[f"Fractions of its weight: {shares}."] * bool(names),
        ]
        if any(x.norm_weighted for x in self.heads):
            lines.append(
                "by norm: its norm-weighted attention on the first token, which is like first, but "
                "each weight is multiplied by |v W_O|, the norm of what the value writes."
            )
        for part in ("encoder", "decoder", "cross-attention"):
            numbers = [str(x.number) for x in self.layers if self.part_of(x) == part]
            if numbers:
                name = part.capitalize() + ", from one text into another" * ("-" in part)
                lines.append(f"{name}: layer{'s' * (len(numbers) > 1)} {', '.join(numbers)}.")
        return lines

    def __repr__(self) -> str:
        """Return a line for each layer: its mean entropy, and the number of heads by label."""
        rows = [("layer", "entropy", "heads")]
        for layer in self.layers:
            counts = Counter(head.label for head in layer.heads)
            labels = ", ".join(f"{count} {label}" for label, count in counts.most_common())
            mean = sum(head.entropy for head in layer.heads) / max(1, len(layer.heads))
            rows.append((str(layer.number), f"{mean:.2f}", labels))
        return "\n".join([f"{visible(self.name, 200)}: {self.about}", *aligned(rows, " ")])
