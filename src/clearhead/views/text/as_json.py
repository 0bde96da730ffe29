"""Convert a trace to JSON, for programs."""

from ...core.errors import must_be
from ...core.formatting import spelled, without_nan
from ...core.functional.trace import Trace


def to_json(trace: Trace) -> dict[str, object]:
    """Return the trace as dicts, lists, strings and numbers.

    Tokens of a vocabulary also have their spelling there and their ids.

    Strict JSON has no infinity, so numbers that are not finite are strings: "inf", "-inf", "nan".
    Raises `BadType` unless `trace` is a `Trace`.
    """
    must_be("to_json", trace, Trace, "explain(...)")
    settings = {
        name: value if isinstance(value, str | int | float | None) else repr(value)
        for name, value in (trace.settings or {}).items()
    }
    steps = [
        {
            "name": step.name,
            "formula": step.formula,
            "why": step.why,
            "axes": step.axes.split(),
            "shape": step.shape,
            "values": step.tensor.detach().tolist(),
        }
        for step in trace
    ]
    document: dict[str, object] = {
        "about": trace.about,
        "queries": trace.queries,
        "keys": trace.keys,
        **{f"query_{name}": x for name, x in spelled(trace.queries or ()).items()},
        **{f"key_{name}": x for name, x in spelled(trace.keys or ()).items()},
        "first": trace.first or {},
        "settings": settings,
        "steps": steps,
    }
    return without_nan(document, str)
