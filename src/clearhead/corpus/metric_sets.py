"""The sets of metrics by name, and how a user's own are chosen."""

import importlib
from collections.abc import Callable, Iterable

from ..core.errors import BadType, BadValue, did_you_mean, is_iterable
from .basic import basic, distance
from .cache_bits import caches
from .grid import grid
from .long import long
from .metric import Metric
from .reader import Reader
from .reasons import reasons
from .written import attribution, values

# Each returns the metrics for a model and the longest context.
SETS: dict[str, Callable[[Reader, int], list[Metric]]] = {
    "basic": lambda reader, context: basic(context),
    "distance": lambda reader, context: distance(context),
    "values": values,
    "long": long,
    "attribution": attribution,
    "reasons": reasons,
    "caches": caches,
    "grid": grid,
}


def entries_of(requested: "str | Metric | Iterable[str | Metric]") -> "list[str | Metric]":
    """Return the entries of `metrics`, each one name or object.

    An entry is the name of a set, a `Metric`, or ``"module:name"`` for one that a module defines.
    Several names may be in one string, with commas. Raises `BadType` for anything else.
    """
    entries = [requested] if isinstance(requested, (str, Metric)) else requested
    if not is_iterable(entries):
        raise _not_metrics(requested)
    result: list[str | Metric] = []
    for entry in entries:
        result += [x.strip() for x in entry.split(",")] if isinstance(entry, str) else [entry]
    if not result:
        raise _not_metrics(requested)
    return result


def chosen_metrics(entries: "Iterable[str | Metric]", reader: Reader, context: int) -> list[Metric]:
    """Return the metrics of the entries. A metric that two sets share is there once.

    Raises `BadType` and `BadValue` for anything else, and for two metrics with one name.
    """
    metrics: dict[str, Metric] = {}
    of_sets: set[str] = set()
    for name in entries:
        for metric in _metrics_of(name, reader, context):
            if name in SETS and metric.name in of_sets:
                continue
            if not metric.name or metric.name in metrics:
                two = f"Two metrics have the name {metric.name!r}."
                gave = two if metric.name else f"The metric {type(metric).__name__} has no name."
                rule = "the name of a metric identifies its rows in the tables."
                raise BadValue(gave, rule, "set its attribute `name`.")
            metrics[metric.name] = metric
            if name in SETS:
                of_sets.add(metric.name)
    return list(metrics.values())


def _metrics_of(entry: object, reader: Reader, context: int) -> list[Metric]:
    if isinstance(entry, Metric):
        return [entry]
    if not isinstance(entry, str):
        raise _not_metrics(entry)
    if entry in SETS:
        if (entry == "grid") != (reader.pictures is not None):
            read = "texts" if reader.pictures is None else "pictures"
            gave = f"metrics has {entry!r}, and {reader.name} reads {read}."
            rule = "'grid' is of patches, which have no previous token, no copies, no next token."
            raise BadValue(gave, rule, "leave out metrics, for the default.")
        return SETS[entry](reader, context)
    module, colon, attribute = entry.partition(":")
    if not colon:
        rule = f"the sets of metrics are {', '.join(SETS)}."
        hint = did_you_mean(entry, SETS) or "for a metric of your own, pass module:name."
        raise BadValue(f"metrics has {entry!r}.", rule, hint)
    try:
        own = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        rule = "module:name is a metric, or a class of metrics, that a module defines."
        hint = "check the name, and that Python finds the module."
        raise BadValue(f"The metric {entry!r} cannot be imported: {error}.", rule, hint) from error
    return _metrics_of(own() if isinstance(own, type) else own, reader, context)


def _not_metrics(value: object) -> BadType:
    rule = f"metrics are sets ({', '.join(SETS)}) and objects of clearhead.corpus.Metric."
    hint = 'pass for example metrics="basic", or metrics=["basic", MyMetric()].'
    return BadType(f"metrics is {value!r}.", rule, hint)
