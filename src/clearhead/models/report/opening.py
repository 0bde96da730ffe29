"""Choose the head and the query with which page and terminal begin: `opening`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..roles.table import LABELS, OFFSETS, RANK, REPEATS, SINKS, WINDOWS
from .findings import Head, Layer, Writer
from .result import Report

CLEAR_SCORE = 0.4  # on random repeated tokens: a head with this score is an induction head
# The roles of a head to begin with, the most interesting first.
RANKED_ROLES = tuple(
    name
    for role in LABELS
    if role not in SINKS
    for name in (WINDOWS if role == "window" else (role,))
)


class Opening(NamedTuple):
    """A head, a query, and the key with its largest weight. `writer` is the reason if the head
    writes the predicted next token."""

    head: Head
    query: int
    key: int
    weight: float
    writer: Writer | None = None


def opening(report: Report) -> Opening | None:
    """Return the head and the query with which to begin on this text.

    This is what the model itself shows first; else the clearest head that writes the predicted next
    token; else the head with the first of `RANKED_ROLES`, and the query that shows it best. None
    without any of these.
    """
    if report.begin is not None:
        return _largest_weight(report, *report.begin)
    if report.next_token is not None and (writer := report.next_token.clearest) is not None:
        last = report.layers[writer.layer].queries - 1
        return _largest_weight(report, writer.layer, writer.head, last)._replace(writer=writer)
    return _clearest_role(report)


def best_heads(report: Report) -> dict[str, Head]:
    """Return the head with the largest mass of each role, by its label, in the order of roles."""
    best: dict[str, tuple[float, Head]] = {}
    for head in report.heads:
        for role in head.roles:
            if role.label not in best or role.mass > best[role.label][0]:
                best[role.label] = role.mass, head
    return {label: best[label][1] for label in sorted(best, key=RANK.__getitem__)}


def token_labels(report: Report, layer: int) -> tuple[Sequence[str], Sequence[str]]:
    """Return the labels of a layer's queries and keys: tokens, or numbers if these are unknown."""
    own = report.layers[layer]
    queries = own.query_tokens or [str(i) for i in range(own.queries)]
    return queries, own.key_tokens or [str(i) for i in range(own.received.shape[-1])]


def _largest_weight(report: Report, layer: int, head: int, query: int) -> Opening:
    own = report.layers[layer]
    row = own.kept_queries.index(query)
    key, weight = own.top_keys[head, row, 0], own.top_weights[head, row, 0]
    return Opening(own.heads[head], query, int(key), float(weight))


def _clearest_role(report: Report) -> Opening | None:
    """Return the head with the first of `RANKED_ROLES`, and the query that shows it best.

    None without roles.
    """
    ranked: list[tuple[int, float, tuple[Layer, Head]]] = []
    for layer in report.layers:
        for head in layer.heads:
            masses = {role.name: role.mass for role in head.roles}
            score = 0.0 if head.repeated_tokens is None else head.repeated_tokens["induction"]
            if score >= CLEAR_SCORE:  # a short text has too few repeated words for the role
                masses.setdefault("induction", score)
            ranked += [
                (rank, -masses[name], (layer, head))
                for rank, name in enumerate(RANKED_ROLES)
                if name in masses
            ]
    ranked.sort(key=lambda role: role[:2])
    examples = (_query_of_role(*where, RANKED_ROLES[rank]) for rank, _, where in ranked)
    return next(filter(None, examples), None)


def _query_of_role(layer: Layer, head: Head, name: str) -> Opening | None:
    """Return the query with the largest weight among those whose largest weight fits the role, if
    possible between words."""
    tokens = layer.key_tokens
    keys = layer.top_keys[head.head, :, 0].tolist()
    best, most = None, 0.0
    shift = layer.received.shape[-1] - layer.queries
    for i, (query, key) in enumerate(zip(layer.kept_queries, keys, strict=True)):
        at, weight = query + shift, float(layer.top_weights[head.head, i, 0])
        words = tokens is not None and all(tokens[x].strip("▁Ġ␣ ")[:1].isalpha() for x in (at, key))
        if key <= 0 or not weight > 0 or weight + words <= most:
            continue
        if name in OFFSETS:
            fits = key - at == OFFSETS[name]
        elif name in REPEATS:
            source = key - (name == "induction")
            fits = tokens is not None and 0 < key < at - 1 and tokens[source] == tokens[at]
        else:
            fits = abs(key - at) < WINDOWS.get(name, math.inf)
        if fits:
            best, most = Opening(head, query, key, weight), weight + words
    return best
