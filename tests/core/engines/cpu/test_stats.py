"""Statistics by the C++ core on every instruction-set level, compared with dense float64
weights."""

import math

import pytest
import torch
from torch.autograd import forward_ad

import clearhead as ch
from clearhead import stats
from clearhead.core.engines.choice import compute_stats
from clearhead.core.engines.cpu import Cpu, stats_backward
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.stats import parse_stats, sweep
from tests.core.engines.cpu.test_kernels import (
    LEVELS,
    draw,
    level as level,
    make_qkv,
    threads as threads,
)
from tests.core.stats.test_stats import (
    LEARNED,
    assert_same,
    dense,
    everything_for,
    flat,
    score,
    tiles,
)
from tests.pairs import pairs
from tests.problems import PROBLEMS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_core(*qkv, statistics=None, **keywords):
    """Return (output, statistics) of the core."""
    problem, inputs = make_problem(*qkv, Options(**keywords))
    assert Cpu().why_not(problem) == []
    parsed = parse_stats(
        everything_for(problem) if statistics is None else statistics, problem.grid
    )
    out = Cpu().compute(problem, inputs)
    return out, Cpu().partial(problem.without_dropout, inputs, parsed).finish()


def truth(*qkv, statistics=None, **keywords):
    problem, inputs = make_problem(*(x.double() for x in qkv), Options(**keywords))
    return dense(problem, inputs, everything_for(problem) if statistics is None else statistics)


@pytest.mark.parametrize(
    "name, dtype, level", pairs(PROBLEMS, DTYPES, LEVELS), indirect=["level"], ids=str
)
def test_equal_to_dense_weights(name, dtype, level):
    case = PROBLEMS[name](dtype, 0)
    if name == "large scores" and dtype != torch.float32:
        pytest.skip("products of half precision, times 300, leave no digit to compare")
    out, found = by_core(*case.tensors, **case.keywords)
    assert torch.equal(out, ch.attention(*case.tensors, engine="cpu", **case.keywords).view_as(out))
    # "large scores" multiplies the rounding of a dot product by 300; torch's softmax errs as much.
    rtol, atol = (1e-3, 1e-4) if name == "large scores" else (1e-5, 4e-6)
    true = truth(*case.tensors, **case.keywords)
    assert_same(found, true, rtol, atol, keys_of="float64")


MASKS = {
    "full": ch.everything,
    "causal": ch.Causal(align="end"),
    "window": ch.window(before=70, after=9, align="end"),
    "holes": ch.window(before=300, after=0, align="end") | ch.prefix(5),
}


LENGTHS = [(1, 1), (1, 2500), (3, 800), (50, 49), (391, 193), (700, 1700)]


@pytest.mark.parametrize(
    "lengths, mask, level", pairs(LENGTHS, MASKS, LEVELS), indirect=["level"], ids=str
)
def test_lengths_around_tiles_and_stretches(lengths, mask, level):
    Tq, Tk = lengths
    qkv = make_qkv(B=1, H=2, G=1, Tq=Tq, Tk=Tk, D=16, dtype=torch.float32)
    statistics = [
        "lse", "max", "entropy", stats.topk(9), "received", stats.pooled(13, 29),
        stats.mass({"sink": ch.prefix(3), "near": ch.window(before=4, align="end")}),
        stats.exact_rows([0, Tq - 1, Tq // 2, 0]),
    ]  # fmt: skip
    _, found = by_core(*qkv, statistics=statistics, mask=MASKS[mask])
    true = truth(*qkv, statistics=statistics, mask=MASKS[mask])
    assert_same(found, true, 1e-5, 4e-6, keys_of="float64")
    best = found["topk"]
    every = truth(*qkv, statistics=[stats.exact_rows(range(Tq))], mask=MASKS[mask])["exact_rows"]
    there = every.gather(-1, best.keys.clamp(min=0)).masked_fill(best.keys < 0, 0.0)
    torch.testing.assert_close(best.weights.double(), there, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(
    "lengths, dtype, level",
    pairs([(2, 3000), (130, 900)], DTYPES, LEVELS),
    indirect=["level"],
    ids=str,
)
def test_threads_do_not_change_a_bit(lengths, dtype, level, threads):
    Tq, Tk = lengths
    qkv = make_qkv(B=2, H=4, G=2, Tq=Tq, Tk=Tk, D=64, dtype=dtype)
    threads(1)
    one = by_core(*qkv)
    threads(2)
    both = by_core(*qkv)
    assert torch.equal(one[0], both[0])
    for name, x in flat(one[1]).items():
        assert torch.equal(x, flat(both[1])[name]), name


@pytest.mark.parametrize("n", [1, 2, 7, 16, 17, 40, 300])
def test_ties_go_to_the_lower_key(n, level):
    """Scores have few different values, so that ties are inside the n, at its edge, across
    blocks."""
    x = torch.randint(0, 3, (23, 411), generator=torch.Generator().manual_seed(n)).float()
    x[3] = 1.0
    q, k = torch.zeros(23, 2), torch.zeros(411, 2)
    _, found = by_core(q, k, k, bias=ch.bias(x), statistics=[stats.topk(n)])
    keys = found["topk"].keys[0, 0]
    assert torch.equal(keys, x.sort(dim=-1, descending=True, stable=True).indices[:, :n])


def test_nan_reaches_only_queries_that_see_it(level):
    """Key 10 is NaN and masked for queries 0 to 9; query 10, in the block of query 9, sees it."""
    q, k, v = draw(13, 4), draw(13, 4, seed=1), draw(13, 4, seed=2)
    broken = k.clone()
    broken[10] = float("nan")
    statistics = [
        "lse",
        "max",
        "entropy",
        stats.topk(2),
        stats.pooled(13, 13),
        stats.exact_rows([9]),
    ]
    clean, dirty = (
        flat(by_core(q, x, v, mask=ch.causal, statistics=statistics)[1]) for x in (k, broken)
    )
    for name in ("lse", "max", "entropy", "topk.weights", "pooled"):
        assert torch.equal(dirty[name][:, :, :10], clean[name][:, :, :10]), name
        assert dirty[name][:, :, 10:].isnan().any(), name
    assert torch.equal(dirty["exact_rows"], clean["exact_rows"])


@pytest.mark.parametrize(
    "sizes", [dict(B=0), dict(Tq=0), dict(Tk=0), dict(D=0), dict(Dv=0), dict(H=0, G=0)], ids=str
)
def test_sizes_of_zero(sizes, level):
    qkv = make_qkv(**sizes)
    problem, inputs = make_problem(*qkv)
    statistics = ["lse", "max", "entropy", stats.topk(2), "received", stats.pooled(2, 2)]
    _, found = by_core(*qkv, statistics=statistics)
    assert_same(found, sweep(problem, inputs, statistics).finish(), 1e-6, 1e-6)


def test_without_output_the_values_are_not_read(level):
    q, k, _ = make_qkv(Tq=40, Tk=60)
    problem, inputs = make_problem(q, k, torch.full((1, 2, 60, 8), float("nan")))
    parsed = parse_stats(["entropy", "received"], problem.grid)
    statistics_only = Cpu().statistics(problem, inputs, parsed)
    looked = Cpu().answer(problem, inputs, parsed).stats
    assert all(torch.equal(statistics_only[name], looked[name]) for name in statistics_only)
    assert statistics_only["entropy"].isfinite().all()


def test_the_core_has_the_statistics_of_merged_chunks():
    """All queries at once by the core, and two chunks of them by torch."""
    q, k, v = make_qkv(Tq=90, Tk=90, D=16)
    problem, inputs = make_problem(q, k, v)
    parsed = parse_stats(["lse", "entropy", "received", stats.pooled(9, 9)], problem.grid)
    whole = Cpu().partial(problem, inputs, parsed)
    halves = sweep(problem, inputs, parsed, slice(0, 40)).merge(
        sweep(problem, inputs, parsed, slice(40, 90))
    )
    assert_same(whole.finish(), halves.finish(), 1e-5, 1e-6)


@pytest.mark.parametrize("size", [278, 31_100, 700_001])
def test_large_logits_give_every_statistic_the_same_weights(level, size):
    """Integers that float32 represents: the weights are as exact as those of small logits."""
    source = torch.Generator().manual_seed(0)
    q = torch.full((1, 1, 20, 1), 1.0)
    k = torch.randint(-size, size, (1, 1, 300, 1), generator=source).float()
    k[0, 0, :4, 0] = torch.tensor([size, size - 1, size - 2, size - 2])
    stats = [ch.topk(4), ch.exact_rows([0]), ch.mass({"first": ch.prefix(4)}), "entropy"]
    seen = ch.look(q, k, k, scale=1.0, stats=stats, engine="cpu")
    weights = torch.softmax(q.double() @ k.double().mT, -1)
    torch.testing.assert_close(seen.exact_rows, weights[:, :, :1].float(), rtol=1e-6, atol=1e-12)
    best = weights.topk(4).values.float()
    torch.testing.assert_close(seen.topk.weights, best, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(seen.mass["first"], weights[..., :4].sum(-1).float())
    torch.testing.assert_close(seen.entropy, torch.special.entr(weights).sum(-1).float())


@pytest.mark.parametrize("engine", ["cpu", "tiled"])
def test_the_largest_of_a_row_with_nan_and_ties(engine):
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 5, 4)
    bias = torch.tensor([[math.nan, math.nan, 1.0, 1.0, 0.0]])
    assert ch.look(q, k, k, bias=bias, stats=[ch.topk(3)], engine=engine).topk.weights.isnan().all()


@pytest.mark.parametrize("base", [1e6, 1e7])
def test_the_largest_weights_are_those_of_the_rows(level, base):
    """The scale exceeds float32: differences are computed before it is applied."""
    k = torch.zeros(1, 1, 8, 80)
    k[..., 0] = base + torch.arange(8.0)
    q = torch.zeros(1, 1, 20, 80)
    q[..., 0] = 1.0
    seen = ch.look(q, k, k, stats=[ch.topk(8), ch.exact_rows([0])], engine="cpu")
    true = torch.softmax(torch.arange(7.0, -1, -1) / 80**0.5, 0)
    torch.testing.assert_close(seen.topk.weights[0, 0, 0], true)
    torch.testing.assert_close(seen.exact_rows[0, 0, 0].flip(0), true)


# --------------------------------------------------------------------------------------- gradients


def with_leaves(case, dtype):
    """The problem of a case in another dtype, and its leaves, which require gradients."""
    keywords = {name: x for name, x in case.keywords.items() if name not in ("dropout", "seed")}
    q, k, v = (x.detach().to(dtype) for x in case.tensors)
    leaves = [q, k]
    if isinstance(keywords.get("sinks"), torch.Tensor):
        keywords["sinks"] = keywords["sinks"].detach().to(dtype)
        leaves.append(keywords["sinks"])
    if getattr(keywords.get("bias"), "tensor", None) is not None:
        leaves.append(keywords["bias"].tensor.detach().to(dtype))
        keywords["bias"] = ch.bias(leaves[-1])
    for x in leaves:
        x.requires_grad_()
    return make_problem(q, k, v, Options(**keywords)), leaves


@pytest.mark.parametrize("only", LEARNED)
@pytest.mark.parametrize(
    "name", ["full", "sinks and fully masked queries", "everything at once", "lengths"]
)
def test_gradients_equal_autograd_through_dense_weights(name, only):
    results = []
    for dtype in (torch.float32, torch.float64):
        (problem, inputs), leaves = with_leaves(PROBLEMS[name](torch.float32, 0), dtype)
        statistics = [s for s in parse_stats(everything_for(problem)) if s.name == only]
        if dtype == torch.float64:
            found = dense(problem, inputs, statistics)
        else:
            found = Cpu().statistics(problem, inputs, tuple(statistics))
        total = score(found, only)
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        results.append([x.double().nan_to_num() for x in grads])
    for got, want in zip(*results, strict=True):
        near = 2e-5 * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=1e-4, atol=near)
    assert any(bool(g.any()) for g in results[0])


CLOSED = {"lse", "entropy", "effective", "mass", "received"}
NEAR = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize(
    "name, dtype, level", pairs(PROBLEMS, DTYPES, LEVELS), indirect=["level"], ids=str
)
def test_gradients_in_closed_form_need_no_strips(name, dtype, level, monkeypatch):
    results = []
    for wide in (False, True):
        case = PROBLEMS[name](dtype, 0)
        (problem, inputs), leaves = with_leaves(case, torch.float64 if wide else dtype)
        statistics = [s for s in parse_stats(everything_for(problem)) if s.name in CLOSED]
        if wide:
            found = dense(problem, inputs, statistics)
        else:
            monkeypatch.setattr(stats_backward, "sweep_gradients", None)
            found = Cpu().statistics(problem, inputs, parse_stats(statistics, problem.grid))
        assert set(found) == CLOSED
        total = sum(score(found, only) for only in sorted(CLOSED))
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        results.append([x.double().nan_to_num() for x in grads])
    for got, want in zip(*results, strict=True):
        near = NEAR[dtype] * float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=10 * NEAR[dtype], atol=near)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_gradients_of_statistics_of_large_scores(scale):
    """All scores are about 1e4, so a float leaves three digits for their differences."""
    grads = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype) for x in make_qkv(H=1, G=1, Tq=40, Tk=60, D=16))
        q[..., 0] = k[..., 0] = 100
        q, k = q.requires_grad_(), k.requires_grad_()
        engine = "cpu" if dtype == torch.float32 else "tiled"
        seen = ch.look(q, k, v, scale=scale, stats=["entropy", "received"], engine=engine)
        total = seen.entropy.square().sum() + seen.received.square().sum()
        grads.append([x.double() for x in torch.autograd.grad(total, (q, k))])
    for got, want in zip(*grads, strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 0.01


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own
def test_the_backward_pass_of_statistics_has_forward_mode_derivatives():
    q, k, v = make_qkv(H=2, G=2, Tq=8, Tk=8, D=4)
    found = []
    for engine in ("cpu", "tiled"):
        x = q.clone().requires_grad_()
        entropy = ch.look(x, k, v, stats=["entropy"], engine=engine).entropy
        with forward_ad.dual_level():
            back = forward_ad.make_dual(torch.ones_like(entropy), torch.ones_like(entropy))
            (g,) = torch.autograd.grad(entropy, x, back)
            found.append(forward_ad.unpack_dual(g).tangent)
    torch.testing.assert_close(*found)
    out = ch.attention(q.requires_grad_(), k, v, engine="cpu")
    with forward_ad.dual_level(), pytest.raises(ch.BadValue, match="forward mode"):
        torch.autograd.grad(out, q, forward_ad.make_dual(out.detach(), out.detach()))


def test_a_gradient_that_is_a_negative_view():
    q, k, v = make_qkv(H=2, G=2, Tq=8, Tk=8, D=4)
    received = ch.look(q.requires_grad_(), k, v, stats=["received"], engine="cpu").received
    back = torch._neg_view(draw(*received.shape))
    twice = [torch.autograd.grad(received, q, g, True)[0] for g in (back, back.resolve_neg())]
    assert torch.equal(*twice)


def test_look_in_training_changes_no_bit_and_saves_nothing(monkeypatch):
    q, k, v = (x.requires_grad_() for x in make_qkv(H=4, G=2, Tq=300, Tk=300, D=16))
    statistics = ["lse", "entropy", "max", "received", stats.pooled(7, 9), stats.exact_rows([5])]
    with torch.no_grad():
        naive_attention = ch.look(q, k, v, stats=statistics, mask=ch.causal, engine="cpu")
    monkeypatch.setattr(tiles._Sweep, "statistics_of", None)  # torch does not compute them
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        seen = ch.look(q, k, v, stats=statistics, mask=ch.causal, engine="cpu")
    assert max(x.numel() for x in kept) <= q.numel() + v.numel()
    for name in ("out", "lse", "entropy", "max", "received", "pooled", "exact_rows"):
        got, wanted = getattr(seen, name), getattr(naive_attention, name)
        # The core finishes rows in double precision, and autograd in float32.
        assert (
            torch.equal(got, wanted) if name == "out" else torch.allclose(got, wanted, 1e-5, 1e-6)
        )
        assert got.requires_grad, name
    seen.out.sum().backward()  # gradients of the output one need no statistics
    assert bool(torch.isfinite(q.grad).all())


def test_sums_of_weights_do_not_depend_on_threads(threads):
    """The tasks of a head add to the same sums, in one order."""
    q, k, v = make_qkv(H=3, G=1, Tq=1009, Tk=1013, D=8)
    mask = ch.Causal(align="end")
    statistics = ["received", stats.pooled(7, 11), stats.exact_rows([3, 700, 3])]
    results = []
    for count in (1, 2, *[5] * 12):
        threads(count)
        results.append(ch.look(q, k, v, stats=statistics, mask=mask, engine="cpu"))
    for name in ("out", "received", "pooled", "exact_rows"):
        first, *others = (getattr(x, name) for x in results)
        assert all(torch.equal(first, x) for x in others), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sums_of_weights_with_a_query_that_is_not_finite(dtype, value):
    """Its weights are NaN on the keys that it sees, and 0 on masked keys."""
    q, k, v = (x.to(dtype) for x in make_qkv(H=2, G=1, Tq=211, Tk=211, D=16))
    true = ch.look(q, k, v, stats=["received"], mask=ch.causal, engine="cpu").received
    q[:, 0, 97] = value
    names = ["received", stats.pooled(1, 211), stats.exact_rows([97, 98])]
    seen = ch.look(q, k, v, stats=names, mask=ch.causal, engine="cpu")
    assert bool(seen.received[:, 0, :98].isnan().all())
    assert torch.equal(seen.received[:, 0, 98:], true[:, 0, 98:])
    assert torch.equal(seen.received[:, 1], true[:, 1])
    assert torch.equal(seen.pooled[:, :, 0].isnan(), seen.received.isnan())
    assert torch.equal(seen.exact_rows[:, 0, 0].isnan(), seen.received[:, 0].isnan())
    assert bool((seen.exact_rows[:, 0, 0, 98:] == 0).all())
    assert bool(seen.exact_rows[:, 0, 1].isfinite().all())


@pytest.mark.parametrize("seed", [None, 7])
def test_statistics_ignore_dropout_and_come_from_the_core(seed, monkeypatch):
    q, k, v = (x.requires_grad_() for x in make_qkv(H=2, G=2, Tq=50, Tk=50, D=16))
    naive_attention = ch.look(q, k, v, stats=["entropy", "received"], engine="cpu")
    monkeypatch.setattr(tiles._Sweep, "statistics_of", None)
    problem, inputs = make_problem(q, k, v, Options(dropout=0.5, seed=seed))
    found = compute_stats(problem, inputs, ["entropy", "received"]).finish()
    if seed is not None:
        seen = ch.look(q, k, v, dropout=0.5, seed=seed, stats=["entropy"], engine="cpu")
        assert torch.equal(seen.entropy, naive_attention.entropy)
        assert torch.equal(seen.out, ch.attention(q, k, v, dropout=0.5, seed=seed, engine="cpu"))
    assert torch.equal(found["entropy"], naive_attention.entropy)
    assert torch.equal(found["received"], naive_attention.received)


def test_gradients_of_statistics_twice_and_after_a_change():
    q, k, v = (x.requires_grad_() for x in make_qkv(H=1, G=1, Tq=5, Tk=9, D=4))

    def entropy(engine):
        return ch.look(q, k, v, stats=["entropy"], engine=engine).entropy.square().sum()

    second = []
    for engine in ("cpu", "tiled"):
        (first,) = torch.autograd.grad(entropy(engine), q, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), (q, k)))
    for got, want in zip(*second, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    total = entropy("cpu")
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_backward_frees_the_saved_tensors():
    import gc
    import weakref

    q, k, v = make_qkv(H=2, G=2, Tq=50, Tk=50, D=16)
    leaves = [x.requires_grad_() * 1 for x in (q, k, v)]
    bias, sinks = torch.zeros(50, requires_grad=True) * 1, torch.zeros(2, requires_grad=True) * 1
    keywords = {"bias": bias, "sinks": sinks, "engine": "cpu"}
    entropy = ch.look(*leaves, stats=["entropy"], **keywords).entropy
    held = [weakref.ref(x) for x in (*leaves, bias, sinks)]
    entropy.sum().backward()
    del leaves, bias, sinks, keywords
    gc.collect()
    assert [ref() for ref in held] == [None] * 5


def test_batched_gradients_of_statistics():
    q, k, v = make_qkv(H=1, G=1, Tq=5, Tk=6, D=4)

    def found(q):
        seen = ch.look(q, k, v, stats=["entropy", stats.pooled(2, 3)], engine="cpu")
        return seen.entropy.sum(-1), seen.pooled

    one, many = (
        torch.autograd.functional.jacobian(found, q, vectorize=batched) for batched in (False, True)
    )
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_statistics_where_one_tensor_comes_from_another():
    x = draw(1, 2, 6, 4).requires_grad_()
    grads = []
    for engine in ("cpu", "tiled"):
        q = x * 1.5
        k = q + 1
        bias, sinks = k.sum(-1, keepdim=True), q[0, :, 0, 0]
        keywords = {"bias": bias, "sinks": sinks, "engine": engine}
        seen = ch.look(q, k, q, stats=["entropy", "received"], **keywords)
        total = seen.out.sum() + seen.entropy.square().sum() + seen.received.square().sum()
        grads += torch.autograd.grad(total, x)
    torch.testing.assert_close(*grads)
