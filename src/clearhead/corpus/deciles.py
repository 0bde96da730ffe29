"""Select the examples of a decile."""

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def sample_of_decile(examples: Rows, bins: Rows, decile: int, n: int) -> list[Mapping[str, Any]]:
    """Return at most n of a metric's examples in a decile, in the order of their hashes."""
    return [x for x in examples if x["stratum"] == decile][:n]
