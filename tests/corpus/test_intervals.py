"""The interval of a mean: its equation, its limits, and how often it contains the true mean."""

import numpy as np
import pytest
from scipy import stats

from clearhead.corpus.inference import interval, score_interval


def test_fractions_have_the_interval_of_wilson():
    for k, n in ((1, 8), (7, 40), (39, 40)):
        wilson = stats.binomtest(k, n).proportion_ci(method="wilson")
        variance, t = k / n * (1 - k / n) / n, stats.norm.ppf(0.975)
        assert score_interval(k / n, variance, t, (0.0, 1.0)) == pytest.approx([*wilson])
        scaled = score_interval(3 + 5 * k / n, 25 * variance, t, (3.0, 8.0))
        assert scaled == pytest.approx([3 + 5 * end for end in wilson])


def test_no_interval_exceeds_its_limits():
    drawn = np.random.default_rng(1)
    for mean, variance in zip(drawn.random(200), 10.0 ** drawn.uniform(-9, 6, 200), strict=True):
        low, high = score_interval(mean, variance, 2.0, (0.0, 1.0))
        assert 0 <= low <= mean <= high <= 1
        low, high = score_interval(mean, variance, 2.0, (0.0, None))
        assert 0 <= low < mean < high
        assert (low - mean) ** 2 == pytest.approx(4 * variance * low / mean, rel=1e-4, abs=1e-9)
        assert (high - mean) ** 2 == pytest.approx(4 * variance * high / mean)
        ends = mean - 2 * variance**0.5, mean + 2 * variance**0.5
        assert score_interval(mean, variance, 2.0, (None, None)) == pytest.approx(ends)
    for mean in (0.0, 1.0, -1e-9, 1 + 1e-7):  # at a limit, within rounding
        assert score_interval(mean, 1e-20, 2.0, (0.0, 1.0)) == (mean, mean)
    assert score_interval(0.3, 0.0, 2.0, (0.0, 1.0)) == (0.3, 0.3)


# Means of texts: a distribution with the mean of the first number.
FRACTIONS = {mean: stats.beta(19 * mean, 19 * (1 - mean)) for mean in (0.02, 0.1, 0.5)}
ERRORS = {0.1: stats.lognorm(0.7, scale=0.1 * np.exp(-(0.7**2) / 2))}


def coverage(of_texts, mean, texts, limits, repeats=1000):
    """How often the interval has the true mean, for texts of lengths that vary sixfold."""
    drawn = np.random.default_rng(texts)
    lengths = np.exp(drawn.normal(5, 0.8, (repeats, texts))).round() + 1
    sums = lengths * of_texts.rvs((repeats, texts), random_state=drawn)
    total, queries = sums.sum(1, keepdims=True), lengths.sum(1, keepdims=True)
    without = (total - sums) / (queries - lengths)
    means, variances = (total / queries)[:, 0], ((without - total / queries) ** 2).sum(1)
    ends = [interval(m, v, texts, limits) for m, v in zip(means, variances, strict=True)]
    return np.mean([low <= mean <= high for low, high in ends])


@pytest.mark.parametrize(("texts", "least"), [(5, 0.85), (20, 0.88), (100, 0.92)])
def test_the_interval_contains_the_true_mean_as_often_as_the_manual_states(texts, least):
    """Nominal is 95 %; a few texts, a mean near 0 and large variation have less."""
    for of_texts, limits in ((FRACTIONS, (0.0, 1.0)), (ERRORS, (0.0, None))):
        for mean, distribution in of_texts.items():
            found = coverage(distribution, mean, texts, limits)
            print(f"{texts} texts, mean {mean}, limits {limits}: {found:.3f}")
            assert found >= least - 0.05 * (mean < 0.1)
