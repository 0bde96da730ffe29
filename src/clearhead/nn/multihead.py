"""Define multi-head attention: self or cross, grouped-query, with positions and a KV cache.

Letters: B batch, T tokens (Tq queries, Tk keys), H query heads, G key/value heads, D head
dimension, d model size (H * D).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.errors import BadType, BadValue, must_be_of
from ..core.functional.attention import attention
from ..core.functional.explain import explain
from ..core.functional.trace import Step, Trace
from ..core.masks import Causal, Mask
from ..core.problem.biases import bias
from ..core.problem.problem import Inputs
from .cache import KVCache, cached_length, restore_on_error
from .checks import check_dropout, check_sequence, check_size, check_type, factory_kwargs
from .embed import RelativePositions, RotaryPositions
from .inputs import Projection, combine_masks, input_step, projection_formula


class MultiHeadAttention(nn.Module):
    """Compute attention with several heads, concatenate their outputs, and project them.

    ``head_i = softmax(Q_i K_j^T / sqrt(D)) V_j`` with ``j = i // (H // G)`` and ``D = d // H``;
    ``out = concat(head_1 .. head_H) W_out``. Q = X W_query is (B, H, Tq, D); K = C W_key and
    V = U W_value are (B, G, Tk, D), where C and U are X itself in self-attention.

    Args:
        d: features of the input and of the output.
        heads: H, which divides d.
        kv_heads: G, which divides H; None means H, and 1 is multi-query attention.
        d_context: features of the context that keys come from; None means d.
        d_values: features of the input of the values; None means d_context.
        dropout: the probability that a weight is dropped, in training mode only.
        qkv_bias: whether the three projections have a bias.
        out_bias: whether the output projection `out_proj` has a bias.
        causal: a token looks only at itself and earlier tokens. With a cache, the last query is at
            the last key; without a cache, Tq = Tk.
        rotary: rotates queries and keys by their positions, which continue those of a cache. Its
            head dimension is D. None means no rotation.
        relative: adds a learned number for each head and distance to the scores; None means none.
        device, dtype: those of the weights; None means torch's default.

    Raises `BadValue` for numbers of heads that do not divide, a `rotary` or `relative` for other
    heads, or a dropout outside [0, 1]. Sources: Vaswani et al. 2017, "Attention Is All You Need";
    Shazeer 2019, "Fast Transformer Decoding" (G = 1); Ainslie et al. 2023, "GQA".
    """

    def __init__(
        self,
        d: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        d_context: int | None = None,
        d_values: int | None = None,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = True,
        causal: bool = False,
        rotary: RotaryPositions | None = None,
        relative: RelativePositions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "MultiHeadAttention"
        self.d, self.heads = d, heads = check_size(name, "d", d), check_size(name, "heads", heads)
        self.kv_heads = check_size(name, "kv_heads", heads if kv_heads is None else kv_heads)
        if d % heads:
            rule = "each head has d / heads features, so heads divides d."
            hint = f"pass for example heads={_nearest_divisor(d, heads)}, or another d."
            raise BadValue(f"{name} got d={d} and heads={heads}.", rule, hint)
        if heads % self.kv_heads:
            rule = "heads / kv_heads query heads read each key head, so kv_heads divides heads."
            hint = f"pass for example kv_heads={_nearest_divisor(heads, self.kv_heads)}."
            raise BadValue(f"{name} got heads={heads} and kv_heads={kv_heads}.", rule, hint)
        self.head_size = d // heads
        check_type(name, "rotary", rotary, RotaryPositions, type(None))
        check_type(name, "relative", relative, RelativePositions, type(None))
        if rotary is not None and rotary.head_size != self.head_size:
            gave = f"MultiHeadAttention got a rotary for heads of {rotary.head_size} features."
            rule = f"the heads of this layer have d / heads = {self.head_size} features."
            raise BadValue(gave, rule, f"pass RotaryPositions({self.head_size}).")
        if relative is not None and relative.heads != heads:
            gave = f"MultiHeadAttention got relative positions for {relative.heads} heads."
            rule = f"each of the {heads} heads of this layer has its own number for a distance."
            raise BadValue(gave, rule, f"pass RelativePositions({heads}).")
        self.d_context = check_size(name, "d_context", d if d_context is None else d_context)
        d_values = self.d_context if d_values is None else d_values
        self.d_values = check_size(name, "d_values", d_values)
        self.dropout = check_dropout(name, dropout)
        self.causal = check_type(name, "causal", causal, bool)
        self.rotary, self.relative = rotary, relative
        narrow = self.kv_heads * self.head_size
        factory = factory_kwargs(name, device, dtype)
        self.W_query = nn.Linear(d, d, bias=qkv_bias, **factory)
        self.W_key = nn.Linear(self.d_context, narrow, bias=qkv_bias, **factory)
        self.W_value = nn.Linear(self.d_values, narrow, bias=qkv_bias, **factory)
        self.out_proj = nn.Linear(d, d, bias=out_bias, **factory)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """Make a layer with a copy of the module's weights, and its mode, dtype and device.

        There are three differences. Inputs are always (B, T, d) or (T, d), so transpose the
        (T, B, d) inputs of a module with `batch_first=False`. The layer returns only the output;
        `watch` and `explain` show the weights. The masks of torch are True where a query must *not*
        look, so pass ``mask=dense(drop=attn_mask)``.

        Raises `BadType` for another module. Raises `BadValue` for a module with `add_bias_kv` or
        `add_zero_attn`, which add keys without tokens, and for a module that is being pruned.
        """
        rule = "from_torch copies the weights of a torch.nn.MultiheadAttention."
        hint = "pass that module, for example the self_attn of a TransformerEncoderLayer."
        must_be_of(nn.MultiheadAttention, "from_torch", module, rule, hint)
        if type(module).forward is not nn.MultiheadAttention.forward:
            gave = f"from_torch got a {type(module).__module__}.{type(module).__name__}."
            rule = "this subclass has its own forward, which may use other weights."
            raise BadType(gave, rule, "pass a plain torch.nn.MultiheadAttention.")
        computed = [n for n, _ in module.named_parameters() if n.endswith("_orig")]
        if computed:
            gave = f"from_torch got a module that computes its weights from {', '.join(computed)}."
            rule = "torch.nn.utils.prune computes weights only before each forward."
            raise BadValue(gave, rule, "call torch.nn.utils.prune.remove(module, name) first.")
        extra = {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn}
        if any(extra.values()):
            added = " and ".join(name for name, on in extra.items() if on)
            rule = "these add a key without a token, which MultiHeadAttention does not support."
            hint = "train without them, or keep torch's module."
            raise BadValue(f"from_torch got a module with {added}.", rule, hint)
        state = {"out_proj.weight": module.out_proj.weight}
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:  # keys or values have another size
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        names = ("W_query", "W_key", "W_value")
        state |= {f"{n}.weight": w for n, w in zip(names, weights, strict=True)}
        if module.in_proj_bias is not None:
            biases = module.in_proj_bias.chunk(3)
            state |= {f"{n}.bias": b for n, b in zip(names, biases, strict=True)}
            state["out_proj.bias"] = module.out_proj.bias
        layer = cls(
            module.embed_dim,
            module.num_heads,
            d_context=module.kdim,
            d_values=module.vdim,
            dropout=module.dropout,
            qkv_bias=module.in_proj_bias is not None,
            out_bias=module.out_proj.bias is not None,
            device="meta",  # which draws no numbers from torch's generator
        )
        layer.load_state_dict({n: t.detach().clone() for n, t in state.items()}, assign=True)
        for name, weight in state.items():
            layer.get_parameter(name).requires_grad_(weight.requires_grad)
        return layer.train(module.training)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Compute the layer: (B, Tq, d) -> (B, Tq, d), or (Tq, d) -> (Tq, d).

        Args:
            x: the input of the queries.
            context: the input of the keys, (B, Tk, d_context); None means x.
            values: the input of the values, (B, Tk, d_values); None means the context.
            mask: which keys each query may look at, besides `causal`; None means no further rule.
                With a cache there are more keys than queries, so masks need align="end".
            cache: has the keys and values of earlier tokens, to which those of x are added. It is
                for self-attention only. If the call raises, the cache is not changed.

        Raises `BadValue`, `BadType` for inputs that do not fit the layer or the mask.
        """
        with restore_on_error(cache):
            inputs, options = self._project(x, context, values, mask, cache)
            return self.out_proj(_join_heads(attention(*inputs, **options)))

    def explain(
        self,
        x: Tensor,
        tokens: Sequence[str] | None = None,
        *,
        context: Tensor | None = None,
        values: Tensor | None = None,
        key_tokens: Sequence[str] | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        scale: float | None = None,
        dropout: float | None = None,
        seed: int | None = None,
    ) -> Trace:
        """Compute `forward` step by step, from the inputs to the projection of the heads.

        `tokens` label x. `key_tokens` label the keys (with a cache, those of all tokens); None
        means `tokens` if there are as many keys, else numbers. `scale=None` means 1/sqrt(D),
        `dropout=None` the dropout of `forward` in this mode, and `seed=None` that torch's generator
        draws. A cache is read but not changed.
        """
        length = cached_length(cache)
        try:
            (q, k, v), options = self._project(x, context, values, mask, cache)
            if cache is not None:  # later tokens may overwrite its memory
                k, v = k.clone(), v.clone()
            if dropout is not None:
                options["dropout"] = dropout
            options |= {"scale": scale, "seed": seed}
            trace = explain(q, k, v, tokens=tokens, key_tokens=key_tokens, **options)
        finally:
            if cache is not None:
                cache.cut(length)
        inputs = [(x, "inputs", "q"), (context, "context", "k"), (values, "values", "k")]
        C = "X" if context is None else "C"
        U = C if values is None else "U"
        query = projection_formula("X", "W_query", self.W_query)
        key = projection_formula(C, "W_key", self.W_key)
        value = projection_formula(U, "W_value", self.W_value)
        if self.rotary is not None:
            query, key = f"rotated({query})", f"rotated({key})"
        trace = trace.with_formulas(query=query, key=key, value=value)
        trace = trace.before(*(input_step(t, *names) for t, *names in inputs if t is not None))
        joined = _join_heads(trace["output"])
        axes = "b q e" if joined.dim() == 3 else "q e"
        last = (
            Step("joined", "concat over heads", "The outputs of the heads, side by side.", axes,
                 joined),
            Step("projected", projection_formula("joined", "W_out", self.out_proj),
                 "The outputs of the heads are mixed into one vector per token.", axes,
                 self.out_proj(joined)),
        )  # fmt: skip
        return replace(trace, steps=(*trace.steps, *last))

    def _project(
        self,
        x: Tensor,
        context: Tensor | None,
        values: Tensor | None,
        mask: Mask | None,
        cache: KVCache | None,
    ) -> Projection:
        """Check and project the inputs, and append the new keys and values to the cache."""
        if context is None and values is not None:
            rule = "every value belongs to a key, and keys are projected from the context."
            hint = "pass context= too, or leave out both for self-attention."
            raise BadValue("MultiHeadAttention got values= without context=.", rule, hint)
        has_positions = self.rotary is not None or self.relative is not None
        if context is not None and (cache is not None or has_positions):
            gave = f"MultiHeadAttention got context= and {'a cache' if cache else 'has positions'}."
            rule = "caches and positions are for self-attention; a context is another sequence."
            raise BadValue(gave, rule, "use a layer without either for cross-attention.")
        name = "MultiHeadAttention"
        context = x if context is None else context
        values = context if values is None else values
        x = check_sequence(name, "x", x, self.d, self.W_query)
        context = check_sequence(name, "context", context, self.d_context, self.W_key)
        values = check_sequence(name, "values", values, self.d_values, self.W_value)
        if self.causal and cache is None and x.shape[-2] != context.shape[-2]:
            gave = f"A causal {name} got {x.shape[-2]} tokens and {context.shape[-2]} of context."
            rule = "without a cache, a causal layer has as many keys as queries."
            hint = "build it with causal=False, and pass mask=Causal(align=...) for this context."
            raise BadValue(gave, rule, hint)
        q = _split_heads(self.W_query(x), self.head_size)
        k = _split_heads(self.W_key(context), self.head_size)
        v = _split_heads(self.W_value(values), self.head_size)
        start = cached_length(cache)
        if self.rotary is not None:
            q, k = self.rotary(q, start), self.rotary(k, start)
        if cache is not None:
            cache.belongs_to(self)
            k, v = cache.append(k, v)
        causal = Causal(align=None if cache is None else "end") if self.causal else None
        distances = None
        if self.relative is not None:
            distances = bias(self.relative(q.shape[-2], k.shape[-2], start))
        dropout = self.dropout if self.training else 0.0
        options = {"mask": combine_masks(causal, mask), "dropout": dropout, "bias": distances}
        return Inputs(q, k, v), options

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}", f"kv_heads={self.kv_heads}", f"dropout={self.dropout:g}"]
        return ", ".join([*parts, f"causal={self.causal}"])


def _split_heads(x: Tensor, D: int) -> Tensor:
    """Split features into heads: (..., T, H * D) -> (..., H, T, D).

    With tensor parallelism, H is the number of heads of this rank.
    """
    return x.unflatten(-1, (-1, D)).transpose(-3, -2)


def _join_heads(x: Tensor) -> Tensor:
    """Concatenate the features of all heads: (..., H, T, D) -> (..., T, H * D)."""
    return x.transpose(-3, -2).flatten(-2)


def _nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of `number` nearest to `target`."""
    divisors = (n for n in range(1, number + 1) if number % n == 0)
    return min(divisors, key=lambda n: abs(n - target))
