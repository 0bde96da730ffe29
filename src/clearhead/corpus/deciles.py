"""Select the examples of a decile, by the histogram of all queries of a head."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from .examples import LARGEST

Rows = Sequence[Mapping[str, Any]]


def decile_range(bins: Rows, decile: int) -> tuple[float, float]:
    """Return the values of a decile of a histogram, to its bins.

    Its first and last bin have the values beyond them too.
    """
    total = sum(row["count"] for row in bins)
    before, inside = 0, []
    for row in bins:
        after = before + row["count"]
        if after > total * decile / 10 and before < total * (decile + 1) / 10:
            inside.append(row)
        before = after
    return (
        -math.inf if inside[0] is bins[0] else inside[0]["low"],
        math.inf if inside[-1] is bins[-1] else inside[-1]["high"],
    )


def sample_of_decile(examples: Rows, bins: Rows, decile: int, n: int) -> list[Mapping[str, Any]]:
    """Return at most n of a metric's examples in a decile, those with the smallest hashes."""
    if not examples:
        return []
    low, high = decile_range(bins, decile)
    inside = [x for x in examples if x["stratum"] < LARGEST and low <= x["value"] <= high]
    return sorted(inside, key=itemgetter("hash"))[:n]
