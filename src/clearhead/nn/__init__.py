"""Layers for models. Their attention calls `clearhead.attention`, so `watch` records it.

Letters: B batch, T tokens, d features; H query heads, G key/value heads, D head dimension. Inputs
are (B, T, d), or (T, d) for one sequence.
"""

from .block import FeedForward, TransformerBlock
from .cache import KVCache
from .embed import RelativePositions, RotaryPositions, SinusoidalPositions, TokenEmbedding
from .multihead import MultiHeadAttention
from .simple import CausalAttention, SelfAttention, SimpleAttention

__all__ = [
    "CausalAttention", "FeedForward", "KVCache", "MultiHeadAttention", "RelativePositions",
    "RotaryPositions", "SelfAttention", "SimpleAttention", "SinusoidalPositions", "TokenEmbedding",
    "TransformerBlock",
]  # fmt: skip
