"""Embeddings and positions: numbers checked by pencil and by complex numbers."""

import math

import pytest
import torch

from clearhead.nn import (
    MultiHeadAttention,
    RelativePositions,
    RotaryPositions,
    SinusoidalPositions,
    TokenEmbedding,
)
from tests.nn.layers import draw, drawn

close = torch.testing.assert_close


def test_an_embedding_is_its_row():
    layer = TokenEmbedding(5, 3)
    ids = torch.tensor([[4, 0], [0, 2]], dtype=torch.int32)
    assert torch.equal(layer(ids)[0, 1], layer.table.weight[0])
    assert layer(ids).shape == (2, 2, 3)
    assert layer(ids[:0]).shape == (0, 2, 3)


@pytest.mark.parametrize(("d", "base"), [(7, 10000.0), (6, 100.0), (1, 10.0)])
def test_sinusoids_column_by_column(d, base):
    shown = SinusoidalPositions(d, base)(torch.zeros(11, d))
    for p in range(11):
        for column in range(d):
            angle = p / base ** (2 * (column // 2) / d)
            want = math.cos(angle) if column % 2 else math.sin(angle)
            assert shown[p, column].item() == pytest.approx(want, abs=2e-6)


def test_sinusoids_are_added_and_continue():
    x = draw(2, 11, 7)
    place = SinusoidalPositions(7)
    close(place(x)[1] - x[1], place(torch.zeros(11, 7)), atol=1e-6, rtol=1e-6)
    close(place(x)[:, 4:], place(x[:, 4:], start=4))


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_rotations_are_products_of_complex_numbers(pairs):
    D, start = 6, 3
    x = draw(2, 5, 11, D, dtype=torch.float64)
    p = torch.arange(start, start + 11, dtype=torch.float64)
    angles = p[:, None] / 500.0 ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    a, b = (x[..., :3], x[..., 3:]) if pairs == "half" else (x[..., ::2], x[..., 1::2])
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    got = RotaryPositions(D, base=500.0, pairs=pairs)(x, start=start)
    ours = (got[..., :3], got[..., 3:]) if pairs == "half" else (got[..., ::2], got[..., 1::2])
    close(torch.complex(*ours), turned)


def test_rotation_by_pencil():
    """Position 1 turns the first pair by one radian: (1, 0) becomes (cos 1, sin 1)."""
    x = torch.zeros(2, 4)
    x[:, 0] = 1
    got = RotaryPositions(4)(x)
    assert torch.equal(got[0], x[0])
    close(got[1], torch.tensor([math.cos(1), 0, math.sin(1), 0]))
    close(RotaryPositions(4, pairs="interleaved")(x)[1],
          torch.tensor([math.cos(1), math.sin(1), 0, 0]))  # fmt: skip


def test_only_the_distance_counts_after_rotation():
    q, k = draw(1, 8), draw(1, 8, seed=8)
    turn = RotaryPositions(8)
    near = turn(q, start=5) @ turn(k, start=2).T
    close(near, turn(q, start=105) @ turn(k, start=102).T, atol=1e-4, rtol=1e-4)
    assert abs(near - turn(q, start=5) @ turn(k, start=3).T) > 1e-2


def test_queries_and_keys_are_turned_and_values_are_not():
    turn = RotaryPositions(4)
    layer = MultiHeadAttention(12, 3, kv_heads=1, rotary=turn)
    x = draw(7, 12)
    trace = layer.explain(x)
    close(trace["query"][2], turn(layer.W_query(x)[:, 8:]))
    close(trace["key"][0], turn(layer.W_key(x)))
    close(trace["value"][0], layer.W_value(x))


def test_distances_share_buckets_by_pencil():
    """Two distances alone, then two buckets that double: 2 and 3; 4, 5, 6, 7, and all beyond."""
    distances = torch.tensor([0, 1, 2, 3, 4, 7, 8, 99, -1, -2, -99])
    bucket = RelativePositions(1, near=2, far=2, longest=8).bucket(distances)
    assert bucket.tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 5, 6, 7]


def test_relative_numbers_are_added_to_the_scores():
    relative = drawn(RelativePositions(3, near=2, far=2, longest=8))
    layer = MultiHeadAttention(12, 3, relative=relative)
    trace = layer.explain(draw(11, 12))
    added = trace["biased"] - trace["scaled"]
    for q, k in ((0, 0), (5, 4), (10, 2), (10, 0), (2, 3), (0, 10)):
        close(added[:, q, k], relative.table[:, relative.bucket(torch.tensor(q - k))])


def test_a_layer_begins_with_all_distances_alike():
    torch.manual_seed(3)
    placed = MultiHeadAttention(12, 3, relative=RelativePositions(3))
    torch.manual_seed(3)
    close(placed(draw(7, 12)), MultiHeadAttention(12, 3)(draw(7, 12)))


def test_the_numbers_of_distances_are_learned():
    relative = RelativePositions(2, near=3, far=1, longest=5)
    layer = MultiHeadAttention(4, 2, causal=True, relative=relative)
    layer(draw(3, 4)).square().sum().backward()
    moved = relative.table.grad != 0
    assert moved[:, :3].all() and not moved[:, 3:].any()  # distances 0, 1, 2 and no others


def test_relative_positions_made_on_meta_begin_at_zero():
    with torch.device("meta"):
        layer = RelativePositions(4)
    layer.to_empty(device="cpu").table.data.fill_(7.0)
    layer.reset_parameters()
    assert not layer.table.any()
