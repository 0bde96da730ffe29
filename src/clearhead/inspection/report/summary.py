"""A report on one screen: counts of roles, the heads that matter most, and the clearest example."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ...formatting import Token, visible
from .findings import Head, Layer
from .result import EFFECTS, Report, columns

TOP = 8  # listed heads
WIDTH = 80
FEW_WORDS = 32  # different tokens
CLEAR_SCORE = 0.4  # on random repeated tokens: a head with this score is an induction head
AROUND = 12  # printed tokens to either side of the query and the key
# The roles of the example, the most interesting first.
RANKED_ROLES = ("induction", "duplicate", "before2", "previous", "next", "window8", "window16",
           "window32", "special", "separators", "same")  # fmt: skip


class Example(NamedTuple):
    """A head, and a query whose largest weight shows its role."""

    head: Head
    query: int
    key: int
    weight: float


def summary(report: Report) -> str:
    """Write the report in about twenty lines, for any number of heads."""
    counts = Counter(label for x in report.heads for label in _labels(x))
    without = sum(not _labels(x) for x in report.heads)
    roles = ", ".join(f"{count} {label}" for label, count in counts.most_common())
    lines = [f"{visible(report.name, 200)}: {report.about}", ""]
    lines += textwrap.wrap(
        f"Roles of heads, of which a head may have several: {roles or 'none'}. "
        f"{without} heads have none that chance does not explain.",
        WIDTH,
    )
    words = len(set(report.tokens))
    if without and words < FEW_WORDS:
        lines += textwrap.wrap(
            f"The text has {words} different tokens, too few to separate many roles from chance: "
            "a longer text shows more.",
            WIDTH,
        )
    strongest = matter_most(report)
    if strongest:
        lines += ["", *textwrap.wrap(_heading(report), WIDTH), *_table(report, strongest)]
    example = clearest_example(report)
    if example is not None:
        lines += ["", *_in_words(report, example)]
    lines += _largest_probes(report)
    return "\n".join(lines)


def matter_most(report: Report) -> list[Head]:
    """Return the heads of the largest effects. Without effects, return those with the clearest role
    besides sinks, by how improbable chance is, then by mass."""
    if report.effect_metric:
        heads = [x for x in report.heads if x.effect is not None]
        return sorted(heads, key=lambda x: -abs(x.effect or 0.0))[:TOP]
    clear = {id(x): _evidence(x) for x in report.heads}
    heads = [x for x in report.heads if clear[id(x)] < (1.0, 0.0)]
    return sorted(heads, key=lambda x: clear[id(x)])[:TOP]


def _evidence(head: Head) -> tuple[float, float]:
    """Return (chance, -mass) of the clearest role besides sinks; (1, 0) without one."""
    roles = [(role.chance, -role.mass) for role in head.roles if role.name not in ("first", "sink")]
    return min(roles, default=(1.0, 0.0))


def _labels(head: Head) -> list[str]:
    """Return the labels of a head, each once; or the labels measured on held-out texts."""
    if head.measured:
        return head.label.split(" and ")
    return list(dict.fromkeys(role.label for role in head.roles))


def _heading(report: Report) -> str:
    if not report.effect_metric:
        return "The heads with the clearest roles besides sinks:"
    name = report.effect_metric
    metric = EFFECTS.get(name, f"how much {name} changes").removesuffix(",")
    return f"The heads with the largest effects: {metric}, without the head."


def _table(report: Report, heads: list[Head]) -> list[str]:
    rows = [("layer", "head", *(("effect",) if report.effect_metric else ()), "does")]
    for x in heads:
        effect = () if not report.effect_metric else (f"{x.effect:+.3f}",)
        rows.append((str(x.layer), str(x.head), *effect, _does(x)))
    return columns(rows)


def _does(head: Head) -> str:
    if head.measured:
        return f"{head.label} {head.number:.2f}"
    return ", ".join(f"{x.label} {x.mass:.2f}" for x in head.roles) or head.label


def clearest_example(report: Report) -> Example | None:
    """Return the head with the first of `RANKED_ROLES`, and the query that shows it best.

    None without roles.
    """
    best: tuple[tuple[int, float], Example] | None = None
    for layer in report.layers:
        for head in layer.heads:
            masses = {role.name: role.mass for role in head.roles}
            score = 0.0 if head.probe is None else head.probe["induction"]
            if score >= CLEAR_SCORE:  # a short text has too few repeated words for the role
                masses.setdefault("induction", score)
            for rank, name in enumerate(RANKED_ROLES):
                order = rank, -masses.get(name, 0.0)
                if name not in masses or (best is not None and order >= best[0]):
                    continue
                example = _example_of(layer, head, name)
                if example is not None:
                    best = order, example
    return None if best is None else best[1]


def _example_of(layer: Layer, head: Head, name: str) -> Example | None:
    """Return the query with the largest weight among those whose largest weight fits the role."""
    tokens = layer.key_tokens
    keys = layer.top_keys[head.head, :, 0].tolist()
    offsets = {"before2": -2, "previous": -1, "next": 1, "same": 0}
    best = None
    shift = layer.received.shape[-1] - layer.queries
    for i, (query, key) in enumerate(zip(layer.kept_queries, keys, strict=True)):
        at, weight = query + shift, float(layer.top_weights[head.head, i, 0])
        if key <= 0 or not weight > 0 or (best is not None and weight <= best.weight):
            continue
        if name in offsets:
            fits = key - at == offsets[name]
        elif name in ("induction", "duplicate"):
            source = key - (name == "induction")
            fits = tokens is not None and 0 < key < at - 1 and tokens[source] == tokens[at]
        else:
            fits = not name.startswith("window") or abs(key - at) < int(name[6:])
        if fits:
            best = Example(head, query, key, weight)
    return best


def _in_words(report: Report, example: Example) -> list[str]:
    head, query, key, weight = example
    layer = report.layers[head.layer]
    queries = layer.query_tokens or [str(i) for i in range(layer.queries)]
    keys = layer.key_tokens or [str(i) for i in range(layer.received.shape[-1])]
    line = (
        f"Clearest example: layer {head.layer}, head {head.head}: {_does(head)}. "
        f"Token {query}, {_quoted(queries[query])}, looks at token {key}, "
        f"{_quoted(keys[key])}, with {weight:.2f} of its weight:"
    )
    sentence = visible(_sentence(keys, query, key), 2000)
    return [
        *textwrap.wrap(line, WIDTH),
        *textwrap.wrap(sentence, WIDTH, initial_indent="  ", subsequent_indent="  "),
    ]


def _sentence(tokens: Sequence[str], query: int, key: int) -> str:
    """Return the tokens around the query and the key, which are in brackets."""
    written = [
        x.replace(x.strip(), f"[{x.strip()}]") if i in (query, key) else x
        for i, x in enumerate(tokens)
    ]
    low, high = sorted((query, key))
    parts = [range(max(0, low - AROUND), low + AROUND), range(high - AROUND, high + AROUND)]
    if parts[0].stop >= parts[1].start:
        parts = [range(parts[0].start, parts[1].stop)]
    between = "" if all(isinstance(x, Token) for x in tokens) else " "
    text = " ... ".join(between.join(written[part.start : part.stop]) for part in parts)
    return f"{'... ' * (parts[0].start > 0)}{' '.join(text.split())}"


def _largest_probes(report: Report) -> list[str]:
    """Return lines for the heads with the largest scores on random repeated tokens."""
    probed = [x for x in report.heads if x.probe is not None]
    if not probed:
        return []
    lines = ["Largest scores on random tokens, repeated (layer.head score):"]
    for name in ("induction", "duplicate", "previous"):
        heads = sorted(probed, key=lambda x: -(x.probe or {})[name])[:5]
        scores = ", ".join(f"{x.layer}.{x.head} {(x.probe or {})[name]:.2f}" for x in heads)
        lines.append(f"  {name:<9}  {scores}")
    return ["", *lines]


def _quoted(token: str) -> str:
    return f'"{visible(token.strip() or token, 40)}"'
