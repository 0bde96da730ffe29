"""A trace as JSON, for programs."""

from ...formatting import without_nan
from ...trace import Trace


def to_json(trace: Trace) -> dict[str, object]:
    """The trace as dicts, lists, strings and numbers.

    Strict JSON has no infinity, so what is not finite is a string: "inf", "-inf" or "nan".
    """
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
        "first": trace.first or {},
        "settings": settings,
        "steps": steps,
    }
    return without_nan(document, str)
