"""Define token embeddings, and sinusoidal, rotary and learned relative positions.

Letters: B batch, T tokens (Tq queries, Tk keys), d features, H heads, D head dimension, p position.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.errors import BadType, BadValue, as_count, must_be_among
from ..core.functional.ambient import must_not_be_sharded, token_positions
from ..core.torch_state import is_plain
from .checks import check_base, check_sequence, check_size, check_type, factory_kwargs

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class TokenEmbedding(nn.Module):
    """Look up a learned row for each token: ``E[ids]``, ids (...) -> (..., d).

    The table is an `nn.Embedding(vocabulary, d)`, so torch's seed determines it. `device` and
    `dtype` are those of the table; None means torch's default.

    Raises `BadValue` for ids outside the vocabulary, `BadType` for ids that are not integers.
    """

    def __init__(
        self,
        vocabulary: int,
        d: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary = check_size("TokenEmbedding", "vocabulary", vocabulary)
        self.d = check_size("TokenEmbedding", "d", d)
        factory = factory_kwargs("TokenEmbedding", device, dtype)
        self.table = nn.Embedding(self.vocabulary, self.d, **factory)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the row of each id: integers of any shape (...) -> (..., d).

        Raises `BadType` for anything but integers, `BadValue` for an id without a row.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            rule = "ids are whole numbers, which index rows of the table."
            hint = "pass an integer tensor, for example torch.tensor([0, 2, 1])."
            raise BadType(f"TokenEmbedding got ids of {kind}.", rule, hint)
        # On a GPU the check would force a synchronisation, and a traced tensor has no values.
        if ids.device.type == "cpu" and ids.numel() and is_plain(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= len(self.table.weight):
                rule = f"an id is a row of the table, from 0 to {len(self.table.weight) - 1}."
                hint = "pass ids of this vocabulary, or make a larger table."
                raise BadValue(f"TokenEmbedding got ids from {low} to {high}.", rule, hint)
        return self.table(ids.long())


class SinusoidalPositions(nn.Module):
    """Add a pattern of sines and cosines of the position to each token: ``x[..., p, :] + P[p]``.

    ``P[p, 2i] = sin(p / base^(2i/d))`` and ``P[p, 2i + 1] = cos(p / base^(2i/d))``: even columns
    are sines, and odd columns cosines of the same angle. For an odd d the last column is a sine.

    Raises `BadValue` for another width, or a start below 0.
    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.5.
    """

    def __init__(self, d: int, base: float = 10000.0) -> None:
        super().__init__()
        self.d = check_size("SinusoidalPositions", "d", d)
        self.base = check_base("SinusoidalPositions", base)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Add the positions to (B, T, d) or (T, d); the first token is at position `start`."""
        x = check_sequence("SinusoidalPositions", "x", x, self.d)
        start = _check_start("SinusoidalPositions", start)
        angles = _angles(x, start, self.d, self.base)
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, : self.d]
        return x + waves.to(x.dtype)

    def extra_repr(self) -> str:
        return f"d={self.d}, base={self.base:g}"


class RotaryPositions(nn.Module):
    """Rotate pairs of features by an angle that grows with the position p.

    ``a' = a cos(p t_i) - b sin(p t_i), b' = b cos(p t_i) + a sin(p t_i)`` with
    ``t_i = base^(-2i/D)``, for the pairs (a, b) with i = 0 .. D/2 - 1. Queries and keys are both
    rotated, so their dot product depends only on the distance of their positions.

    `pairs` selects which features form a pair: ``"half"`` pairs i with i + D/2 (Hugging Face and
    its Llama checkpoints, GPT-NeoX), ``"interleaved"`` pairs 2i with 2i + 1 (the paper, Meta's own
    Llama files). Trained weights work only with the pairs of their training.

    Raises `BadValue` for an odd head dimension, another last dimension, or a start below 0.
    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """

    def __init__(
        self, head_size: int, base: float = 10000.0, pairs: Literal["half", "interleaved"] = "half"
    ) -> None:
        super().__init__()
        self.head_size = check_size("RotaryPositions", "head_size", head_size)
        if head_size % 2:
            rule = "features are rotated in pairs, so the head size is even."
            hint = f"use heads of {head_size + 1} features."
            raise BadValue(f"RotaryPositions got head_size={head_size}.", rule, hint)
        self.base = check_base("RotaryPositions", base)
        rule = "'half' pairs feature i with i + D/2, 'interleaved' pairs 2i with 2i + 1."
        hint = "pass pairs='half' for weights from Hugging Face."
        must_be_among(("half", "interleaved"), "RotaryPositions got pairs", pairs, rule, hint)
        self.pairs = pairs

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate the features of (..., T, D); the first token is at position `start`.

        Raises `BadType` unless x is a tensor, `BadValue` for another D or a start below 0.
        """
        check_type("RotaryPositions", "x", x, Tensor)
        if not x.dtype.is_floating_point or x.dim() < 2 or x.shape[-1] != self.head_size:
            gave = f"RotaryPositions got x of shape {tuple(x.shape)} and {x.dtype}."
            rule = f"x is a floating tensor (..., T, D) with the head size D={self.head_size}."
            hint = "split the heads first; queries are (B, H, T, D), keys (B, G, T, D)."
            raise BadValue(gave, rule, hint)
        start = _check_start("RotaryPositions", start)
        angles = _angles(x, start, self.head_size, self.base)
        interleaved = self.pairs == "interleaved"
        return rotate_pairs(x.to(angles.dtype), angles, interleaved).to(x.dtype)

    def extra_repr(self) -> str:
        return f"head_size={self.head_size}, base={self.base:g}, pairs={self.pairs!r}"


def rotate_pairs(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of features of x, (..., D), by angles, (..., D/2)."""
    cos, sin = angles.cos(), angles.sin()
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    rotated = a * cos - b * sin, b * cos + a * sin
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


class RelativePositions(nn.Module):
    """Learn a number for each head and distance to add to the scores: ``S[h, q, k] + r[h, b]``.

    b is the bucket of the distance from q back to k. Each of the first `near` distances, from 0 on,
    has its own bucket. Larger distances share `far` buckets, whose widths grow with the distance up
    to `longest`, and the last bucket has all distances beyond. Keys after the query have separate
    buckets. All numbers are initialised to zero.

    The result has H x Tq x Tk numbers, which limits the length of a text. `device` and `dtype` are
    those of the table; None means torch's default.

    Raises `BadValue` for sizes below 1, a `longest` that is not beyond `near`, or a start below 0.
    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer" (T5), section 2.1.
    """

    def __init__(
        self,
        heads: int,
        near: int = 16,
        far: int = 16,
        longest: int = 128,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "RelativePositions"
        self.heads = check_size(name, "heads", heads)
        self.near, self.far = check_size(name, "near", near), check_size(name, "far", far)
        self.longest = check_size(name, "longest", longest)
        if self.longest <= self.near:
            rule = "distances from near to longest share buckets, so longest is larger than near."
            hint = f"pass longest={8 * self.near}, or a smaller near."
            raise BadValue(f"RelativePositions got near={near} and longest={longest}.", rule, hint)
        factory = factory_kwargs(name, device, dtype)
        self.table = nn.Parameter(torch.empty(self.heads, 2 * (self.near + self.far), **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all numbers to zero."""
        nn.init.zeros_(self.table)

    def forward(self, queries: int, keys: int, start: int = 0) -> Tensor:
        """Return the bias, (H, Tq, Tk), with query 0 at position `start` and key 0 at 0."""
        must_not_be_sharded("RelativePositions")
        start = _check_start("RelativePositions", start)
        if not queries or not keys:
            return self.table.new_empty(self.heads, queries, keys)
        last = start + queries - 1
        distances = torch.arange(last, start - keys, -1, device=self.table.device)
        by_distance = self.table[:, self.bucket(distances)]
        # The result is a Toeplitz matrix: each row is the next row, shifted by one.
        if torch.compiler.is_compiling():  # unfold would specialise the graph on the length
            rows = torch.arange(queries - 1, -1, -1, device=self.table.device)
            return by_distance[:, rows.unsqueeze(-1) + torch.arange(keys, device=rows.device)]
        return by_distance.unfold(-1, keys, 1).flip(1)

    def bucket(self, distances: Tensor) -> Tensor:
        """Return the column of the table for each distance from query back to key."""
        distance = distances.abs()
        growth = (distance.clamp_min(self.near).float() / self.near).log() / math.log(
            self.longest / self.near
        )
        shared = self.near + (growth * self.far).long().clamp_max(self.far - 1)
        bucket = torch.where(distance < self.near, distance, shared)
        return torch.where(distances < 0, bucket + self.near + self.far, bucket)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, near={self.near}, far={self.far}, longest={self.longest}"


def _angles(x: Tensor, start: int, d: int, base: float) -> Tensor:
    """Compute position times base^(-2i/d), (T, ceil(d / 2)), in fp32, or fp64 for fp64 inputs.

    There is no cached table, which would have to follow the layer's dtype and device. T x d/2
    angles cost little next to the T x d x d products of a projection.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    positions = token_positions(start, x.shape[-2], wide, x.device)
    powers = torch.arange(0, d, 2, dtype=wide, device=x.device) / d
    return positions.unsqueeze(-1) / base**powers


def _check_start(layer: str, start: object) -> int:
    rule = "start is the position of the first token, a whole number from 0 on."
    hint = "pass the number of earlier tokens, for example cache.length."
    return as_count(f"{layer} got start", start, rule, hint)
