"""`divergence`: how far attention on other keys and values is from attention on the exact ones."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from ..engines import answer, choose
from ..errors import BadValue, kind_of, refuse_keywords
from ..files.results import Savable
from ..masks import Mask, intersect
from ..problem.biases import Bias
from ..problem.check import Options, make_problem, must_have_values
from ..problem.problem import Inputs, Problem
from ..problem.tiles import key_tiles, query_tiles, width_of_tiles
from ..stats import parse_stats
from ..torch_state import loadable, no_autocast
from .ambient import must_not_be_sharded
from .look import summary

TILE_CELLS = 2**16  # of a tile over all batches and heads
TILE_QUERIES = 64


@loadable
@dataclass(frozen=True, eq=False)
class Divergence(Savable):
    """Attention with weights w and output z, beside attention with other keys, values or edges,
    weights w' and output z'. All but the outputs are (B, H, Tq).

    Attributes:
        out: z, (B, H, Tq, Dv), with the bits of `attention`.
        other: z', likewise.
        error: ``|z - z'| / |z|``, with the Euclidean norm; 0 if both are 0.
        kl: ``KL(w || w') = sum of w log(w / w')``, in nats; infinite where a key has weight in w
            and none in w', as when keys are dropped.
        reverse_kl: ``KL(w' || w)``, in nats. It is finite where keys are dropped: if nothing else
            differs, it is ``-log(mass)``.
        mass: the sum of w over the keys that the other attention may look at.
        lost: the largest w of a key that it may not look at; 0 without such a key.

    A sink counts as a key of both. A fully masked query has 0 everywhere, and one whose keys are
    all dropped has two infinite divergences.
    """

    out: Tensor
    other: Tensor
    error: Tensor
    kl: Tensor
    reverse_kl: Tensor
    mass: Tensor
    lost: Tensor

    def __repr__(self) -> str:
        rows = (f"  {n:<10}  {summary(getattr(self, n))}" for n in self.numbers)
        return "\n".join([f"divergence of {' x '.join(map(str, self.kl.shape))} queries", *rows])

    numbers = ("error", "kl", "reverse_kl", "mass", "lost")


def divergence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    other_k: Tensor | None = None,
    other_v: Tensor | None = None,
    *,
    other_mask: Mask | None = None,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **unknown: NoReturn,
) -> Divergence:
    """Compare attention with attention on other keys and values, such as those of a cache.

    No tensor of the size Tq x Tk is formed. The outputs are those of the engines. The divergences
    are accumulated in float64 over tiles of logits, so that they hold where a weight is near 1 or
    logits are large; this takes longer than attention.

    >>> import torch, clearhead as ch
    >>> q, k, v = torch.randn(3, 8, 100, 64).unbind()
    >>> rounded = k.to(torch.float8_e4m3fn).to(k.dtype)
    >>> ch.divergence(q, k, v, rounded, mask=ch.causal).kl.mean() < 0.01
    tensor(True)

    Args:
        q, k, v: as in `attention`.
        other_k: the other keys, of the shape and dtype of k; None means k.
        other_v: the other values, likewise; None means v.
        other_mask: the pairs that the other attention may look at, among those of `mask`, such as
            ``ch.prefix(4) | ch.window(before=255, after=0)``; None means all of them.
        mask, bias, scale, softcap, sinks: as in `attention`, for both.
        unknown: raises `BadType`.

    Returns:
        A `Divergence`, without gradients.

    Raises:
        BadValue, BadType: as `attention`; other keys or values of another shape or dtype; neither
            other keys, nor values, nor a mask; meta tensors; a call inside `distributed.sharded`.
    """
    if unknown:
        refuse_keywords(divergence, unknown)
    must_not_be_sharded("divergence")
    if other_k is other_v is other_mask is None:
        gave = "divergence got neither other keys, nor other values, nor another mask."
        rule = "it compares two attentions."
        raise BadValue(gave, rule, "pass for example divergence(q, k, v, other_k, other_v).")
    for name, x, exact in (("other_k", other_k, k), ("other_v", other_v, v)):
        if x is not None:
            _must_be_like(name, x, exact)
    with torch.no_grad():
        options = Options(mask, bias, scale, softcap, sinks)
        problem, inputs = make_problem(q, k, v, options)
        must_have_values(problem, "divergence")
        k = k if other_k is None else other_k
        _, others = make_problem(q, k, v if other_v is None else other_v, options)
        other = problem
        if other_mask is not None:
            other_problem, _ = make_problem(q, k, v, Options(other_mask))
            other = replace(problem, mask=intersect(problem.mask, other_problem.mask))
        compared = compare(problem, inputs, other, others)
    back = problem.shape_back
    return Divergence(**{name: back(x) for name, x in vars(compared).items()})


def compare(problem: Problem, inputs: Inputs, other: Problem, others: Inputs) -> Divergence:
    """Compare two calls of the same sizes; `other` allows no pair that `problem` does not."""
    with torch.no_grad(), no_autocast(problem.device):
        calls = []
        for p, x in (problem, inputs), (other, others):
            out, stats = answer(choose(p, "auto"), p, x, parse_stats(["lse"]))
            # In float32 a logit of 90 errs by 1e-5, as much as the divergence of a good cache.
            wide = replace(p, dtype=torch.float64), x.q.double(), x.k.double()
            calls.append(_Call(*wide, cast(Tensor, stats["lse"]).double(), out))
        a, b = calls
        parts = query_tiles(range(problem.Tq), TILE_QUERIES)
        tiles = [tuple(_compared(a, b, part)) for part in parts]
        numbers = [torch.cat(x, 2).to(problem.wide) for x in zip(*tiles, strict=True)]
        z, z2 = (call.out.to(problem.wide) for call in calls)
        error = (z2 - z).norm(dim=-1)
        error = torch.where(error == 0, 0.0, error / z.norm(dim=-1))
        return Divergence(a.out, b.out, error, *numbers)


class _Call(NamedTuple):
    """A call in float64, with the log-sum-exp, (B, H, Tq), and the output of its engine."""

    problem: Problem
    q: Tensor
    k: Tensor
    lse: Tensor
    out: Tensor


def _compared(a: _Call, b: _Call, queries: slice) -> Iterator[Tensor]:
    """Yield KL(w || w'), KL(w' || w), the weight that b sees and the largest lost, (B, H, q)."""
    same = a.problem.mask is b.problem.mask
    lse, lse2 = a.lse[:, :, queries], b.lse[:, :, queries]
    # The sums of w and w', of w over the keys that both see, and of both times log (w / w').
    sums = [torch.zeros_like(lse) for _ in range(5)]
    lost = torch.zeros_like(lse)
    for x, y in _logits(a, b, queries):
        seen = y > -torch.inf
        gap = torch.where(seen, x - y, 0.0)
        w, w2 = (_exp(logits, of) for logits, of in ((x, lse), (y, lse2)))
        both = w if same else torch.where(seen, w, 0.0)
        for total, part in zip(sums, (w, w2, both, both * gap, w2 * gap), strict=True):
            total += part.sum(-1)
        if not same:
            lost = torch.maximum(lost, (w - both).amax(-1))
    total, total2, mass, forth, back = sums
    # The gaps lack lse' - lse. With the sums of this pass for those of the engines:
    shift = (total2.log() + lse2) - (total.log() + lse)
    kl = (forth / total + shift).masked_fill(lost > 0, torch.inf)
    reverse = (-back / total2 - shift).masked_fill(total2 == 0, torch.inf)
    for x in kl.clamp(min=0), reverse.clamp(min=0), mass / total, lost / total:
        yield x.masked_fill(total == 0, 0.0) + 0.0  # no -0


def _logits(a: _Call, b: _Call, queries: slice) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits of both calls, (B, H, q, k), tile by tile, and those of the sink."""
    p, q, q2 = a.problem, a.q[:, :, queries], b.q[:, :, queries]
    width = width_of_tiles(p, TILE_QUERIES, TILE_CELLS)
    full = b.problem.key_ranges.tile_lists(queries, width)[1]
    for keys, tile in key_tiles(p, queries, width):
        other = b.problem.without_mask if full[keys.start // width] else b.problem
        x, _ = tile.logits(q, a.k[:, :, keys], queries, keys)
        yield x, other.logits(q2, b.k[:, :, keys], queries, keys)[0]
    if p.sinks is not None:
        sinks = p.sinks.double().reshape(1, -1, 1, 1).expand(p.B, p.H, q.shape[2], 1)
        yield sinks, sinks


def _exp(x: Tensor, lse: Tensor) -> Tensor:
    """Return exp(x - lse), and 0 in a row without keys, whose lse is -inf."""
    return (x - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _must_be_like(name: str, x: object, exact: Tensor) -> None:
    gave = kind_of(x)
    if isinstance(x, Tensor):
        if (x.shape, x.dtype, x.device) == (exact.shape, exact.dtype, exact.device):
            return
        gave = f"{tuple(x.shape)}, {x.dtype} on {x.device}"
    rule = f"it matches the exact tensor: {tuple(exact.shape)}, {exact.dtype} on {exact.device}."
    hint = "convert it with .to(k); for dropped keys pass all of them, and other_mask."
    raise BadValue(f"divergence got {name} of {gave}.", rule, hint)
