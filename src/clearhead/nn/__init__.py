"""Layers to build with. Every one of them asks `clearhead.attention`, so all that looks at that
door sees them.

Letters: B batch, T tokens, d features; H query heads, G key/value heads, D head size. Inputs are
(B, T, d), or (T, d) for one sequence.
"""

from .block import FeedForward as FeedForward, TransformerBlock as TransformerBlock
from .cache import KVCache as KVCache
from .embed import (
    RelativePositions as RelativePositions,
    RotaryPositions as RotaryPositions,
    SinusoidalPositions as SinusoidalPositions,
    TokenEmbedding as TokenEmbedding,
)
from .multihead import MultiHeadAttention as MultiHeadAttention
from .simple import (
    CausalAttention as CausalAttention,
    SelfAttention as SelfAttention,
    SimpleAttention as SimpleAttention,
)
