"""A trace as JSON, for programs."""

import math

from torch import Tensor

from ...results.trace import Trace


def to_json(trace: Trace) -> dict[str, object]:
    """The whole trace as dicts, lists, strings and numbers.

    Strict JSON has no infinity, so what is not finite is a string: "inf", "-inf" or "nan".
    """
    return {
        "about": trace.about,
        "queries": _strings(trace.queries),
        "keys": _strings(trace.keys),
        "first": trace.first or {},
        "settings": {name: _jsonable(value) for name, value in (trace.settings or {}).items()},
        "steps": [
            {
                "name": step.name,
                "formula": step.formula,
                "why": step.why,
                "axes": step.axes.split(),
                "shape": list(step.shape),
                "values": _values(step.tensor),
            }
            for step in trace
        ],
    }


def _strings(tokens: tuple[str, ...] | None) -> list[str] | None:
    return None if tokens is None else list(tokens)


def _values(tensor: Tensor) -> object:
    values = tensor.detach().tolist()
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        return _jsonable(values)
    return values


def _jsonable(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else repr(value)
