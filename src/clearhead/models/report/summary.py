"""A report on one screen: counts of roles, the heads that matter most, and the clearest example."""

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from ...core.formatting import Token, aligned, quantity, visible
from .findings import REGISTER_NORM, REGISTER_WEIGHT, Head, NextToken, Writer
from .opening import Opening, best_heads, opening, token_labels
from .result import EFFECTS, Report

TOP = 8  # listed heads
WIDTH = 80
FEW_HEADS = 24  # of which effects alone are listed
FEW_WORDS = 32  # different tokens
AROUND = 12  # printed tokens to either side of the query and the key


def summary(report: Report, width: int = WIDTH) -> str:
    """Write the report in about twenty lines, for any number of heads.

    Text is wrapped at `width` characters. Tables are folded only if `width` is less than 80.
    """
    counts = Counter(label for x in report.heads for label in _labels(x))
    writing = {(x.layer, x.head) for x in report.writers}
    without = sum(not _labels(x) and (x.layer, x.head) not in writing for x in report.heads)
    without_role = f" {quantity(without, 'head')} {'has' if without == 1 else 'have'} no role"
    roles = [f"{count} {label}" for label, count in counts.most_common()]
    if report.next_token is not None and writing:  # which the page shows as a group
        roles.insert(0, f"{len(writing)} write {_quoted(report.next_token.token)}")
    lines = [f"{visible(report.name, 200)}: {report.about}", ""]
    begin = opening(report)
    if begin is not None:
        picture = report.layers[begin.head.layer].picture
        sentence = "" if picture else visible(_sentence(report, begin), 2000)
        lines += [
            *textwrap.wrap(in_words(report, begin), width),
            *textwrap.wrap(sentence, width, initial_indent="  ", subsequent_indent="  "),
            "",
        ]
    if report.next_token is not None and writing:
        lines += [*_writers(report, report.next_token, width), ""]
    lines += textwrap.wrap(
        f"Roles (a head may have several): {', '.join(roles) or 'none'}."
        + f"{without_role}, or one that may be chance." * (without > 0),
        width,
    )
    words = len(set(report.tokens))
    if without and words < FEW_WORDS:
        different = f"{words} different token{'s' * (words != 1)}"
        lines += textwrap.wrap(
            f"The text has {different}, too few to separate many roles from chance. "
            "A longer text shows more.",
            width,
        )
    lines += _registers(report, width)
    if report.effect_metric:
        lines += _largest_effects(report, width)
    if not report.effect_metric or len(report.heads) > FEW_HEADS:
        lines += _best_of_roles(report, width)
    return "\n".join([*lines, *_largest_on_repeated_tokens(report)])


def _registers(report: Report, width: int) -> list[str]:
    """Return which patches of each image are registers in all but name, and which tokens of a
    text are sinks besides the first."""
    lines = []
    for layer in {(id(x.picture), x.in_decoder): x for x in report.layers}.values():
        is_text = layer.picture is None
        of = "tokens" if is_text else "patches"
        patches = [
            (f"{visible(x.name, 24)!r} ({x.token})" if is_text else x.name)
            + f" (in layer {x.layer} it has {x.norm:.1f} times the median norm of {of}, "
            f"and {x.weight:.0f} times an even part of the weight)"
            for x in report.registers_of(layer)
        ]
        kind = "Sinks besides the first token" if is_text else "Registers in all but name"
        sentence = f"{kind}: {'; '.join(patches)}."
        if is_text and not patches:
            continue
        if layer.stream_norms is None:
            sentence = "It is unknown whether patches are registers: no module receives the stream."
        elif not patches:
            sentence = (
                f"No patch is a register in all but name, with {REGISTER_NORM} times the median "
                f"norm of patches and {REGISTER_WEIGHT} times an even part of the weight."
            )
        lines += ["", *textwrap.wrap(sentence, width)]
    return lines


def matter_most(report: Report) -> list[Head]:
    """Return the heads of the largest effects."""
    effects = [(abs(x.effect), x) for x in report.heads if x.effect is not None]
    effects.sort(key=lambda pair: -math.inf if math.isnan(pair[0]) else -pair[0])
    return [head for _, head in effects[:TOP]]


def _best_of_roles(report: Report, width: int) -> list[str]:
    """Return a table of the best head of each role."""
    rows = [("role", "head", "weight", "over")]
    for label, head in best_heads(report).items():
        role = max((x for x in head.roles if x.label == label), key=lambda x: x.mass)
        rows.append((label, _named(report, head), f"{role.mass:.2f}", f"{role.queries} tokens"))
    heading = (
        "The best head of each role: the fraction of its weight on the keys of the role, over the "
        "tokens that may look at such keys and at others."
    )
    return ["", *textwrap.wrap(heading, width), *_columns(rows, width)] if rows[1:] else []


def _labels(head: Head) -> tuple[str, ...]:
    """Return the labels of a head, each once; or the labels measured on held-out texts."""
    return head.labels if head.measured else tuple(dict.fromkeys(x.label for x in head.roles))


def _largest_effects(report: Report, width: int) -> list[str]:
    """Return a table of the heads with the largest effects."""
    name = report.effect_metric
    metric = EFFECTS.get(name, f"how much {name} changes").removesuffix(",")
    heading = f"The heads with the largest effects: {metric}, without the head."
    rows = [["head", "effect", "role, fraction of weight over tokens"]]
    rows += [[_named(report, x), f"{x.effect:+.3f}", _does(x)] for x in matter_most(report)]
    return ["", *textwrap.wrap(heading, width), *_columns(rows, width)]


def _named(report: Report, head: Head | Writer) -> str:
    part = report.part_of(report.layers[head.layer])
    return f"L{head.layer}H{head.head}{f' ({part})' * bool(part)}"


def _columns(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    return aligned(rows, " ", width if width < WIDTH else None)


def _does(head: Head) -> str:
    if head.measured:
        return f"{head.label} {head.number:.2f} (of held-out words)"
    return ", ".join(f"{x.label} {x.mass:.2f} over {x.queries}" for x in head.roles) or head.label


def in_words(report: Report, begin: Opening) -> str:
    """Describe the head to begin with, its query and its key, and why it is that head."""
    head, query, key, weight, writer = begin
    queries, keys = token_labels(report, head.layer)
    begin_with = f"Begin with {_named(report, head)}"
    looks = (
        f"At {_quoted(queries[query])} (position {query}, counted from 0) it looks at "
        f"{_quoted(keys[key])} (position {key}) with {weight:.2f} of its weight"
    )
    if writer is None or report.next_token is None:
        does = _does(head) + " tokens" * (bool(head.roles) and not head.measured)
        return f"{begin_with}: {does}. {looks}."
    token, probability = _quoted(report.next_token.token), report.next_token.probability
    return (
        f"After this text the model predicts {token}, with {probability:.1%}. {begin_with}. "
        f"{looks}, and from there it writes {token}. Without this head the probability is "
        f"{writer.without:.1%}."
    )


def _writers(report: Report, next_token: NextToken, width: int) -> list[str]:
    """Return a table of the heads that write the predicted next token."""
    line = (
        f"The heads that add most to the logit of {_quoted(next_token.token)}, the predicted next "
        f"token ({next_token.probability:.1%}), each from one token:"
    )
    rows = [("head", "logits", "from")]
    for x in next_token.writers:
        _, keys = token_labels(report, x.layer)
        rows.append((_named(report, x), f"{x.from_key:+.2f}", _quoted(keys[x.key])))
    return [*textwrap.wrap(line, width), *_columns(rows, width)]


def _sentence(report: Report, begin: Opening) -> str:
    """Return the tokens around the key and the query, which are in brackets; with cross-attention
    those around the key, because the query is in another text."""
    layer, (_, tokens) = report.layers[begin.head.layer], token_labels(report, begin.head.layer)
    at = begin.query + len(tokens) - layer.queries
    low, high = sorted((begin.key, begin.key if layer.cross_attention else at))
    written = list(tokens)
    for i in {low, high}:
        token = written[i] if written[i].strip() else visible(written[i])
        written[i] = token.replace(token.strip(), f"[{token.strip()}]")
    parts = [range(max(0, low - AROUND), low + AROUND), range(high - AROUND, high + AROUND)]
    if parts[0].stop >= parts[1].start:
        parts = [range(parts[0].start, parts[1].stop)]
    between = "" if all(isinstance(x, Token) for x in tokens) else " "
    text = " ... ".join(between.join(written[part.start : part.stop]) for part in parts)
    return f"{'... ' * (parts[0].start > 0)}{' '.join(text.split())}"


def _largest_on_repeated_tokens(report: Report) -> list[str]:
    """Return lines for the heads with the largest scores on random repeated tokens."""
    tested = [(x, x.repeated_tokens) for x in report.heads if x.repeated_tokens is not None]
    if not tested:
        return []
    lines = ["Largest scores on random tokens, repeated (score of layer L, head H):"]
    for name in ("induction", "duplicate", "previous"):
        largest = sorted(tested, key=lambda pair: -pair[1][name])[:5]
        scores = ", ".join(f"L{x.layer}H{x.head} {of[name]:.2f}" for x, of in largest)
        lines.append(f"  {name:<9}  {scores}")
    return ["", *lines]


def _quoted(token: str) -> str:
    return f'"{visible(token.strip() or token, 40)}"'
