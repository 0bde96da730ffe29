"""What `logit_attribution` returns: the parts of logits, and their sources.

Letters: L attention calls (layers), H heads, T tokens, Dv value size.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.engines.parts import largest_parts
from ...core.errors import BadValue, as_count, as_index
from ...core.functional.matrix import Matrix
from ...core.problem.problem import Inputs, Problem, repeat_heads
from ...core.torch_state import own_dtypes


class Source(NamedTuple):
    """The data that split the heads of a layer by source token."""

    problem: Problem
    inputs: Inputs
    direction: Tensor  # (H, T, Dv): the derivative of the logit by each value
    is_edited: bool  # so the output may differ from weights times values

    def total(self) -> tuple[Tensor, Tensor]:
        """Compute the sum of all parts of each query, and the sum of the absolute values of its
        terms, (H, T) both."""
        weights = Matrix(replace(self.problem, input_dims=4), self.inputs)
        z = (weights @ self.inputs.v)[0, :, : self.direction.shape[1]]
        terms = z.to(self.direction.dtype) * self.direction
        return terms.sum(-1), terms.abs().sum(-1)

    def largest(self, n: int) -> tuple[Tensor, Tensor]:
        """Find the n largest parts and their keys, (H, T, n), for the queries with a direction."""
        T = self.direction.shape[1]
        padded = F.pad(self.direction, (0, 0, 0, self.problem.Tq - T)).unsqueeze(0)
        _, parts, keys = largest_parts(self.problem, self.inputs, padded, n)
        return parts[0, :, :T], keys[0, :, :T]


class LargestSources(NamedTuple):
    """The largest parts of each head at each query, by absolute value, and the tokens that they
    come from, (L, H, T, n) both; -1 where a query sees fewer. NaN is above all numbers.

    Tokens are keys of the call, without those that a cache has dropped."""

    parts: Tensor
    keys: Tensor


@dataclass(frozen=True, repr=False)
class LogitAttribution:
    """The parts of the target's logit that each part of a model writes, at each position.

    `heads` is (L, H, T) and `mlps` (L, T), where a layer is an attention call, as in `watch`, and
    `modules` names its module. `mlps[l]` has all modules in the block of layer l except its heads,
    with their biases. `embedding`, (T,), is the part of the stream before the first layer. `bias`,
    (T,), is that of the biases of output projections, norms and the unembedding. All parts sum to
    `logit`, (T,). `target` has the target's id at each position; for a difference of logits, the
    positive id.

    The part of a head includes the bias of V. The parts are exact for the scales of the norms in
    the run; without a part, these scales would also change.
    """

    heads: Tensor
    mlps: Tensor
    embedding: Tensor
    bias: Tensor
    logit: Tensor
    target: Tensor
    modules: tuple[str, ...]
    _sources: tuple[Source, ...] = field(repr=False)

    def check(self) -> float:
        """Return the largest difference between `logit` and the sum of the parts.

        It is relative to the sum of the absolute parts.
        """
        parts = torch.cat([self.heads.flatten(0, 1), self.mlps, self.embedding[None],
                           self.bias[None]]).double()  # fmt: skip
        residue = (parts.sum(0) - self.logit.double()).abs()
        return float((residue / parts.abs().sum(0).clamp(min=1e-30)).max())

    @own_dtypes()
    def sources(self, layer: int, head: int, query: int) -> Tensor:
        """Split the part of a head at a query by source token, (Tk,).

        A number is the weight of a key times the part of its value in the logit. They sum to
        ``heads[layer, head, query]``.

        Raises `BadValue` for a layer, head or query that does not exist.
        """
        names = "Layer", "Head", "Query"
        layer, head, query = map(as_index, names, (layer, head, query), self.heads.shape)
        parts = self._parts(layer, slice(query, query + 1))[head, 0]
        self._check_sum(layer, head, slice(query, query + 1), parts.sum(), parts.abs().sum())
        return parts

    @own_dtypes()
    def largest_sources(self, n: int = 5) -> LargestSources:
        """Find the n largest sources of every head at every query, without a matrix of all pairs.

        The C++ core computes it in one sweep, which takes about as long as attention itself; for
        other devices and float64 plain torch does, about 7 times slower. Memory is O(T). Raises
        `BadValue` for an n below 1 or above Tk, and if an edit changed the output of a head.
        """
        Tk = self._sources[0].problem.Tk
        n = as_count("n", n, f"there are {Tk} tokens.", f"pass 1 to {Tk}.", 1, Tk)
        for layer, source in enumerate(self._sources):
            if source.is_edited:
                for head, (sums, sizes) in enumerate(zip(*source.total(), strict=True)):
                    self._check_sum(layer, head, slice(None), sums, sizes)
        layers = [source.largest(n) for source in self._sources]
        parts, keys = (torch.stack(of_layers) for of_layers in zip(*layers, strict=True))
        return LargestSources(parts, keys)

    def _check_sum(
        self, layer: int, head: int, queries: slice, sums: Tensor, sizes: Tensor
    ) -> None:
        """Raise `BadValue` unless the sources sum to the part of a head, relative to `sizes`."""
        missed = (sums - self.heads[layer, head, queries]).abs()
        tolerance = max(1e-3, 8 * torch.finfo(self._sources[layer].inputs.v.dtype).eps)
        if (missed > tolerance * sizes + 1e-6).any():
            gave = f"The sources of L{layer}H{head} miss its part by {float(missed.max()):.3g}."
            rule = "sources are weights times values, without an edit of the output."
            raise BadValue(gave, rule, "call logit_attribution without edits of outputs.")

    def _parts(self, layer: int, queries: slice) -> Tensor:
        """Compute the parts of a layer's heads at some queries, by source token, (H, n, Tk)."""
        problem, inputs, direction, _ = self._sources[layer]
        with torch.no_grad():
            values = repeat_heads(inputs.v, problem.H)[0].to(direction.dtype)
            per_weight = direction[:, queries] @ values.mT
            rows = Matrix(problem, inputs).rows(queries)
            parts = rows.reshape(per_weight.shape).to(direction.dtype) * per_weight
            # A masked key adds 0, even if its value is NaN.
            at = torch.arange(problem.Tq, device=problem.device)[queries]
            visible = problem.key_ranges.to_bool(at, slice(0, problem.Tk))[0]
            return parts.masked_fill(~visible.to(parts.device), 0.0)

    def __repr__(self) -> str:
        L, H, T = self.heads.shape
        named = [("embedding", self.embedding[-1]), ("bias", self.bias[-1])]
        named += [(f"layer {at} MLP", x) for at, x in enumerate(self.mlps[:, -1])]
        named += [
            (f"L{at}H{h}", x)
            for at, row in enumerate(self.heads[..., -1])
            for h, x in enumerate(row)
        ]
        sizes = torch.stack([x for _, x in named]).abs()  # topk puts NaN first
        largest = [named[at] for at in sizes.topk(min(10, len(named))).indices.tolist()]
        lines = [f"  {float(x):+8.3f}  {name}" for name, x in largest]
        head = f"{L} layers x {H} heads, {T} positions; the largest parts at the last position:"
        return "\n".join([head, *lines, f"  {float(self.logit[-1]):+8.3f}  the logit"])
