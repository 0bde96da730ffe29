"""Reading a request: the entries of `stats=`, checked."""

from collections.abc import Iterable

from ..errors import BadType, BadValue, did_you_mean
from ..masks import Grid
from .group_statistics import mass, value_weighted, weighted
from .row_statistics import Effective, Entropy, Largest, LogSumExp, topk
from .statistic import Statistic
from .weight_statistics import exact_rows, pooled, received

# In the order in which errors name them.
STATISTICS: tuple[type[Statistic], ...] = (
    LogSumExp, Largest, Entropy, Effective, topk, mass, weighted, value_weighted,
    received, pooled, exact_rows
)  # fmt: skip
BY_NAME: dict[str, Statistic] = {s.name: s() for s in STATISTICS if not s.call}
EXAMPLES = {s.name: s.example for s in STATISTICS if s.call}
DEFAULT_STATISTICS = ("lse", "entropy", "max")  # of look and watch
ALL_NAMES = ", ".join(s.call or f'"{s.name}"' for s in STATISTICS)


def parse_stats(
    entries: "Iterable[str | Statistic]", grid: Grid | None = None
) -> tuple[Statistic, ...]:
    """The statistics that `stats=` asks for, checked; against the sizes too where they are known.

    >>> [s.name for s in parse_stats(["entropy", "lse"])]
    ['entropy', 'lse']
    """
    if isinstance(entries, (str, Statistic)) or not isinstance(entries, Iterable):
        raise BadType(
            f"stats is {entries!r}.",
            "stats is a list of statistics.",
            'ask for one at least, for example stats=["entropy"].'
            if entries is None
            else f"put it in a list: stats=[{entries!r}].",
        )
    found: dict[str, Statistic] = {}
    for entry in entries:
        statistic = entry if isinstance(entry, Statistic) else BY_NAME.get(str(entry))
        name = str(getattr(entry, "name", entry))
        if statistic is None:
            raise BadValue(
                f"stats asks for {entry!r}.",
                f"the statistics are {ALL_NAMES}.",
                f"call it with what it needs, for example {EXAMPLES[name]}."
                if name in EXAMPLES
                else did_you_mean(entry, [*BY_NAME, *EXAMPLES]) or "ask for one of these.",
            )
        if statistic.name in found:
            raise BadValue(
                f"stats asks for {statistic.name} twice.",
                "each statistic is an attribute of the result, under its name.",
                "ask once: topk with the larger n, mass with all groups, or exact_rows with all.",
            )
        if grid is not None:
            statistic.check(grid)
        found[statistic.name] = statistic
    return tuple(found.values())


def must_fit(statistics: Iterable[Statistic], grid: Grid) -> None:
    """Raise `BadValue` for a statistic that names more keys than one call of these sizes has."""
    for statistic in statistics:
        statistic.must_fit(grid)


def how_to_request(name: str, requested: Iterable[str]) -> str:
    """Write the hint for a missing attribute, misspelt or not requested in `stats=`."""
    misspelt = "" if name in BY_NAME or name in EXAMPLES else did_you_mean(name, requested)
    return misspelt or f"ask for it in stats=; there are {ALL_NAMES}."


def lse_alone(statistics: tuple[Statistic, ...]) -> bool:
    """Is there nothing to count but what comes with the answer?"""
    return [s.name for s in statistics] == ["lse"]
