"""Block masks made from key ranges are those that torch makes by looking at every pair."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import clearhead as ch

from .test_masks import ONE, cell_by_cell

KINDS = {
    "everything": ch.everything,
    "causal": ch.causal,
    "from a position": ch.Causal(align=[3, 40]),
    "window": ch.window(before=20, after=7),
    "prefix": ch.causal | ch.prefix(29),
    "lengths": ch.lengths(keys=[83, 17], queries=[83, 50]),
    "documents": ch.documents([0] * 40 + [1] * 13 + [0] * 30) & ch.causal,
    "per batch": ch.documents([[0] * 40 + [1] * 43, [0] * 70 + [2] * 13]),
    "keep": ch.dense(keep=torch.rand(2, 3, 83, 83, generator=torch.Generator()) < 0.9),
    "drop": ch.dense(drop=torch.arange(83) < 31),
    "nobody": ~ch.everything,
    "not": ~ch.window(before=40, after=40),
}


def listed(counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Which blocks a BlockMask lists, as booleans."""
    used = torch.arange(places.shape[-1]) < counts.unsqueeze(-1)
    return torch.zeros(places.shape, dtype=torch.bool).scatter_(-1, places.long(), used)


def assert_same(got: BlockMask, true: BlockMask) -> None:
    for kind in ("kv", "full_kv", "q", "full_q"):
        a, b = (
            listed(getattr(m, f"{kind}_num_blocks"), getattr(m, f"{kind}_indices"))
            for m in (got, true)
        )
        assert torch.equal(*torch.broadcast_tensors(a, b)), kind
    assert got.BLOCK_SIZE == true.BLOCK_SIZE and got.seq_lengths == true.seq_lengths


@pytest.mark.parametrize("block_size", [16, (32, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mask_gives_the_blocks_that_torch_finds(kind, block_size):
    mask = KINDS[kind]
    sizes = dict(B=2, H=3)
    got = mask.to_block_mask(83, 83, block_size=block_size, **sizes)
    true = create_block_mask(
        mask.to_flex(83, 83, **sizes), 2, 3, 83, 83, device="cpu", BLOCK_SIZE=block_size
    )
    assert_same(got, true)


@given(ONE, st.integers(1, 4), st.integers(1, 4))
def test_random_masks_give_the_blocks_that_torch_finds(asked, height, width):
    grid, mask = asked
    sizes = dict(B=grid.B, H=grid.H)
    size = height, width
    got = mask.to_block_mask(grid.Tq, grid.Tk, block_size=size, **sizes)
    rule = mask.to_flex(grid.Tq, grid.Tk, **sizes)
    assert_same(got, create_block_mask(rule, *sizes.values(), *grid[:2], "cpu", BLOCK_SIZE=size))
    places = torch.meshgrid(
        *(torch.arange(n) for n in (grid.B, grid.H, grid.Tq, grid.Tk)), indexing="ij"
    )
    assert torch.equal(got.mask_mod(*places), cell_by_cell(mask, grid))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_flex_attention_computes_with_it_what_we_compute():
    q, k, v = (torch.randn(2, 3, 83, 8, generator=torch.Generator().manual_seed(1)) for _ in "qkv")
    mask = ch.documents([0] * 40 + [1] * 43) & ch.window(before=20)
    got = torch.compile(flex_attention)(q, k, v, block_mask=mask.to_block_mask(B=2, H=3))
    torch.testing.assert_close(got, ch.attention(q, k, v, mask=mask, engine="steps"))


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor made."""

    cells = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor))
        self.cells = max(self.cells, *sizes, 0)
        return made


def test_nothing_of_the_size_queries_x_keys_is_formed():
    mask = ch.documents(torch.arange(2**14) // 1000) & ch.causal
    with Largest() as seen:
        blocks = mask.to_block_mask(2**14)
    assert seen.cells <= 2 * 2**14 and blocks.shape == (1, 1, 2**14, 2**14)


@pytest.mark.parametrize("size", [0, (16, -1), (16,), 2.5])
def test_a_block_holds_something(size):
    with pytest.raises(ch.BadValue, match="a block has at least 1 query and 1 key"):
        ch.causal.to_block_mask(8, block_size=size)
