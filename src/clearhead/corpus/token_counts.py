"""Count the tokens that a head connects: of queries, and of the keys of their largest weights.

A link is a query whose largest weight is neither on key 0 nor on itself, so a head that attends to
the first token most has few. Counts are exact, and merge by addition.
"""

import numpy as np
from torch import Tensor

from .groups import first_of_groups
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


def links_of(layer: int, keys: Tensor, chooses: Tensor, batch: Batch) -> np.ndarray:
    """Return the links of the queries that have a choice, (B, T); `keys` has those of their
    largest weights, (B, H, T)."""
    ids, key = batch.ids.numpy(), keys.numpy()
    b, h, t = np.nonzero(chooses.numpy()[:, None] & (key > 0) & (key != np.arange(ids.shape[1])))
    parts = []
    for side, tokens in ((QUERY, ids[b, t]), (KEY, ids[b, key[b, h, t]])):
        known, count = np.unique(h * 2**32 + tokens, return_counts=True)
        part = np.zeros(len(known), LINK)
        part["layer"], part["side"] = layer, side
        part["head"], part["token"], part["count"] = known >> 32, known & 0xFFFFFFFF, count
        parts.append(part)
    return np.concatenate(parts)


def tokens_of(chooses: Tensor, batch: Batch) -> np.ndarray:
    """Count the tokens of the queries that have a choice, (B, T)."""
    known, count = np.unique(batch.ids[chooses].numpy(), return_counts=True)
    part = np.zeros(len(known), LINK)
    part["token"], part["count"] = known, count
    return part
