"""What heads do by the class of a query's token, and which heads do more than one thing.

A mix has the fraction of a class's queries whose largest weight is on each kind of key. A class
shows a behaviour if the fraction of keys that have this behaviour and no other (`alone`)
exceeds `LEAST`, and `TIMES_CHANCE` times the chance: a one-sided t test over texts. A token before
that is also punctuation shows neither behaviour; otherwise a head that looks at punctuation would
seem to do two things.

A head does more than one thing if it shows two behaviours, over all queries or in classes:

- The p-value of a behaviour is 2 min(p over all queries, C times the least p of C classes).
- "self" and "previous" are one behaviour, a local window: its p-value is twice the lesser. A local
  head has its largest weight on the query or on the token before it.
- That of a head is V - 2 times the second smallest of these V - 1. It tests that at most one is
  real (Benjamini and Heller 2008, Biometrics 64, for a partial conjunction).
- q corrects for the number of heads (`inference`).

Its classes differ if one of two classes shows a behaviour, the other another one, and each more
often than the other class; here "self" and "previous" are two. All four tests must hold, so the
p-value of two classes and behaviours is the largest; that of a head is the smallest of these, times
their number.

Letters: N heads of all layers, C classes and then all queries, K kinds, V behaviours.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from ..models.roles.role_tests import t_tail
from .basic import KINDS
from .inference import MOST_FREE, adjusted, interval
from .looks import BEHAVIOURS, CLASSES, NUMBERS

LEAST, TIMES_CHANCE = 0.1, 2.0
ALL = "all"
CLASS_NAMES = [*CLASSES, ALL]
LOCAL = [list(BEHAVIOURS).index(kind) for kind in ("self", "previous")]
LARGEST_P = 0.05  # a test with a larger p-value has 1, as it cannot be evidence


class Shares(NamedTuple):
    """Sums and fractions of all heads.

    Attributes:
        queries, texts: numbers of queries and of texts with one, (N, C + 1).
        share: of each kind, (N, C + 1, K); NaN without a query. `variance` is that of its mean,
            from the means without each text (as `fold.Moments.variance`).
        alone: of keys with one behaviour, (N, C + 1, V).
        covariance: of `alone` between classes, (N, V, C + 1, C + 1).
        chance: of a uniform choice among the keys of a query, (N, C + 1, V).
    """

    queries: np.ndarray
    texts: np.ndarray
    share: np.ndarray
    variance: np.ndarray
    alone: np.ndarray
    covariance: np.ndarray
    chance: np.ndarray


def apart_of(looks: Iterable[np.ndarray], total: np.ndarray) -> list[np.ndarray]:
    """Sum over texts, from the counts of each text, (N, *looks.SHAPE), and those of all texts.

    Returns `texts`, `variance` and `covariance` of `Shares`, of these texts: they add up.
    """
    queries, on_kind, alone, share, of_alone = _fractions(total)
    variance, texts = np.zeros(share.shape), np.zeros(queries.shape, dtype=np.int64)
    covariance = np.zeros((len(total), len(BEHAVIOURS), len(CLASS_NAMES), len(CLASS_NAMES)))
    for counts in map(_with_all, looks):
        own = counts.sum((-1, -2))
        texts += own > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            left = (queries - own)[..., None]
            without = (on_kind - counts.sum(-1)) / left - share
            apart = (alone - counts[:, :, NUMBERS, 0]) / left - of_alone
        variance += without**2
        apart = apart.transpose(0, 2, 1)
        covariance += apart[..., :, None] * apart[..., None, :]
    return [texts, variance, covariance]


def shares_of(apart: Sequence[np.ndarray], total: np.ndarray, chances: np.ndarray) -> Shares:
    """Compute the fractions from `apart_of` all texts, and their total counts.

    `chances` are the sums of uniform weights over the queries of all texts, (N, C, V).
    """
    queries, _, _, share, of_alone = _fractions(total)
    with np.errstate(divide="ignore", invalid="ignore"):
        every = np.concatenate([chances, chances.sum(1, keepdims=True)], 1) / queries[..., None]
    texts, variance, covariance = apart
    return Shares(queries, texts, share, variance, of_alone, covariance, every)


def _fractions(total: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return numbers of queries, those on each kind and alone, and the fractions of both."""
    total = _with_all(total)
    queries = total.sum((-1, -2))
    on_kind, alone = total.sum(-1), total[:, :, NUMBERS, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        return queries, on_kind, alone, *(x / queries[..., None] for x in (on_kind, alone))


def _with_all(counts: np.ndarray) -> np.ndarray:
    """Add all queries as a last class."""
    return np.concatenate([counts, counts.sum(1, keepdims=True)], 1).astype(np.int64)


class HeadTest(NamedTuple):
    """The tests of one head; NaN without two texts.

    Attributes:
        p: that it does more than one thing.
        surest: the two behaviours with the smallest p-values, and their classes, which are all
            queries if these suffice; () if it has none.
        p_differ: that its classes differ.
        differ: two classes with their behaviours, the surest; () if they do not differ.
    """

    p: float
    surest: tuple[tuple[str, str], ...]
    p_differ: float
    differ: tuple[tuple[str, str], ...]


def p_of_behaviours(shares: Shares) -> np.ndarray:
    """Return the p-value that a class shows a behaviour, (N, C + 1, V).

    It is 1 if above `LARGEST_P`, and NaN without two texts or without the chance.
    """
    variance = np.einsum("nvcc->ncv", shares.covariance)
    bar = np.maximum(LEAST, TIMES_CHANCE * shares.chance)
    t = (shares.alone - bar) / np.sqrt(np.maximum(variance, _least_variance(shares)))
    free = np.minimum(shares.texts - 1, MOST_FREE)
    p = np.full(t.shape, np.nan)
    for n, c, v in np.argwhere((free >= 1)[..., None] & np.isfinite(t)).tolist():
        p[n, c, v] = _p_value(t[n, c, v], free[n, c])
    return p


def tests_of(shares: Shares, p: np.ndarray) -> list[HeadTest]:
    """Test all heads. `p` are the p-values of behaviours."""
    return [_test_of(shares, of_head, n) for n, of_head in enumerate(p)]


def _test_of(shares: Shares, p: np.ndarray, n: int) -> HeadTest:
    tested = ~np.isnan(p)
    if not tested[-1].any():
        return HeadTest(math.nan, (), math.nan, ())
    C, V = int(tested[:-1].any(-1).sum()), len(BEHAVIOURS)
    weighted = 2 * np.where(tested, p, 1.0)
    weighted[:-1] *= C
    best = weighted.min(0)
    local, other = sorted(LOCAL, key=lambda v: best[v])
    best[local], best[other] = 2 * best[local], np.inf
    order = np.argsort(best, kind="stable")[:2]
    value = min(1.0, (V - 2) * float(best[order[1]]))
    # all queries, if these suffice
    classes = [-1 if weighted[-1, v] <= LARGEST_P else int(weighted[:, v].argmin()) for v in order]
    surest = list(zip(classes, order.tolist(), strict=True))
    p_differ, differ = 1.0, surest[:0]
    for (c, v), (other, w) in permutations(np.argwhere(p[:-1] < 1).tolist(), 2):
        if c < other and v != w:
            pieces = p[c, v], p[other, w], _p_more(shares, n, v, c, other)
            largest = max(*pieces, _p_more(shares, n, w, other, c))
            if largest < p_differ:
                p_differ, differ = float(largest), [(c, v), (other, w)]
    p_differ = min(1.0, p_differ * math.comb(C, 2) * V * (V - 1))
    return HeadTest(
        value, _named(surest) if value < 1 else (), p_differ, _named(differ) if p_differ < 1 else ()
    )


def _named(pair: Iterable[tuple[int, int]]) -> tuple[tuple[str, str], ...]:
    names = list(BEHAVIOURS)
    return tuple((CLASS_NAMES[c], names[v]) for c, v in pair)


def _p_more(shares: Shares, n: int, v: int, c: int, other: int) -> float:
    """Return the p-value that a behaviour is more frequent in class c than in another one."""
    of = shares.covariance[n, v]
    least = _least_variance(shares)[n, :, v]
    variance = max(of[c, c] + of[other, other] - 2 * of[c, other], least[c] + least[other])
    free = min(shares.texts[n, c], shares.texts[n, other], MOST_FREE + 1) - 1
    return _p_value((shares.alone[n, c, v] - shares.alone[n, other, v]) / math.sqrt(variance), free)


def _p_value(t: float, free: int) -> float:
    p = t_tail(float(t), int(free)) if t > 0 else 1.0
    return p if p <= LARGEST_P else 1.0


def _least_variance(shares: Shares) -> np.ndarray:
    """Return the variance that `alone` has if all queries are independent, (N, C + 1, V).

    It is that of a fraction with one more success and one more failure: few queries that agree
    prove nothing.
    """
    queries = shares.queries[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        fraction = (shares.alone * queries + 1) / (queries + 2)
        return fraction * (1 - fraction) / queries


def columns_of(heads: Sequence[tuple[int, int]], shares: Shares, p: np.ndarray) -> dict[str, Any]:
    """Return the columns of the table `mixes`; `heads` has layer and head of each."""
    n, c, k = at = np.nonzero(np.broadcast_to(shares.queries[..., None] > 0, shares.share.shape))
    texts, share, variance = shares.texts[n, c], shares.share[at], shares.variance[at]
    ends = np.full((len(n), 2), np.nan)
    for i in np.flatnonzero(texts > 1):
        ends[i] = interval(float(share[i]), float(variance[i]), int(texts[i]), (0.0, 1.0))
    of_behaviour = np.full((3, *shares.share.shape), np.nan)
    of_behaviour[..., NUMBERS] = shares.alone, shares.chance, p
    alone, chance, of_p = of_behaviour[:, n, c, k]
    layer, head = np.array(heads)[n].T
    return {
        "layer": layer, "head": head, "token_class": np.array(CLASS_NAMES)[c],
        "kind": np.array([*KINDS])[k], "share": share, "low": ends[:, 0], "high": ends[:, 1],
        "alone": alone, "chance": chance, "p": of_p, "queries": shares.queries[n, c],
        "texts": texts,
    }  # fmt: skip


def roles_rows(heads: Sequence[tuple[int, int]], tests: Sequence[HeadTest]) -> list[dict[str, Any]]:
    """Return the rows of the table `roles`, one for each head."""
    corrected = adjusted([test.p for test in tests]), adjusted([test.p_differ for test in tests])
    rows = []
    for (layer, head), test, q, q_differ in zip(heads, tests, *corrected, strict=True):
        row: dict[str, Any] = {"layer": layer, "head": head, "p": test.p, "q": q}
        row |= {"p_differ": test.p_differ, "q_differ": q_differ}
        for name, pair in (("", test.surest), ("differ_", test.differ)):
            (token_class, kind), (other_class, other_kind) = pair or ((None, None), (None, None))
            row |= {
                f"{name}class": token_class, f"{name}kind": kind,
                f"{name}other_class": other_class, f"{name}other_kind": other_kind,
            }  # fmt: skip
        rows.append(row)
    return rows
