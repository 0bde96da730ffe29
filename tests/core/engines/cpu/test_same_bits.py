"""Threads and other examples of a batch do not change a bit of an example."""

from itertools import product

import pytest
import torch

import clearhead as ch
from clearhead.core.engines.cpu.extension import core, use_level

LEVELS = [name for name, _, present in core.levels() if present]
SIZES = [(1, 53), (1, 1501), (5, 107), (17, 97), (37, 131)]  # Tq, Tk


def output_and_gradients(q, k, v, upstream):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ch.attention(*leaves, mask=ch.Causal(align="end"), engine="cpu")
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.fixture(params=LEVELS)
def level(request):
    before = use_level(request.param)
    yield request.param
    use_level(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_example_has_the_same_bits_alone_in_a_batch_and_on_any_threads(level, dtype):
    for (Tq, Tk), (D, Dv) in product(SIZES, [(40, 40), (24, 56)]):
        source = torch.Generator().manual_seed(Tq * 7 + Tk)
        q, k, v, upstream = (
            torch.randn(3, heads, T, size, generator=source).to(dtype)
            for heads, T, size in ((6, Tq, D), (3, Tk, D), (3, Tk, Dv), (6, Tq, Dv))
        )
        together = output_and_gradients(q, k, v, upstream)
        torch.set_num_threads(2)
        try:
            again = output_and_gradients(q, k, v, upstream)
        finally:
            torch.set_num_threads(1)
        assert all(map(torch.equal, again, together))
        alone = output_and_gradients(*(x[2:] for x in (q, k, v, upstream)))
        assert all(torch.equal(x, y[2:]) for x, y in zip(alone, together, strict=True))


@pytest.mark.parametrize("Tq, Tk", [(16, 16), (50, 128)])
def test_shared_keys_give_the_bits_of_repeated_ones(Tq, Tk, level):
    """The queries of heads that share keys are packed; those of one short head are not."""
    q, k, v = torch.randn(1, 4, Tq, 33), torch.randn(1, 2, Tk, 33), torch.randn(1, 2, Tk, 33)
    repeated = (x.repeat_interleave(2, 1) for x in (k, v))
    mask = ch.Causal(align="end")
    shared = ch.attention(q, k, v, mask=mask, engine="cpu")
    assert torch.equal(shared, ch.attention(q, *repeated, mask=mask, engine="cpu"))
