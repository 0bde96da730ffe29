"""Merge the statistics that several metrics request of one batch, and distribute the results.

A group of keys that several metrics read is computed once.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ..core.errors import BadValue
from ..core.masks import Mask
from ..core.stats import Result, Statistic, TopWeights, parse_stats, topk
from ..core.stats.group_statistics import GroupStatistic
from .metric import Batch, Metric


class Requests:
    """What all metrics request of a batch: `statistics`. `results_of` has the part of one."""

    def __init__(self, metrics: Sequence[Metric], batch: Batch) -> None:
        self._merged: dict[str, Statistic] = {}
        self._groups: dict[str, dict[str, Mask]] = {}  # of each statistic over groups
        self._own: dict[str, dict[str, Any]] = {}  # of each metric: its statistics by name
        for metric in metrics:
            own = parse_stats(metric.statistics(batch))
            self._own[metric.name] = {s.name: self._add(metric, s) for s in own}
        self.statistics = tuple(
            replace(s, groups=self._groups[name])  # type: ignore[type-var]
            if isinstance(s, GroupStatistic)
            else s
            for name, s in self._merged.items()
        )

    def _add(self, metric: Metric, statistic: Statistic) -> Any:
        """Add a statistic; return what selects its part: names of groups, or a number of keys."""
        name = statistic.name
        earlier = self._merged.setdefault(name, statistic)
        merges = isinstance(statistic, (GroupStatistic, topk)) or statistic == earlier
        if not merges or statistic.factors != earlier.factors:
            gave = f"{metric.name} requests {name} with other arguments than an earlier metric."
            rule = "metrics of one survey share the statistics of a call."
            hint = f"request the same {name}, or survey the two metrics separately."
            raise BadValue(gave, rule, hint)
        if isinstance(statistic, GroupStatistic):
            groups = self._groups.setdefault(name, {})
            return {own: _name_of(groups, mask) for own, mask in statistic.groups.items()}
        if not isinstance(statistic, topk):
            return None
        self._merged[name] = max(earlier, statistic, key=attrgetter("n"))
        return statistic.n

    def count_of(self, metric: Metric) -> int:
        """Return how many statistics a metric requested."""
        return len(self._own[metric.name])

    def results_of(self, metric: Metric, results: dict[str, Result]) -> dict[str, Result]:
        """Return the results of a metric's statistics. Those that were not computed are absent."""
        return {
            name: _part(results[name], chosen)
            for name, chosen in self._own[metric.name].items()
            if name in results
        }


def _name_of(groups: dict[str, Mask], mask: Any) -> str:
    """Return the name of a mask in `groups`, and add it if it is new."""
    known = next((name for name, other in groups.items() if other is mask), None)
    if known is None:
        groups[known := str(len(groups))] = mask
    return known


def _part(result: Result, chosen: Any) -> Result:
    if isinstance(result, dict):
        return {own: result[name] for own, name in chosen.items()}
    if isinstance(result, TopWeights):
        few = chosen < result.keys.shape[-1]
        return TopWeights(*(x[..., :chosen] for x in result)) if few else result
    return result
