"""Runs of keys against the same thing written out: operations, blocks, tiles, counts."""

import pytest
import torch
from hypothesis import given, strategies as st

from clearhead.core.masks import key_ranges
from clearhead.core.masks.key_ranges import KeyRanges


@st.composite
def written_out(draw, Tq: int, Tk: int) -> tuple[KeyRanges, torch.Tensor]:
    """A ranges and the same as booleans (B, H, Tq, Tk), made from bounds or from bits."""
    B, H = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]))
    k = torch.arange(Tk)
    if draw(st.booleans()):
        bounds = st.integers(-3, Tk + 3)
        rows = draw(st.sampled_from([1, Tq]))
        lo, hi = (
            torch.tensor(
                draw(st.lists(bounds, min_size=B * H * rows, max_size=B * H * rows)),
                dtype=torch.long,
            ).reshape(B, H, rows)
            for _ in range(2)
        )
        keep = (lo.unsqueeze(-1) <= k) & (k < hi.unsqueeze(-1))
        return key_ranges.from_bounds(lo, hi, Tq, Tk), keep.expand(B, H, Tq, Tk)
    shape = [draw(st.sampled_from([1, size])) for size in (Tq, Tk)]
    cells = B * H * shape[0] * shape[1]
    bits = torch.tensor(
        draw(st.lists(st.booleans(), min_size=cells, max_size=cells)), dtype=torch.bool
    ).reshape(B, H, *shape)
    return key_ranges.from_bits(bits, Tq, Tk), bits.expand(B, H, Tq, Tk)


@st.composite
def composed(draw) -> tuple[KeyRanges, torch.Tensor]:
    Tq, Tk = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    ranges, keep = draw(written_out(Tq, Tk))
    for _ in range(draw(st.integers(0, 3))):
        other, also = draw(written_out(Tq, Tk))
        if draw(st.booleans()):
            ranges, keep = ~ranges, ~keep
        if draw(st.booleans()):
            ranges, keep = ranges & other, keep & also
        else:
            ranges, keep = ranges | other, keep | also
    return ranges, keep


@given(composed())
def test_operations_are_those_of_booleans(pair):
    ranges, keep = pair
    assert torch.equal(ranges.to_bool().expand_as(keep), keep)
    assert torch.equal((~ranges).to_bool().expand_as(keep), ~keep)
    assert torch.equal(ranges.keys_per_query().expand(keep.shape[:3]), keep.sum(-1))


@given(composed())
def test_runs_are_sorted_disjoint_and_within_bounds(pair):
    ranges, _ = pair
    lo, hi = ranges.lo, ranges.hi
    used = lo < hi
    assert ((lo >= 0) & (hi <= ranges.Tk)).all()
    assert ((lo == ranges.Tk) & (hi == ranges.Tk))[~used].all()
    assert (hi[..., :-1] <= lo[..., 1:]).all()


@given(composed(), st.data())
def test_blocks_and_tiles(pair, data):
    ranges, keep = pair
    start = data.draw(st.integers(0, ranges.Tq - 1))
    queries = slice(start, data.draw(st.integers(start + 1, ranges.Tq)))
    keys = slice(data.draw(st.integers(0, ranges.Tk)), None, data.draw(st.integers(1, 3)))
    part = keep[:, :, queries]
    assert torch.equal(ranges.to_bool(queries, keys).expand_as(part[..., keys]), part[..., keys])

    width = data.draw(st.integers(1, ranges.Tk + 2))
    some, full = ranges.tiles(queries, width)
    tiles = part.split(width, -1)
    assert some.tolist() == [bool(t.any()) for t in tiles]
    assert full.tolist() == [bool(t.all()) for t in tiles]


def test_one_run_by_hand():
    """Bounds are cut to the keys there are; crossed ones ranges nothing."""
    ranges = key_ranges.from_bounds(torch.tensor([[[-2, 1, 4]]]), torch.tensor([[[2, 9, 3]]]), 3, 5)
    assert ranges.lo.flatten().tolist() == [0, 1, 5] and ranges.hi.flatten().tolist() == [2, 5, 5]
    assert ranges.keys_per_query().tolist() == [[[2, 4, 0]]]


def test_the_gap_between_two_runs_is_a_run():
    everything = key_ranges.all_keys(1, 9)
    middle = key_ranges.from_bounds(torch.tensor([[[3]]]), torch.tensor([[[6]]]), 1, 9)
    sides = ~middle
    assert sides.bits is None  # no bits are needed
    assert torch.stack([sides.lo, sides.hi], -1).tolist() == [[[[[0, 3], [6, 9]]]]]
    assert torch.equal((sides | middle).to_bool(), everything.to_bool())


@pytest.mark.parametrize("Tq, Tk", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("bits", [False, True])
def test_no_queries_or_no_keys(Tq, Tk, bits):
    ranges = key_ranges.all_keys(Tq, Tk)
    if bits:
        ranges = key_ranges.from_bits(torch.ones(1, 1, Tq, Tk, dtype=torch.bool), Tq, Tk)
    assert ranges.to_bool().shape == (1, 1, Tq, Tk) and ranges.keys_per_query().shape == (1, 1, Tq)
    assert (~ranges).to_bool().shape == (1, 1, Tq, Tk)
    some, full = ranges.tiles(slice(0, Tq), 4)
    assert some.shape == full.shape == ((Tk + 3) // 4,)


def test_runs_need_no_square():
    """A million queries against a million keys takes a few numbers."""
    T = 2**20
    end = torch.arange(1, T + 1).reshape(1, 1, T)
    ranges = key_ranges.from_bounds(torch.zeros_like(end), end, T, T)
    assert int((~ranges).keys_per_query().sum()) == T * (T - 1) // 2
    some, full = ranges.tiles(slice(T - 4, T), 2**18)
    assert some.all() and full.tolist() == [True, True, True, False]


def test_many_runs_meet_as_bits():
    """Scattered, 50 runs and 50 would make 2500 pairs a query, of which few hold a key."""
    Tk = 400
    keep = torch.rand(2, 1, 1, 3, Tk, generator=torch.Generator().manual_seed(0)) < 0.5
    edges = torch.arange(50) * 8 + torch.tensor([[[[0], [1], [2]]]])
    odd, even = (KeyRanges(edges + at, (edges + at + 5).clamp(max=Tk), 3, Tk) for at in (0, 3))
    both = odd & even
    assert both.bits is not None and torch.equal(both.to_bool(), odd.to_bool() & even.to_bool())
    with_bits = KeyRanges(odd.lo, odd.hi, 3, Tk, keep[0]) & KeyRanges(
        even.lo, even.hi, 3, Tk, keep[1]
    )
    assert torch.equal(with_bits.to_bool(), both.to_bool() & keep[0] & keep[1])
