"""Count the tokens that a head connects: of queries, and of the keys of their largest weights.

A link is a query whose largest weight is neither on key 0 nor on itself, so a head that rests on
the first token has few. Counts are exact, and merge by addition.
"""

import numpy as np
from torch import Tensor

from .groups import Pile, first_of_groups
from .metric import Batch

LINK = np.dtype([("layer", "i2"), ("head", "i2"), ("side", "i1"), ("token", "i4"), ("count", "i8")])
QUERY, KEY = 0, 1  # sides


def merged(counts: np.ndarray) -> np.ndarray:
    """Add the counts of equal entries, in the order of layer, head, side and token."""
    names = "token", "side", "head", "layer"
    counts = counts[np.lexsort([counts[name] for name in names])]
    first = first_of_groups(counts, names)
    result = counts[first]
    result["count"] = np.add.reduceat(counts["count"], np.flatnonzero(first))
    return result


class Links:
    """The links of all heads, collected batch by batch; and how often each token is a query."""

    def __init__(self) -> None:
        self._pile = Pile(merged, np.zeros(0, LINK))

    def add(self, layer: int, keys: Tensor, chooses: Tensor, batch: Batch) -> None:
        """Add the queries that have a choice, (B, T); `keys` has those of their largest weights,
        (B, H, T)."""
        ids = batch.ids.numpy()
        key = keys.numpy()
        T = ids.shape[1]
        linked = chooses.numpy()[:, None] & (key > 0) & (key != np.arange(T))
        b, h, t = np.nonzero(linked)
        for side, tokens in ((QUERY, ids[b, t]), (KEY, ids[b, key[b, h, t]])):
            known, count = np.unique(h * 2**32 + tokens, return_counts=True)
            part = np.zeros(len(known), LINK)
            part["layer"], part["side"] = layer, side
            part["head"], part["token"], part["count"] = known >> 32, known & 0xFFFFFFFF, count
            self._pile.add(part)

    def count(self, chooses: Tensor, batch: Batch) -> None:
        """Count the tokens of the queries that have a choice, (B, T)."""
        known, count = np.unique(batch.ids[chooses].numpy(), return_counts=True)
        part = np.zeros(len(known), LINK)
        part["token"], part["count"] = known, count
        self._pile.add(part)

    def result(self) -> np.ndarray:
        """Return the counts so far."""
        return self._pile.result()
