"""Compute the response to a request of a page: a snapshot, a layer, or an error, as JSON."""

from typing import Any, TypeAlias

from ...core.errors import AttentionError, BadType, BadValue, as_count, must_be_of
from ..html.exact_steps import every_step
from ..html.report import snapshot
from ..html.steps import trace_data
from ..html.why import why_data
from .reader import OnProgress, Reader

Answer: TypeAlias = dict[str, object]
Request: TypeAlias = Any  # an object of JSON, whose values the reader checks


def answer(reader: Reader, path: str, request: Any, on_progress: OnProgress) -> Answer:
    """Return the response to a request.

    It is ``{"snapshot": ...}`` for the path "compute", ``{"layer": ...}`` for "tile" and "steps",
    ``{"vectors": ...}`` for "vectors", ``{"why": ...}`` for "why", or ``{"error": ...}``
    with three parts. Raises only what `on_progress` raises.
    """
    try:
        rule = 'a request is an object such as {"text": "a text"}.'
        must_be_of(dict, "The server", request, rule, "send an object.")
        return ANSWERS[path](reader, request, on_progress)
    except AttentionError as error:
        return error_for_page(error)
    except Exception as error:  # a model may raise anything, and the server must continue
        gave = f"The model failed: {type(error).__name__}: {str(error)[:500]}."
        rule = "a model runs on every text that its tokenizer reads."
        return error_for_page(BadValue(gave, rule, "try another text or fewer edits."))


def error_for_page(error: AttentionError) -> Answer:
    """Return an error as data for the page."""
    return {"error": {"gave": error.gave, "rule": error.rule, "hint": error.hint}}


def _compute(reader: Reader, request: Request, on_progress: OnProgress) -> Answer:
    report = reader.report(request.get("text"), request.get("edits"), on_progress)
    return {"snapshot": snapshot(report)}


def _vectors(reader: Reader, request: Request, on_progress: OnProgress) -> Answer:
    layer, head = _layer_and_head(request, "vectors have a layer and a head, numbered from 0.")
    return {"vectors": reader.vectors(layer, head, on_progress)}


def _tile(reader: Reader, request: Request, on_progress: OnProgress) -> Answer:
    layer, head = _layer_and_head(request, "a tile has a layer and a head, numbered from 0.")
    queries, keys = (_span(name, request.get(name)) for name in ("queries", "keys"))
    text, edits = request.get("text"), request.get("edits")
    return {"layer": trace_data(reader.tile(text, layer, head, queries, keys, edits, on_progress))}


def _steps(reader: Reader, request: Request, on_progress: OnProgress) -> Answer:
    rule, hint = "a layer is numbered from 0.", 'send "layer": 0.'
    layer = as_count("layer", request.get("layer"), rule, hint)
    trace = reader.steps(request.get("text"), layer, request.get("edits"), on_progress)
    return {"layer": every_step(trace)}


def _why(reader: Reader, request: Request, on_progress: OnProgress) -> Answer:
    layer, head = _layer_and_head(request, "a weight has a layer and a head, numbered from 0.")
    rule, hint = "queries and keys are numbered from 0.", 'send "query": 1, "key": 0.'
    query, key = (as_count(name, request.get(name), rule, hint) for name in ("query", "key"))
    options = {"layer": layer, "head": head, "query": query, "key": key}
    options["against"] = request.get("against", "others")
    why = reader.why(request.get("text"), request.get("edits"), on_progress, **options)
    return {"why": why_data(why)}


def _layer_and_head(request: Request, rule: str) -> tuple[int, int]:
    """Return the layer and the head of a request."""
    hint = 'send "layer": 0, "head": 0.'
    layer, head = (as_count(name, request.get(name), rule, hint) for name in ("layer", "head"))
    return layer, head


def _span(name: str, value: object) -> range:
    rule, hint = f"{name} are [first, last], counted from 0.", "send for example [0, 63]."
    if not isinstance(value, list) or len(value) != 2:
        raise BadType(f"{name} is {str(value)[:80]!r}.", rule, hint)
    first, last = (as_count(name, x, rule, hint) for x in value)
    return range(first, last + 1)


ANSWERS = {"compute": _compute, "tile": _tile, "steps": _steps, "vectors": _vectors, "why": _why}
