"""Caches: what is computed in chunks is the whole."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.core.problem.blocks import in_blocks
from clearhead.nn import (
    KVCache,
    MultiHeadAttention,
    RelativePositions,
    RotaryPositions,
    TransformerBlock,
)
from tests.nn.layers import draw, drawn

close = torch.testing.assert_close


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
def test_a_cache_returns_the_appended_tokens(max_length):
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


def test_what_fails_after_attention_leaves_the_cache_as_it_was():
    block, cache = TransformerBlock(8, heads=2, causal=True), KVCache()
    block(torch.randn(1, 3, 8), cache=cache)
    for broken in (block.attention.out_proj, block.feed_forward.W_2):
        weight, broken.weight = broken.weight, torch.nn.Parameter(torch.zeros(8, 7))
        with pytest.raises(RuntimeError):
            block(torch.randn(1, 2, 8), cache=cache)
        assert cache.length == 3
        broken.weight = weight


def test_a_trace_with_a_cache_stays_as_it_was():
    layer, x, cache = ch.nn.MultiHeadAttention(8, 2, causal=True), torch.randn(1, 5, 8), None
    cache = ch.nn.KVCache(10)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        trace = layer.explain(x[:, 3:4], cache=cache)
        before = trace["key"].clone()
        layer(x[:, 4:5], cache=cache)
    assert trace["key"].equal(before)


@torch.no_grad()
def test_a_cache_stays_with_its_layer():
    """What two layers write into one cache would be looked at by both."""
    blocks = [ch.nn.TransformerBlock(16, 4, causal=True) for _ in range(2)]
    x, cache = torch.randn(1, 5, 16), ch.nn.KVCache()
    blocks[0](x, cache=cache)
    with pytest.raises(ch.BadValue, match="another layer has filled"):
        blocks[1](x, cache=cache)
    assert cache.length == 5
    twin, copied = copy.deepcopy(blocks[0]), copy.deepcopy(cache)
    torch.testing.assert_close(twin(x, cache=copied), blocks[0](x, cache=cache))
    cache.reset()
    blocks[1](x, cache=cache)


def test_a_cache_allocated_in_inference_mode_is_refused_outside_it():
    layer, cache = ch.nn.MultiHeadAttention(16, 4, causal=True), ch.nn.KVCache(9)
    with torch.inference_mode():
        layer(torch.randn(1, 5, 16), cache=cache)
    with torch.no_grad(), pytest.raises(ch.BadValue, match="was allocated in"):
        layer(torch.randn(1, 1, 16), cache=cache)
    with torch.inference_mode():
        layer(torch.randn(1, 1, 16), cache=cache)
    assert cache.length == 6


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_cache_is_not_filled_again_in_the_backward_pass(use_reentrant):
    block, cache = TransformerBlock(8, 2, causal=True), KVCache()
    x = torch.randn(1, 5, 8, requires_grad=True)
    with torch.no_grad():
        block(torch.randn(1, 3, 8), cache=cache)
    out = checkpoint(lambda x: block(x, cache=cache), x, use_reentrant=use_reentrant)
    with pytest.raises(ch.BadValue, match="a cache stores every token once"):
        out.sum().backward()
    assert cache.length == 8


@pytest.mark.parametrize("max_length", [None, 9])
def test_a_cache_shares_no_memory(max_length):
    """Not with what it is given, which may be a buffer that is written again, nor with a copy."""
    cache, given = KVCache(max_length), torch.ones(1, 1, 2, 4)
    cache.append(given, given)
    given.fill_(7.0)
    assert torch.equal(cache.keys, torch.ones(1, 1, 2, 4))
    other = copy.copy(cache)
    cache.append(given, given)
    other.append(2 * given, given)
    assert cache.length == other.length == 4
    assert (cache.keys[..., 2:, :] == 7).all() and (other.keys[..., 2:, :] == 14).all()


@torch.no_grad()
def test_memory_is_reserved_ahead():
    cache, x = KVCache(), torch.randn(2, 3, 600, 4)
    addresses = [cache.append(token, token)[0].data_ptr() for token in x.split(1, dim=2)]
    assert torch.equal(cache.keys, x) and torch.equal(cache.values, x)
    assert len(set(addresses)) <= 3  # at the first token, and each time that 256 more are there


@torch.no_grad()
def test_who_holds_keys_keeps_them():
    """What was cut off is not written over in the keys that `append` returned before."""
    cache, x = KVCache(), torch.randn(1, 1, 6, 4)
    cache.append(x[..., :4, :], x[..., :4, :])
    held, _ = cache.append(x[..., 4:, :], x[..., 4:, :])
    copied = copy.copy(cache)
    cache.cut(4)
    cache.append(-x[..., 4:, :], -x[..., 4:, :])
    copied.append(2 * x[..., :1, :], x[..., :1, :])
    assert torch.equal(held, x) and torch.equal(copied.keys[..., :6, :], x)
    assert torch.equal(cache.keys[..., 4:, :], -x[..., 4:, :])


def test_a_cache_goes_on_with_gradients_and_without():
    """Keys that need no gradient, in a layer whose queries do: nothing that autograd saved is
    written over."""
    layer, x, cache = MultiHeadAttention(8, 2, causal=True), draw(1, 7, 8), KVCache()
    layer.W_key.requires_grad_(False), layer.W_value.requires_grad_(False)
    with torch.inference_mode():
        layer(x[:, :2], cache=cache)
    with torch.no_grad():
        layer(x[:, 2:3], cache=cache)
    out = layer(x[:, 3:5], cache=cache)
    with torch.no_grad():
        layer(x[:, 5:6], cache=cache), layer(x[:, 6:], cache=cache)
    found = torch.autograd.grad(out.sum(), layer.W_query.weight)
    close(found, torch.autograd.grad(layer(x)[:, 3:5].sum(), layer.W_query.weight))


@torch.no_grad()
def test_a_cache_under_vmap():
    def step(held, new):
        cache = KVCache()
        cache.append(held, held)
        return cache.append(new, new)[0]

    held, new = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 1, 5)
    assert torch.equal(torch.vmap(step)(held, new), torch.cat([held, new], 2))


@ROOM
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@torch.no_grad()
def test_a_cache_in_blocks_computes_with_what_it_stores(dtype, max_length):
    torch.manual_seed(6)
    layer = MultiHeadAttention(128, 4, kv_heads=2, causal=True, rotary=RotaryPositions(32))
    x, cache = draw(2, 13, 128), KVCache(max_length, dtype)
    got = in_chunks(layer, x, [5, 1, 1, 3, 1, 1, 1], cache)
    exact = KVCache()
    layer(x, cache=exact)
    # The tokens are rounded when they are stored, one by one or together.
    rounded = [in_blocks(part, dtype).dequantize() for part in (exact.keys, exact.values)]
    close(cache.keys.dequantize(), rounded[0], atol=1e-6, rtol=0)
    last = layer.explain(x)["query"][:, :, -1:]
    right = layer.out_proj(ch.attention(last, *rounded).transpose(1, 2).flatten(2))
    close(got[:, -1:], right, atol=1e-5, rtol=1e-5)
    assert dtype in repr(cache) and cache.keys.stored.dtype is torch.uint8
    other = copy.copy(cache)
    for each in (cache, other, copy.deepcopy(cache)):
        each.cut(7)
        again = in_chunks(layer, x[:, 7:], [1] * 6, each)
        close(again, got[:, 7:], atol=1e-5, rtol=1e-5)


def test_a_cache_in_blocks_refuses_what_it_cannot_store():
    layer = MultiHeadAttention(128, 4, causal=True)
    with pytest.raises(BadValue, match="need a gradient"):
        layer(draw(1, 3, 128), cache=KVCache(dtype="q8_0"))
    with pytest.raises(BadValue, match="formats of blocks are q8_0, q4_0"):
        KVCache(dtype="q5_0")
    small = MultiHeadAttention(12, 3, causal=True)
    with torch.no_grad(), pytest.raises(BadValue, match="vectors of 4 numbers"):
        small(draw(1, 3, 12), cache=KVCache(dtype="q8_0"))
