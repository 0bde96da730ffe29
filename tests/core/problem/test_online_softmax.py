"""Softmax in pieces: pieces merge in any order and any grouping, and give softmax @ V."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from clearhead.core.problem import online_softmax
from clearhead.core.problem.online_softmax import State

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def piece(scores: Tensor, v: Tensor) -> State:
    return online_softmax.begin(scores, v, keep=torch.isfinite(scores))


def pieces(sizes: list[int], seed: int, masked: float = 0.3) -> tuple[Tensor, Tensor, list[State]]:
    """Scores (2, 3, k), values (2, k, 5), and their pieces of these sizes."""
    source = torch.Generator().manual_seed(seed)
    scores = 20 * torch.randn(2, 3, sum(sizes), dtype=torch.float64, generator=source)
    blocked = torch.rand(scores.shape, generator=source) < masked
    scores = scores.masked_fill(blocked, -math.inf)
    v = torch.randn(2, sum(sizes), 5, dtype=torch.float64, generator=source)
    parts = zip(scores.split(sizes, -1), v.split(sizes, -2), strict=True)
    return scores, v, [piece(s, x) for s, x in parts]


def finished(state: State) -> tuple[Tensor, Tensor]:
    """softmax @ V, and the log-sum-exp."""
    return online_softmax.finish(state), state.max + state.sum.log()


def truth(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a row of -inf alone sees nothing
    return weights @ v, torch.logsumexp(scores, -1)


@given(SIZES, st.integers(0, 99), st.sampled_from([0.0, 0.3, 1.0]))
def test_any_split_gives_softmax(sizes, seed, masked):
    scores, v, parts = pieces(sizes, seed, masked)
    rows = parts[0]
    for part in parts[1:]:
        rows = online_softmax.merge(rows, part)
    torch.testing.assert_close(finished(rows), truth(scores, v))


@given(st.tuples(*[st.integers(0, 4)] * 3), st.integers(0, 99))
def test_merge_is_associative_and_commutative(sizes, seed):
    _, _, (a, b, c) = pieces(list(sizes), seed)
    left = online_softmax.merge(online_softmax.merge(a, b), c)
    torch.testing.assert_close(left, online_softmax.merge(a, online_softmax.merge(b, c)))
    torch.testing.assert_close(left, online_softmax.merge(c, online_softmax.merge(b, a)))


@given(st.integers(1, 5), st.integers(0, 99))
def test_an_empty_piece_changes_nothing(size, seed):
    scores, v, (rows, empty) = pieces([size, 0], seed)
    blind = piece(torch.full_like(scores, -math.inf), v)
    for nothing in (empty, blind):
        for merged in (online_softmax.merge(rows, nothing), online_softmax.merge(nothing, rows)):
            pairs = zip(merged.tensors(), rows.tensors(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_by_hand():
    """Scores 0 and log 3: weights 1/4 and 3/4, log-sum-exp log 4."""
    one, three = (
        piece(torch.tensor([[math.log(n)]]), torch.tensor([[value]]))
        for n, value in ((1.0, 8.0), (3.0, 4.0))
    )
    rows = online_softmax.merge(one, three)
    assert rows.max.item() == pytest.approx(math.log(3)) and rows.sum.item() == pytest.approx(4 / 3)
    out, lse = finished(rows)
    assert out.item() == pytest.approx(8 / 4 + 4 * 3 / 4)
    assert lse.item() == pytest.approx(math.log(4))


def test_nothing_seen_gives_zero_and_minus_infinity():
    out, lse = finished(piece(torch.zeros(3, 0), torch.zeros(0, 5)))
    assert torch.equal(out, torch.zeros(3, 5)) and torch.equal(lse, torch.full((3,), -math.inf))


@given(st.integers(0, 5), st.integers(0, 99), st.floats(-50, 50))
def test_a_sink_takes_weight_and_gives_no_value(size, seed, logit):
    scores, v, (rows,) = pieces([size], seed)
    sinks = torch.full((3,), logit, dtype=torch.float64)
    rows = rows.map(lambda x: x.unsqueeze(2))  # (B, H, q)
    lse = finished(online_softmax.with_sinks(rows, sinks))[1]
    out, lse = online_softmax.finish(rows, sinks).squeeze(2), lse.squeeze(2)
    extra = torch.cat([scores, torch.full((2, 3, 1), logit, dtype=torch.float64)], -1)
    nothing = torch.cat([v, torch.zeros(2, 1, 5, dtype=torch.float64)], -2)
    torch.testing.assert_close((out, lse), truth(extra, nothing))


def test_dropout_takes_from_the_values_and_not_from_the_sum():
    scores, v, _ = pieces([4], 0, masked=0.0)
    drop = torch.tensor([2.0, 0.0, 2.0, 0.0], dtype=torch.float64).expand_as(scores)
    out, lse = finished(online_softmax.begin(scores, v, None, drop))
    torch.testing.assert_close(out, (torch.softmax(scores, -1) * drop) @ v)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


@given(st.sampled_from([(5,), (2, 3), (1, 0, 4)]), st.integers(0, 9))
def test_gradients_of_pieces_are_those_of_softmax(sizes, seed):
    scores, v, _ = pieces(list(sizes), seed, masked=0.2)
    scores[0, 1] = -math.inf  # a query that sees nothing, in every piece
    scores, v = scores.requires_grad_(), v.requires_grad_()
    rows = [piece(s, x) for s, x in zip(scores.split(sizes, -1), v.split(sizes, -2), strict=True)]
    while len(rows) > 1:
        rows.append(online_softmax.merge(rows.pop(0), rows.pop(0)))
    out, seen = online_softmax.finish(rows[0]), rows[0].sum > 0
    lse = rows[0].max[seen] + rows[0].sum[seen].log()
    weigh = torch.randn(out.shape, dtype=torch.float64)
    got = torch.autograd.grad((out * weigh).sum() + lse.sum(), (scores, v))
    x = scores.detach().requires_grad_()
    w = v.detach().requires_grad_()
    keep = torch.isfinite(x.detach())
    exps = torch.exp(
        x.masked_fill(~keep, -1e3) - x.detach().masked_fill(~keep, -1e3).amax(-1, True)
    )
    exps = exps * keep
    total = exps.sum(-1, keepdim=True)
    weights = exps / total.masked_fill(total == 0, 1.0)
    mine = torch.where(seen, torch.logsumexp(x.masked_fill(~seen.unsqueeze(-1), 0.0), -1), 0.0)
    true = torch.autograd.grad(((weights @ w) * weigh).sum() + mine.sum(), (x, w))
    torch.testing.assert_close(got, true)
    assert all(torch.isfinite(g).all() for g in got)


def test_scores_as_large_as_they_come():
    """exp(1e300) would overflow; differences from the maximum do not."""
    scores = torch.tensor([[1e300, -1e300, 1e300]], dtype=torch.float64)
    v = torch.eye(3, dtype=torch.float64)
    a, b = piece(scores[:, :1], v[:1]), piece(scores[:, 1:], v[1:])
    out = online_softmax.finish(online_softmax.merge(a, b))
    assert out.tolist() == [[0.5, 0.0, 0.5]]
