"""One of each layer, and what to call it on, for the tests of `clearhead.nn`."""

import torch

from clearhead.nn import (
    CausalAttention,
    FeedForward,
    MultiHeadAttention,
    RelativePositions,
    RotaryPositions,
    SelfAttention,
    SimpleAttention,
    SinusoidalPositions,
    TokenEmbedding,
    TransformerBlock,
)


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
