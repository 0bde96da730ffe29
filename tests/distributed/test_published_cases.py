"""Published test cases of other projects for attention over ranks: their sizes, layouts, masks and
dtypes, compared with torch's dense float64 attention.

The cases are those of zhuzilin/ring-flash-attention (test/test_*.py: 1 x 5 heads x 128, bfloat16,
causal, 8 ranks; its lengths are divided by 8 here) and of torch's context parallelism
(test/distributed/tensor/test_attention.py: 8 x 8 heads x 32, 64 tokens a rank; 2 x 8 heads here).
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.core.masks import Mask
from clearhead.core.problem.check import Options
from clearhead.distributed import Layout, contiguous, head_tail
from clearhead.distributed.attention import Call, attend
from clearhead.distributed.look import look_over_ranks
from tests.distributed.threads import on_ranks
from tests.problems import within_yardstick

RING = 3816 // 8
ZIGZAG = 3824 // 8
PACKED = [0, 120 // 8, 1248 // 8, 4232 // 8]
PACKED_ZIGZAG = [0, 128 // 8, 1248 // 8, 4240 // 8]


def stripes(length: int, world: int) -> Layout:
    """A layout with token i on rank i % world."""
    return Layout([[range(i, i + 1) for i in range(r, length, world)] for r in range(world)])


def each_text(ends: list[int], world: int, cut=contiguous) -> Layout:
    """A layout that cuts every text of a row separately."""
    held: list[list[range]] = [[] for _ in range(world)]
    for start, stop in pairwise(ends):
        for of_rank, ranges in zip(held, cut(stop - start, world).ranges, strict=True):
            of_rank += [range(start + r.start, start + r.stop) for r in ranges]
    return Layout(held)


def packed(ends: list[int]) -> Mask:
    lengths = torch.tensor(ends).diff()
    return ch.causal & ch.documents(torch.arange(len(lengths)).repeat_interleave(lengths))


CASES = {
    "ring": (ch.causal, contiguous(RING, 8)),
    "zigzag": (ch.causal, head_tail(ZIGZAG, 8)),
    "stripe": (ch.causal, stripes(ZIGZAG, 8)),
    "ring, packed": (packed(PACKED), each_text(PACKED, 8)),
    "zigzag, packed": (packed(PACKED_ZIGZAG), each_text(PACKED_ZIGZAG, 8, head_tail)),
    "stripe, packed": (packed(PACKED), stripes(PACKED[-1], 8)),
    "llama3, packed": (packed(PACKED), contiguous(PACKED[-1], 8)),
}


def check(
    shape: tuple[int, int, int], mask: Mask, layout: Layout, dtype: torch.dtype, heads: int = 1
) -> None:
    """Compare output, log-sum-exp and gradients with torch's dense attention."""
    B, H, D = shape
    T, world = layout.length, layout.world
    draw = torch.Generator().manual_seed(42)
    q, k, v, dout = (torch.randn(B, H, T, D, generator=draw).to(dtype) for _ in range(4))
    keep = mask.to_bool(T, T)

    def dense(kind: torch.dtype) -> list[Tensor]:
        given = [x.to(kind).requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*given, attn_mask=keep)
        scores = given[0] @ given[1].mT / D**0.5
        lse = scores.masked_fill(~keep, -torch.inf).logsumexp(-1)
        return [out, *torch.autograd.grad(out, given, dout.to(kind)), lse]

    def rank(transport):
        held = layout.positions[transport.rank]
        mine = [held.cut(x, 2).clone().requires_grad_() for x in (q, k, v)]
        out = attend(transport, Call(Options(mask), layout, heads=heads), *mine)
        learned = torch.autograd.grad(out, mine, held.cut(dout, 2))
        given = [x.detach() for x in mine]
        lse = look_over_ranks(transport, Call(Options(mask), layout), *given, ["lse"]).lse
        return out, *learned, lse

    found = [layout.join(parts, 2) for parts in zip(*on_ranks(world, rank), strict=True)]
    names = "out", "dq", "dk", "dv", "lse"
    for name, got, true, plain in zip(
        names, found, dense(torch.float64), dense(dtype), strict=True
    ):
        size = float(true.detach().abs().max())
        fits, figures = within_yardstick(got.detach(), true.detach(), plain.detach(), size)
        assert fits, f"{name}: {figures}"


@pytest.mark.parametrize("case", CASES)
def test_ring_flash_attentions_cases(case):
    check((1, 5, 128), *CASES[case], torch.bfloat16)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mask, balanced", [("causal", True), ("causal", False), ("all", False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_context_parallels_cases(mask, balanced, dtype, heads, world):
    layout = (head_tail if balanced else contiguous)(64 * world, world)
    check((2, 8, 32), ch.causal if mask == "causal" else ch.everything, layout, dtype, heads)
