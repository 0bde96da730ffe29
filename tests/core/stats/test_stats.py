"""Statistics gathered while streaming equal those of the dense float64 weights, in parts or whole.

The weights that everything is held against are those of the reference, step by step.
"""

import importlib
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead import (
    BadType,
    BadValue,
    Causal,
    Look,
    alibi,
    bias,
    causal,
    everything,
    lengths,
    look,
    prefix,
    window,
)
from clearhead.core.engines.choice import statistics_of
from clearhead.core.engines.reference import steps
from clearhead.core.masks import Grid
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.stats import (
    TopWeights,
    exact_rows,
    mass,
    parse_stats,
    pooled,
    sweep,
    topk,
    value_weighted,
    weighted,
)
from clearhead.core.stats.parse import BY_NAME, EXAMPLES, is_per_query
from clearhead.core.stats.statistic import RowStatistic
from clearhead.core.stats.top_scores import top_of_tile
from tests.fresh_process import run_program
from tests.memory import needs_peak
from tests.problems import PROBLEMS, make

tiles = importlib.import_module("clearhead.core.stats.sweep")

NOTHING = float("-inf")
GROUPS = {
    "sink": prefix(1),
    "local": window(before=2, after=1, align="start"),
    "all": everything,
    "name": (2, 9),
    "none": (4, 4),
}


def everything_for(problem):
    picked = [5, 0, -1] if problem.Tq > 5 else [0, -1] if problem.Tq else []
    return [
        "lse",
        "max",
        "entropy",
        "effective",
        topk(4),
        mass(GROUPS),
        "received",
        pooled(3, 5),
        exact_rows(picked),
    ]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 3 queries and 5 keys, so that every problem has many, cut at no convenient place."""
    for name, size in (("TILE_QUERIES", 3), ("LEAST_QUERIES", 3), ("LEAST_KEYS", 5)):
        monkeypatch.setattr(tiles, name, size)
    monkeypatch.setattr(tiles, "TILE_CELLS", 1)
    monkeypatch.setattr(tiles._Sweep, "least_keys", 5)


def dense(problem, inputs, wanted):
    """Every statistic as one would write it with the whole matrix at hand."""
    made = {s.name: s.tensor for s in steps(problem, inputs)}
    w = made["weights"]
    x = [made[n] for n in ("scores", "scaled", "capped", "biased", "masked") if n in made][-1]
    p = problem
    found = {}
    for s in parse_stats(wanted, p.grid):
        n = x.new_ones(1) if s.factors is None else s.factors.of(p).unsqueeze(2)
        if s.name == "lse":
            sink = x.new_full((1, p.H, 1, 1), NOTHING)
            sink = sink if p.sinks is None else p.sinks.to(x).reshape(1, -1, 1, 1)
            every = torch.cat([x, sink.expand(p.B, p.H, p.Tq, 1)], -1)
            found["lse"] = every.logsumexp(-1)
        elif s.name == "max":
            found["max"] = F.pad(x, (0, 1), value=NOTHING).amax(-1)
        elif s.name in ("entropy", "effective"):
            logs = torch.where(w > 0, w, 1.0).log()
            entropy = -(w * logs).sum(-1)
            found[s.name] = entropy if s.name == "entropy" else entropy.exp()
        elif s.name == "topk":
            best, keys = (x + n.log()).sort(dim=-1, descending=True, stable=True)
            best, keys = best[..., : s.n], keys[..., : s.n]
            weights = (w * n).gather(-1, keys)
            found["topk"] = TopWeights(weights, keys.masked_fill(best == NOTHING, -1))
        elif s.name in ("mass", "weighted", "value_weighted"):
            total = (w * n).sum(-1) if s.name == "value_weighted" else 1.0
            found[s.name] = {
                name: (w * n * mask.key_ranges(p.grid).to_bool()).sum(-1) / total
                for name, mask in s.groups.items()
            }
        elif s.name == "received":
            found["received"] = (w * n).sum(2)
        elif s.name == "pooled":
            found["pooled"] = mean_pool(w * n, min(s.rows, p.Tq), min(s.cols, p.Tk))
        elif s.name == "exact_rows":
            found["exact_rows"] = w[:, :, list(s.queries)]
    return found


def mean_pool(w, r, c):
    """Bin by bin, as in the docstring of `pooled`."""
    Tq, Tk = w.shape[2:]
    out = w.new_zeros(*w.shape[:2], r, c)
    for i in range(r):
        for j in range(c):
            block = w[:, :, i * Tq // r : (i + 1) * Tq // r, j * Tk // c : (j + 1) * Tk // c]
            out[:, :, i, j] = block.sum(-1).mean(-1)
    return out


def flat(results):
    """Every tensor by a name: topk.weights, topk.keys, mass.sink ..."""
    out = {}
    for name, result in results.items():
        if isinstance(result, TopWeights):
            out |= {f"{name}.weights": result.weights, f"{name}.keys": result.keys}
        elif isinstance(result, dict):
            out |= {f"{name}.{group}": x for group, x in result.items()}
        else:
            out[name] = result
    return out


def assert_same(got, want, rtol=1e-12, atol=1e-12, keys_of=None):
    got, want = flat(got), flat(want)
    assert list(got) == list(want)
    for name, x in want.items():
        if name == "topk.keys" and keys_of is not None:
            # In fp32 two weights may change places; then the fp64 weights there are as good.
            assert torch.equal(got[name] < 0, x < 0), name
            continue
        torch.testing.assert_close(
            got[name].to(x.dtype), x, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


def problem_of(name, dtype, **more):
    case = PROBLEMS[name](dtype, 0) if isinstance(name, str) else name(dtype, 0)
    return make_problem(*case.tensors, Options(**(case.keywords | more)))


# -------------------------------------------------------------------------- against dense weights


@pytest.mark.parametrize("held", [2**24, 0], ids=["held", "computed twice"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_equal_to_dense_weights_in_float64(name, held, small_tiles, monkeypatch):
    monkeypatch.setattr(tiles, "STORED_CELLS", held)
    if name == "large":
        monkeypatch.setattr(tiles, "TILE_QUERIES", 101)
        monkeypatch.setattr(tiles, "LEAST_QUERIES", 101)
        monkeypatch.setattr(tiles._Sweep, "least_keys", 67)
    problem, inputs = problem_of(name, torch.float64)
    wanted = everything_for(problem)
    assert_same(sweep(problem, inputs, wanted).finish(), dense(problem, inputs, wanted))


@pytest.mark.parametrize("name", PROBLEMS)
def test_float32_is_within_a_hundred_thousandth(name):
    problem, inputs = problem_of(name, torch.float32)
    wanted = everything_for(problem)
    got = sweep(problem, inputs, wanted).finish()
    exact, wide = problem_of(name, torch.float64)
    # "large scores" multiplies the rounding of a dot product by 300: torch's own softmax is as far.
    rtol = 1e-3 if name == "large scores" else 1e-5
    atol = 1e-4 if name == "large scores" else 2e-6
    assert_same(got, dense(exact, wide, wanted), rtol, atol, keys_of="float64")
    assert all(x.dtype in (torch.float32, torch.int64) for x in flat(got).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_wide(dtype):
    problem, inputs = problem_of("grouped", dtype)
    exact, wide = make_problem(*(x.double() for x in inputs), Options(mask=problem.mask))
    wanted = ["lse", "entropy", "received"]
    assert_same(
        sweep(problem, inputs, wanted).finish(), dense(exact, wide, wanted), rtol=1e-5, atol=2e-6
    )


def test_weights_never_carry_dropout():
    with_it = problem_of("dropout by seed", torch.float64)
    without = problem_of("dropout by seed", torch.float64, dropout=0.0)
    wanted = everything_for(with_it[0])
    assert_same(sweep(*with_it, wanted).finish(), sweep(*without, wanted).finish(), 0, 0)


# ---------------------------------------------------------------------------------- by the pencil


def test_two_keys_by_hand():
    """q·k = 0 and √2, scaled by 1/√2: logits 0 and 1, weights 1/(1+e) and e/(1+e)."""
    q, k = torch.tensor([[0.0, math.sqrt(2)]], dtype=torch.float64), torch.eye(2).double()
    problem, inputs = make_problem(q, k, k)
    a, b = 1 / (1 + math.e), math.e / (1 + math.e)
    found = sweep(problem, inputs, ["lse", "max", "entropy", "effective", topk(3)]).finish()
    entropy = -a * math.log(a) - b * math.log(b)
    look = Look(problem, torch.zeros(1, 1, 1, 2), found)
    assert look.lse.tolist() == pytest.approx([math.log(1 + math.e)])
    assert look.max.tolist() == pytest.approx([1.0])
    assert look.entropy.tolist() == pytest.approx([entropy])
    assert look.effective.tolist() == pytest.approx([math.exp(entropy)])
    assert look.topk.weights[0].tolist() == pytest.approx([b, a])
    assert look.topk.keys.tolist() == [[1, 0]]


def test_a_sink_of_the_same_logit_takes_the_same_weight():
    """Three keys of logit 0 and a sink of logit 0: four shares of 1/4, one of them no key's."""
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)
    found = sweep(
        *make_problem(q, k, k, Options(sinks=torch.zeros(1))), ["lse", "max", "entropy", "received"]
    ).finish()
    assert found["lse"].flatten().tolist() == pytest.approx([math.log(4)] * 2)
    assert found["max"].flatten().tolist() == [0, 0]
    assert found["entropy"].flatten().tolist() == pytest.approx([0.75 * math.log(4)] * 2)
    assert found["received"].flatten().tolist() == pytest.approx([0.5] * 3)


def test_mass_by_hand():
    """Five keys alike, so each has 1/5. A group counts its keys for any position of the query."""
    groups = {
        "sink": prefix(1),
        "local": window(before=1, after=0),
        "name": (1, 4),
        "tail": (3, 99),
    }
    found = sweep(*make_problem(*(torch.zeros(5, 2),) * 3), [mass(groups)]).finish()["mass"]
    shares = {name: x.flatten().tolist() for name, x in found.items()}
    assert shares["sink"] == pytest.approx([0.2] * 5)
    assert shares["local"] == pytest.approx([0.2, 0.4, 0.4, 0.4, 0.4])
    assert shares["name"] == pytest.approx([0.6] * 5)
    assert shares["tail"] == pytest.approx([0.4] * 5)


def test_a_tile_has_no_more_keys_than_may_be_seen():
    scores = torch.tensor([[[[NOTHING, 2.0, NOTHING]]]])
    top, keys = top_of_tile(scores, 7, 2)
    assert top.flatten().tolist() == [2.0, NOTHING] and keys.flatten().tolist() == [8, -1]
    assert top_of_tile(scores, 7, 4).keys.flatten().tolist() == [8, -1, -1]


def test_a_fully_masked_query():
    problem, inputs = make_problem(
        torch.randn(1, 3), *(torch.randn(4, 3),) * 2, Options(mask=~everything)
    )
    found = sweep(problem, inputs, everything_for(problem)).finish()
    assert found["lse"].item() == found["max"].item() == float("-inf")
    assert found["entropy"].item() == 0 and found["effective"].item() == 1
    assert found["topk"].keys.flatten().tolist() == [-1] * 4
    for zero in (found["topk"].weights, found["received"], found["pooled"], found["exact_rows"]):
        assert not zero.any()


def test_bins_that_do_not_divide():
    """7 queries in 3 bins: 2, 2 and 3 of them. 2 queries in 5 bins are 2 bins."""
    p, i = make_problem(torch.zeros(7, 2), *(torch.zeros(5, 2),) * 2)
    found = sweep(p, i, [pooled(3, 2)]).finish()["pooled"]
    torch.testing.assert_close(found, torch.tensor([[[[0.4, 0.6]] * 3]]))
    p, i = make_problem(
        torch.zeros(2, 2), *(torch.zeros(3, 2),) * 2, Options(mask=Causal(align="start"))
    )
    found = sweep(p, i, [pooled(5, 5)]).finish()["pooled"]
    torch.testing.assert_close(found, torch.tensor([[[[1.0, 0, 0], [0.5, 0.5, 0]]]]))


def test_queries_of_a_bin_are_counted_where_they_are(monkeypatch):
    """torch.bincount would copy two numbers from a GPU; of all queries, and of some."""
    monkeypatch.setattr(torch, "bincount", None)
    for Tq, bins in ((7, 3), (101, 13), (5, 9)):
        n = min(bins, Tq)
        grid, total = Grid(Tq, 11), torch.rand(2, 3, n, 7)
        for queries in (range(Tq), range(1, Tq, 3), range(0)):
            of = [sum(i * Tq // n <= q < (i + 1) * Tq // n for q in queries) for i in range(n)]
            found = pooled(bins, 7).finish(total, grid, torch.tensor(queries, dtype=torch.long))
            assert torch.equal(found, total / torch.tensor(of).clamp(min=1.0).unsqueeze(-1))


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_ties_go_to_the_lower_key(n, small_tiles):
    """Scores of few different values, so that ties are among the n, at its edge, across tiles."""
    source = torch.Generator().manual_seed(n)
    x = torch.randint(0, 3, (23, 41), generator=source).double()
    x[3] = 1.0
    problem, inputs = make_problem(
        torch.zeros(23, 2).double(), *(torch.zeros(41, 2).double(),) * 2, Options(bias=bias(x))
    )
    keys = sweep(problem, inputs, [topk(n)]).finish()["topk"].keys[0, 0]
    assert torch.equal(keys, x.sort(dim=-1, descending=True, stable=True).indices[:, :n])
    assert keys[3].tolist() == list(range(n))


def test_nan_stays_where_it_may_look(small_tiles):
    """Key 10 is NaN and masked for queries 0 to 9; query 10, in one tile with 9, sees it."""
    q, k = torch.randn(13, 4), torch.randn(13, 4)
    clean = make_problem(q, k, k, Options(mask=causal))
    k = k.clone()
    k[10] = float("nan")
    wanted = ["lse", "entropy", topk(2), pooled(13, 13), exact_rows([9])]
    dirty = make_problem(q, k, k, Options(mask=causal))
    first = sweep(*dirty, wanted)
    got = flat(first.finish())
    want = flat(sweep(*clean, wanted).finish())
    for name in ("lse", "entropy", "topk.weights", "pooled"):
        assert torch.equal(got[name][:, :, :10], want[name][:, :, :10]), name
        assert got[name][:, :, 10:].isnan().any(), name
    assert torch.equal(got["exact_rows"], want["exact_rows"])
    again = sweep(*dirty, wanted, lse=first.lse).finish()["pooled"]
    torch.testing.assert_close(again[:, :, :10], want["pooled"][:, :, :10])


@pytest.mark.parametrize("engine", ["auto", "cpu", "tiled"])
def test_masked_keys_have_weight_0_in_a_row_of_nan(engine):
    q, k = torch.randn(1, 2, 7, 5), torch.randn(1, 2, 11, 5)
    q[:, :, 3] = torch.nan  # a query that sees the keys 0 to 3
    found = ch.look(
        q, k, k, mask=ch.Causal(align="start"), stats=[exact_rows([3]), pooled(7, 11)],
        engine=engine,
    )  # fmt: skip
    for row in (found.exact_rows[:, :, 0], found.pooled[:, :, 3]):
        assert row[..., :4].isnan().all() and not row[..., 4:].any()


def test_a_mask_of_ones_own_batch_in_a_group():
    problem, inputs = problem_of(make(Tq=17), torch.float64)
    wanted = [mass({"own": prefix([3, 8])})]
    assert_same(sweep(problem, inputs, wanted).finish(), dense(problem, inputs, wanted))


# ----------------------------------------------------------------------------------------- merging


def cuts(size):
    return st.lists(st.integers(0, size), max_size=3).map(
        lambda inner: list(zip([0, *sorted(inner)], [*sorted(inner), size], strict=True))
    )


@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(
        ["sinks and fully masked queries", "everything at once", "documents", "lengths"]
    ),
    data=st.data(),
)
def test_parts_merge_to_the_whole_in_any_order(name, data, small_tiles):
    problem, inputs = problem_of(name, torch.float64)
    wanted = everything_for(problem)
    whole = sweep(problem, inputs, wanted).finish()
    chunks = data.draw(cuts(problem.Tq).flatmap(st.permutations))
    shards = data.draw(cuts(problem.Tk).flatmap(st.permutations))
    left = data.draw(st.booleans())

    def merged(parts):
        """((a b) c) or (a (b c)), in the order drawn."""
        parts = list(parts)
        while len(parts) > 1:
            a, b = (parts.pop(0), parts.pop(0)) if left else (parts.pop(-2), parts.pop(-1))
            parts.insert(0 if left else len(parts), a.merge(b))
        return parts[0]

    done = []
    for chunk in chunks:
        q = slice(*chunk)
        first = merged(sweep(problem, inputs, wanted, q, slice(*s)) for s in shards)
        second = merged(sweep(problem, inputs, wanted, q, slice(*s), lse=first.lse) for s in shards)
        if len(shards) == 1:  # all keys at once: the first call has made both sweeps
            assert first.sums is not None
            done.append(first)
        else:
            done.append(first.merge(second) if first.sums is None else first)
    assert_same(merged(done).finish(), whole, rtol=1e-9, atol=1e-12)


def test_two_steps_over_shards_that_hold_only_their_own_keys():
    """As on machines that each hold a part of the cache: q and k are cut before the sweep."""
    problem, inputs = problem_of("grouped", torch.float64)
    wanted = everything_for(problem)
    shards = [slice(0, 5), slice(5, 6), slice(6, 17)]
    cut = [inputs._replace(k=inputs.k[:, :, s]) for s in shards]
    a, b, c = (sweep(problem, i, wanted, keys=s) for i, s in zip(cut, shards, strict=True))
    first = c.merge(a).merge(b)
    a, b, c = (
        sweep(problem, i, wanted, keys=s, lse=first.lse) for i, s in zip(cut, shards, strict=True)
    )
    found = first.merge(b.merge(c).merge(a)).finish()
    assert_same(found, sweep(problem, inputs, wanted).finish(), rtol=1e-9)
    assert a.finish()["received"].shape == (2, 6, 5)  # a shard may keep its own part
    assert list(first.finish()) == ["lse", "max", "entropy", "effective", "topk", "mass"]


def test_a_chunk_of_queries_is_finished_by_itself():
    problem, inputs = problem_of("window", torch.float64)
    wanted = everything_for(problem)
    whole = sweep(problem, inputs, [*wanted[:6]]).finish()
    w = dense(problem, inputs, [exact_rows(range(17))])["exact_rows"][:, :, 4:9]
    found = sweep(problem, inputs, wanted, queries=slice(4, 9)).finish()
    torch.testing.assert_close(found["lse"], whole["lse"][:, :, 4:9])
    torch.testing.assert_close(found["received"], w.sum(2))
    torch.testing.assert_close(found["exact_rows"], w[:, :, 1:2])  # of 5, 0 and -1 it holds query 5
    assert not found["pooled"][:, :, 2].any()  # no query of the last bin, 11 to 16, is in the chunk


def test_partials_that_do_not_merge():
    problem, inputs = problem_of("full", torch.float64)

    def part(q, k, wanted=("lse", "received"), **more):
        return sweep(problem, inputs, wanted, slice(*q), slice(*k), **more)

    a = part((0, 5), (0, 9))
    for other, why in (
        (part((0, 5), (8, 17)), "overlap"),
        (part((5, 13), (9, 17)), "pairs uncovered"),
        (part((0, 5), (9, 17), ["lse"]), "different statistics"),
        (part((0, 5), (9, 17), lse=torch.zeros(2, 6, 5).double()), "different sweeps"),
    ):
        with pytest.raises(BadValue, match=why):
            a.merge(other)
    with pytest.raises(BadValue, match=r"9 of 17 keys(?s:.*)merge it with the partials"):
        a.finish()
    with pytest.raises(BadValue, match="9 of 17 keys"):
        _ = a.lse
    with pytest.raises(BadValue, match=r"shape \(5,\)"):
        part((0, 5), (0, 9), lse=torch.zeros(5))
    with pytest.raises(BadValue, match="got 4 keys, for 3 of 17"):
        short = inputs._replace(k=inputs.k[:, :, :4])
        sweep(problem, short, ["lse"], keys=slice(0, 3))
    with pytest.raises(BadValue, match="without a step"):
        sweep(problem, inputs, ["lse"], keys=slice(0, 9, 2))


# --------------------------------------------------------------------------------------- gradients


LEARNED = ["lse", "max", "entropy", "effective", "topk", "mass", "received", "pooled", "exact_rows"]


def learning(name):
    case = PROBLEMS[name](torch.float64, 0)
    case.keywords.pop("dropout", None)
    for x in case.wanted:
        x.requires_grad_()
    return case, *make_problem(*case.tensors, Options(**case.keywords))


def score(results, only):
    """One number that depends on every finite entry, each in its own way."""
    total = 0.0
    for name, x in flat(results).items():
        if name.startswith(only) and x.is_floating_point():
            finite = torch.where(torch.isfinite(x), x, 0.0)
            total = total + (finite * torch.linspace(0.3, 1.7, x.numel()).reshape(x.shape)).sum()
    return total


@pytest.mark.parametrize("only", LEARNED)
@pytest.mark.parametrize(
    "name", ["full", "sinks and fully masked queries", "everything at once", "lengths", "no keys"]
)
def test_gradients_equal_autograd_through_dense_weights(name, only, small_tiles):
    case, problem, inputs = learning(name)
    asked = {s.name: s for s in parse_stats(everything_for(problem))}
    wanted = [asked[only]]
    results = []
    for found in (sweep(problem, inputs, wanted).finish(), dense(problem, inputs, wanted)):
        leaves = (case.q, case.k, *case.learn)
        total = score(found, only)
        results.append(
            torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
            if isinstance(total, torch.Tensor) and total.requires_grad
            else [torch.zeros_like(x) for x in leaves]
        )
    for got, want in zip(*results, strict=True):
        assert bool(torch.isfinite(got).all())
        torch.testing.assert_close(got, want.nan_to_num(), rtol=1e-9, atol=1e-11)
    if name != "no keys":
        assert any(bool(g.any()) for g in results[0])


def test_gradients_flow_through_the_two_steps(small_tiles):
    case, problem, inputs = learning("everything at once")
    wanted = ["received", pooled(3, 5)]
    shards = [slice(0, 7), slice(7, 17)]
    a, b = (sweep(problem, inputs, wanted, keys=s) for s in shards)
    first = a.merge(b)
    a, b = (sweep(problem, inputs, wanted, keys=s, lse=first.lse) for s in shards)
    leaves = (case.q, case.k, *case.learn)
    got = torch.autograd.grad(score(a.merge(b).finish(), ""), leaves)
    want = torch.autograd.grad(score(dense(problem, inputs, wanted), ""), leaves)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11)


def test_slopes_of_alibi_learn():
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    q, k = torch.randn(2, 5, 3).double(), torch.randn(2, 5, 3).double()
    asked = make_problem(q, k, k, Options(bias=alibi(slopes), mask=causal))
    got = torch.autograd.grad(sweep(*asked, ["entropy"]).finish()["entropy"].sum(), slopes)
    want = torch.autograd.grad(dense(*asked, ["entropy"])["entropy"].sum(), slopes)
    torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------- time and space


class Allocations(TorchDispatchMode):
    """The most elements in a tensor that any operation gives back."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return result


def test_nothing_grows_with_the_square(monkeypatch):
    S = 16384
    monkeypatch.setattr(tiles, "TILE_CELLS", 2**17)
    q = torch.randn(1, 1, S, 4)
    problem, inputs = make_problem(q, q, q, Options(mask=window(before=100, after=0)))
    with torch.no_grad(), Allocations() as seen:
        sweep(problem, inputs, everything_for(problem))
    assert seen.largest <= 16 * S  # S * S is a thousand times that


def test_nothing_grows_with_the_square_in_training():
    S = 1024
    q = torch.randn(1, 1, S, 4, requires_grad=True)
    problem, inputs = make_problem(q, q, q, Options(mask=causal))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        found = sweep(problem, inputs, ["entropy", "received", pooled(8, 8)]).finish()
    assert max(kept) <= 16 * S
    (found["entropy"].sum() + found["received"].square().sum()).backward()
    assert bool(torch.isfinite(q.grad).all())


def test_empty_tiles_are_skipped_and_each_product_is_made_once(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_CELLS", 32 * 128)
    monkeypatch.setattr(tiles, "TILE_QUERIES", 128)
    monkeypatch.setattr(tiles, "LEAST_QUERIES", 128)
    q = torch.randn(1, 1, 1024, 4)
    products = 0
    original = type(make_problem(q, q, q)[0]).logits

    def counted(self, *args):
        nonlocal products
        products += 1
        return original(self, *args)

    monkeypatch.setattr("clearhead.core.problem.problem.Problem.logits", counted)
    sweep(
        *make_problem(q, q, q, Options(mask=causal)), ["lse", "entropy", "received", pooled(8, 8)]
    )
    assert products == 8 * 9 // 2  # 8 x 8 tiles of 128 x 128, at and below the diagonal


PEAK = """
import sys, torch, clearhead
from clearhead import stats
from clearhead.core.problem.check import Options, make_problem
from tests.memory import grown

def sweep(S):
    groups = {"sink": clearhead.prefix(1), "local": clearhead.window(before=15)}
    wanted = ["lse", "max", "entropy", "effective", stats.topk(8), stats.mass(groups), "received",
              stats.pooled(256, 256), stats.exact_rows([0, -1])]
    if "look" in sys.argv:
        return clearhead.look(q[:S], k[:S], k[:S], mask=clearhead.causal, stats=wanted)
    problem, inputs = make_problem(q[:S], k[:S], k[:S], Options(mask=clearhead.causal))
    return stats.sweep(problem, inputs, wanted).finish()

torch.set_grad_enabled(False)
q, k = torch.randn(65536, 64), torch.randn(65536, 64)
sweep(300)
print(grown(lambda: sweep(65536 if "look" in sys.argv else 32768)))
"""


@needs_peak
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by", ["sweep", "look"])
def test_long_texts_take_no_square(by):
    """`look` counts 65,536 tokens in the C++ core, and `sweep` half as many in torch. Dense float32
    matrices would have 17 and 4 GB."""
    allowed = {"sweep": 600, "look": 100}[by]  # tiles of torch are freed and made in many sizes
    run = run_program(PEAK, by)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < allowed


# ---------------------------------------------------------------------------- requests and look


@pytest.mark.parametrize(
    ("entries", "error", "says"),
    [
        ("lse", BadType, r"stats=\['lse'\]"),
        (["variance"], BadValue, r"'variance'(?s:.*)\"lse\".*topk\(n\).*rows"),
        (["topk"], BadValue, r"topk\(8\)"),
        ([7], BadValue, "contains 7"),
        (["lse", "lse"], BadValue, "lse twice"),
        ([topk(2), topk(3)], BadValue, "topk twice"),
        ([exact_rows([13])], BadValue, "query 13, and there are 13"),
        ([exact_rows([0, -14])], BadValue, "query -14"),
        ([mass({"near": window(before=1)})], BadValue, "Tq=13 queries and Tk=17"),
    ],
)
def test_wrong_requests_are_refused(entries, error, says):
    with pytest.raises(error, match=says) as caught:
        parse_stats(entries, problem_of("full", torch.float32)[0].grid)
    assert caught.value.gave and caught.value.rule and caught.value.hint


@pytest.mark.parametrize(
    ("make_it", "error", "says"),
    [
        (lambda: topk(0), BadValue, "topk got n=0"),
        (lambda: topk(True), BadType, "topk got n=True"),
        (lambda: pooled(0, 3), BadValue, "pooled got rows=0"),
        (lambda: pooled(3, 2.5), BadType, "pooled got cols=2.5"),
        (lambda: mass({}), BadType, "mass got {}"),
        (lambda: mass({"a": (3, 1)}), BadValue, r"\(3, 1\) for the group 'a'"),
        (lambda: mass({"a": 3}), BadValue, "3 for the group 'a'"),
        (lambda: exact_rows(3), BadType, "exact_rows got 3"),
        (lambda: exact_rows([1.5]), BadType, r"exact_rows got \[1.5\]"),
    ],
)
def test_wrong_statistics_are_refused(make_it, error, says):
    with pytest.raises(error, match=says):
        make_it()


def test_every_statistic_declares_itself():
    problem, inputs = problem_of("full", torch.float32)
    asked = parse_stats(everything_for(problem), problem.grid)
    assert parse_stats(asked) == asked
    found = sweep(problem, inputs, asked).finish()
    sizes = {"B": 2, "H": 6, "Tq": 13, "Tk": 17, "min(rows,Tq)": 3, "min(cols,Tk)": 5}
    for s in asked:
        result = found[s.name]
        each = (
            result.values()
            if isinstance(result, dict)
            else result
            if isinstance(result, TopWeights)
            else [result]
        )
        count = {"topk": 4, "exact_rows": 3}.get(s.name, 0)
        shape = tuple({**sizes, "n": count}[letter] for letter in s.shape.split())
        assert {tuple(x.shape) for x in each} == {shape}
        assert s.sweep == ("second" if s.name in ("received", "pooled", "exact_rows") else "first")
        assert s.formula


def test_a_look_shows_itself():
    q = torch.randn(5, 3)
    problem, inputs = make_problem(q, q, q, Options(mask=causal & ~prefix(1)))
    found = sweep(problem, inputs, ["lse", topk(2), mass({"sink": prefix(1)}), "received"]).finish()
    look = Look(problem, torch.ones(1, 1, 5, 3), found)
    assert look.out.shape == (5, 3) and look.lse.shape == (5,) and look.received.shape == (5,)
    assert look.topk.weights.shape == look.topk.keys.shape == (5, 2)
    assert look.names == ("lse", "topk", "mass", "received") and "lse" in dir(look)
    lines = repr(look).splitlines()
    assert lines[0].startswith("look at B=1 H=1 Tq=5 Tk=5") and len(lines) == 6
    assert lines[1].split() == "out 5 x 3 1 to 1, mean 1".split()
    assert lines[2].endswith("1 not finite")
    assert lines[4].split() == "mass sink 5 0 to 0, mean 0".split()
    assert "empty" in repr(Look(problem, torch.zeros(1, 1, 5, 0), {}))


def test_an_error_names_a_missing_statistic():
    problem, _ = problem_of("full", torch.float32)
    look = Look(problem, torch.zeros(2, 6, 13, 5), {"lse": torch.zeros(2, 6, 13)})
    with pytest.raises(AttributeError, match=r"no 'entropy'(?s:.*)out, lse(?s:.*)stats=") as caught:
        _ = look.entropy
    assert isinstance(caught.value, BadValue) and caught.value.gave
    assert not hasattr(look, "_repr_svg_")


def test_numbers_of_another_engine_finish_the_same():
    """What a native kernel would fill: the maximum, the sum and the moment, from outside."""
    from clearhead.core.problem.online_softmax import State
    from clearhead.core.stats import Partial
    from clearhead.core.stats.row_statistics import Moment

    problem, inputs = problem_of("sinks", torch.float64)
    made = {s.name: s.tensor for s in steps(problem, inputs)}
    x = made["masked"]
    top = x.amax(-1)
    below = (x - top.unsqueeze(-1)).clamp(min=-1000)
    moment = Moment((below.exp() * below).sum(-1))
    state = State(top, below.exp().sum(-1), {"moment": moment})
    asked = parse_stats(["lse", "max", "entropy"])
    q, k = torch.arange(13), torch.arange(17)
    got = Partial(problem, asked, q, k, state, None).finish()
    assert_same(got, dense(problem, inputs, asked))


@pytest.mark.parametrize("statistic", [topk(2), "received", pooled(2, 2), exact_rows([0])], ids=str)
def test_what_vmap_does_not_follow_is_refused(statistic):
    x = torch.randn(3, 2, 5, 4)
    with pytest.raises(BadValue, match="inside torch"):
        torch.func.vmap(lambda x: look(x, x, x, stats=[statistic]).out)(x)
    entropy = torch.func.vmap(lambda x: look(x, x, x).entropy)(x)
    torch.testing.assert_close(entropy, look(x, x, x).entropy)


def test_unknown_statistics_are_refused_before_the_model_runs():
    with (
        pytest.raises(ch.BadValue, match="entropi"),
        ch.watch(torch.nn.Linear(2, 2), stats=["entropi"]),
    ):
        raise AssertionError("the block was entered")


@pytest.mark.parametrize("verb", [ch.look, ch.explain, lambda q, k, v: ch.matrix(q, k)])
def test_meta_tensors_have_nothing_to_look_at(verb):
    q = torch.empty(1, 2, 3, 5, device="meta")
    with pytest.raises(ch.BadValue, match="meta tensors"):
        verb(q, q, q)


def test_statistics_follow_torch_func():
    x = torch.randn(1, 2, 6, 4)
    for stats in ("entropy", "received"):

        def total(x, stats=stats):
            return getattr(ch.look(x, x, x, mask=ch.causal, stats=[stats]), stats).square().sum()

        by_func = torch.func.grad(total)(x)
        y = x.clone().requires_grad_()
        torch.testing.assert_close(by_func, torch.autograd.grad(total(y), y)[0])
    biases = torch.randn(3, 6, 6)
    got = torch.func.vmap(lambda b: ch.attention(x, x, x, bias=b))(biases)
    for a, b in zip(got, biases, strict=True):
        torch.testing.assert_close(a, ch.attention(x, x, x, bias=b))


def test_the_entropy_of_one_key_is_no_negative_zero():
    q = torch.randn(1, 1, 64, 16)
    for engine in ("tiled", "steps"):
        mask = ch.window(before=0, after=0)
        entropy = ch.look(q, q, q, mask=mask, engine=engine, stats=["entropy"]).entropy
        assert (entropy == 0).all() and not torch.signbit(entropy).any()


def test_every_statistic_declares_its_third_dimension():
    q, k = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 11, 5)
    by_call = [
        topk(2), mass({"first": ch.prefix(1)}), weighted(torch.ones(11)),
        value_weighted({"first": ch.prefix(1)}, by=torch.ones(11)), pooled(2, 3),
        exact_rows([0, 1, 2]),
    ]  # fmt: skip
    requested = parse_stats(
        ["lse", "max", "entropy", "effective", "received", "drop_error", *by_call]
    )
    assert {s.name for s in requested} == {*BY_NAME, *EXAMPLES} - {"varying"}
    seen = ch.look(q, k, k, stats=requested)
    for s in requested:
        (size,) = {x.shape[2] for x in tree_leaves(getattr(seen, s.name))}
        assert s.axis == {7: "queries", 11: "keys"}.get(size, "")
        assert is_per_query(s.name) == (size == 7)


@dataclass(frozen=True)
class Concentration(RowStatistic):
    """The sum of squared weights: the probability that two draws choose the same key."""

    name, formula, accumulator = "concentration", "Σₖ w²", "squares"

    class Squares(NamedTuple):
        total: torch.Tensor

        def moved(self, shift, factor, sum):
            return Concentration.Squares(self.total * factor**2)

        def merged(self, other):
            return Concentration.Squares(self.total + other.total)

    def empty(self, p, queries):
        return self.Squares(torch.zeros(p.B, p.H, queries, dtype=p.wide))

    def counter(self, p):
        return lambda tile: self.Squares(tile.exps.square().sum(-1))

    def finish(self, rows):
        (squares,) = rows.state.more["squares"]
        return squares * rows.factor.square()


@pytest.mark.parametrize("engine", ["cpu", "tiled", "steps"])
def test_a_statistic_of_ones_own_needs_a_class_only(engine):
    q, k, v = torch.randn(2, 4, 37, 8), torch.randn(2, 2, 700, 8), torch.randn(2, 2, 700, 8)
    mask, sinks = ch.Causal(align="end"), torch.randn(4)
    keywords = {"mask": mask, "sinks": sinks, "engine": engine}
    look = ch.look(q, k, v, stats=["lse", Concentration(), "received"], **keywords)
    weights = ch.explain(q, k, v, mask=mask, sinks=sinks)["weights"]
    torch.testing.assert_close(look.concentration, weights.square().sum(-1))
    torch.testing.assert_close(look.received, weights.sum(2), rtol=1e-5, atol=1e-5)


NO_MORE = {
    "topk": (topk(6), "topk got n=6, and there are 5 keys."),
    "span": (mass({"a": (0, 5), "b": (3, 6)}), "mass got (3, 6) for the group 'b': there are 5"),
    "lengths": (mass({"a": lengths(keys=6)}), "lengths(keys=6) counts 6 keys, and there are 5."),
}


@pytest.mark.parametrize("what", NO_MORE)
def test_a_look_has_no_more_keys_than_its_call(what):
    statistic, gave = NO_MORE[what]
    q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(BadValue, match=re.escape(gave)):
        ch.look(q, k, k, stats=[statistic])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_has_no_more_keys_than_there_are(dtype):
    q, k = torch.randn(1, 2, 5, 8, dtype=dtype), torch.randn(1, 2, 20, 8, dtype=dtype)
    problem, inputs = make_problem(q, k, k)
    part = sweep(problem, inputs, [topk(10**12)])
    assert part.rows.more["top"].keys.shape == (1, 2, 5, 20)
    few = ch.look(q, k, k, stats=[topk(20)]).topk
    for many in (part.finish()["topk"], statistics_of(problem, inputs, [topk(10**12)])["topk"]):
        assert many.keys.equal(few.keys)
        torch.testing.assert_close(many.weights, few.weights)
