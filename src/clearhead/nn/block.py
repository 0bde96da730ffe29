"""Define the transformer block: attention and a feed-forward network with residual connections.

Letters: B batch, T tokens, d model size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import must_be_among
from ..core.functional.trace import Step, Trace
from ..core.masks import Mask
from .cache import KVCache, restore_on_error
from .checks import check_dropout, check_sequence, check_size, factory_kwargs
from .embed import RelativePositions, RotaryPositions
from .inputs import projection_formula
from .multihead import MultiHeadAttention

_ACTIVATIONS = ("gelu", "relu", "silu")  # functions of torch.nn.functional


class FeedForward(nn.Module):
    """Transform each token separately: ``dropout(activation(x W_1 + b_1)) W_2 + b_2``.

    x is (B, T, d) or (T, d). `hidden` is the inner size; None means 4 d. `activation` is "gelu"
    (exact), "relu" or "silu". Dropout is active in training mode only. `device` and `dtype` are
    those of the weights; None means torch's default.

    Raises `BadValue` for an unknown activation, a dropout outside [0, 1], or another width.
    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3 (with relu).
    """

    def __init__(
        self,
        d: int,
        hidden: int | None = None,
        activation: Literal["gelu", "relu", "silu"] = "gelu",
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d = check_size("FeedForward", "d", d)
        self.hidden = check_size("FeedForward", "hidden", 4 * self.d if hidden is None else hidden)
        rule = f"an activation is one of {', '.join(map(repr, _ACTIVATIONS))}."
        name, hint = "FeedForward got activation", "pass one of these."
        must_be_among(_ACTIVATIONS, name, activation, rule, hint)
        self.activation = activation
        factory = factory_kwargs("FeedForward", device, dtype)
        self.W_1 = nn.Linear(self.d, self.hidden, **factory)
        self.W_2 = nn.Linear(self.hidden, self.d, **factory)
        self.dropout = nn.Dropout(check_dropout("FeedForward", dropout))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to each token: (B, T, d) or (T, d) -> the same shape."""
        x = check_sequence("FeedForward", "x", x, self.d, self.W_1)
        return self.W_2(self.dropout(getattr(F, self.activation)(self.W_1(x))))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class TransformerBlock(nn.Module):
    """One layer of a transformer: x is (B, T, d) or (T, d), and so is the result.

    ``norm="pre"``:  ``h = x + A(norm_1(x))``, ``y = h + F(norm_2(h))``
    ``norm="post"``: ``h = norm_1(x + A(x))``, ``y = norm_2(h + F(h))``

    A is `MultiHeadAttention` and F is `FeedForward`, each followed by dropout; the norms are
    `nn.LayerNorm(d)`. The arguments are those of these two classes. `dropout` applies to the
    weights, to the hidden features and to both branches, in training mode only.

    Raises `BadValue` for an unknown norm, and the errors of both classes.
    Sources: Vaswani et al. 2017, "Attention Is All You Need" (post); Xiong et al. 2020, "On Layer
    Normalization in the Transformer Architecture" (pre).
    """

    def __init__(
        self,
        d: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        hidden: int | None = None,
        activation: Literal["gelu", "relu", "silu"] = "gelu",
        norm: Literal["pre", "post"] = "pre",
        dropout: float = 0.0,
        qkv_bias: bool = False,
        causal: bool = False,
        rotary: RotaryPositions | None = None,
        relative: RelativePositions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        rule = "'pre' normalises the input of a branch, 'post' the sum after it."
        hint = "pass norm='pre' or norm='post'."
        must_be_among(("pre", "post"), "TransformerBlock got norm", norm, rule, hint)
        factory = factory_kwargs("TransformerBlock", device, dtype)
        self.norm = norm
        self.attention = MultiHeadAttention(
            d,
            heads,
            kv_heads=kv_heads,
            dropout=dropout,
            qkv_bias=qkv_bias,
            causal=causal,
            rotary=rotary,
            relative=relative,
            **factory,
        )
        self.feed_forward = FeedForward(d, hidden, activation, dropout, **factory)
        self.norm_1 = nn.LayerNorm(d, **factory)
        self.norm_2 = nn.LayerNorm(d, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Apply the block: (B, T, d) or (T, d) -> the same shape.

        `mask` and `cache` are as in `MultiHeadAttention`.
        """
        x = self._check_input(x)
        with restore_on_error(cache):
            if self.norm == "pre":
                x = x + self.dropout(self.attention(self.norm_1(x), mask=mask, cache=cache))
                return x + self.dropout(self.feed_forward(self.norm_2(x)))
            x = self.norm_1(x + self.dropout(self.attention(x, mask=mask, cache=cache)))
            return self.norm_2(x + self.dropout(self.feed_forward(x)))

    def _check_input(self, x: Tensor) -> Tensor:
        # A norm that replaces LayerNorm may convert its input.
        projection = self.attention.W_query if type(self.norm_1) is nn.LayerNorm else None
        return check_sequence("TransformerBlock", "x", x, self.attention.d, projection)

    def explain(
        self,
        x: Tensor,
        tokens: Sequence[str] | None = None,
        *,
        key_tokens: Sequence[str] | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        seed: int | None = None,
    ) -> Trace:
        """Compute `forward` step by step: norms, attention, feed-forward network, residual sums.

        After the steps of `MultiHeadAttention.explain`, `attended` and `block` are the two residual
        sums (with post-norm, `normed` and `block` are their layer norms), and `fed` is the output
        of the feed-forward network.

        The arguments are those of `MultiHeadAttention.explain`. With `seed=None` dropout draws from
        torch's generator in the order of `forward`. A cache is read but not changed.
        """
        x = self._check_input(x)
        inner = self.norm_1(x) if self.norm == "pre" else x
        trace = self.attention.explain(
            inner, tokens, key_tokens=key_tokens, mask=mask, cache=cache, seed=seed
        )
        axes = trace.step("projected").axes
        attended = x + self.dropout(trace["projected"])

        drops = self.training and self.dropout.p > 0

        def dropped(x: str) -> str:
            return f"dropout({x})" if drops else x

        act, W_1, W_2 = self.feed_forward.activation, self.feed_forward.W_1, self.feed_forward.W_2
        hidden = dropped(f"{act}({projection_formula('normed', 'W_1', W_1)})")

        def step(name: str, formula: str, why: str, tensor: Tensor) -> Step:
            return Step(name, formula, why, axes, tensor)

        pre = self.norm == "pre"
        normed = (self.norm_2 if pre else self.norm_1)(attended)
        fed = self.feed_forward(normed)
        if pre:
            stream, norm = "stream", "norm_2"
            first = step("stream", "x", "The input of the block, which bypasses both branches.", x)
            why = "The input of attention: each token is normalised to one scale."
            inputs = replace(trace.step("inputs"), formula="norm_1(stream)", why=why)
            before = first, inputs, *trace.steps[1:]
            block = step("block", f"attended + {dropped('fed')}",
                         "The result of the network is added to the stream.",
                         attended + self.dropout(fed))  # fmt: skip
        else:
            stream, norm, before = "inputs", "norm_1", trace.steps
            block = step("block", f"norm_2(normed + {dropped('fed')})",
                         "The result is added to the stream, and normalised again.",
                         self.norm_2(normed + self.dropout(fed)))  # fmt: skip
        after = (
            step("attended", f"{stream} + {dropped('projected')}",
                 "The result of attention is added to the stream.", attended),
            step("normed", f"{norm}(attended)", "Each token is normalised again.", normed),
            step("fed", projection_formula(hidden, "W_2", W_2),
                 "The network transforms each token separately.", fed),
            block,
        )  # fmt: skip
        return replace(trace, steps=(*before, *after))

    def extra_repr(self) -> str:
        return f"norm={self.norm!r}"
