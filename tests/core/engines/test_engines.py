"""Every engine computes what the reference computes: named problems, gradients, every dtype.

The expected value is that of `steps` in float64. An engine may err twice as much as plain torch in
the same dtype. It is skipped only if its own `why_not` declines the problem.
"""

import copy
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead.core.engines import tiled
from clearhead.core.engines.choice import BY_NAME, ENGINES, TRITON
from clearhead.core.problem.check import Options, make_problem
from tests.pairs import pairs
from tests.problems import PROBLEMS, Case, make, naive_attention, within_yardstick

# On a CPU the Triton kernels run in Triton's interpreter, in a separate process
# (tests/core/engines/gpu/triton/test_triton.py).
INTERPRETED = (TRITON,) if os.environ.get("TRITON_INTERPRET") == "1" else ()
# A call of "auto" without bias, sinks and dropout takes its own path (core/engines/cpu/direct.py).
NAMES = ["auto", *(engine.name for engine in (*ENGINES, *INTERPRETED))]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def engine_or_skip(name: str, *tensors: Tensor, **keywords: object) -> str:
    problem, _ = make_problem(*tensors, Options(**keywords))
    if name == "auto":
        return name
    engine = next(e for e in BY_NAME if e.name == name)
    if reasons := engine.why_not(problem):
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    return name


def wanting(case: Case, dtype: torch.dtype) -> Case:
    """The same problem in `dtype`, in which all floating tensors require gradients."""
    q, k, v = (x.to(dtype).requires_grad_() for x in case.tensors)
    learn = tuple(x.to(dtype).requires_grad_() for x in case.learn)
    keywords = dict(case.keywords)
    fresh = iter(learn)
    for name in ("bias", "sinks"):
        if isinstance(keywords.get(name), Tensor):
            keywords[name] = next(fresh)
        elif keywords.get(name) is not None and getattr(keywords[name], "tensor", None) is not None:
            keywords[name] = ch.bias(next(fresh))
    return Case(q, k, v, keywords, learn)


def forward_and_back(answer, case: Case, seed: Tensor) -> tuple[Tensor, ...]:
    out = answer(*case.tensors, **case.keywords)
    return out, *torch.autograd.grad(out, case.wanted, seed.to(out.dtype))


@pytest.mark.parametrize("name, problem, dtype", pairs(NAMES, PROBLEMS, DTYPES), ids=str)
def test_engine_is_as_exact_as_torch(name, problem, dtype):
    case = wanting(PROBLEMS[problem](dtype, 0), dtype)
    engine_or_skip(name, *case.tensors, **case.keywords)
    seed = torch.randn(
        *case.q.shape[:3], case.v.shape[-1], generator=torch.Generator().manual_seed(5)
    ).to(dtype)

    true = forward_and_back(
        lambda *x, **kw: ch.attention(*x, engine="steps", **kw), wanting(case, torch.float64), seed
    )
    got = forward_and_back(lambda *x, **kw: ch.attention(*x, engine=name, **kw), case, seed)
    ruler = forward_and_back(naive_attention, wanting(case, dtype), seed)

    scale = case.keywords.get("scale", 1.0) or 1.0
    biggest = max((float(x.detach().abs().max()) for x in case.tensors if x.numel()), default=0.0)
    mixed = (
        biggest * max(1.0, abs(scale)) * biggest * float(seed.abs().max() if seed.numel() else 0)
    )
    names = ["out", "q", "k", "v", *["bias or sinks"] * len(case.learn)]
    for what, a, b, c in zip(names, got, true, ruler, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        # With one key, the gradients of queries and keys are 0: compare with the terms that cancel.
        size = biggest if what == "out" else largest or mixed
        if (
            dtype == torch.float64
        ):  # the ruler is the truth's own sum: a score's rounding is not in it
            size *= max(1.0, abs(scale))
        fits, figures = within_yardstick(a, b, c, size)
        assert fits, f"{what}: {figures}"
        # Products of bf16, times 300, leave torch without a correct digit.
        if largest and (problem, dtype) != ("large scores", torch.bfloat16):
            zeros_fit, _ = within_yardstick(torch.zeros_like(a), b, c, size)
            assert not zeros_fit, f"{what}: zeros would have passed"


# ------------------------------------------------------------------------------- edges of the call


@pytest.fixture
def qkv():
    source = torch.Generator().manual_seed(3)
    q = torch.randn(2, 6, 7, 5, generator=source)
    k, v = (torch.randn(2, 3, 11, d, generator=source) for d in (5, 3))
    return tuple(x.requires_grad_() for x in (q, k, v))


def gradients(out: Tensor, *inputs: Tensor, of: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, torch.ones_like(out) if of is None else of)


@pytest.mark.parametrize("name", NAMES)
def test_fully_masked_queries_have_output_0_and_finite_gradients(name, qkv):
    mask = ch.lengths(queries=[7, 4]) & ch.Causal(align=-2)  # masks two more rows fully
    out = ch.attention(*qkv, mask=mask, engine=engine_or_skip(name, *qkv, mask=mask))
    blind = ~mask.to_bool(7, 11).any(-1)
    assert blind.sum() == 2 + 2 + 3
    assert (out[blind.expand(2, 6, 7)] == 0).all() and (out[~blind.expand(2, 6, 7)] != 0).all()
    for x, grad in zip(qkv, gradients(out, *qkv), strict=True):
        assert torch.isfinite(grad).all()
        assert x is not qkv[0] or (grad[blind.expand(2, 6, 7)] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_bias_of_minus_infinity_masks_like_a_mask(name, qkv):
    bias = torch.zeros(7, 11)
    bias[4] = -math.inf
    bias.requires_grad_()
    out = ch.attention(*qkv, bias=bias, engine=engine_or_skip(name, *qkv, bias=bias))
    assert (out[:, :, 4] == 0).all()
    assert all(torch.isfinite(g).all() for g in gradients(out, *qkv, bias))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("name", NAMES)
def test_masked_keys_do_not_reach_output_or_gradients(name, where, bad, qkv):
    """Keys from 8 on are masked for all queries, and hold NaN or infinity."""
    mask = ch.lengths(keys=8) & ch.window(before=3, align="end")
    q, k, v = qkv
    engine_or_skip(name, q, k, v, mask=mask)
    spoiled = {"k": k, "v": v}
    spoiled[where] = spoiled[where].detach().clone()
    spoiled[where][:, :, 8:, 1] = bad
    spoiled[where].requires_grad_()
    true = ch.attention(q, k, v, mask=mask, engine=name)
    got = ch.attention(q, spoiled["k"], spoiled["v"], mask=mask, engine=name)
    torch.testing.assert_close(got, true)
    expected = gradients(true, q, k, v)
    for a, b in zip(gradients(got, q, spoiled["k"], spoiled["v"]), expected, strict=True):
        torch.testing.assert_close(a, b)
        assert torch.isfinite(a).all()


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_key_reaches_only_the_queries_that_see_it(name, where, qkv):
    """Causal, aligned at the end: only the last query may look at the last key."""
    q, k, v = (x.detach().clone() for x in qkv)
    mask = ch.Causal(align="end")
    engine_or_skip(name, q, k, v, mask=mask)
    true = ch.attention(q, k, v, mask=mask, engine="steps")
    {"k": k, "v": v}[where][:, :, -1] = math.nan
    got = ch.attention(q, k, v, mask=mask, engine=name)
    assert torch.isnan(got[:, :, -1]).all()
    torch.testing.assert_close(got[:, :, :-1], true[:, :, :-1])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_query_reaches_only_its_own_row(name, masked, qkv):
    q, k, v = (x.detach().clone() for x in qkv)
    mask = ch.Causal(align="end") if masked else ch.everything
    true = ch.attention(q, k, v, mask=mask, engine="steps")
    q[:, :, 2] = math.nan
    got = ch.attention(q, k, v, mask=mask, engine=engine_or_skip(name, q, k, v, mask=mask))
    rest = [0, 1, 3, 4, 5, 6]
    assert torch.isnan(got[:, :, 2]).all()
    torch.testing.assert_close(got[:, :, rest], true[:, :, rest])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_query_does_not_reach_gradients_of_keys_that_it_does_not_see(name, bad, qkv):
    """Query 2 sees keys up to 6; the other gradients are those without it."""
    q, k, v = qkv
    mask = ch.Causal(align="end")
    spoiled = q.detach().clone()
    spoiled[:, :, 2, 1] = bad
    spoiled.requires_grad_()
    engine_or_skip(name, q, k, v, mask=mask)
    true = gradients(ch.attention(q, k, v, mask=mask, engine=name), k, v)
    got = gradients(ch.attention(spoiled, k, v, mask=mask, engine=name), k, v)
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a[:, :, 7:], b[:, :, 7:])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fully_masked_queries_do_not_reach_output_or_gradients(name, biased, qkv):
    """A padded query and its bias may hold NaN: its output is 0, and no gradient changes."""
    mask = ch.lengths(queries=5)
    q, k, v = qkv
    bias = torch.randn(7, 11, generator=torch.Generator().manual_seed(1)) if biased else None
    engine_or_skip(name, q, k, v, mask=mask, bias=bias)
    true = ch.attention(q, k, v, mask=mask, bias=bias, engine=name)
    spoiled = q.detach().clone()
    spoiled[:, :, 5:] = math.nan
    spoiled.requires_grad_()
    if biased:
        bias = bias.clone()
        bias[5:] = math.nan
    got = ch.attention(spoiled, k, v, mask=mask, bias=bias, engine=name)
    torch.testing.assert_close(got, true)
    for a, b in zip(gradients(got, spoiled, k, v), gradients(true, q, k, v), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_bias_does_not_reach_output_or_gradients(name, qkv):
    mask = ch.Causal(align="start")
    keep = mask.to_bool(7, 11)
    clean = torch.randn(7, 11, generator=torch.Generator().manual_seed(1))
    spoiled = clean.masked_fill(~keep, math.nan).requires_grad_()
    engine_or_skip(name, *qkv, mask=mask, bias=clean)
    true = ch.attention(*qkv, mask=mask, bias=clean, engine=name)
    got = ch.attention(*qkv, mask=mask, bias=spoiled, engine=name)
    torch.testing.assert_close(got, true)
    *_, of_bias = gradients(got, *qkv, spoiled)
    assert (of_bias[~keep] == 0).all() and torch.isfinite(of_bias).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("Tq", [1, 5])
@pytest.mark.parametrize("empty", ["B", "H", "Tq", "Tk", "D", "Dv", "D Dv"])
def test_sizes_of_zero(name, empty, Tq):
    sizes = {"B": 2, "H": 3, "Tq": Tq, "Tk": 7, "D": 4, "Dv": 6, **dict.fromkeys(empty.split(), 0)}
    B, H, Tq, Tk, D, Dv = sizes.values()
    q, k, v = (torch.randn(B, H, T, d, requires_grad=True) for T, d in ((Tq, D), (Tk, D), (Tk, Dv)))
    for mask in (ch.everything, ch.window(before=2, align="end")):
        engine_or_skip(name, q, k, v, mask=mask)
        out = ch.attention(q, k, v, mask=mask, engine=name)
        assert out.shape == (B, H, Tq, Dv)
        if empty == "Tk":
            assert (out == 0).all()
        if empty == "D":  # every score is 0, so all visible keys get the same weight
            keep = mask.to_bool(Tq, Tk).double()
            mean = (keep / keep.sum(-1, keepdim=True)).float() @ v
            torch.testing.assert_close(out, mean)
        assert [g.shape for g in gradients(out, q, k, v)] == [q.shape, k.shape, v.shape]
        seen = ch.look(q, k, v, mask=mask, stats=["lse", "entropy", "received"], engine=name)
        assert torch.equal(seen.out, out) and seen.lse.shape == (B, H, Tq)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_of_fully_masked_queries_have_gradient_0(name):
    q, k, v = (torch.randn(2, 2, T, 8, requires_grad=True) for T in (3, 5, 5))
    keywords = {"mask": ch.lengths(keys=0), "engine": name}
    engine_or_skip(name, q, k, v, mask=keywords["mask"])
    for names in (["entropy"], ["lse", "max"], ["received", ch.stats.pooled(2, 2)]):
        seen = ch.look(q, k, v, stats=names, **keywords)
        for name_ in seen.names:
            finite = getattr(seen, name_).nan_to_num(0.0, 0.0, 0.0)
            for g in torch.autograd.grad(finite.sum(), (q, k), retain_graph=True):
                assert not g.any(), name_


def _spread(x: Tensor) -> Tensor:
    """The same numbers with gaps between the rows and between the features."""
    wide = torch.full((*x.shape[:-2], 2 * x.shape[-2], 3 * x.shape[-1]), math.nan, dtype=x.dtype)
    wide[..., ::2, ::3] = x
    return wide[..., ::2, ::3]


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "with gaps": _spread,
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_any_strides(name, layout, qkv):
    mask = ch.Causal(align="end")
    engine_or_skip(name, *qkv, mask=mask)
    q, k, v = (LAYOUTS[layout](x.detach()).requires_grad_() for x in qkv)
    true = ch.attention(*qkv, mask=mask, engine=name)
    got = ch.attention(q, k, v, mask=mask, engine=name)
    torch.testing.assert_close(got, true)
    for a, b in zip(gradients(got, q, k, v), gradients(true, *qkv), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_expanded_inputs_have_stride_0(name):
    source = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 7, 5, generator=source).expand(2, 6, 7, 5)
    k = torch.randn(1, 3, 1, 5, generator=source).expand(2, 3, 11, 5)
    v = torch.randn(2, 1, 11, 1, generator=source).expand(2, 3, 11, 3)
    engine_or_skip(name, q, k, v)
    for mask in (ch.everything, ch.Causal(align="start")):
        true = ch.attention(q.clone(), k.clone(), v.clone(), mask=mask, engine="steps")
        torch.testing.assert_close(ch.attention(q, k, v, mask=mask, engine=name), true)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_1_broadcasts(name, qkv):
    q, k, v = (x.detach() for x in qkv)
    mask = ch.lengths(keys=[11, 4])
    engine_or_skip(name, q, k, v, mask=mask)
    got = ch.attention(q[:1], k, v[:1], mask=mask, engine=name)
    true = ch.attention(q[:1].expand_as(q), k, v[:1].expand_as(v), mask=mask, engine="steps")
    assert got.shape == (2, 6, 7, 3)
    torch.testing.assert_close(got, true)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_leading_dimensions_may_be_missing(name, rank, qkv):
    q, k, v = (x.detach()[1, 2 if x is qkv[0] else 1] for x in qkv)  # head 2 of 6 reads head 1 of 3
    q, k, v = (x.reshape((1,) * (rank - 2) + tuple(x.shape)) for x in (q, k, v))
    mask = ch.Causal(align="end")
    engine_or_skip(name, q, k, v, mask=mask)
    got = ch.attention(q, k, v, mask=mask, engine=name)
    assert got.shape == (*q.shape[:-1], 3)
    whole = ch.attention(*qkv, mask=mask, engine="steps")
    torch.testing.assert_close(got.reshape(7, 3), whole[1, 2].detach())


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_stay_finite(name, qkv):
    """Scores of 1e4 would overflow exp(), so the largest is subtracted first."""
    q, k, v = (x.detach() for x in qkv)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = [x.to(dtype) for x in (q, k, v)]
        engine_or_skip(name, *inputs, scale=3e3)
        got = ch.attention(*inputs, scale=3e3, engine=name)
        best = (inputs[0].double() @ inputs[1].double().repeat_interleave(2, 1).mT).argmax(-1)
        picked = inputs[2].repeat_interleave(2, 1).gather(2, best.unsqueeze(-1).expand_as(got))
        torch.testing.assert_close(got, picked, atol=2e-2, rtol=0)  # softmax is almost a maximum


@pytest.mark.parametrize("scale", [0.0, -0.7])
@pytest.mark.parametrize("name", NAMES)
def test_scale_may_be_zero_or_negative(name, scale, qkv):
    engine_or_skip(name, *qkv, scale=scale)
    got = ch.attention(*qkv, scale=scale, engine=name)
    torch.testing.assert_close(got, naive_attention(*qkv, scale=scale))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_repetition(name, qkv):
    mask = ch.Causal(align="end")
    engine_or_skip(name, *qkv, mask=mask)
    first, again = (ch.attention(*qkv, mask=mask, engine=name) for _ in range(2))
    assert torch.equal(first, again)
    for a, b in zip(gradients(first, *qkv), gradients(again, *qkv), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_the_inputs_are_not_changed(name, qkv):
    before = [x.detach().clone() for x in qkv]
    mask = ch.lengths(queries=5, keys=9)
    ch.attention(*qkv, mask=mask, engine=engine_or_skip(name, *qkv, mask=mask)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, qkv, strict=True))


@pytest.mark.parametrize("low, high", [(-3.4e38, -1e38), (1e38, 3e38), (-1e30, 1e30)])
@pytest.mark.parametrize("name", NAMES)
def test_a_bias_may_be_as_large_as_a_float(name, low, high):
    """The key with the larger bias has all the weight, and the log-sum-exp is that bias."""
    q, k, v = (
        torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    bias = torch.full((4, 4), low)
    bias[:, 1] = high
    seen = ch.look(q, k, v, bias=bias, stats=["lse", "max", "entropy"], engine=name)
    torch.testing.assert_close(seen.out, v[:, :, 1:2].expand(-1, -1, 4, -1))
    for found, true in ((seen.lse, high), (seen.max, high), (seen.entropy, 0.0)):
        torch.testing.assert_close(found, torch.full_like(found, true))


@pytest.mark.parametrize("size", [100.0, 1e4, 1e5])
@pytest.mark.parametrize("name", NAMES)
def test_a_bias_that_cancels_the_score_cancels_it(name, size):
    q = torch.full((1, 1, 30, 1), size)
    k = v = torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1)
    out = ch.attention(q, k, v, scale=1.0, bias=torch.tensor([-size, 0.0]), engine=name)
    torch.testing.assert_close(out, torch.full_like(out, 0.5))


@pytest.mark.parametrize("sink", [math.inf, math.nan, 1.0])
@pytest.mark.parametrize("name", ["cpu", "tiled", "steps"])
def test_a_fully_masked_query_has_output_0_with_any_sink(name, sink):
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 1, 4)
    out = ch.attention(
        q, k, k, mask=ch.Causal(align="end"), sinks=torch.tensor([sink]), engine=name
    )
    assert (out[:, :, :2] == 0).all()


@pytest.mark.parametrize("name", ["auto", "cpu", "tiled", "steps"])
def test_a_cap_close_to_0(name):
    q, k = torch.zeros(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    out = ch.attention(q, k, torch.ones(1, 1, 5, 4), softcap=1e-40, engine=name)
    torch.testing.assert_close(out, torch.ones(1, 1, 3, 4))


@pytest.mark.parametrize("cap", [2.0**100, 3e38, 1e39])  # the last one is infinite in float32
@pytest.mark.parametrize("name", ["auto", "cpu", "tiled", "steps"])
def test_a_large_cap_changes_nothing(name, cap):
    q, k, v = 1e-10 * torch.randn(3, 4), 1e-10 * torch.randn(5, 4), torch.randn(5, 2)
    q[0] = k[2] = 1.0
    capped, free = (ch.attention(q, k, v, softcap=cap, engine=name) for cap in (cap, None))
    assert torch.equal(capped, free)
    seen, right = (ch.look(q, k, v, softcap=cap, engine=name).entropy for cap in (cap, None))
    assert torch.equal(seen, right)


@pytest.mark.parametrize("name", ["cpu", "sdpa", "tiled", "steps"])
@pytest.mark.parametrize("number", [1e300, -1e300])
def test_a_bias_beyond_float32_masks_no_key(name, number):
    zeros, v = torch.zeros(1, 3, 2), torch.randn(1, 3, 2)
    bias = torch.full((3, 3), number, dtype=torch.float64)
    out = ch.attention(zeros, zeros, v, bias=bias, engine=name)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(1, 3, 2))


# ------------------------------------------------------------------------------ tiles, derivatives


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that every problem crosses their edges."""
    monkeypatch.setattr(tiled, "TILE_QUERIES", 4)
    monkeypatch.setattr(tiled, "TILE_KEYS", 5)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p != "large"])
def test_tiles_of_any_size_give_the_same(problem, small_tiles):
    true_case, case = (
        wanting(PROBLEMS[problem](torch.float64, 0), torch.float64) for _ in range(2)
    )
    seed = torch.ones(*case.q.shape[:3], case.v.shape[-1])
    true = forward_and_back(
        lambda *x, **kw: ch.attention(*x, engine="steps", **kw), true_case, seed
    )
    got = forward_and_back(lambda *x, **kw: ch.attention(*x, engine="tiled", **kw), case, seed)
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["steps", "tiled"])
def test_first_and_second_derivatives(name, small_tiles):
    """Compared with finite differences, for q, k, v, bias and sinks."""
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=source).requires_grad_()

    inputs = draw(1, 2, 3, 2), draw(1, 1, 7, 2), draw(1, 1, 7, 2), draw(2, 1, 7), draw(2)

    def answer(q, k, v, bias, sinks):
        mask = ch.Causal(align=2) & ch.dense(drop=torch.arange(7) == 1)
        return ch.attention(q, k, v, bias=bias, sinks=sinks, softcap=2.0, mask=mask, engine=name)

    assert torch.autograd.gradcheck(answer, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(answer, inputs, fast_mode=True)


def test_alibi_slopes_have_gradients():
    q, k, v = (torch.randn(1, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    slopes = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64, requires_grad=True)
    for name in ("steps", "tiled", "sdpa"):
        assert torch.autograd.gradcheck(
            lambda s, name=name: ch.attention(
                q, k, v, bias=ch.alibi(s), mask=ch.causal, engine=name
            ),
            slopes,
        )


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *made])
        return out


def test_tiles_never_store_all_pairs():
    """8,192 tokens have 67 million pairs; a tile has 131,072."""
    T = 8192
    q, k, v = (torch.randn(1, 1, T, 32) for _ in range(3))
    with Largest() as forward:
        ch.attention(q, k, v, engine="tiled")
    assert forward.numel == T * 32 < T * T / 200


def test_tiles_never_store_all_pairs_in_the_backward_pass():
    T = 16384
    q, k, v = (torch.randn(1, 1, T, 16, requires_grad=True) for _ in range(3))
    with Largest() as both:
        ch.attention(q, k, v, mask=ch.window(before=90, after=0), engine="tiled").sum().backward()
    assert both.numel == T * 16 and all(x.grad.abs().sum() > 0 for x in (q, k, v))


# ------------------------------------------------------------------------ other implementations


FOR_JAX = {  # problems with Dv = D, as JAX requires
    "full": make(Dv=7),
    "causal": make(Dv=7, mask=ch.Causal(align="start")),
    "grouped": make(Dv=7, G=2, mask=ch.window(before=3, after=5, align="start")),
    "bias": make(Dv=7, bias=(6, 13, 17), scale=0.6),
    "lengths": make(Dv=7, mask=ch.lengths(keys=[11, 0], queries=[13, 7])),
    "documents": make(Dv=7, mask=ch.documents([0] * 8 + [1] * 9, queries=[1] * 6 + [0] * 7)),
}


@pytest.mark.outside
@pytest.mark.parametrize("problem", FOR_JAX)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_jax(name, problem):
    import jax  # imported late, because each process of tests/distributed imports this file
    import jax.numpy as jnp

    case = FOR_JAX[problem](torch.float32, 0)
    engine_or_skip(name, *case.tensors, **case.keywords)
    (B, H, Tq, _), Tk = case.q.shape, case.k.shape[2]
    keep = case.keywords.get("mask", ch.everything).to_bool(Tq, Tk, B=B, H=H).expand(B, H, Tq, Tk)
    q, k, v = (jnp.asarray(x.transpose(1, 2).numpy()) for x in case.tensors)
    added = case.keywords.get("bias")
    theirs = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=None if added is None else jnp.asarray(added.tensor[None].numpy()),
        mask=jnp.asarray(keep.numpy()),
        scale=case.keywords.get("scale"),
    )
    theirs = torch.from_numpy(np.array(theirs)).transpose(1, 2)
    theirs = theirs.masked_fill(
        ~keep.any(-1, keepdim=True), 0.0
    )  # JAX returns the mean of the values for fully masked queries
    ours = ch.attention(*case.tensors, engine=name, **case.keywords)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch(name, causal, qkv):
    theirs = F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=True)
    mask = ch.Causal(align="start") if causal else None
    engine_or_skip(name, *qkv, mask=mask)
    torch.testing.assert_close(ch.attention(*qkv, mask=mask, engine=name), theirs)


# ---------------------------------------------------------- transforms, compilers and autocast


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_over_the_call(qkv):
    q, k, v = (x.detach() for x in qkv)
    mask = ch.Causal(align="end")
    true = ch.attention(q, k, v, mask=mask)
    got = torch.func.vmap(lambda q, k, v: ch.attention(q, k, v, mask=mask, engine="sdpa"))(
        q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    )
    torch.testing.assert_close(got.squeeze(1), true)


RULES_OF_NUMBERS = {  # one of each for an example, and the same for a batch
    "lengths": (lambda x: ch.lengths(keys=x), torch.tensor([2, 5, 0])),
    "align": (lambda x: ch.Causal(align=x), torch.tensor([0, 1, -2])),
    "dense": (lambda x: ch.dense(keep=x), torch.arange(75).reshape(3, 1, 5, 5) % 7 > 2),
    "documents": (ch.documents, torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2], [0, 1, 0, 1, 0]])),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("kind", RULES_OF_NUMBERS)
@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_the_numbers_of_a_rule(name, kind):
    rule, numbers = RULES_OF_NUMBERS[kind]
    x = torch.randn(3, 3, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    engine_or_skip(name, *x, mask=rule(numbers))

    def answer(q, k, v, numbers):
        return ch.attention(q, k, v, mask=rule(numbers), engine=name)

    torch.testing.assert_close(torch.func.vmap(answer)(*x, numbers), answer(*x, numbers))


TWICE = {
    "causal": {"mask": ch.Causal(align="end")},
    "dense": {"mask": ch.dense(keep=torch.arange(6).reshape(2, 3) % 4 > 0)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)},
}


@pytest.mark.parametrize("rule", TWICE.values(), ids=TWICE)
def test_derivatives_of_derivatives_in_float64(rule):
    source = torch.Generator().manual_seed(1)
    shapes = ((1, 4, 2, 3), (1, 2, 3, 3), (1, 2, 3, 2))
    qkv = [torch.randn(s, generator=source, dtype=torch.float64) for s in shapes]
    qkv = [x.requires_grad_() for x in qkv]
    assert torch.autograd.gradgradcheck(lambda *x: ch.attention(*x, **rule), qkv, atol=1e-5)


def test_a_rule_outlives_a_transform_that_read_it():
    """A mask of documents caches its ranges, except those wrapped by a torch.func transform."""
    mask, q = ch.documents([0, 0, 1, 1]), torch.randn(2, 4, 8)
    torch.func.grad(lambda q: ch.attention(q, q, q, mask=mask).sum())(q)
    assert torch.isfinite(ch.attention(q, q, q, mask=mask)).all()
    copy.deepcopy(mask)


@pytest.mark.outside
@pytest.mark.parametrize("name", NAMES)
def test_compiled_functions(name, qkv):
    q, k, v = (x.detach() for x in qkv)
    mask = ch.Causal(align="end")
    engine_or_skip(name, q, k, v, mask=mask)
    asked = torch.compile(
        lambda q, k, v: ch.attention(q, k, v, mask=mask, engine=name), backend="eager"
    )
    torch.testing.assert_close(asked(q, k, v), ch.attention(q, k, v, mask=mask, engine=name))


def test_meta_tensors_yield_shapes():
    q, k = (torch.empty(2, h, t, 8, device="meta") for h, t in ((6, 7), (3, 11)))
    out = ch.attention(q, k, k, mask=ch.Causal(align="end"))
    assert out.shape == q.shape and out.device.type == "meta" and not out.requires_grad
    learning = q.clone().requires_grad_()
    ch.attention(learning, k, k, mask=ch.Causal(align="end")).sum().backward()
    assert learning.grad.shape == q.shape
    assert ch.plan(q, k, k, mask=ch.Causal(align="end")).pairs == 2 * 6 * sum(range(5, 12))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_jacobians_agree(qkv):
    q, k, v = (x.detach().double()[:1, :2, :3] for x in qkv)
    k, v = k[:, :1], v[:, :1]

    def answer(q):
        return ch.attention(q, k, v, mask=ch.Causal(align="end"), engine="steps")

    torch.testing.assert_close(torch.func.jacfwd(answer)(q), torch.func.jacrev(answer)(q))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own
def test_forward_mode_derivatives_are_not_dropped(qkv):
    q, k, v = (x.detach() for x in qkv)
    along = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))

    def answer(q):
        return ch.attention(q, k, v, mask=ch.Causal(align="end"))

    _, moved = torch.func.jvp(answer, (q,), (along,))
    with torch.autograd.forward_ad.dual_level():
        dual = answer(torch.autograd.forward_ad.make_dual(q, along))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual).tangent, moved)
        with pytest.raises(ch.BadValue, match="no forward-mode derivatives"):
            ch.attention(q, k, v, engine="cpu")
    step = 1e-3
    slope = (answer(q + step * along) - answer(q - step * along)) / (2 * step)
    torch.testing.assert_close(moved, slope, rtol=1e-2, atol=1e-3)


def test_autocast_does_not_change_float32_calls(qkv):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ch.attention(*qkv, engine="steps")
    assert out.dtype == torch.float32


def test_without_keys_queries_may_hold_nan():
    q = torch.full((1, 1, 2, 3), math.inf, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(1, 1, 0, 3, dtype=torch.float64, requires_grad=True)
    for engine in ("sdpa", "tiled", "steps"):
        out = ch.attention(q, none, none, engine=engine)
        assert torch.equal(out, torch.zeros(1, 1, 2, 3, dtype=torch.float64))
        grads = torch.autograd.grad(out.sum(), (q, none), allow_unused=True)
        assert not any(x is not None and x.any() for x in grads)


def test_the_default_dtype_and_device_have_no_influence():
    q = torch.randn(1, 6, 9, 4, generator=torch.Generator().manual_seed(1))
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / 6) for i in range(6)], dtype=torch.float64)
    true = ch.attention(*(q.double(),) * 3, bias=ch.alibi(slopes), engine="steps")
    torch.testing.assert_close(
        ch.attention(*(q.double(),) * 3, bias=ch.alibi()), true, rtol=0, atol=1e-14
    )
    before, buckets = ch.attention(q, q, q, bias=ch.alibi()), range(1024)
    layer = ch.nn.RelativePositions(2, 32, 32, 1024)
    columns = layer.bucket(torch.tensor(buckets))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(ch.attention(q, q, q, bias=ch.alibi()), before)
        assert torch.equal(layer.bucket(torch.tensor(buckets)), columns)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert torch.equal(ch.attention(q, q, q, bias=ch.alibi()), before)


def test_tensors_of_inference_mode_are_not_saved_for_training():
    q, rule = torch.randn(1, 1, 3, 4), ch.documents([0, 0, 1])
    with torch.inference_mode():
        true = ch.attention(q, q, q, mask=rule)
    got = ch.attention(q.requires_grad_(), q, q, mask=rule)
    got.sum().backward()
    torch.testing.assert_close(got.detach(), true.clone())


@pytest.mark.parametrize("name", ["bias", "slopes", "sinks"])
def test_negated_views(name):
    numbers = torch.randn(2, dtype=torch.complex64).conj().imag
    assert numbers.is_neg()
    q = torch.randn(1, 2, 5, 4)
    asked = {
        "bias": {"bias": numbers.reshape(2, 1, 1)},
        "slopes": {"bias": ch.alibi(numbers)},
        "sinks": {"sinks": numbers},
    }[name]
    true = ch.attention(q, q, q, engine="steps", **asked)
    torch.testing.assert_close(ch.attention(q, q, q, **asked), true)


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_tensors_without_values_are_named(name):
    q, hollow = torch.randn(1, 2, 5, 4), torch.randn(2, 1, 1, device="meta")
    with pytest.raises(ch.BadValue, match=f"{name} is a meta tensor"):
        ch.attention(q, q, q, **{name: hollow if name == "bias" else hollow.flatten()})


def test_keys_without_memory_are_refused():
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    k.untyped_storage().resize_(0)
    with pytest.raises((ch.BadValue, RuntimeError)):
        ch.attention(q, k, q)


def test_sparse_tensors_are_named():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ch.BadType, match="sparse"):
        ch.attention(q, q.to_sparse(), q)


def test_mixed_dtypes_are_named_on_any_device():
    x = torch.randn(1, 2, 4, 8, device="meta")
    with pytest.raises(ch.BadType, match="dtypes"):
        ch.attention(x, x, x.bfloat16())


def test_autocast_narrows_mixed_dtypes():
    q = torch.randn(1, 2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert ch.attention(q, q, q.bfloat16()).dtype == torch.bfloat16
        assert ch.attention(q, q, q).dtype == torch.float32
    with pytest.raises(ch.BadType, match="dtypes"):
        ch.attention(q, q, q.bfloat16())


def test_autocast_changes_no_view():
    q = torch.randn(2, 3, 7, 5)
    stats = ["lse", "entropy", ch.topk(2), ch.pooled(3, 3)]

    def everything():
        A = ch.matrix(q, q, mask=ch.causal)
        seen = ch.look(q, q, q, mask=ch.causal, stats=stats)
        trace = ch.explain(q, q, q, mask=ch.causal)
        return [A.rows([0, 6]), A @ q, A.T @ q, seen.out, seen.lse, seen.pooled, trace["output"]]

    naive_attention = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = everything()
    assert all(
        a.dtype == torch.float32 and a.equal(b)
        for a, b in zip(naive_attention, narrow, strict=True)
    )


@pytest.mark.parametrize("engine", ["cpu", "sdpa", "tiled", "steps"])
@pytest.mark.parametrize("B, Tq, Tk", [(2, 5, 0), (0, 5, 3), (2, 0, 3)])
@pytest.mark.parametrize("mask", [None, ch.Causal(align="end")], ids=str)
def test_a_bias_has_a_gradient_without_queries_or_keys(engine, B, Tq, Tk, mask):
    q, k, v = (torch.randn(B, 2, T, 4) for T in (Tq, Tk, Tk))
    bias = torch.zeros(2, 1, 1, requires_grad=True)
    out = ch.attention(q, k, v, bias=bias, engine=engine, mask=mask)
    (learned,) = torch.autograd.grad(out.sum(), bias)
    assert not learned.any() and not out.any()


def test_values_without_features_connect_the_bias():
    q = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    bias = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    out = ch.attention(q, q, q[..., :0], bias=bias, engine="sdpa")
    out.sum().backward()
    assert out.shape == (1, 2, 4, 0) and torch.equal(bias.grad, torch.zeros(4, 4))
