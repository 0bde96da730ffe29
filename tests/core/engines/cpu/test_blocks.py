"""Decoding from blocks is attention over their numbers, with and without statistics."""

import pytest
import torch

import clearhead as ch
from clearhead.core.engines import cpu
from clearhead.core.engines.cpu import blocks, extension
from clearhead.core.problem.blocks import BYTES, in_blocks
from clearhead.core.problem.check import make_problem

pytestmark = pytest.mark.skipif(cpu.core is None, reason="the core is missing")

LEVELS = [name for name, _, present in cpu.core.levels() if present] if cpu.core else []
MASKS = {
    "none": None, "causal": ch.Causal(align="end"),
    "window": ch.window(before=40, align="end") | ch.prefix(4), "padded": ch.lengths(keys=[70, 3]),
}  # fmt: skip
# query heads, KV heads, queries, keys, head dimension, value size
SIZES = [
    (4, 4, 1, 100, 64, 64), (4, 2, 1, 77, 128, 32), (8, 2, 1, 1500, 96, 96), (4, 1, 1, 333, 32, 64),
    (6, 2, 1, 80, 64, 64), (2, 2, 2, 90, 160, 160), (3, 3, 4, 100, 64, 64), (8, 1, 1, 80, 64, 64),
    (7, 1, 1, 2100, 32, 32),
]  # fmt: skip


@pytest.fixture(params=LEVELS)
def level(request):
    before = extension.use_level(request.param)
    yield request.param
    extension.use_level(before)


@pytest.mark.parametrize("format", list(BYTES))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_output_is_exact_for_the_stored_numbers(level, format, sizes):
    H, G, Tq, Tk, D, Dv = sizes
    torch.manual_seed(1)
    q, k, v = torch.randn(2, H, Tq, D), torch.randn(2, G, Tk, D), torch.randn(2, G, Tk, Dv)
    k, v = in_blocks(k, format), in_blocks(v, format)
    read = [x.dequantize().double() for x in (k, v)]
    bits = ch.dense(keep=torch.arange(Tk).remainder(3).gt(0).expand(Tq, Tk))
    for mask in (*MASKS.values(), bits):
        for options in ({}, {"softcap": 5.0}, {"sinks": torch.randn(H)}):
            out = ch.attention(q, k, v, mask=mask, **options)
            wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
            right = ch.attention(q.double(), *read, mask=mask, **wide)
            torch.testing.assert_close(out.double(), right, atol=3e-6, rtol=0)
    problem, inputs = make_problem(q, k, v)
    rows = H // G * Tq
    assert (blocks.decoded(problem, inputs, False) is None) == (rows > cpu.core.block_rows())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", list(BYTES))
def test_looking_keeps_the_bits(format, dtype):
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, n, t, 64, dtype=dtype) for n, t in ((8, 1), (2, 300), (2, 300)))
    k, v = in_blocks(k, format), in_blocks(v, format)
    out = ch.attention(q, k, v)
    assert out.dtype is dtype
    read = [x.dequantize() for x in (k, v)]
    for stats in (["lse"], ["entropy", ch.topk(2), ch.mass({"first": ch.prefix(1)})]):
        seen, plain = ch.look(q, k, v, stats=stats), ch.look(q, *read, stats=stats)
        assert torch.equal(seen.out, out)
        for name in plain.names:
            ours, theirs = getattr(seen, name), getattr(plain, name)
            pairs = zip(ours, theirs, strict=True) if name == "topk" else [(ours, theirs)]
            for a, b in pairs:
                torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3)
    trace = ch.explain(q, k, v)
    torch.testing.assert_close(trace["output"].to(dtype), out, atol=1e-2, rtol=1e-2)


def test_other_calls_read_the_numbers_first():
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 4, 30, 64), torch.randn(1, 4, 30, 64), torch.randn(1, 4, 30, 64)
    k, v = in_blocks(k, "q8_0"), in_blocks(v, "q4_0")
    read = [x.dequantize() for x in (k, v)]
    dropped = {"dropout": 0.5, "seed": 1}
    for queries, options in ((q, {"mask": ch.causal}), (q[:, :, :1], {}), (q, dropped)):
        for engine in ("auto", "sdpa", "tiled"):
            if engine == "sdpa" and "seed" in options:
                continue
            out = ch.attention(queries, k, v, engine=engine, **options)
            assert torch.equal(out, ch.attention(queries, *read, engine=engine, **options))
    q.requires_grad_()
    ch.attention(q, k, v, mask=ch.causal).sum().backward()
    gradient, q.grad = q.grad, None
    ch.attention(q, *read, mask=ch.causal).sum().backward()
    assert torch.equal(gradient, q.grad)


def test_a_plan_names_the_format():
    k = in_blocks(torch.randn(1, 2, 100, 64), "q8_0")
    planned = ch.plan(torch.randn(1, 2, 1, 64), k, k)
    assert planned.engine == "cpu"
    assert "exact for the numbers that q8_0 stores" in repr(planned)
    assert "exact for" not in repr(ch.plan(*[torch.randn(1, 2, 4, 8)] * 3))
