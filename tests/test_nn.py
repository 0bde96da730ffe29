"""The layers: numbers checked by pencil, torch's own modules as second opinion, caches against the
whole. Sizes are distinct primes where heads allow it, and Tq differs from Tk."""

import copy
import io
import math

import pytest
import torch

import clearhead as ch
from clearhead.nn import (
    CausalAttention,
    FeedForward,
    KVCache,
    MultiHeadAttention,
    RelativePositions,
    RotaryPositions,
    SelfAttention,
    SimpleAttention,
    SinusoidalPositions,
    TokenEmbedding,
    TransformerBlock,
)

close = torch.testing.assert_close


def draw(*shape, seed=7, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def drawn(relative):
    """Numbers instead of the zeros it begins with."""
    torch.nn.init.normal_(relative.table)
    return relative


def every_layer():
    """One of each, with what to call it on."""
    torch.manual_seed(11)
    x = draw(2, 5, 12)
    return {
        "simple": (SimpleAttention(), x),
        "self": (SelfAttention(12, 7, qkv_bias=True), x),
        "causal": (CausalAttention(12, 7, 5, dropout=0.3), x),
        "many": (MultiHeadAttention(12, 6, kv_heads=3, dropout=0.3, rotary=RotaryPositions(2)), x),
        "tokens": (TokenEmbedding(13, 12), torch.tensor([[3, 12, 0], [1, 1, 2]])),
        "sinusoids": (SinusoidalPositions(12), x),
        "rotary": (RotaryPositions(12), x),
        "relative": (MultiHeadAttention(12, 3, relative=drawn(RelativePositions(3))), x),
        "feed": (FeedForward(12, 17, dropout=0.3), x),
        "pre": (TransformerBlock(12, 3, dropout=0.3), x),
        "post": (TransformerBlock(12, 3, norm="post", causal=True), x),
    }


NAMES = list(every_layer())


# -------------------------------------------------------------------------------------- one head


def test_two_tokens_by_pencil():
    """Scores 1 and 0, so weights e/(1+e) and 1/(1+e)."""
    x = torch.eye(2)
    big, small = math.e / (1 + math.e), 1 / (1 + math.e)
    close(SimpleAttention()(x), torch.tensor([[big, small], [small, big]]))


def test_projections_by_pencil():
    """q = 2x, k = x, v = 3x of one feature: the score of (1, 1) is 2, and of (1, 0) it is 0."""
    one = torch.ones(1, 1)
    layer = SelfAttention.from_matrices(2 * one, one, 3 * one)
    out = layer(torch.tensor([[1.0], [0.0]]))
    close(out, torch.tensor([[3 * math.e**2 / (1 + math.e**2)], [1.5]]))


def test_matrices_are_used_from_the_right_and_copied():
    W_q, W_k, W_v = (draw(5, 3, seed=s) for s in (1, 2, 3))
    x = draw(2, 7, 5)
    layer = SelfAttention.from_matrices(W_q, W_k, W_v)
    by_hand = ((x @ W_q) @ (x @ W_k).mT / 3**0.5).softmax(-1) @ (x @ W_v)
    close(layer(x), by_hand)
    W_v.zero_()
    close(layer(x), by_hand)
    assert all(p.requires_grad for p in layer.parameters())


def test_building_from_matrices_draws_nothing():
    torch.manual_seed(3)
    SelfAttention.from_matrices(*[torch.eye(3)] * 3)
    MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(4, 2))
    after = torch.rand(1)
    torch.manual_seed(3)
    torch.nn.MultiheadAttention(4, 2)
    assert torch.equal(after, torch.rand(1))


def test_projections_are_drawn_in_the_order_query_key_value():
    torch.manual_seed(5)
    layer = SelfAttention(5, 3)
    torch.manual_seed(5)
    for name in ("W_query", "W_key", "W_value"):
        assert torch.equal(getattr(layer, name).weight, torch.nn.Linear(5, 3, bias=False).weight)
    assert layer.W_key.bias is None
    assert SelfAttention(5, 3, qkv_bias=True).W_key.bias is not None


def test_the_mask_of_the_layer_and_of_the_call_both_hold():
    x = draw(2, 7, 5)
    layer = SelfAttention(5, 3, mask=ch.causal)
    both = layer.explain(x, mask=ch.lengths(keys=[3, 6]))
    free = SelfAttention.from_matrices(
        layer.W_query.weight.T, layer.W_key.weight.T, layer.W_value.weight.T
    )
    rule = ch.causal & ch.lengths(keys=[3, 6])
    close(both["output"].squeeze(1), free(x, mask=rule))
    assert not torch.equal(free(x), free(x, mask=rule))
    assert (both["weights"][0, 0, :, 3:] == 0).all() and both["weights"][1, 0, 6, 5] > 0


def test_a_batch_is_its_sequences_one_by_one():
    x = draw(3, 7, 5)
    for layer in (SimpleAttention(), SelfAttention(5, 2), CausalAttention(5, 2, 11)):
        close(layer(x), torch.stack([layer(one) for one in x]))


def test_causal_attention_does_not_see_what_comes_later():
    x = draw(2, 7, 5)
    layer = CausalAttention(5, 3, 7)
    changed = x.clone()
    changed[:, 4:] += 1
    assert torch.equal(layer(x)[:, :4], layer(changed)[:, :4])
    assert not torch.equal(layer(x)[:, 4:], layer(changed)[:, 4:])
    close(layer(x)[:, 0], layer.W_value(x[:, 0]))  # the first token sees only itself
    close(layer(x, ch.window(before=0)), layer.W_value(x))  # now everyone does


def test_dropout_acts_in_training_only():
    x = draw(2, 7, 5)
    layer = CausalAttention(5, 3, 7, dropout=0.5).eval()
    assert torch.equal(layer(x), layer(x))
    assert "dropped" not in layer.explain(x)
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_all_dropped_is_nothing():
    assert (CausalAttention(5, 3, 7, dropout=1.0)(draw(2, 7, 5)) == 0).all()


# ----------------------------------------------------------------------------- many heads


def by_loops(layer, x, context, values):
    """Every batch and every head on its own, from the formula."""
    q, k, v = layer.W_query(x), layer.W_key(context), layer.W_value(values)
    D, group = layer.head_size, layer.heads // layer.kv_heads
    rows = []
    for b in range(x.shape[0]):
        heads = []
        for i in range(layer.heads):
            j = i // group
            ours, theirs = slice(i * D, (i + 1) * D), slice(j * D, (j + 1) * D)
            weights = (q[b, :, ours] @ k[b, :, theirs].T / D**0.5).softmax(-1)
            heads.append(weights @ v[b, :, theirs])
        rows.append(layer.out_proj(torch.cat(heads, -1)))
    return torch.stack(rows)


@pytest.mark.parametrize("kv_heads", [None, 6, 3, 1])
def test_heads_one_by_one(kv_heads):
    layer = MultiHeadAttention(30, 6, kv_heads=kv_heads, qkv_bias=True)
    x = draw(2, 7, 30)
    close(layer(x), by_loops(layer, x, x, x))
    close(layer(x[0]), layer(x)[0])
    assert layer.W_key.out_features == 5 * (6 if kv_heads is None else kv_heads)


def test_cross_attention_with_its_own_widths():
    layer = MultiHeadAttention(30, 6, kv_heads=2, d_context=11, d_values=13)
    x, context, values = draw(2, 5, 30), draw(2, 7, 11, seed=8), draw(2, 7, 13, seed=9)
    close(layer(x, context, values), by_loops(layer, x, context, values))
    same = MultiHeadAttention(30, 6, d_context=11)
    close(same(x, context), by_loops(same, x, context, context))
    close(same(x, context[:1]), by_loops(same, x, context[:1].expand(2, -1, -1), context[:1]
          .expand(2, -1, -1)))  # fmt: skip


def test_masks_of_the_call():
    layer = MultiHeadAttention(12, 3)
    x, context = draw(2, 5, 12), draw(2, 7, 12, seed=8)
    short = layer(x, context, mask=ch.lengths(keys=[4, 7]))
    close(short[0], layer(x[0], context[0, :4]))
    close(short[1], layer(x[1], context[1]))
    end = layer(x, context, mask=ch.Causal(align="end"))
    close(end[:, 0], layer(x[:, :1], context[:, :3])[:, 0])
    ours = MultiHeadAttention(12, 3, causal=True)
    ours.load_state_dict(layer.state_dict())
    close(ours(x), layer(x, mask=ch.causal))
    close(ours(x, mask=ch.window(before=1)), layer(x, mask=ch.causal & ch.window(before=1)))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5}, {"kdim": 5, "vdim": 7}, {"vdim": 7}])
def test_torch_weights(batch_first, bias, widths):
    torch.manual_seed(2)
    theirs = torch.nn.MultiheadAttention(
        12, 3, bias=bias, batch_first=batch_first, dropout=0.2, **widths
    ).eval()
    if bias:  # torch begins with zeros, which would hide a bias in the wrong place
        torch.nn.init.normal_(theirs.in_proj_bias)
        torch.nn.init.normal_(theirs.out_proj.bias)
    ours = MultiHeadAttention.from_torch(theirs)
    assert not ours.training and ours.dropout == 0.2
    x = draw(2, 5, 12)
    context, values = draw(2, 11, widths.get("kdim", 12)), draw(2, 11, widths.get("vdim", 12))
    keep = draw(5, 11, seed=4) > -0.5
    turned = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    want, _ = theirs(turned(x), turned(context), turned(values), attn_mask=~keep)
    got = ours(x, context, values, mask=ch.dense(keep=keep))
    close(got, turned(want), rtol=1e-5, atol=1e-6)


def test_torch_weights_keep_their_dtype_and_mode_and_are_copied():
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.training and ours.W_key.weight.dtype == torch.float64
    assert all(p.requires_grad for p in ours.parameters())
    x = draw(2, 5, 12, dtype=torch.float64)
    before = ours(x)
    torch.nn.init.zeros_(theirs.in_proj_weight)
    assert torch.equal(ours(x), before)


# ------------------------------------------------------------------------------- explain


def test_explain_is_forward_with_dropout_in_training():
    torch.manual_seed(0)
    x = draw(2, 7, 12)
    layers = [
        CausalAttention(12, 5, 7, dropout=0.4),
        MultiHeadAttention(12, 6, kv_heads=2, dropout=0.4, causal=True, rotary=RotaryPositions(2)),
    ]
    for layer in layers:
        torch.manual_seed(1)
        out = layer(x)
        torch.manual_seed(1)
        trace = layer.explain(x)
        last = trace.steps[-1].tensor.reshape(out.shape)
        close(last, out)
        assert "dropped" in trace
        assert not torch.equal(trace["dropped"], trace["weights"])


def test_what_a_trace_of_one_head_holds():
    x = draw(5, 3)
    trace = SelfAttention(3, 2).explain(x, tokens="a b c d e".split(), mask=ch.causal)
    assert trace.names == (
        "inputs", "query", "key", "value", "scores", "scaled", "masked", "weights", "output"
    )  # fmt: skip
    assert trace["inputs"] is x and trace.step("inputs").axes == "q e"
    assert trace.queries == trace.keys == ("a", "b", "c", "d", "e")
    assert "scaled" not in SimpleAttention().explain(x)
    assert SimpleAttention().explain(draw(2, 5, 3)).step("weights").axes == "b h q k"


def test_what_a_trace_of_many_heads_holds():
    layer = MultiHeadAttention(12, 6, kv_heads=2, d_context=5)
    x, context = draw(2, 3, 12), draw(2, 7, 5)
    trace = layer.explain(x, list("abc"), context=context, key_tokens=list("tuvwxyz"))
    assert trace.names == (
        "inputs", "context", "query", "key", "value", "scores", "scaled", "weights", "output",
        "joined", "projected"
    )  # fmt: skip
    assert [trace.step(n).axes for n in ("inputs", "context", "key", "joined", "projected")] == [
        "b q e", "b k e", "b g k d", "b q e", "b q e"
    ]  # fmt: skip
    close(trace["joined"][:, :, 2:4], trace["output"][:, 1])
    close(trace["projected"], layer(x, context))
    assert trace.keys == tuple("tuvwxyz")
    assert layer.explain(x[0], context=context[0]).step("joined").axes == "q e"


def test_explain_asks_what_if():
    layer = MultiHeadAttention(12, 3).eval()
    x = draw(5, 12)
    assert "scaled" not in layer.explain(x, scale=1)
    dropped = layer.explain(x, dropout=0.5, seed=3)["dropped"]
    assert torch.equal(dropped, layer.explain(x, dropout=0.5, seed=3)["dropped"])
    assert not torch.equal(dropped, layer.explain(x, dropout=0.5, seed=4)["dropped"])


# -------------------------------------------------------------------------- embeddings, positions


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


# --------------------------------------------------------------------------------------- caches

ROOM = pytest.mark.parametrize("max_length", [None, 13, 17])


def in_chunks(layer, x, sizes, cache, **keywords):
    parts, start = [], 0
    for size in sizes:
        parts.append(layer(x[..., start : start + size, :], cache=cache, **keywords))
        start += size
    assert start == x.shape[-2]
    return torch.cat(parts, -2)


@ROOM
@pytest.mark.parametrize("sizes", [[1] * 13, [5, 1, 7], [11, 1, 1], [13]], ids=str)
@pytest.mark.parametrize("make", [
    lambda: MultiHeadAttention(12, 6, kv_heads=2, causal=True),
    lambda: MultiHeadAttention(24, 6, kv_heads=1, causal=True, rotary=RotaryPositions(4)),
    lambda: TransformerBlock(12, 3, causal=True, rotary=RotaryPositions(4)),
    lambda: TransformerBlock(12, 3, causal=True, norm="post"),
    lambda: MultiHeadAttention(12, 3, causal=True, relative=drawn(RelativePositions(3, 2, 3, 7))),
], ids=["plain", "rotary", "pre", "post", "relative"])  # fmt: skip
@torch.no_grad()
def test_decoding_is_the_whole(make, sizes, max_length):
    torch.manual_seed(6)
    layer = make().double()
    d = layer.d if isinstance(layer, MultiHeadAttention) else layer.attention.d
    x = draw(2, 13, d, dtype=torch.float64)
    cache = KVCache(max_length)
    close(in_chunks(layer, x, sizes, cache), layer(x))
    assert cache.length == 13


@ROOM
@torch.no_grad()
def test_decoding_with_a_window(max_length):
    layer = MultiHeadAttention(12, 3, causal=True, rotary=RotaryPositions(4)).double()
    x = draw(2, 13, 12, dtype=torch.float64)
    rule = ch.window(before=3, align="end")
    got = in_chunks(layer, x, [5, 1, 4, 1, 1, 1], KVCache(max_length), mask=rule)
    close(got, layer(x, mask=rule))
    assert not torch.allclose(got, layer(x))


@torch.no_grad()
def test_a_cache_in_half_precision_and_without_a_batch():
    layer = MultiHeadAttention(12, 3, causal=True).to(torch.bfloat16)
    x = draw(7, 12).to(torch.bfloat16)
    close(in_chunks(layer, x, [3, 1, 3], KVCache(7)), layer(x), atol=2e-2, rtol=2e-2)


def test_gradients_flow_through_a_cache_without_reserved_room():
    layer = MultiHeadAttention(12, 3, causal=True)
    x = draw(2, 7, 12).requires_grad_()
    (whole,) = torch.autograd.grad(layer(x).square().sum(), x)
    (parts,) = torch.autograd.grad(in_chunks(layer, x, [3, 4], KVCache()).square().sum(), x)
    close(parts, whole)


@ROOM
@torch.no_grad()
def test_a_cache_holds_what_it_was_given(max_length):
    cache = KVCache(max_length)
    assert cache.keys is None and cache.values is None and cache.length == 0
    k, v = draw(2, 3, 7, 5), draw(2, 3, 7, 4, seed=8)
    for part in (slice(0, 2), slice(2, 3), slice(3, 7)):
        keys, values = cache.append(k[:, :, part], v[:, :, part])
    assert torch.equal(keys, k) and torch.equal(values, v)
    assert torch.equal(cache.keys, k) and torch.equal(cache.values, v)
    of = "" if max_length is None else f" of {max_length}"
    assert repr(cache) == f"KVCache(7{of} tokens, keys (2, 3, 7, 5))"
    cache.cut(3)
    keys, values = cache.append(k[:, :, 5:], v[:, :, 5:])
    assert torch.equal(keys, torch.cat([k[:, :, :3], k[:, :, 5:]], 2))
    assert torch.equal(values, torch.cat([v[:, :, :3], v[:, :, 5:]], 2))
    cache.reset()
    assert cache.length == 0 and cache.keys is None
    assert cache.append(k[:1, :1], v[:1, :1])[0].shape == (1, 1, 7, 5)


@ROOM
@torch.no_grad()
def test_looking_and_failing_leave_a_cache_as_it_was(max_length):
    layer = MultiHeadAttention(12, 3, causal=True, rotary=RotaryPositions(4))
    x = draw(2, 7, 12)
    cache = KVCache(max_length)
    layer(x[:, :5], cache=cache)
    trace = layer.explain(x[:, 5:], cache=cache, key_tokens=list("abcdefg"))
    assert cache.length == 5 and trace["weights"].shape == (2, 3, 2, 7)
    with pytest.raises(ch.BadValue):
        layer(x[:, 5:], cache=cache, mask=ch.window(before=2))
    assert cache.length == 5
    close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])
    close(trace["projected"], layer(x)[:, 5:])


# --------------------------------------------------------------------------------------- blocks


def torch_block(theirs, norm):
    """Our block with the weights of torch's encoder layer."""
    ours = TransformerBlock(
        12, 3, hidden=17, activation="relu", norm=norm, qkv_bias=True, dropout=theirs.dropout.p
    )
    ours.attention = MultiHeadAttention.from_torch(theirs.self_attn)
    for name, source in (("W_1", "linear1"), ("W_2", "linear2")):
        getattr(ours.feed_forward, name).load_state_dict(getattr(theirs, source).state_dict())
    for name, source in (("norm_1", "norm1"), ("norm_2", "norm2")):
        getattr(ours, name).load_state_dict(getattr(theirs, source).state_dict())
    return ours


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_is_torchs_encoder_layer(norm):
    torch.manual_seed(4)
    theirs = torch.nn.TransformerEncoderLayer(
        12, 3, 17, dropout=0.2, batch_first=True, norm_first=norm == "pre"
    )
    for parameter in theirs.parameters():  # norms begin at 1 and 0, biases at 0
        torch.nn.init.normal_(parameter, std=0.5)
    ours = torch_block(theirs, norm).eval()
    theirs.eval()
    x = draw(2, 7, 12)
    close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    drop = torch.ones(7, 7, dtype=torch.bool).triu(1)
    close(ours(x, mask=ch.causal), theirs(x, src_mask=drop), rtol=1e-4, atol=1e-5)
    ours.attention.causal = True
    close(ours(x), theirs(x, src_mask=drop), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_block_drops_everything_but_the_stream(norm):
    block = TransformerBlock(12, 3, dropout=1.0, norm=norm)
    x = draw(2, 7, 12)
    twice = torch.nn.functional.layer_norm(torch.nn.functional.layer_norm(x, (12,)), (12,))
    close(block(x), x if norm == "pre" else twice)


@pytest.mark.parametrize(("name", "at_one"), [
    ("gelu", 0.8413447), ("relu", 1.0), ("silu", 0.7310586)
])  # fmt: skip
def test_feed_forward_by_pencil(name, at_one):
    """Weights 1 and 2, biases 0: f(x) = 2 * activation(x); gelu(1) = Phi(1), silu(1) = e/(1+e)."""
    layer = FeedForward(1, 1, name)
    layer.load_state_dict({
        "W_1.weight": torch.ones(1, 1), "W_1.bias": torch.zeros(1),
        "W_2.weight": torch.full((1, 1), 2.0), "W_2.bias": torch.zeros(1),
    })  # fmt: skip
    close(layer(torch.ones(1, 1)), torch.tensor([[2 * at_one]]))
    assert FeedForward(5).hidden == 20
    layer = FeedForward(3, dropout=1.0)
    close(layer(draw(5, 3)), layer.W_2.bias.expand(5, 3))  # the hidden features are dropped


# ------------------------------------------------------------------------ what all layers share


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_and_copied(name):
    layer, x = every_layer()[name]
    layer.eval()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    if list(layer.parameters()):
        assert not torch.equal(other(x), layer(x))
    other.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", NAMES)
def test_double_and_half(name):
    layer, x = every_layer()[name]
    layer.eval()
    wide = copy.deepcopy(layer).double()
    narrow = copy.deepcopy(layer).to(torch.bfloat16)
    inputs = (x, x, x) if name == "tokens" else (x, x.double(), x.bfloat16())
    outs = [m(i) for m, i in zip((layer, wide, narrow), inputs, strict=True)]
    assert [o.dtype for o in outs[1:]] == [torch.float64, torch.bfloat16]
    close(outs[0].double(), outs[1], rtol=1e-4, atol=1e-5)
    close(outs[2].double(), outs[1], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "tokens"])
def test_gradients_by_differences(name):
    layer, x = every_layer()[name]
    layer = layer.double().eval()
    x = x[:, :3].double().requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))
    weights = tuple(layer.parameters())[:2]
    if weights:
        grads = torch.autograd.grad(layer(x).square().sum(), weights)
        assert all(g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("name", ["self", "causal", "many", "feed", "pre", "post"])
def test_every_parameter_learns(name):
    layer, x = every_layer()[name]
    layer(x).square().sum().backward()
    for key, parameter in layer.named_parameters():
        if "W_key.bias" not in key:  # softmax does not see what is added to a whole row
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_training_learns_to_copy_the_token_before(norm):
    """Only attention can bring it over, and only positions say which one it is."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({
        "embed": TokenEmbedding(5, 16), "place": SinusoidalPositions(16),
        "block": TransformerBlock(16, 2, causal=True, norm=norm, dropout=0.01),
        "read": torch.nn.Linear(16, 5),
    })  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        ids = torch.randint(5, (32, 7))
        logits = model["read"](model["block"](model["place"](model["embed"](ids))))
        loss = torch.nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 1.3 and sum(losses[-10:]) / 10 < 0.4


def test_layers_print_themselves():
    assert str(SelfAttention(3, 2, mask=ch.causal)).startswith("SelfAttention(\n  mask=causal\n")
    assert "context_length=7, dropout=0.5" in str(CausalAttention(3, 2, 7, dropout=0.5))
    assert "heads=6, kv_heads=3, dropout=0, causal=True" in str(
        MultiHeadAttention(12, 6, kv_heads=3, causal=True)
    )
    assert str(RotaryPositions(4)) == "RotaryPositions(head_size=4, base=10000, pairs='half')"
    assert str(SinusoidalPositions(5, 100.0)) == "SinusoidalPositions(d=5, base=100)"
    assert "activation='gelu'" in str(FeedForward(3))
    assert "norm='post'" in str(TransformerBlock(4, 2, norm="post"))


# -------------------------------------------------------------------------------- wrong input


def grown():
    cache = KVCache(5)
    cache.append(torch.zeros(2, 3, 4, 7), torch.zeros(2, 3, 4, 7))
    return cache


def needs_grad():
    return torch.zeros(1, 2, 3, requires_grad=True)


def odd_torch(**keywords):
    return torch.nn.MultiheadAttention(4, 2, **keywords)


WRONG = {
    "heads": (lambda: MultiHeadAttention(14, 4), ch.BadValue,
        "MultiHeadAttention got d=14 and heads=4.\n"
        "  Rule: each head has d / heads features, so heads divides d.\n"
        "  Way out: pass another number of heads, for example 2, or another d."),
    "key heads": (lambda: MultiHeadAttention(12, 6, kv_heads=4), ch.BadValue,
        "MultiHeadAttention got heads=6 and kv_heads=4.\n"
        "  Rule: each key head serves heads / kv_heads query heads, so kv_heads divides heads.\n"
        "  Way out: pass another number of key heads, for example 3."),
    "no heads": (lambda: MultiHeadAttention(12, 0), ch.BadValue,
        "MultiHeadAttention got heads=0.\n  Rule: heads is a whole number, 1 or more."),
    "rotary of another size": (
        lambda: MultiHeadAttention(12, 3, rotary=RotaryPositions(6)), ch.BadValue,
        "MultiHeadAttention got a rotary for heads of 6 features.\n"
        "  Rule: its heads have d / heads = 4 features.\n  Way out: pass RotaryPositions(4)."),
    "width": (lambda: SelfAttention(5, 3)(torch.zeros(2, 7, 4)), ch.BadValue,
        "SelfAttention got x of shape (2, 7, 4).\n"
        "  Rule: the last dimension of x is 5, as the layer was built.\n"
        "  Way out: pass vectors of 5 features, or build the layer for 4."),
    "context width": (
        lambda: MultiHeadAttention(4, 2, d_context=5)(torch.zeros(2, 4), torch.zeros(3, 4)),
        ch.BadValue, "MultiHeadAttention got context of shape (3, 4)."),
    "dimensions": (lambda: SimpleAttention()(torch.zeros(2, 3, 5, 7)), ch.BadValue,
        "SimpleAttention got x of shape (2, 3, 5, 7).\n"
        "  Rule: x is (B, T, d), or (T, d) for one sequence."),
    "ids for vectors": (lambda: FeedForward(4)(torch.tensor([[1, 2, 3, 4]])), ch.BadType,
        "FeedForward got a tensor of torch.int64 as x.\n"
        "  Rule: x holds one vector per token: a floating tensor (B, T, 4) or (T, 4).\n"
        "  Way out: pass vectors as torch.tensor(x, dtype=torch.float32); look ids up first, for "
        "example with TokenEmbedding."),
    "a list": (lambda: SimpleAttention()([[1.0]]), ch.BadType,
        "SimpleAttention got a list as x."),
    "context length": (lambda: CausalAttention(4, 3, 5)(torch.zeros(2, 7, 4)), ch.BadValue,
        "CausalAttention got 7 tokens, in x of shape (2, 7, 4).\n"
        "  Rule: this layer reads at most context_length=5 tokens.\n"
        "  Way out: cut the input, for example to its last tokens, or build the layer for more."),
    "dropout": (lambda: CausalAttention(4, 3, 5, dropout=1.5), ch.BadValue,
        "CausalAttention got dropout=1.5.\n"
        "  Rule: dropout is a probability, from 0 to 1; it acts in training mode only."),
    "dropout of a block": (lambda: TransformerBlock(4, 2, dropout=-0.1), ch.BadValue,
        "MultiHeadAttention got dropout=-0.1."),
    "odd head size": (lambda: RotaryPositions(7), ch.BadValue,
        "RotaryPositions got head_size=7.\n"
        "  Rule: features are turned in pairs, so the head size is even.\n"
        "  Way out: use heads of 8 features."),
    "pairs": (lambda: RotaryPositions(8, pairs="both"), ch.BadValue,
        "RotaryPositions got pairs='both'."),
    "rotary width": (lambda: RotaryPositions(8)(torch.zeros(3, 6)), ch.BadValue,
        "RotaryPositions got x of shape (3, 6) and torch.float32.\n"
        "  Rule: x is floating, (..., T, D), with the head size D=8."),
    "start": (lambda: SinusoidalPositions(4)(torch.zeros(3, 4), start=-1), ch.BadValue,
        "SinusoidalPositions got start=-1.\n"
        "  Rule: start is the position of the first token, a whole number from 0 on."),
    "base": (lambda: SinusoidalPositions(4, base=0), ch.BadValue,
        "SinusoidalPositions got base=0."),
    "ids": (lambda: TokenEmbedding(5, 4)(torch.tensor([0, 5])), ch.BadValue,
        "TokenEmbedding got ids from 0 to 5.\n"
        "  Rule: an id is a row of the table, from 0 to 4."),
    "negative ids": (lambda: TokenEmbedding(5, 4)(torch.tensor([-1, 3])), ch.BadValue,
        "TokenEmbedding got ids from -1 to 3."),
    "floating ids": (lambda: TokenEmbedding(5, 4)(torch.zeros(3)), ch.BadType,
        "TokenEmbedding got ids of torch.float32."),
    "matrices": (
        lambda: SelfAttention.from_matrices(torch.zeros(3, 2), torch.zeros(3, 2),
                                            torch.zeros(2, 3)), ch.BadValue,
        "The matrices have shapes (3, 2), (3, 2), (2, 3).\n"
        "  Rule: W_q, W_k and W_v have one shape, (d_in, d_out), and are used as x @ W."),
    "activation": (lambda: FeedForward(4, activation="tanh"), ch.BadValue,
        "FeedForward got activation='tanh'.\n"
        "  Rule: an activation is one of 'gelu', 'relu', 'silu'."),
    "norm": (lambda: TransformerBlock(4, 2, norm="both"), ch.BadValue,
        "TransformerBlock got norm='both'."),
    "corner": (lambda: MultiHeadAttention(4, 2, causal=True)(torch.zeros(2, 4), torch.zeros(3, 4)),
        ch.BadValue, "align"),
    "bare boolean": (
        lambda: MultiHeadAttention(4, 2, causal=True)(torch.zeros(2, 4), mask=torch.ones(2, 2) > 0),
        ch.BadType, "dense(keep=mask)"),
    "values alone": (
        lambda: MultiHeadAttention(4, 2)(torch.zeros(2, 4), values=torch.zeros(2, 4)), ch.BadValue,
        "MultiHeadAttention got values= without context=."),
    "context and cache": (
        lambda: MultiHeadAttention(4, 2)(torch.zeros(2, 4), torch.zeros(3, 4), cache=KVCache()),
        ch.BadValue, "MultiHeadAttention got context= and a cache."),
    "context and rotary": (
        lambda: MultiHeadAttention(4, 2, rotary=RotaryPositions(2))(
            torch.zeros(2, 4), torch.zeros(3, 4)), ch.BadValue,
        "MultiHeadAttention got context= and has positions."),
    "relative heads": (lambda: MultiHeadAttention(6, 3, relative=RelativePositions(2)), ch.BadValue,
        "MultiHeadAttention got relative positions for 2 heads.\n"
        "  Rule: it has 3 heads, each with its own number for a distance.\n"
        "  Way out: pass RelativePositions(3)."),
    "longest": (lambda: RelativePositions(2, near=16, longest=16), ch.BadValue,
        "RelativePositions got near=16 and longest=16.\n"
        "  Rule: distances from near to longest share buckets, so longest is beyond near.\n"
        "  Way out: pass longest=128, or a smaller near."),
    "cache is full": (lambda: grown().append(*[torch.zeros(2, 3, 2, 7)] * 2), ch.BadValue,
        "KVCache got 2 more tokens and holds 4.\n  Rule: it has room for max_length=5.\n"
        "  Way out: build a longer cache, or KVCache() without a limit."),
    "cache of another batch": (lambda: grown().append(*[torch.zeros(1, 3, 1, 7)] * 2), ch.BadValue,
        "KVCache got keys of shape (1, 3, 1, 7), torch.float32 on cpu; it holds (2, 3, 4, 7), "
        "torch.float32 on cpu.\n"
        "  Rule: new tokens continue the same sequences: all but the length stays as it was."),
    "cache of another dtype": (
        lambda: grown().append(*[torch.zeros(2, 3, 1, 7).double()] * 2), ch.BadValue,
        "KVCache got keys of shape (2, 3, 1, 7), torch.float64 on cpu; it holds"),
    "keys without values": (
        lambda: KVCache().append(torch.zeros(2, 3, 1, 7), torch.zeros(2, 3, 2, 7)), ch.BadValue,
        "KVCache got keys (2, 3, 1, 7) and values (2, 3, 2, 7)."),
    "cache with gradient": (lambda: KVCache(5).append(needs_grad(), needs_grad()), ch.BadValue,
        "KVCache(max_length=5) got keys or values that need a gradient."),
    "cache length": (lambda: KVCache(0), ch.BadValue, "KVCache got max_length=0."),
    "cut": (lambda: grown().cut(5), ch.BadValue,
        "cut was asked for length=5.\n"
        "  Rule: the cache holds 4 tokens, and cutting keeps the first of them.\n"
        "  Way out: pass a whole number from 0 to 4."),
    "bias_kv": (lambda: MultiHeadAttention.from_torch(odd_torch(add_bias_kv=True)), ch.BadValue,
        "from_torch got a module with add_bias_kv.\n"
        "  Rule: these add a key that no token has, and MultiHeadAttention has none.\n"
        "  Way out: train without them, or keep using torch's module."),
    "zero_attn": (lambda: MultiHeadAttention.from_torch(odd_torch(add_zero_attn=True)), ch.BadValue,
        "from_torch got a module with add_zero_attn."),
    "another module": (lambda: MultiHeadAttention.from_torch(torch.nn.Linear(4, 4)), ch.BadType,
        "from_torch got a Linear."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name):
    call, kind, text = WRONG[name]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)
    assert caught.value.rule and caught.value.way_out


def test_a_trace_says_where_queries_keys_and_values_came_from():
    x, other = torch.randn(3, 8), torch.randn(5, 8)
    layer = MultiHeadAttention(8, 2)
    formulas = [s.formula for s in layer.explain(x, context=other) if s.name in "query key value"]
    assert formulas == ["X · W_query", "C · W_key", "C · W_value"]
    assert [SimpleAttention().explain(x).step(n).formula for n in ("query", "key")] == ["X", "X"]
    turned = MultiHeadAttention(8, 2, rotary=RotaryPositions(4)).explain(x)
    assert turned.step("key").formula == "rotated(X · W_key)"


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("shape", [(3, 5, 14), (5, 14)])
def test_a_block_explains_what_it_computes(norm, shape):
    block = ch.nn.TransformerBlock(14, 2, norm=norm, causal=True, dropout=0.3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    for train in (True, False):
        block.train(train)
        torch.manual_seed(11)
        expected = block(x)
        torch.manual_seed(11)
        trace = block.explain(x, list("abcde"))
        torch.testing.assert_close(trace["block"], expected)
        assert trace.names[-4:] == ("attended", "normed", "fed", "block")
        assert ch.views.text.to_json(trace)["steps"][-1]["name"] == "block"


def test_a_block_explains_a_step_of_a_cache_and_leaves_the_cache():
    block = ch.nn.TransformerBlock(14, 2, causal=True).eval()
    x = torch.randn(1, 7, 14, generator=torch.Generator().manual_seed(7))
    cache = ch.nn.KVCache(7)
    with torch.no_grad():
        block(x[:, :5], cache=cache)
        trace = block.explain(x[:, 5:], cache=cache)
        assert cache.length == 5
        torch.testing.assert_close(trace["block"], block(x[:, 5:], cache=cache))


# ------------------------------------------------------------------- what builders do to a layer


def test_a_layer_whose_heads_are_shared_out_among_machines():
    """Each holds the projections of some heads and its rows of the last; the answers are added."""
    layer = MultiHeadAttention(12, heads=4, kv_heads=2, causal=True, out_bias=False)
    x, parts = torch.randn(2, 5, 12), []
    for i in range(2):
        part = copy.deepcopy(layer)
        for name, width in (("W_query", 6), ("W_key", 3), ("W_value", 3)):
            projection = getattr(part, name)
            projection.weight = torch.nn.Parameter(projection.weight[i * width : (i + 1) * width])
        part.out_proj.weight = torch.nn.Parameter(part.out_proj.weight[:, i * 6 : (i + 1) * 6])
        parts.append(part(x))
    torch.testing.assert_close(sum(parts), layer(x))


def test_what_fails_after_attention_leaves_the_cache_as_it_was():
    block, cache = TransformerBlock(8, heads=2, causal=True), KVCache()
    block(torch.randn(1, 3, 8), cache=cache)
    for broken in (block.attention.out_proj, block.feed_forward.W_2):
        weight, broken.weight = broken.weight, torch.nn.Parameter(torch.zeros(8, 7))
        with pytest.raises(RuntimeError):
            block(torch.randn(1, 2, 8), cache=cache)
        assert cache.length == 3
        broken.weight = weight


def test_relative_positions_made_on_meta_begin_at_zero():
    with torch.device("meta"):
        layer = RelativePositions(4)
    layer.to_empty(device="cpu").table.data.fill_(7.0)
    layer.reset_parameters()
    assert not layer.table.any()


def test_from_torch_keeps_what_is_frozen_and_refuses_what_computes_otherwise():
    theirs = torch.nn.MultiheadAttention(8, 2)
    theirs.in_proj_weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    learns = {name: p.requires_grad for name, p in ours.named_parameters()}
    assert not learns["W_query.weight"] and learns["out_proj.weight"] and learns["W_key.bias"]
    with pytest.raises(ch.BadType, match="a way of its own"):
        MultiHeadAttention.from_torch(torch.ao.nn.quantizable.MultiheadAttention(8, 2))


def test_the_trace_of_a_block_says_how_each_number_arose():
    x = torch.randn(1, 3, 8)
    for norm, given in (("pre", "norm_1(stream)"), ("post", "X")):
        block = TransformerBlock(8, heads=2, norm=norm)
        trace = block.explain(x)
        assert trace.step("inputs").formula == given
        assert trace.step("fed").formula == "gelu(normed · W_1 + b) · W_2 + b"
        torch.testing.assert_close(
            trace["inputs"], block.norm_1(x) if norm == "pre" else x, rtol=0, atol=0
        )
        dropping = TransformerBlock(8, heads=2, norm=norm, dropout=0.5)
        formulas = [dropping.explain(x).step(name).formula for name in ("attended", "fed", "block")]
        assert all("dropout(" in formula for formula in formulas)
        assert "dropout(" not in dropping.eval().explain(x).step("block").formula


def test_a_projection_may_be_wrapped():
    class Wrapped(torch.nn.Module):  # as adapters do it
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 2

    layer = MultiHeadAttention(8, heads=2)
    layer.W_query, x = Wrapped(layer.W_query), torch.randn(1, 3, 8)
    torch.testing.assert_close(layer.explain(x)["projected"], layer(x))


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: MultiHeadAttention(8, 2, rotary=True), "rotary is RotaryPositions or None"),
        (lambda: MultiHeadAttention(8, 2, relative=3), "relative is RelativePositions or None"),
        (lambda: MultiHeadAttention(8, 2, causal="no"), "causal is bool"),
        (lambda: MultiHeadAttention(8, 2)(torch.ones(3, 8), cache=[]), "cache is KVCache"),
        (lambda: SelfAttention(4, 4, mask=torch.ones(2, 2)), "mask is Mask or None"),
        (lambda: SelfAttention.from_matrices("abc", None, None), "nested lists of numbers"),
        (lambda: SelfAttention.from_matrices([[1, 0]], [[1, 0]], [[1, 0]]), "floating dtype"),
        (
            lambda: MultiHeadAttention(8, 2, causal=True)(torch.ones(3, 8), torch.ones(5, 8)),
            "build it with causal=False",
        ),
    ],
)
def test_what_a_layer_cannot_be_built_of(make, said):
    with pytest.raises(ch.AttentionError, match=said):
        make()


def test_a_projection_that_converts_what_it_reads_is_left_to_itself():
    """Hooks may cast, and a weight that is computed is computed once for a call."""
    layer = ch.nn.MultiHeadAttention(16, heads=2).bfloat16()
    for name in ("W_query", "W_key", "W_value"):
        getattr(layer, name).register_forward_pre_hook(lambda _, given: given[0].bfloat16())
    assert layer(torch.randn(2, 5, 16)).dtype == torch.bfloat16
    layer, calls = ch.nn.MultiHeadAttention(16, heads=2), []

    class Counted(torch.nn.Module):
        def forward(self, weight):
            calls.append(1)
            return weight

    torch.nn.utils.parametrize.register_parametrization(layer.W_query, "weight", Counted())
    calls.clear()
    layer(torch.randn(2, 5, 16))
    assert len(calls) == 1
