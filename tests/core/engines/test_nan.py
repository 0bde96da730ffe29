"""NaN and infinity reach only queries that see them, forward and backward, in every engine and
statistic."""

import math

import pytest
import torch

import clearhead as ch

from .test_engines import NAMES, engine_or_skip

BEHIND = ch.documents([0, 0, 0, 0, 1, 1])  # tokens 4 and 5 hold NaN; the others do not see them


def spoiled(where, bad, dtype=torch.float32):
    """q, k, v of six tokens, `bad` in the keys or values of the last two."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, 4, dtype=dtype) for _ in range(3))
    (k if where == "k" else v)[:, :, 4:] = bad
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("engine", NAMES)
def test_nan_reaches_only_gradients_of_tensors_that_see_it(engine, where, bad, softcap):
    q, k, v = spoiled(where, bad)
    rule = {"mask": BEHIND, "softcap": softcap}
    engine_or_skip(engine, q, k, v, **rule)
    for part in (slice(0, 4), slice(0, 6)):
        out = ch.attention(q, k, v, **rule, engine=engine)[:, :, part]
        for grad in torch.autograd.grad(out.sum(), (q, k, v)):
            assert grad[:, :, :4].isfinite().all()
    assert out[:, :, :4].isfinite().all()


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_nan_reaches_only_gradients_of_statistics_that_see_it(softcap):
    q, k, v = spoiled("k", math.nan)
    seen = ch.look(q, k, v, mask=BEHIND, softcap=softcap, stats=["lse", "entropy", "received"])
    for x in (seen.lse, seen.entropy, seen.received):
        for grad in torch.autograd.grad(x[:, :, :4].sum(), (q, k), retain_graph=True):
            assert grad[:, :, :4].isfinite().all()


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_reaches_only_statistics_of_queries_that_see_it(dtype, learns):
    q, k, v = (x.detach() for x in spoiled("k", math.nan, dtype))
    stats = ["received", "entropy", ch.pooled(6, 6), ch.exact_rows([0, 4])]
    seen = ch.look(q.requires_grad_(learns), k, v, mask=BEHIND, stats=stats)
    lost = torch.tensor([False] * 4 + [True] * 2)
    for x in (seen.received, seen.entropy, seen.exact_rows[:, :, 1]):
        assert torch.equal(x.isnan().flatten(), lost)
    assert torch.equal(seen.pooled.isnan()[0, 0], lost.outer(lost))
    for weights in (
        ch.explain(q, k, v, mask=BEHIND)["weights"],
        ch.matrix(q, k, mask=BEHIND).to_dense(),
    ):
        assert torch.equal(weights.isnan()[0, 0], lost.outer(lost))


def test_an_infinite_score_is_nan_only_in_the_statistics_of_its_row():
    q = torch.randn(1, 1, 4, 8)
    bias = torch.zeros(4, 4)
    bias[2, 1] = math.inf
    seen = torch.tensor([True, True, True, False])
    for dtype, learns in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
        x = q.to(dtype, copy=True).requires_grad_(learns)
        found = ch.look(x, x, x, mask=ch.causal, bias=bias.to(dtype), stats=[
            "received", ch.exact_rows([2]), ch.pooled(4, 4)])  # fmt: skip
        assert torch.equal(found.exact_rows.isnan().flatten(), seen)
        assert torch.equal(found.received.isnan().flatten(), seen)
        assert torch.equal(found.pooled.isnan()[0, 0], torch.arange(4).eq(2).outer(seen))


@pytest.mark.parametrize("engine", ["auto", "sdpa", "tiled", "steps"])
def test_minus_infinity_in_a_bias_masks_nan(engine):
    q, v = torch.randn(4, 3), torch.randn(4, 3)
    v[2] = float("nan")
    bias = torch.zeros(4, 4)
    bias[:, 2] = float("-inf")
    out = ch.attention(q, q, v, bias=bias, engine=engine)
    torch.testing.assert_close(out, ch.attention(q, q[[0, 1, 3]], v[[0, 1, 3]]))


@pytest.mark.parametrize("name", ["cpu", "tiled", "steps"])
def test_a_bad_value_does_not_change_other_gradients_of_values(name):
    """dV = W^T dO does not depend on V."""
    q, k, v = (torch.randn(1, 1, T, 4) for T in (3, 5, 5))
    lost = v.clone()
    lost[0, 0, 3, 0] = math.nan
    found = []
    for values in (v, lost):
        values.requires_grad_()
        out = ch.attention(q, k, values, mask=ch.Causal(align="end"), engine=name)
        found.append(torch.autograd.grad(out.sum(), values)[0])
    true, got = found
    true, got = (x.index_select(2, torch.tensor([0, 1, 2, 4])) for x in (true, got))
    torch.testing.assert_close(got, true)
