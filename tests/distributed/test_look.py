"""Statistics over ranks equal those of one machine."""

import pytest
import torch
from hypothesis import given, strategies as st

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.core.problem.biases import TensorBias
from clearhead.core.problem.check import Options
from clearhead.core.stats import map_tensors, parse_stats
from clearhead.distributed import Layout, contiguous, head_tail
from clearhead.distributed.attention import Call
from clearhead.distributed.look import look_over_ranks, must_merge_over_ranks
from tests.distributed.threads import on_ranks
from tests.pairs import pairs
from tests.problems import PROBLEMS

GROUPS = {"start": ch.prefix(3), "local": ch.window(before=2, after=1, align="end")}
ROWS = ["lse", "max", "entropy", "effective"]
STATS = [*ROWS, ch.topk(3), ch.mass({**GROUPS, "span": (4, 9)}), "received"]
SHARED = [ch.pooled(5, 4), ch.exact_rows([0, -1, 0])]  # complete on every rank
LAYOUTS = {
    "contiguous": contiguous,
    "head-tail": head_tail,
    "all on one rank": lambda length, world: Layout([*[[]] * (world - 1), [range(length)]]),
}


def over_ranks(case, queries, keys, asked, gather=False):
    """Return the look of each rank at its shards of a problem."""
    keywords = dict(case.keywords)
    bias = keywords.pop("bias", None)

    def rank(transport):
        at, on = queries.positions[transport.rank], keys.positions[transport.rank]
        mine = bias
        if isinstance(bias, TensorBias):
            rows = bias.as_4d()
            mine = ch.bias(rows if rows.shape[2] == 1 else at.cut(rows, 2))
        call = Call(Options(bias=mine, **keywords), queries, keys)
        q, k, v = at.cut(case.q, 2), on.cut(case.k, 2), on.cut(case.v, 2)
        return look_over_ranks(transport, call, q, k, v, asked, gather)

    return on_ranks(queries.world, rank)


LOOKED_AT = [name for name in PROBLEMS if name not in ("no batch", "large scores")]


@pytest.mark.parametrize(
    "problem, layout, dtype", pairs(LOOKED_AT, LAYOUTS, [torch.float64, torch.float32]), ids=str
)
def test_statistics_are_those_of_one_machine(problem, layout, dtype):
    case = PROBLEMS[problem](dtype, 0)
    asked = [*STATS, *SHARED] if case.q.shape[2] else STATS
    if case.k.shape[2] < 9:  # fewer than topk and the span name
        asked = [*ROWS, ch.mass(GROUPS), "received", *(SHARED if case.q.shape[2] else [])]
    one = ch.look(*case.tensors, stats=asked, **case.keywords)
    queries, keys = (LAYOUTS[layout](x.shape[2], 3) for x in (case.q, case.k))
    parts = over_ranks(case, queries, keys, asked)
    loose = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-9, atol=1e-9)
    for name in ("out", *ROWS):
        whole = queries.join([getattr(part, name) for part in parts], 2)
        torch.testing.assert_close(whole, getattr(one, name), **loose)
    for group in one.mass:
        whole = queries.join([part.mass[group] for part in parts], 2)
        torch.testing.assert_close(whole, one.mass[group], **loose)
    if "topk" in one.names:
        weights = queries.join([part.topk.weights for part in parts], 2)
        torch.testing.assert_close(weights, one.topk.weights, **loose)
        assert torch.equal(queries.join([part.topk.keys for part in parts], 2), one.topk.keys)
    torch.testing.assert_close(keys.join([p.received for p in parts], 2), one.received, **loose)
    for part in parts:
        for name in {"pooled", "exact_rows"} & set(one.names):
            torch.testing.assert_close(getattr(part, name), getattr(one, name), **loose)


def test_gathered_statistics_are_complete_on_every_rank():
    case = PROBLEMS["grouped"](torch.float32, 0)
    one = ch.look(*case.tensors, stats=[*STATS, *SHARED], **case.keywords)
    queries, keys = (head_tail(x.shape[2], 3) for x in (case.q, case.k))
    for part in over_ranks(case, queries, keys, [*STATS, *SHARED], gather=True):
        assert part.names == one.names
        for name in one.names:
            a, b = getattr(part, name), getattr(one, name)
            torch.testing.assert_close(
                tuple(a.values()) if isinstance(a, dict) else a,
                tuple(b.values()) if isinstance(b, dict) else b,
            )


def weighted_by(numbers):
    return [
        ch.weighted(numbers - 1, {**GROUPS, "span": (4, 9)}),
        ch.value_weighted({"start": ch.prefix(3), "span": (4, 9)}, by=numbers),
        ch.topk(3, by=numbers),
        ch.received(by=numbers),
        ch.pooled(5, 4, by=numbers),
    ]


@pytest.mark.parametrize("per", ["key", "head and key", "batch, head and key"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_per_key_are_those_of_the_whole_text(layout, per):
    case = PROBLEMS["grouped"](torch.float64, 0)
    (B, H, Tq, _), Tk = case.q.shape, case.k.shape[2]
    sizes = {"key": (Tk,), "head and key": (H, Tk), "batch, head and key": (B, H, Tk)}
    numbers = torch.rand(sizes[per], generator=torch.Generator().manual_seed(1)) + 0.1
    numbers[..., 2] = 0
    asked, world = weighted_by(numbers), 2
    one = ch.look(*case.tensors, stats=asked, **case.keywords)
    queries, keys = (LAYOUTS[layout](size, world) for size in (Tq, Tk))
    for part in over_ranks(case, queries, keys, asked, gather=True):
        for name in one.names:
            a, b = getattr(part, name), getattr(one, name)
            if isinstance(b, dict):
                assert a.keys() == b.keys()
                a, b = tuple(a.values()), tuple(b.values())
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_ranks_with_other_numbers_per_key_are_named():
    case = PROBLEMS["grouped"](torch.float64, 0)
    Tk = case.k.shape[2]
    queries, keys = (contiguous(x.shape[2], 2) for x in (case.q, case.k))

    def rank(transport):
        at, on = queries.positions[transport.rank], keys.positions[transport.rank]
        numbers = torch.ones(Tk) + transport.rank
        call = Call(Options(**case.keywords), queries, keys)
        q, k, v = at.cut(case.q, 2), on.cut(case.k, 2), on.cut(case.v, 2)
        with pytest.raises(BadValue, match="different calls: stats is"):
            look_over_ranks(transport, call, q, k, v, [ch.weighted(numbers)])

    on_ranks(2, rank)


def test_norms_of_values_outside_a_model_are_refused():
    case = PROBLEMS["grouped"](torch.float64, 0)

    def rank(transport):
        call = Call(Options(**case.keywords))
        with pytest.raises(BadValue, match="'value' outside a model"):
            look_over_ranks(transport, call, *case.tensors, [ch.topk(2, by="value")])

    on_ranks(1, rank)


@st.composite
def subsets(draw):
    """Draw a problem, and any statistics that fit it, also none."""
    case = PROBLEMS[draw(st.sampled_from([*PROBLEMS]))](torch.float64, draw(st.integers(0, 999)))
    (B, H, Tq, _), Tk = case.q.shape, case.k.shape[2]
    source = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    numbers = torch.rand(
        draw(st.sampled_from([(Tk,), (H, Tk), (B, H, Tk)])), generator=source, dtype=torch.float64
    )
    by = st.sampled_from([None, numbers])
    positions = st.lists(st.integers(-Tq, Tq - 1), max_size=4) if Tq else st.just([])
    bins = st.integers(1, 23)
    fitting = [
        *ROWS,
        ch.mass(GROUPS),
        ch.weighted(numbers - 0.5, {"start": ch.prefix(3), "span": (0, min(2, Tk))}),
        ch.value_weighted(GROUPS, by=numbers),
        ch.received(by=draw(by)),
        ch.pooled(draw(bins), draw(bins), by=draw(by)),
        ch.exact_rows(draw(positions)),
    ]
    if Tk:
        fitting.append(ch.topk(draw(st.integers(1, Tk)), by=draw(by)))
    chosen = st.lists(st.sampled_from(range(len(fitting))), unique=True)
    return case, [
        fitting[i] for i in draw(st.integers(0, len(fitting) - 1).map(lambda i: [i]) | chosen)
    ]


@given(subsets(), st.integers(1, 3), st.sampled_from([*LAYOUTS]), st.booleans())
def test_every_subset_of_statistics_is_that_of_one_machine(asked, world, layout, gather):
    case, stats = asked
    one = ch.look(*case.tensors, stats=stats, **case.keywords)
    queries, keys = (LAYOUTS[layout](x.shape[2], world) for x in (case.q, case.k))
    for rank, part in enumerate(over_ranks(case, queries, keys, stats, gather)):
        assert part.names == one.names
        for name in one.names:
            held, expected = (keys if name == "received" else queries), getattr(one, name)
            if not (gather or name in ("pooled", "exact_rows")):
                own = held.positions[rank]
                expected = map_tensors(expected, lambda x, own=own: own.cut(x, 2))
            torch.testing.assert_close(
                getattr(part, name), expected, rtol=1e-9, atol=1e-9, msg=f"{name} of {stats}"
            )


@pytest.mark.parametrize("score", [ch.received(power=2), ch.received(last=3), ch.drop_error()])
def test_scores_of_keys_are_not_merged(score):
    with pytest.raises(ch.BadValue, match="ranks merge only three sums") as error:
        must_merge_over_ranks(parse_stats(["entropy", score]))
    assert score.name in str(error.value)
    must_merge_over_ranks(parse_stats(["entropy", ch.received(by=torch.ones(4))]))
