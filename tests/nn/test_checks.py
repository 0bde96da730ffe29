"""Errors for wrong inputs of layers."""

import numpy as np
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
        "  Hint: pass for example heads=2, or another d."),
    "key heads": (lambda: MultiHeadAttention(12, 6, kv_heads=4), ch.BadValue,
        "MultiHeadAttention got heads=6 and kv_heads=4.\n"
        "  Rule: heads / kv_heads query heads read each key head, so kv_heads divides heads.\n"
        "  Hint: pass for example kv_heads=3."),
    "no heads": (lambda: MultiHeadAttention(12, 0), ch.BadValue,
        "MultiHeadAttention got heads=0.\n  Rule: heads is a whole number, 1 or more."),
    "rotary of another size": (
        lambda: MultiHeadAttention(12, 3, rotary=RotaryPositions(6)), ch.BadValue,
        "MultiHeadAttention got a rotary for heads of 6 features.\n"
        "  Rule: the heads of this layer have d / heads = 4 features.\n"
        "  Hint: pass RotaryPositions(4)."),
    "dtype": (lambda: FeedForward(4, dtype=torch.int8), ch.BadType,
        "FeedForward got dtype=torch.int8.\n"
        "  Rule: parameters are floating-point: dtype is a torch.dtype such as "
        "torch.bfloat16."),
    "device": (lambda: TransformerBlock(4, 2, device="gpu"), ch.BadValue,
        "TransformerBlock got device='gpu'.\n"
        "  Rule: device is a torch.device, or the name of one, such as 'cpu' or 'cuda:0'."),
    "width": (lambda: SelfAttention(5, 3)(torch.zeros(2, 7, 4)), ch.BadValue,
        "SelfAttention got x of shape (2, 7, 4).\n"
        "  Rule: this layer was built for 5 features, the last dimension of x.\n"
        "  Hint: pass vectors of 5 features, or build the layer for 4."),
    "context width": (
        lambda: MultiHeadAttention(4, 2, d_context=5)(torch.zeros(2, 4), torch.zeros(3, 4)),
        ch.BadValue, "MultiHeadAttention got context of shape (3, 4)."),
    "dimensions": (lambda: SimpleAttention()(torch.zeros(2, 3, 5, 7)), ch.BadValue,
        "SimpleAttention got x of shape (2, 3, 5, 7).\n"
        "  Rule: x is (B, T, d), or (T, d) for one sequence."),
    "ids for vectors": (lambda: FeedForward(4)(torch.tensor([[1, 2, 3, 4]])), ch.BadType,
        "FeedForward got a tensor of torch.int64 as x.\n"
        "  Rule: x has one vector per token: a floating tensor (B, T, 4) or (T, 4).\n"
        "  Hint: pass torch.tensor(x, dtype=torch.float32); turn ids into vectors by "
        "TokenEmbedding."),
    "a list": (lambda: SimpleAttention()([[1.0]]), ch.BadType,
        "SimpleAttention got a list as x."),
    "context length": (lambda: CausalAttention(4, 3, 5)(torch.zeros(2, 7, 4)), ch.BadValue,
        "CausalAttention got 7 tokens, in x of shape (2, 7, 4).\n"
        "  Rule: this layer accepts at most context_length=5 tokens.\n"
        "  Hint: cut the input, for example to its last tokens, or build a layer for more."),
    "dropout": (lambda: CausalAttention(4, 3, 5, dropout=1.5), ch.BadValue,
        "CausalAttention got dropout=1.5.\n"
        "  Rule: dropout is a probability, from 0 to 1; it is active in training mode only."),
    "dropout of a block": (lambda: TransformerBlock(4, 2, dropout=-0.1), ch.BadValue,
        "MultiHeadAttention got dropout=-0.1."),
    "odd head size": (lambda: RotaryPositions(7), ch.BadValue,
        "RotaryPositions got head_size=7.\n"
        "  Rule: features are rotated in pairs, so the head size is even.\n"
        "  Hint: use heads of 8 features."),
    "pairs": (lambda: RotaryPositions(8, pairs="both"), ch.BadValue,
        "RotaryPositions got pairs='both'."),
    "rotary width": (lambda: RotaryPositions(8)(torch.zeros(3, 6)), ch.BadValue,
        "RotaryPositions got x of shape (3, 6) and torch.float32.\n"
        "  Rule: x is a floating tensor (..., T, D) with the head size D=8."),
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
        "  Rule: each of the 3 heads of this layer has its own number for a distance.\n"
        "  Hint: pass RelativePositions(3)."),
    "longest": (lambda: RelativePositions(2, near=16, longest=16), ch.BadValue,
        "RelativePositions got near=16 and longest=16.\n"
        "  Rule: distances from near to longest share buckets, so longest is larger than near.\n"
        "  Hint: pass longest=128, or a smaller near."),
    "cache is full": (lambda: grown().append(*[torch.zeros(2, 3, 2, 7)] * 2), ch.BadValue,
        "KVCache got 2 tokens, and stores 4.\n  Rule: it stores at most max_length=5 tokens.\n"
        "  Hint: make a longer cache, or KVCache() without a limit."),
    "cache of another batch": (lambda: grown().append(*[torch.zeros(1, 3, 1, 7)] * 2), ch.BadValue,
        "KVCache got keys of shape (1, 3, 1, 7), torch.float32 on cpu; it stores (2, 3, 4, 7), "
        "torch.float32 on cpu.\n"
        "  Rule: new tokens continue the same sequences, so only the length may differ."),
    "cache of another dtype": (
        lambda: grown().append(*[torch.zeros(2, 3, 1, 7).double()] * 2), ch.BadValue,
        "KVCache got keys of shape (2, 3, 1, 7), torch.float64 on cpu; it stores"),
    "keys without values": (
        lambda: KVCache().append(torch.zeros(2, 3, 1, 7), torch.zeros(2, 3, 2, 7)), ch.BadValue,
        "KVCache got keys (2, 3, 1, 7) and values (2, 3, 2, 7)."),
    "cache with gradient": (lambda: KVCache(5).append(needs_grad(), needs_grad()), ch.BadValue,
        "KVCache(0 of 5 tokens) got keys or values that need a gradient."),
    "cache length": (lambda: KVCache(0), ch.BadValue, "KVCache got max_length=0."),
    "cut": (lambda: grown().cut(5), ch.BadValue,
        "cut got length=5.\n"
        "  Rule: the cache has 4 tokens, and cut keeps the first of them.\n"
        "  Hint: pass a whole number from 0 to 4."),
    "bias_kv": (lambda: MultiHeadAttention.from_torch(odd_torch(add_bias_kv=True)), ch.BadValue,
        "from_torch got a module with add_bias_kv.\n"
        "  Rule: these add a key without a token, which MultiHeadAttention does not support.\n"
        "  Hint: train without them, or keep torch's module."),
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
    assert caught.value.rule and caught.value.hint


@pytest.mark.parametrize(
    "make, text",
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
def test_what_a_layer_cannot_be_built_of(make, text):
    with pytest.raises(ch.AttentionError, match=text):
        make()


def test_layers_are_built_of_the_sizes_that_were_checked():
    layer = ch.nn.MultiHeadAttention(np.int64(8), torch.tensor(2))
    sizes = layer.d, layer.heads, layer.head_size, layer.W_query.in_features
    assert all(type(size) is int for size in sizes)
    assert type(ch.nn.TokenEmbedding(torch.tensor(3), 4).table.num_embeddings) is int
