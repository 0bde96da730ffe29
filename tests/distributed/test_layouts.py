"""Layouts contain every position once, and can be inverted; masks are the same when cut to them."""

from math import prod

import pytest
import torch
from hypothesis import given, strategies as st

import clearhead as ch
from clearhead.distributed import Layout, balanced, by_document, contiguous, head_tail
from clearhead.distributed.cut import Cut, seen
from clearhead.distributed.layouts import Positions, layout_of
from tests.core.masks.test_masks import ONE, cell_by_cell

IDS = [4] * 5 + [1] * 3 + [7] * 11 + [4] * 2 + [9] * 2


def every_layout(length: int, world: int) -> list[Layout]:
    ids = (IDS * length)[:length]
    return [
        contiguous(length, world),
        head_tail(length, world),
        by_document(ids, world),
        balanced(ch.causal, length, world),
        Layout([[range(0, length)] if r == world - 1 else [] for r in range(world)]),
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 5, 23, 64])
def test_split_and_join_are_inverse(length, world):
    x = torch.arange(length * 3).reshape(1, length, 3)
    for layout in every_layout(length, world):
        shards = layout.split(x, 1)
        assert len(shards) == world and sum(s.shape[1] for s in shards) == length
        for held, part in zip(layout.positions, shards, strict=True):
            assert torch.equal(part[0, :, 0] // 3, held.tensor())
            assert held.tensor().equal(held.tensor().sort().values)
        assert torch.equal(layout.join(shards, 1), x)
        assert torch.equal(layout.order()[layout.inverse()], torch.arange(length))


@pytest.mark.parametrize("dim", range(-3, 3))
def test_shards_are_contiguous(dim):
    sizes = [5, 3, 2]
    sizes[dim] = 23
    whole = torch.arange(prod(sizes)).reshape(sizes)
    for x in (whole, whole.movedim(0, -1).contiguous().movedim(-1, 0)):
        for layout in every_layout(23, 3):
            for held, part in zip(layout.positions, layout.split(x, dim), strict=True):
                assert part.is_contiguous()
                assert torch.equal(part, x.index_select(dim, held.tensor()))


def test_contiguous_is_as_torch_chunks():
    for length, world in ((7, 3), (12, 4), (5, 8)):
        chunks = torch.arange(length).chunk(world)
        held = [h.tensor() for h in contiguous(length, world).positions]
        assert all(torch.equal(a, b) for a, b in zip(chunks, held, strict=False))
        assert not any(len(h) for h in held[len(chunks) :])


def test_head_tail_by_hand():
    assert repr(head_tail(12, 3)) == "Layout(0:2, 10:12; 2:4, 8:10; 4:8)"


def work(mask: ch.masks.Mask, layout: Layout) -> list[int]:
    pairs = mask.key_ranges(ch.masks.Grid(layout.length, layout.length)).keys_per_query()[0, 0]
    return [int(pairs[held.tensor()].sum()) for held in layout.positions]


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_head_tail_is_even_under_causal(world):
    found = work(ch.causal, head_tail(32768, world))
    assert max(found) <= 1.05 * sum(found) / world


def test_documents_are_not_cut_and_nothing_is_sent():
    layout = by_document(IDS, 3)
    grid = ch.masks.Grid(len(IDS), len(IDS))
    for a in range(3):
        for b in range(3):
            found = seen(ch.documents(IDS), grid, layout.positions[a], layout.positions[b])
            assert len(found) == (len(layout.positions[a]) if a == b else 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world", [2, 4, 8])
def test_balanced_is_even_under_packed_documents(world, seed):
    source = torch.Generator().manual_seed(seed)
    sizes = (torch.rand(40, generator=source).pow(3) * 4000 + 16).long()
    ids = torch.arange(len(sizes)).repeat_interleave(sizes)
    mask = ch.causal & ch.documents(ids)
    layout = balanced(mask, len(ids), world)
    found = work(mask, layout)
    assert max(found) <= 1.10 * sum(found) / world
    tokens = [len(h) for h in layout.positions]
    assert max(tokens) <= 1.10 * len(ids) / world


@given(ONE, st.data())
def test_a_cut_mask_allows_what_the_mask_allows(asked, data):
    grid, mask = asked
    at, on = (
        Positions.listed(torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
                         .nonzero().flatten())
        for n in (grid.Tq, grid.Tk)
    )  # fmt: skip
    cut = Cut(mask, grid, at, on)
    small = grid._replace(Tq=len(at), Tk=len(on))
    expected = cell_by_cell(mask, grid)[:, :, at.tensor()][..., on.tensor()]
    assert torch.equal(cell_by_cell(cut, small), expected)
    ranges = cut.key_ranges(small)
    assert torch.equal(ranges.to_bool().expand(expected.shape), expected)
    if (band := cut.band(small)) is not None:
        q, k = torch.arange(len(at)).unsqueeze(-1), torch.arange(len(on))
        keep = (k >= q - band[0]) & (k <= q + band[1])
        assert torch.equal(keep.expand(expected.shape), expected)
    needed = expected.flatten(0, 2).any(0) if len(at) else torch.zeros(len(on), dtype=torch.bool)
    assert seen(mask, grid, at, on).tensor().equal(on.tensor()[needed])


def test_invalid_layouts():
    with pytest.raises(ch.BadValue, match="A layout has range\\(4, 6\\) after position 3"):
        Layout([[range(0, 3)], [range(4, 6)]])
    with pytest.raises(ch.BadValue, match="A layout has range\\(2, 6\\) after position 3"):
        Layout([[range(0, 3)], [range(2, 6)]])
    with pytest.raises(ch.BadType, match="layout is 'zigzag'"):
        layout_of("zigzag", 4, 2)
    with pytest.raises(ch.BadValue, match="has 8 positions on 2 ranks; there are 9 positions on 2"):
        layout_of(contiguous(8, 2), 9, 2)
    with pytest.raises(ch.BadValue, match="A layout was requested with ranks=0"):
        contiguous(8, 0)
    with pytest.raises(ch.BadValue, match="ids of shape \\(2, 3\\)"):
        by_document([[0, 0, 1], [0, 1, 1]], 2)
