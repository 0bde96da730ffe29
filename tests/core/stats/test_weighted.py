"""Statistics that multiply weights by a number per key, against dense float64 matrices."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.core import torch_state
from clearhead.core.stats.per_key import PerKey

B, H, G, TQ, TK, D = 2, 6, 2, 37, 45, 16
END = ch.Causal(align="end")
MASKS = {"everything": None, "causal": END, "band": ch.window(before=9, after=2, align="end")}
# The core computes statistics itself, and those of a call that learns with torch where it must. A
# call of "auto" that does not learn takes its own path (core/engines/cpu/direct.py).
WAYS = [("auto", False), ("cpu", False), ("cpu", True), ("tiled", False)]
GROUPS = {"first": ch.prefix(2), "near": ch.window(2, 0, align="end"), "span": (3, 9)}


def in_group(name):
    group = ch.prefix(9) & ~ch.prefix(3) if name == "span" else GROUPS[name]
    return group.to_bool(TQ, TK)


def drawn(dtype=torch.float32, requires_grad=False):
    g = torch.Generator().manual_seed(7)
    shapes = (B, H, TQ, D), (B, G, TK, D), (B, G, TK, D)
    q, k, v = (torch.randn(x, generator=g).to(dtype).requires_grad_(requires_grad) for x in shapes)
    numbers = 3 * torch.rand(B, H, TK, generator=g)
    numbers[..., 5] = 0
    return q, k, v, numbers


def products(q, k, numbers, mask, softcap=None):
    """w n of every query and key, in float64."""
    weights = ch.matrix(q.double(), k.double(), mask=mask, softcap=softcap).to_dense()
    return torch.where(weights == 0, 0.0, weights * numbers.double().unsqueeze(2))


def mean_of_bins(x, rows, cols):
    def members(size, bins):
        index = torch.tensor([((i + 1) * bins - 1) // size for i in range(size)])
        return F.one_hot(index, bins).double()

    of_queries, of_keys = members(x.shape[-2], rows), members(x.shape[-1], cols)
    return of_queries.T @ x @ of_keys / of_queries.sum(0).unsqueeze(-1)


@pytest.mark.parametrize(("engine", "learns"), WAYS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("dtype", "softcap"), [(torch.float32, None), (torch.float32, 3.0), (torch.bfloat16, None)]
)
def test_numbers_are_those_of_dense_matrices(engine, learns, mask, dtype, softcap):
    q, k, v, n = drawn(dtype, learns)
    wanted = [
        "entropy", ch.mass(GROUPS), ch.weighted(n, GROUPS), ch.value_weighted(GROUPS, by=n),
        ch.topk(3, by=n), ch.pooled(4, 5, by=n), ch.received(by=n),
    ]  # fmt: skip
    seen = ch.look(q, k, v, mask=MASKS[mask], softcap=softcap, stats=wanted, engine=engine)
    plain = ch.attention(q, k, v, mask=MASKS[mask], softcap=softcap, engine=engine)
    assert torch.equal(seen.out, plain)
    moved = products(q, k, n, MASKS[mask], softcap)
    close = dict(rtol=2e-5, atol=1e-5, check_dtype=False)
    for name in GROUPS:
        of_group = (moved * in_group(name)).sum(-1)
        torch.testing.assert_close(seen.weighted[name], of_group, **close)
        torch.testing.assert_close(seen.value_weighted[name], of_group / moved.sum(-1), **close)
    largest = moved.topk(3)
    torch.testing.assert_close(seen.topk.weights, largest.values, **close)
    sure = largest.values.diff(dim=-1).abs().amin(-1) > 1e-4
    assert sure.any() and torch.equal(seen.topk.keys[sure], largest.indices[sure])
    torch.testing.assert_close(seen.pooled, mean_of_bins(moved, 4, 5), **close)
    torch.testing.assert_close(seen.received, moved.sum(2), **close)


@pytest.mark.parametrize("engine", ["cpu", "tiled"])
def test_gradients_are_those_of_dense_matrices(engine):
    q, k, v, n = drawn(requires_grad=True)
    wanted = [
        "entropy", ch.mass(GROUPS), ch.weighted(n, GROUPS), ch.value_weighted(GROUPS, by=n),
        ch.pooled(4, 5, by=n), ch.received(by=n),
    ]  # fmt: skip
    seen = ch.look(q, k, v, mask=END, stats=wanted, engine=engine)
    double = [x.detach().double().requires_grad_() for x in (q, k)]
    weights = ch.matrix(*double, mask=END, engine="steps").to_dense()
    moved = weights * n.double().unsqueeze(2)
    by_group = {name: (moved * in_group(name)).sum(-1) for name in GROUPS}
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    pairs = [
        (seen.entropy, entropy),
        *((seen.mass[name], (weights * in_group(name)).sum(-1)) for name in GROUPS),
        *((seen.weighted[name], by_group[name]) for name in GROUPS),
        *((seen.value_weighted[name], by_group[name] / moved.sum(-1)) for name in GROUPS),
        (seen.pooled, mean_of_bins(moved, 4, 5)),
        (seen.received, moved.sum(2)),
    ]
    g = torch.Generator().manual_seed(1)
    directions = [torch.randn(x.shape, generator=g) for x, _ in pairs]
    ours = sum((x * d).sum() for (x, _), d in zip(pairs, directions, strict=True))
    dense = sum((x * d).sum() for (_, x), d in zip(pairs, directions, strict=True))
    for x, y in zip(
        torch.autograd.grad(ours, (q, k)), torch.autograd.grad(dense, double), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize(("engine", "learns"), WAYS)
def test_a_masked_key_adds_nothing_whatever_its_number(engine, learns):
    q, k, v, n = drawn(requires_grad=learns)
    n[..., -1] = torch.nan  # which causal queries but the last do not see
    n[..., -2] = torch.inf
    wanted = [ch.weighted(n), ch.topk(4, by=n), ch.pooled(TQ, TK, by=n), ch.received(by=n)]
    seen = ch.look(q, k, v, mask=END, stats=wanted, engine=engine)
    assert seen.weighted["all"][..., :-2].isfinite().all()
    assert seen.weighted["all"][..., -1].isnan().all()
    assert seen.topk.weights[..., :-2, :].isfinite().all()
    assert seen.pooled[..., :-2, :].isfinite().all() and seen.received[..., :-2].isfinite().all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize(("engine", "learns"), WAYS)
def test_keys_and_queries_that_see_nothing_are_0_whatever_a_number(engine, learns, number):
    q, k, v, n = drawn(requires_grad=learns)
    n[..., -1] = number
    wanted = [
        ch.weighted(n), ch.value_weighted(GROUPS, by=n), ch.received(by=n), ch.topk(3, by=n),
        ch.pooled(TQ, TK, by=n),
    ]  # fmt: skip
    mask = END & ch.lengths(keys=TK - 1, queries=TQ - 1)
    seen = ch.look(q, k, v, mask=mask, stats=wanted, engine=engine)
    of_query = [seen.weighted["all"], *seen.value_weighted.values()]
    for x in (*of_query, seen.received, seen.topk.weights, seen.pooled):
        assert x.isfinite().all()
    assert not any(x[..., -1].any() for x in (*of_query, seen.received))


@pytest.mark.parametrize(("engine", "learns"), WAYS)
def test_topk_lists_a_key_whose_number_is_nan_first(engine, learns):
    q, k, v, n = drawn(requires_grad=learns)
    n[..., -2] = torch.nan  # which only the last two causal queries see
    top = ch.look(q, k, v, mask=END, stats=[ch.topk(3, by=n)], engine=engine).topk
    assert bool((top.keys[..., -2:, 0] == TK - 2).all())
    assert bool(top.weights[..., -2:, 0].isnan().all())
    assert bool(top.weights[..., :-2, :].isfinite().all() & top.weights[..., 1:].isfinite().all())


@pytest.mark.parametrize("change", [lambda s: replace(s, n=1), copy.deepcopy])
def test_a_copy_of_topk_lists_a_key_whose_number_is_nan_too(change):
    q, k, v, n = drawn()
    n[..., 7] = torch.nan
    copied = change(ch.topk(3, by=n))
    assert bool((ch.look(q, k, v, stats=[copied]).topk.keys[..., 0] == 7).all())


@pytest.mark.parametrize(("engine", "learns"), WAYS)
def test_numbers_of_1_change_nothing(engine, learns):
    q, k, v, _ = drawn(requires_grad=learns)
    ones = torch.ones(TK)
    plain = ["received", ch.mass(GROUPS), ch.topk(3), ch.pooled(4, 5)]
    numbered = [
        ch.received(by=ones), ch.weighted(ones, GROUPS), ch.topk(3, by=ones),
        ch.pooled(4, 5, by=ones),
    ]  # fmt: skip
    a, b = (ch.look(q, k, v, mask=END, stats=x, engine=engine) for x in (plain, numbered))
    assert torch.equal(a.received, b.received) and torch.equal(a.pooled, b.pooled)
    assert torch.equal(a.topk.keys, b.topk.keys)
    torch.testing.assert_close(a.topk.weights, b.topk.weights)
    assert all(torch.equal(a.mass[name], b.weighted[name]) for name in GROUPS)


def test_by_hand():
    """Weights of 1/4 and 3/4, numbers 2 and 10: 0.5 and 7.5 move, 1/16 and 15/16 of 8."""
    q, v = torch.ones(1, 1), torch.zeros(2, 1)
    k = torch.tensor([[0.0], [torch.tensor(3.0).log()]])
    n = torch.tensor([2.0, 10.0])
    groups = {"first": (0, 1), "second": (1, 2)}
    wanted = [ch.weighted(n, groups), ch.value_weighted(groups, by=n), ch.topk(1, by=n)]
    seen = ch.look(q, k, v, scale=1, stats=wanted)
    assert [round(x.item(), 6) for x in seen.weighted.values()] == [0.5, 7.5]
    assert [round(x.item(), 6) for x in seen.value_weighted.values()] == [1 / 16, 15 / 16]
    assert seen.topk.keys.item() == 1 and round(seen.topk.weights.item(), 5) == 7.5


def test_the_matrix_takes_numbers_too():
    q, k, _, n = drawn()
    matrix, moved = ch.matrix(q, k, mask=END), products(*drawn()[:2], n, END)
    close = dict(rtol=1e-5, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(matrix.topk(3, by=n).weights, moved.topk(3).values, **close)
    torch.testing.assert_close(matrix.pool(4, 5, by=n), mean_of_bins(moved, 4, 5), **close)


def test_partial_results_merge_if_their_numbers_are_equal():
    n = drawn()[-1]
    statistic = ch.weighted(n, GROUPS)
    assert statistic == replace(statistic) and statistic != ch.weighted(n + 1, GROUPS)
    assert PerKey("value", "x") == PerKey("value", "x") != PerKey(n, "x")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ch.weighted([1.0, 2.0]), ch.BadType, "got a list"),
        (lambda: ch.weighted(None), ch.BadType, "weighted by got None"),
        (lambda: ch.value_weighted({"a": ch.prefix(1)}, by=None), ch.BadType, "by got None"),
        (lambda: ch.weighted(torch.tensor(1.0)), ch.BadValue, r"shape \(\)"),
        (lambda: ch.topk(2, by=-torch.ones(TK)), ch.BadValue, "negative"),
        (lambda: ch.topk(2, by=torch.ones(TK, device="meta")), ch.BadValue, "cannot be read now"),
        (lambda: torch.vmap(lambda n: ch.topk(2, by=n))(torch.ones(2, TK)), ch.BadValue, "read"),
        (lambda: ch.weighted(torch.ones(TK), {}), ch.BadType, "named groups"),
    ],
)
def test_wrong_numbers_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_numbers_are_not_read_while_a_graph_is_captured(monkeypatch):
    """On a CPU, as during a capture, which reading would end."""
    n = torch.ones(TK)
    before = ch.topk(2, by=n)
    monkeypatch.setattr(torch_state, "_is_captured", lambda x: True)
    for make in (lambda: ch.topk(2, by=n), lambda: ch.value_weighted(GROUPS, by=n)):
        with pytest.raises(ch.BadValue, match="make the statistic before"):
            make()
    assert replace(before, n=3).by == before.by  # its numbers have been checked


@pytest.mark.parametrize(
    ("statistic", "match"),
    [
        (ch.weighted(torch.ones(TK - 1)), "44 numbers for 45 keys"),
        (ch.weighted(torch.ones(H + 1, TK)), "the call has H = 6"),
        (ch.pooled(2, 2, by=torch.ones(3)), "3 numbers for 45 keys"),
        (ch.received(by=torch.ones(3)), "3 numbers for 45 keys"),
        (ch.topk(2, by="value"), "outside a model"),
        (ch.value_weighted({"first": ch.prefix(1)}), "outside a model"),
    ],
)
@pytest.mark.parametrize("engine", ["cpu", "tiled"])
def test_numbers_that_do_not_fit_the_call_are_refused(statistic, match, engine):
    with pytest.raises(ch.BadValue, match=match):
        ch.look(*drawn()[:3], stats=[statistic], engine=engine)
