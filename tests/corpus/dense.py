"""The metrics of `basic` from matrices of weights, in float64: the oracle of the survey.

Every metric is a sum over explicit pairs of positions. Nothing of clearhead is used.
"""

import math

import pytest
import torch
from scipy import optimize, stats

PUNCTUATION = {".", ",", ";", "!"}
NEAR = 16


def contexts_of(ids: list[int], size: int, around: tuple[list[int], list[int]]):
    """Cut the ids of a text into contexts, as the manual describes."""
    before, after = around
    body = size - len(before) - len(after)
    return [[*before, *ids[i : i + body], *after] for i in range(0, len(ids), body)]


def groups(ids: list[int], words: list[str], causal: bool, context: int):
    """The keys of each mass metric, (T, T) booleans, as [query, key]."""
    T = len(ids)
    q, k = torch.arange(T)[:, None], torch.arange(T)[None]
    x = torch.tensor(ids)
    same = x[:, None] == x[None]
    after_same = torch.zeros(T, T, dtype=torch.bool)
    after_same[:, 1:] = same[:, :-1]
    punctuation = torch.tensor([w in PUNCTUATION for w in words])
    result = {
        "first": (k == 0).expand(T, T),
        "self": q == k,
        "previous": k == q - 1,
        "next": k == q + 1,
        "separators": (punctuation & (k[0] > 0)).expand(T, T),
        "duplicate": same & (k >= 1) & (k <= q - 2),
        "induction": after_same & (k >= 1) & (k <= q - 2),
        "ahead": k > q,
    }
    for n in (4, 16, 64, 256):
        if n < context:
            result[f"last_{n}"] = (q - k >= 0) & (q - k < n)
    low = 2
    while low < context:
        high = min(2 * low, context)
        result[f"distance_{low}_{high - 1}"] = (q - k >= low) & (q - k < high)
        low = high
    return result


def kind(q: int, k: int, ids: list[int], words: list[str]) -> str:
    """The kind of the key with the largest weight."""
    if k == 0:
        return "first"
    if k == q:
        return "self"
    if k == q - 1:
        return "previous"
    if k < q and ids[k - 1] == ids[q]:
        return "induction"
    if k < q and ids[k] == ids[q]:
        return "duplicate"
    if words[k] in PUNCTUATION:
        return "separator"
    if k > q:
        return "ahead"
    return "near" if q - k <= NEAR else "far"


KINDS = ("first self previous induction duplicate separator near far ahead").split()


def values_of(weights: torch.Tensor, ids: list[int], words: list[str], causal: bool, context: int):
    """For each metric: the numbers of a context, (H, T), the same for uniform weights, (T,), and
    the queries that count, (T,). `weights` is (H, T, T)."""
    H, T, _ = weights.shape
    allowed = torch.ones(T, T, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    n = allowed.sum(-1)
    uniform = (allowed / n[:, None]).double()
    chooses = n > 1
    values = {}

    def entropy(w):
        return -torch.where(w > 0, w * w.clamp(min=1e-300).log(), 0.0).sum(-1)

    for name, compute in {
        "entropy": entropy,
        "evenness": lambda w: entropy(w) / n.clamp(min=2).double().log(),
        "support": lambda w: entropy(w).exp(),
        "largest": lambda w: w.amax(-1),
    }.items():
        values[name] = compute(weights), compute(uniform), chooses
    for name, keys in groups(ids, words, causal, context).items():
        inside = (keys & allowed).sum(-1)
        counts = (inside > 0) & (inside < n)
        values[name] = (weights * keys).sum(-1), (uniform * keys).sum(-1), counts
    best = weights.argmax(-1)
    top = weights.topk(2, -1).values if T > 1 else weights
    values["tied"] = (top[..., -1] > top[..., 0] * (1 - 1e-4)).double(), None, chooses
    for name in KINDS:
        fits = [[kind(q, int(best[h, q]), ids, words) == name for q in range(T)] for h in range(H)]
        values[f"looks_{name}"] = torch.tensor(fits).double(), None, chooses
    return values


def interval(sums: list[float], counts: list[int]):
    """Mean, its standard error, mean of texts and their standard deviation."""
    pairs = [(s, n) for s, n in zip(sums, counts, strict=True) if n]
    total, queries, K = sum(s for s, _ in pairs), sum(n for _, n in pairs), len(pairs)
    mean = total / queries
    squares = sum(((s - mean * n) / (1 - n / queries)) ** 2 for s, n in pairs)
    of_texts = [s / n for s, n in pairs]
    average = sum(of_texts) / K
    return {
        "mean": mean,
        "error": math.sqrt(squares) / queries,
        "mean_of_texts": average,
        "sd_of_texts": math.sqrt(sum((m - average) ** 2 for m in of_texts) / (K - 1)),
        "queries": queries,
        "texts": K,
    }


def ends_of(wanted: dict, least: float | None, most: float | None) -> tuple[float, float]:
    """The 95 % interval of a mean in limits: the least and the largest mean that is not rejected,
    if a variance shrinks toward a limit as that of a fraction does."""
    mean, t = wanted["mean"], float(stats.t.ppf(0.975, wanted["texts"] - 1))

    def shape(x):
        return (1.0 if least is None else x - least) * (1.0 if most is None else most - x)

    def excess(x):
        return (x - mean) ** 2 - (t * wanted["error"]) ** 2 * shape(x) / shape(mean)

    far = 1e3 * t * wanted["error"]
    lowest, highest = mean - far if least is None else least, mean + far if most is None else most
    if not lowest < mean < highest:
        return mean, mean
    return optimize.brentq(excess, lowest, mean), optimize.brentq(excess, mean, highest)


def add_numbers(rows: dict, layer: int, text: int, numbers: dict):
    """Add the numbers of a context, (H, T), at the queries that count, (T,), to `rows`: by layer,
    head and metric, the numbers of all queries, and the text of each."""
    for metric, (values, counts) in numbers.items():
        for head, of_head in enumerate(values):
            row = rows.setdefault((layer, head, metric), [[], []])
            row[0].append(of_head[counts])
            row[1] += [text] * int(counts.sum())


def interval_of(numbers: torch.Tensor, of_text: list[int], texts: int):
    """`interval` of numbers of queries, which belong to the texts `of_text`."""
    sums = torch.zeros(texts).double().index_add_(0, torch.tensor(of_text), numbers)
    return interval(sums.tolist(), torch.tensor(of_text).bincount(minlength=texts).tolist())


def assert_row(row: dict, wanted: dict, least: float | None = None, most: float | None = None):
    for column in ("queries", "texts", "mean", "mean_of_texts", "sd_of_texts"):
        assert row[column] == pytest.approx(wanted[column], rel=5e-5, abs=5e-6), (row, column)
    ends = ends_of(wanted, least, most)
    assert (row["low"], row["high"]) == pytest.approx(ends, rel=1e-3, abs=2e-5), row
