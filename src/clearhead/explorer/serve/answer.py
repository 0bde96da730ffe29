"""What a page asks, as JSON, and what it is answered: a snapshot, a layer, or an error."""

from collections.abc import Mapping
from typing import TypeAlias

from ...errors import AttentionError, BadType, BadValue, as_count, kind_of
from ..html.steps import trace_data
from .reader import OnProgress, Reader

Answer: TypeAlias = dict[str, object]


def answer(reader: Reader, path: str, request: object, on_progress: OnProgress) -> Answer:
    """The answer to a request: ``{"snapshot": ...}`` for the path "compute", ``{"layer": ...}``
    for "tile", and in place of both ``{"error": ...}`` in three parts. It raises only what
    `on_progress` does."""
    try:
        if not isinstance(request, dict):
            raise BadType(
                f"The request is {kind_of(request)}.",
                'a request is an object such as {"text": "a text"}.',
                "send one.",
            )
        return ANSWERS[path](reader, request, on_progress)
    except AttentionError as error:
        return said(error)
    except Exception as error:  # a model raises whatever it happens to, and its host goes on
        return said(
            BadValue(
                f"The model failed: {type(error).__name__}: {str(error)[:500]}.",
                "a model that runs on one text runs on another of its kind.",
                "try another text or fewer edits.",
            )
        )


def said(error: AttentionError) -> Answer:
    """An error for a page."""
    return {"error": {"gave": error.gave, "rule": error.rule, "hint": error.hint}}


def _compute(reader: Reader, given: Mapping[str, object], on_progress: OnProgress) -> Answer:
    text = given.get("text")
    return {"snapshot": reader.snapshot(text, given.get("edits"), on_progress)}  # type: ignore[arg-type]  # it is checked there


def _tile(reader: Reader, given: Mapping[str, object], on_progress: OnProgress) -> Answer:
    rule, way = "a tile has a layer and a head, numbered from 0.", 'send "layer": 0, "head": 0.'
    layer, head = (as_count(name, given.get(name), rule, way) for name in ("layer", "head"))
    queries, keys = (_span(name, given.get(name)) for name in ("queries", "keys"))
    text, edits = given.get("text"), given.get("edits")
    trace = reader.tile(text, layer, head, queries, keys, edits, on_progress)  # type: ignore[arg-type]  # as above
    return {"layer": trace_data(trace)}


def _span(name: str, given: object) -> range:
    rule, way = f"{name} are [first, last], counted from 0.", "send for example [0, 63]."
    if not isinstance(given, list) or len(given) != 2:
        raise BadType(f"{name} is {str(given)[:80]!r}.", rule, way)
    first, last = (as_count(name, x, rule, way) for x in given)
    return range(first, last + 1)


ANSWERS = {"compute": _compute, "tile": _tile}
