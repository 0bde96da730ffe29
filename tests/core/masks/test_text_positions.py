"""Rules over the positions of texts, in a call with padding, a cache, or both: cell by cell."""

import pytest
import torch
from hypothesis import given, strategies as st

import clearhead as ch
from clearhead.core.masks import Grid
from clearhead.core.masks.text_positions import Padding, Positions, padding_of
from clearhead.core.masks.without import edges_in_call

T = 7  # tokens of the text that masks of T x T are about
CELLS = torch.rand(T, T, generator=torch.Generator().manual_seed(2)) > 0.5
RULES = {
    "prefix": lambda q, k: k < 3,
    "span": lambda q, k: (k >= 1) & (k < 4),
    "lengths": lambda q, k: k < 5,
    "causal": lambda q, k: k <= q,
    "window": lambda q, k: (k >= q - 2) & (k <= q + 1),
    "dense": lambda q, k: _inside(q, k) & CELLS[q.clamp(0, T - 1), k.clamp(0, T - 1)],
    "words": lambda q, k: (k < T) & CELLS[0][k.clamp(0, T - 1)],
    "documents": lambda q, k: _inside(q, k) & (q // 3 == k // 3),
}
MASKS = {
    "prefix": ch.prefix(3),
    "span": ch.prefix(4) & ~ch.prefix(1),
    "lengths": ch.lengths(keys=5),
    "causal": ch.causal,
    "window": ch.window(before=2, after=1),
    "dense": ch.dense(keep=CELLS),
    "words": ch.dense(keep=CELLS[:1, :]),
    "documents": ch.documents([i // 3 for i in range(T)]),
}


def _inside(q, k):
    return (q >= 0) & (q < T) & (k >= 0) & (k < T)


@given(
    first=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    names=st.lists(st.sampled_from(sorted(MASKS)), min_size=1, max_size=2, unique=True),
    start=st.integers(0, 6),
    Tq=st.integers(1, 5),
    dropped=st.integers(0, 3),
    negate=st.booleans(),
)
def test_a_rule_moves_to_the_columns_of_a_call(first, names, start, Tq, dropped, negate):
    """Query i is column `start + i` of the batch, key j is column `dropped + j`."""
    Tk = start + Tq - min(dropped, start)
    dropped = min(dropped, start)
    at = Positions(
        start=tuple(start - n for n in first),
        first_key=tuple(dropped - n for n in first),
        length=tuple(20 - n for n in first),
        column=start,
        dropped=dropped,
    )
    whole = {"dense", "documents"} & set(names)  # beyond the text, a mask of T x T is silent
    if whole and len(names) > 1:
        return
    mask, grid = MASKS[names[0]], Grid(Tq, Tk, 2, 1)
    for name in names[1:]:
        mask = mask & MASKS[name]
    mask = ~mask if negate and not whole else mask
    made = edges_in_call(mask, grid, at)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 1, Tq, Tk)), indexing="ij")
    q, k = i + start - torch.tensor(first)[b], j + dropped - torch.tensor(first)[b]
    right = torch.ones_like(q, dtype=torch.bool)
    for name in names:
        right = right & RULES[name](q, k)
    right = (right ^ (negate and not whole)) & (k >= 0)
    assert made.allowed(grid, b, h, i, j).equal(right)
    assert made.key_ranges(grid).to_bool().expand(2, 1, Tq, Tk).equal(right)


def test_padding_from_a_mask_of_zeros_and_ones():
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert padding_of(real) == Padding((2, 0, 1, 0, 0), (4, 2, 4, 0, 4))
    assert padding_of(torch.ones(2, 3)) is None
    at = Positions((-2, 0), (-2, 0), (2, 4), 0)
    assert at.real_queries(4) == ((2, 0), 4)
    assert at.rows((0, 1, 2, -1, -3), 4).tolist() == [[2, 3, -1, 3, -1], [0, 1, 2, 3, 1]]


@pytest.mark.parametrize("explicit", ["end", "start", 0])
def test_a_named_align_keeps_distances_under_padding(explicit):
    at, grid = Positions((-2, 0), (-2, 0), (5, 7), 0), Grid(7, 7, 2, 1)
    made = edges_in_call(ch.window(before=1, after=0, align=explicit), grid, at)
    plain = ch.window(before=1, after=0).to_bool(7)
    bits = made.key_ranges(grid).to_bool().expand(2, 1, 7, 7)
    assert bits[1, 0].equal(plain) and bits[0, 0, 2:, 2:].equal(plain[2:, 2:])
