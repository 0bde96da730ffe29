"""Any number of ranks computes what one computes, with gradients: every named problem, layout and
number of ranks. Ranks are threads here; in tests/distributed/test_group.py they are processes."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.core.problem.biases import TensorBias
from clearhead.core.problem.check import Options
from clearhead.distributed import Layout, by_document, contiguous, head_tail, local
from clearhead.distributed.attention import Call, attend, gathered
from tests.core.engines.test_engines import forward_and_back, wanting
from tests.core.masks.test_masks import masks
from tests.distributed.threads import on_ranks
from tests.pairs import pairs
from tests.problems import PROBLEMS, Case, make, naive_attention, within_yardstick

LAYOUTS = {
    "contiguous": contiguous,
    "head-tail": head_tail,
    "all on one rank": lambda length, world: Layout([*[[]] * (world - 1), [range(length)]]),
    "single positions in turn": lambda length, world: Layout(
        [[range(i, i + 1) for i in range(r, length, world)] for r in range(world)]
    ),
}


def tiled(*tensors: Tensor, **keywords: object) -> Tensor:
    return ch.attention(*tensors, engine="tiled", **keywords)


def over_ranks(
    world: int, layout: str, case: Case, seed: Tensor, heads: int = 1
) -> tuple[Tensor, ...]:
    """Return the output and the gradients of a call, from its shards."""
    queries = LAYOUTS[layout](case.q.shape[2], world)
    keys = LAYOUTS[layout](case.k.shape[2], world)
    keywords = dict(case.keywords)
    given_bias = keywords.pop("bias", None)

    def rank(transport):
        at, on = queries.positions[transport.rank], keys.positions[transport.rank]
        q, k, v = (
            h.cut(x.detach(), 2).clone().requires_grad_()
            for h, x in ((at, case.q), (on, case.k), (on, case.v))
        )
        bias, learn = given_bias, []
        mine = dict(keywords)
        if "sinks" in mine:
            mine["sinks"] = mine["sinks"].detach().clone().requires_grad_()
        if isinstance(bias, TensorBias):
            rows = bias.as_4d().detach()
            rows = (rows if rows.shape[2] == 1 else at.cut(rows, 2)).clone().requires_grad_()
            bias = ch.bias(rows)
            learn.append(rows)
        learn += [mine["sinks"]] if "sinks" in mine else []
        call = Call(Options(bias=bias, **mine), queries, keys, heads)
        out = attend(transport, call, q, k, v)
        dout = at.cut(seed, 2).to(out.dtype)
        return out, *torch.autograd.grad(out, (q, k, v, *learn), dout)

    parts = on_ranks(world, rank)
    out, dq, dk, dv, *learned = zip(*parts, strict=True)
    whole = [queries.join(out, 2), queries.join(dq, 2), keys.join(dk, 2), keys.join(dv, 2)]
    for part in learned:
        by_rows = part[0].dim() == 4 and given_bias.as_4d().shape[2] > 1
        if by_rows:
            whole.append(queries.join(part, 2).reshape(given_bias.tensor.shape))
        else:
            shape = given_bias.tensor.shape if part[0].dim() == 4 else part[0].shape
            whole.append(sum(part).reshape(shape))
    return tuple(whole)


def check(
    world: int, layout: str, problem, dtype: torch.dtype, strict: bool = True, heads: int = 1
) -> None:
    case = wanting(problem(dtype, 0), dtype)
    seed = torch.randn(
        *case.q.shape[:3], case.v.shape[-1], generator=torch.Generator().manual_seed(5)
    ).to(dtype)
    true = forward_and_back(
        lambda *x, **kw: ch.attention(*x, engine="steps", **kw), wanting(case, torch.float64), seed
    )
    # Gradients of dropped weights err as much in all fast engines.
    plain = tiled if case.keywords.get("dropout") else naive_attention
    ruler = forward_and_back(plain, wanting(case, dtype), seed)
    got = over_ranks(world, layout, case, seed, heads)
    scale = abs(case.keywords.get("scale", 1.0) or 1.0)
    biggest = max((float(x.detach().abs().max()) for x in case.tensors if x.numel()), default=0.0)
    mixed = biggest * max(1.0, scale) * biggest * float(seed.abs().max() if seed.numel() else 0)
    names = ["out", "q", "k", "v", *["bias or sinks"] * len(case.learn)]
    for what, a, b, c in zip(names, got, true, ruler, strict=True):
        assert a.dtype == dtype and a.shape == b.shape, what
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        size = biggest if what == "out" else largest or mixed
        if (
            scale > 100 or not strict
        ):  # for few queries, scores of 4000 are rounded differently on one rank too
            size = max(size, 10 * mixed if scale > 100 else mixed)
        fits, figures = within_yardstick(a, b, c, size)
        assert fits, f"{what}: {figures}"
        if largest and strict and scale < 100:
            zeros_fit, _ = within_yardstick(torch.zeros_like(a), b, c, size)
            assert not zeros_fit, f"{what}: zeros would have passed"


@pytest.mark.parametrize(
    "problem, layout, dtype",
    pairs(PROBLEMS, LAYOUTS, [torch.float64, torch.float32, torch.bfloat16]),
    ids=str,
)
def test_ranks_are_as_exact_as_one(problem, layout, dtype):
    check(3, layout, PROBLEMS[problem], dtype)


@pytest.mark.parametrize("world", [1, 2, 4, 8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("problem", ["large", "everything at once", "alibi", "dropout by seed"])
def test_any_number_of_ranks(problem, world):
    check(world, "head-tail", PROBLEMS[problem], torch.float32)


GRID = st.sampled_from([(13, 13), (13, 17), (17, 5)]).map(lambda s: ch.masks.Grid(*s, 2, 3))


@given(GRID.flatmap(lambda g: st.tuples(st.just(g), masks(g))), st.sampled_from([*LAYOUTS]))
def test_any_mask(asked, layout):
    grid, mask = asked
    problem = make(B=grid.B, H=grid.H, G=1, Tq=grid.Tq, Tk=grid.Tk, mask=mask)
    check(3, layout, problem, torch.float32, strict=False)


def test_fully_masked_rows_of_shards_are_zero():
    case = PROBLEMS["nobody sees anything"](torch.float32, 0)
    got = over_ranks(2, "contiguous", wanting(case, torch.float32), torch.ones(2, 6, 13, 5))
    assert not any(bool(x.any()) for x in got)


def test_unshard_inverts_shard_and_sums_gradients():
    x = torch.randn(2, 11, 3)
    layout = head_tail(11, 4)

    def rank(transport):
        mine = layout.positions[transport.rank].cut(x, 1).clone().requires_grad_()
        whole = gathered(transport, mine, layout, 1)
        (learned,) = torch.autograd.grad(whole, mine, x * (transport.rank + 1))
        return whole, learned

    found = on_ranks(4, rank)
    for (whole, learned), held in zip(found, layout.positions, strict=True):
        assert torch.equal(whole, x)
        torch.testing.assert_close(learned, held.cut(10 * x, 1))


def test_a_window_sends_the_same_for_any_length():
    def sent(length: int) -> int:
        x = torch.randn(1, 2, length, 8)

        def rank(transport):
            q = contiguous(length, 4).positions[transport.rank].cut(x, 2)
            mask = ch.causal & ch.window(before=16)
            attend(transport, Call(Options(mask)), q, q, q)
            return transport.sent

        return sum(on_ranks(4, rank))

    assert sent(256) == sent(1024) == 3 * 16 * 2 * 2 * 8 * 4


def test_alibi_on_many_short_ranges_takes_few_problems(monkeypatch):
    T, world, count = 384, 2, []
    ids = torch.arange(T) // 6
    layout, mask = by_document(ids, world), ch.causal & ch.documents(ids)
    whole = torch.randn(1, 3, T, 5, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([0.5, 0.25, 0.1])
    inputs = [whole.double().requires_grad_(), slopes.double().requires_grad_()]
    out = ch.attention(*inputs[:1] * 3, mask=mask, bias=ch.alibi(inputs[1]), engine="steps")
    expected = out, *torch.autograd.grad(out.square().sum(), inputs)
    attend_here = local.attend
    monkeypatch.setattr(local, "attend", lambda *x: count.append(1) or attend_here(*x))

    def rank(transport):
        x = layout.positions[transport.rank].cut(whole, 2).clone().requires_grad_()
        learned = slopes.clone().requires_grad_()
        call = Call(Options(mask=mask, bias=ch.alibi(learned)), layout)
        out = attend(transport, call, x, x, x)
        return out, *torch.autograd.grad(out.square().sum(), (x, learned))

    out, dx, dslopes = zip(*on_ranks(world, rank), strict=True)
    found = layout.join(out, 2), layout.join(dx, 2), sum(dslopes)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert len(count) <= world * world
