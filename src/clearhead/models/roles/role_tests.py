"""Test roles, and compute the interval of their mass.

The tests count words instead of queries, because queries of the same word look alike in any head.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor


def chance_of_votes(rate: Tensor, words: Tensor, chance: float) -> Tensor:
    """Bound the probability that the mean of `words` independent votes is at least `rate`.

    Votes are from 0 to 1, and `chance` on average. The bound is exp(-n KL(rate || chance)), by
    Hoeffding 1963, theorem 1.

    >>> chance_of_votes(torch.tensor([1.0, 0.5]), torch.tensor([6, 6]), 0.5).tolist()
    [0.015625, 1.0]
    """
    if not 0 < chance < 1:
        return torch.ones_like(rate)
    distance = torch.xlogy(rate, rate / chance) + torch.xlogy(1 - rate, (1 - rate) / (1 - chance))
    return torch.exp(-words * distance).where(rate > chance, 1.0)


def chance_of_column(excess: Tensor, is_role: Tensor, included: Tensor) -> Tensor:
    """Compute the probability that words of a role receive this much more weight by chance, (H,).

    It is a one-sided two-sample t test over words. `excess`, (H, words), is the logarithm of the
    weight that a word receives, relative to uniform weights. `is_role`, (words,), selects the words
    of the role, and `included`, (H, words), the words of the test. The test assumes that the
    preferences of a head for words are normal.
    """
    role, others = included & is_role, included & ~is_role
    n, m = role.sum(-1), others.sum(-1)
    mean_role = _mean(excess, role)
    mean_others = _mean(excess, others)
    squares = ((excess - mean_role.unsqueeze(-1)) ** 2 * role).sum(-1)
    squares += ((excess - mean_others.unsqueeze(-1)) ** 2 * others).sum(-1)
    free = n + m - 2
    error = (squares / free.clamp(min=1) * (1 / n.clamp(min=1) + 1 / m.clamp(min=1))).sqrt()
    t = (mean_role - mean_others) / (error + 1e-9)
    tested = (n > 0) & (m > 2)
    tails = [
        t_tail(x, int(v)) if ok else 1.0
        for x, v, ok in zip(t.tolist(), free.tolist(), tested.tolist(), strict=True)
    ]
    return torch.tensor(tails)


def _mean(x: Tensor, chosen: Tensor) -> Tensor:
    return (x * chosen).sum(-1) / chosen.sum(-1).clamp(min=1)


def interval(mass: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of a mass over queries, and half the width of its 95 % interval, (H,) each.

    `mass` is (H, n), and `words`, (n,), numbers the word of each query. Queries of a word are one
    cluster: the variance is the sum of squares of the clusters' summed deviations, divided by n²
    (Liang and Zeger 1986), times K / (K - 1) for K words, with Student's t of K - 1.
    """
    mean = mass.mean(-1)
    count = int(words.max()) + 1
    sums = torch.zeros(len(mass), count).index_add_(1, words, mass - mean.unsqueeze(-1))
    present = len(words.unique())
    if present < 2:
        return mean, torch.ones_like(mean)
    deviation = (sums**2).sum(-1).sqrt() / len(words) * math.sqrt(present / (present - 1))
    return mean, deviation * t_quantile(present - 1)


def t_tail(t: float, free: int) -> float:
    """Compute the probability that Student's t with `free` degrees of freedom exceeds `t`.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4; above 5, where 1 minus these sums would
    cancel, the series 26.5.4.

    >>> round(t_tail(2.228, 10), 4), round(t_tail(-1.0, 1), 4)
    (0.025, 0.75)
    """
    if math.isnan(t):
        return 1.0
    t = max(-1e12, min(1e12, t))
    if t > 5:
        return _far_tail(t, free)
    angle = math.atan(t / math.sqrt(free))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = free % 2
    term, total = (cosine, cosine if free > 1 else 0.0) if odd else (1.0, 1.0)
    for k in range(3 if odd else 2, free, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 - inside) / 2


def _far_tail(t: float, free: int) -> float:
    a, b, x = free / 2, 0.5, free / (free + t * t)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    first = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a
    term = total = 1.0
    k = 0
    while term > 1e-16 * total:
        term *= x * (a + b + k) / (a + 1 + k)
        total += term
        k += 1
    return first * total / 2


@lru_cache(maxsize=1024)
def t_quantile(free: int) -> float:
    """Find the t that is exceeded with probability 0.025.

    >>> round(t_quantile(10), 3)
    2.228
    """
    low, high = 0.0, 13.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, free) > 0.025 else (low, middle)
    return high
