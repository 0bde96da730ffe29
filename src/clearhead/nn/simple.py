"""Define layers with one head, from one without parameters to causal attention with dropout.

Letters: B batch, T tokens, d_in and d_out features. Inputs are (B, T, d_in) or (T, d_in). `forward`
calls `clearhead.attention`, and `explain` calls `clearhead.explain` with the same arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BadType, BadValue, kind_of
from ..core.functional.attention import attention
from ..core.functional.explain import explain
from ..core.functional.trace import Trace
from ..core.masks import Mask, causal
from ..core.problem.problem import Inputs
from .checks import check_dropout, check_sequence, check_size, check_type, factory_kwargs
from .inputs import Projection, combine_masks, input_step, projection_formula


class OneHead(nn.Module, ABC):
    """A layer that calls attention once, with one head, and returns its output."""

    @abstractmethod
    def project(self, x: Tensor, mask: Mask | None) -> Projection:
        """Check the input and project it to q, k and v, which are (B, T, d) or (T, d), like x.

        Returns these, and the keywords of `attention`. Raises `BadType` or `BadValue` for an input
        that does not fit the layer.
        """

    def formulas(self) -> dict[str, str]:
        """Return the formulas of query, key and value."""
        return {"query": "X", "key": "X", "value": "X"}

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """Compute the layer: (B, T, d_in) -> (B, T, d_out), or (T, d_in) -> (T, d_out).

        `mask` is combined with the layer's own mask; None means no further rule.
        """
        inputs, options = self._with_head(x, mask)
        out = attention(*inputs, **options)
        return out.squeeze(1) if out.dim() == 4 else out

    def explain(
        self, x: Tensor, tokens: Sequence[str] | None = None, *, mask: Mask | None = None
    ) -> Trace:
        """Compute `forward(x, mask)` step by step, from the inputs on.

        `tokens` label the positions; None means numbers. A batch has a head axis of size 1. In
        training mode dropout is a step, which torch's generator draws as in `forward`.
        """
        inputs, options = self._with_head(x, mask)
        trace = explain(*inputs, tokens=tokens, **options)
        return trace.with_formulas(**self.formulas()).before(input_step(x))

    def _with_head(self, x: Tensor, mask: Mask | None) -> Projection:
        """Add a head axis to a batch, (B, T, d), which attention would read as (H, T, d)."""
        inputs, options = self.project(x, mask)
        batched = inputs.q.dim() == 3
        return Inputs(*(t.unsqueeze(1) for t in inputs)) if batched else inputs, options


class Projected(OneHead):
    """A layer with one head and learned projections to queries, keys and values."""

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool, **factory: Any) -> None:
        super().__init__()
        name = type(self).__name__
        self.d_in, self.d_out = check_size(name, "d_in", d_in), check_size(name, "d_out", d_out)
        factory = factory_kwargs(name, **factory)
        self.W_query = nn.Linear(self.d_in, self.d_out, bias=qkv_bias, **factory)
        self.W_key = nn.Linear(self.d_in, self.d_out, bias=qkv_bias, **factory)
        self.W_value = nn.Linear(self.d_in, self.d_out, bias=qkv_bias, **factory)

    def project(self, x: Tensor, mask: Mask | None) -> Projection:
        x = check_sequence(type(self).__name__, "x", x, self.d_in, self.W_query)
        return Inputs(self.W_query(x), self.W_key(x), self.W_value(x)), {"mask": mask}

    def formulas(self) -> dict[str, str]:
        names = {"query": "W_query", "key": "W_key", "value": "W_value"}
        return {
            step: projection_formula("X", name, getattr(self, name)) for step, name in names.items()
        }


class SimpleAttention(OneHead):
    """Compute attention without parameters and without scaling: ``softmax(X X^T) X``.

    Queries, keys and values are the inputs themselves. Inputs are (B, T, d) or (T, d) for any d.

    >>> import torch, clearhead as ch
    >>> ch.nn.SimpleAttention()(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # e/(1+e), 1/(1+e)
    tensor([[0.7311, 0.2689],
            [0.2689, 0.7311]])

    Raises `BadValue` or `BadType` for inputs of another shape or type.
    """

    def project(self, x: Tensor, mask: Mask | None) -> Projection:
        x = check_sequence("SimpleAttention", "x", x)
        return Inputs(x, x, x), {"mask": mask, "scale": 1.0}


class SelfAttention(Projected):
    """Compute attention with learned projections: ``softmax(Q K^T / sqrt(d_out)) V``.

    ``Q = X W_query, K = X W_key, V = X W_value``, each an `nn.Linear(d_in, d_out)`. They are
    created in this order, so torch's seed determines them. `mask` applies to every call; None means
    that every token may look at every token. `device` and `dtype` are those of the weights; None
    means torch's default.

    Raises `BadValue` for sizes that are not whole numbers from 1 on, and for inputs of another
    width. Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        qkv_bias: bool = False,
        mask: Mask | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_in, d_out, qkv_bias, device=device, dtype=dtype)
        self.mask = check_type("SelfAttention", "mask", mask, Mask, type(None))

    @classmethod
    def from_matrices(
        cls, W_q: Tensor, W_k: Tensor, W_v: Tensor, mask: Mask | None = None
    ) -> "SelfAttention":
        """Make a layer with copies of three matrices (d_in, d_out), used as ``X @ W``.

        An `nn.Linear` stores its matrix transposed, so ``layer.W_query.weight`` is W_q.T. Raises
        `BadType` unless all three have one floating dtype, and `BadValue` unless they have one
        shape.
        """
        matrices = [_as_matrix(W) for W in (W_q, W_k, W_v)]
        if len({W.dtype for W in matrices}) > 1 or not matrices[0].is_floating_point():
            dtypes = ", ".join(str(W.dtype) for W in matrices)
            rule = "W_q, W_k and W_v have one floating dtype."
            hint = "convert them first, for example with W.float()."
            raise BadType(f"The matrices have dtypes {dtypes}.", rule, hint)
        if matrices[0].dim() != 2 or len({W.shape for W in matrices}) > 1:
            shapes = ", ".join(str(tuple(W.shape)) for W in matrices)
            rule = "W_q, W_k and W_v have one shape, (d_in, d_out), and are used as x @ W."
            hint = "pass three such matrices; transpose the weight of an nn.Linear."
            raise BadValue(f"The matrices have shapes {shapes}.", rule, hint)
        d_in, d_out = matrices[0].shape
        # On the meta device no numbers are drawn from torch's generator.
        layer = cls(d_in, d_out, mask=mask, device="meta")
        names = ("W_query.weight", "W_key.weight", "W_value.weight")
        weights = [W.detach().T.clone(memory_format=torch.contiguous_format) for W in matrices]
        layer.load_state_dict(dict(zip(names, weights, strict=True)), assign=True)
        return layer

    def project(self, x: Tensor, mask: Mask | None) -> Projection:
        return super().project(x, combine_masks(self.mask, mask))

    def extra_repr(self) -> str:
        return "" if self.mask is None else f"mask={self.mask!r}"


class CausalAttention(Projected):
    """Compute self-attention in which a token looks only at itself and earlier tokens.

    ``dropout(softmax(mask(Q K^T / sqrt(d_out)))) V`` with projections as in `SelfAttention`, for at
    most `context_length` tokens. Dropout applies to the weights, in training mode only. `device`
    and `dtype` are those of the weights; None means torch's default.

    Raises `BadValue` for a longer or a wider input, and for a dropout outside [0, 1].
    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3; the dropout of weights
    is in the code of its authors, tensor2tensor.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_in, d_out, qkv_bias, device=device, dtype=dtype)
        self.context_length = check_size("CausalAttention", "context_length", context_length)
        self.dropout = check_dropout("CausalAttention", dropout)

    def project(self, x: Tensor, mask: Mask | None) -> Projection:
        inputs, options = super().project(x, combine_masks(causal, mask))
        if x.shape[-2] > self.context_length:
            gave = f"CausalAttention got {x.shape[-2]} tokens, in x of shape {tuple(x.shape)}."
            rule = f"this layer accepts at most context_length={self.context_length} tokens."
            hint = "cut the input, for example to its last tokens, or build a layer for more."
            raise BadValue(gave, rule, hint)
        return inputs, options | {"dropout": self.dropout if self.training else 0.0}

    def extra_repr(self) -> str:
        return f"context_length={self.context_length}, dropout={self.dropout:g}"


def _as_matrix(W: object) -> Tensor:
    try:
        return torch.as_tensor(W)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "a matrix (d_in, d_out) is a tensor, or nested lists of numbers."
        raise BadType(f"from_matrices got {kind_of(W)}.", rule, "pass three tensors.") from error
