"""Read and check the entries of `stats=`."""

from collections.abc import Iterable

from ..errors import BadType, BadValue, did_you_mean, is_iterable
from ..masks import Grid
from .group_statistics import mass, value_weighted, weighted
from .row_statistics import Effective, Entropy, Largest, LogSumExp, Varying, topk
from .statistic import Statistic, Statistics
from .weight_statistics import drop_error, exact_rows, pooled, received

# In the order in which errors list them.
STATISTICS: tuple[type[Statistic], ...] = (
    LogSumExp, Largest, Entropy, Effective, topk, mass, weighted, value_weighted,
    received, drop_error, pooled, exact_rows, Varying
)  # fmt: skip
BY_NAME: dict[str, Statistic] = {s.name: s() for s in STATISTICS if not s.call}
EXAMPLES = {s.name: s.example for s in STATISTICS if s.call}
PER_QUERY = {s.name: s.axis == "queries" for s in STATISTICS}
DEFAULT_STATISTICS = ("lse", "entropy", "max")  # of look and watch
ALL_NAMES = ", ".join(s.call or f'"{s.name}"' for s in STATISTICS)


def parse_stats(entries: "Iterable[str | Statistic]", grid: Grid | None = None) -> Statistics:
    """Return the requested statistics, checked, also against the sizes if these are known.

    Raises `BadType` unless they are a list, `BadValue` for an unknown name, for one statistic
    twice, and for one that does not fit the sizes.

    >>> [s.name for s in parse_stats(["entropy", "lse"])]
    ['entropy', 'lse']
    """
    listed = type(entries) in (list, tuple)  # the test of an abstract class takes longer
    if not listed and (isinstance(entries, (str, Statistic)) or not is_iterable(entries)):
        hint = f"put it in a list: stats=[{entries!r}]."
        if entries is None:
            hint = 'request at least one, for example stats=["entropy"].'
        raise BadType(f"stats is {entries!r}.", "stats is a list of statistics.", hint)
    by_name: dict[str, Statistic] = {}
    for entry in entries:
        statistic = BY_NAME.get(entry) if type(entry) is str else _statistic(entry)
        if statistic is None:
            name = str(getattr(entry, "name", entry))
            hint = did_you_mean(entry, [*BY_NAME, *EXAMPLES]) or "request one of these."
            if name in EXAMPLES:
                hint = f"call it with its arguments, for example {EXAMPLES[name]}."
            raise BadValue(f"stats contains {entry!r}.", f"the statistics are {ALL_NAMES}.", hint)
        if statistic.name in by_name:
            rule = "each statistic is an attribute of the result, under its name."
            hint = "request it once, with the larger n, all groups or all queries."
            raise BadValue(f"stats contains {statistic.name} twice.", rule, hint)
        if grid is not None:
            statistic.check(grid)
        by_name[statistic.name] = statistic
    return tuple(by_name.values())


def _statistic(entry: object) -> Statistic | None:
    return entry if isinstance(entry, Statistic) else BY_NAME.get(str(entry))


def must_fit(statistics: Iterable[Statistic], grid: Grid) -> None:
    """Raise `BadValue` for a statistic that names more keys than a call of these sizes has."""
    for statistic in statistics:
        statistic.must_fit(grid)


def how_to_request(name: str, requested: Iterable[str]) -> str:
    """Write the hint for a missing attribute, misspelt or not requested in `stats=`."""
    misspelt = "" if name in BY_NAME or name in EXAMPLES else did_you_mean(name, requested)
    return misspelt or f"request it in stats=; there are {ALL_NAMES}."


def is_per_query(name: str) -> bool:
    """Has the statistic of this name, perhaps of one's own, numbers for each query?"""
    return PER_QUERY.get(name, True)


def lse_alone(statistics: Statistics) -> bool:
    """Is lse the only statistic? Engines compute it together with the output."""
    return len(statistics) == 1 and statistics[0].name == "lse"
