"""`divergence`: how far attention on other keys and values is from attention on the exact ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from ..engines.choice import CORE, answer, choose, statistics_of
from ..engines.cpu.divergence import core_divergences
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
Call: TypeAlias = tuple[Problem, Tensor]  # a problem and its keys
Exact: TypeAlias = tuple[Mask, Mask] | None  # pairs with the exact key, and with the exact value


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
    exact_mask: Mask | None = None,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **unknown: NoReturn,
) -> Divergence:
    """Compare attention with attention on other keys and values, such as those of a cache.

    No tensor of the size Tq x Tk is formed. The outputs are those of the engines. The C++ core adds
    one sweep, so that a call takes about three times attention, and each divergence has its digits,
    also where a weight is near 1. In float64, beyond logits of 90 and on other devices torch adds
    tiles of logits in float64, which takes 20 times attention.

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
        exact_mask: the pairs in which the other attention reads the exact key and value, such as
            the newest keys, ``ch.window(before=127, after=0)``, before a cache rounds them; None
            means none.
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
        for pairs in other_mask, exact_mask:
            make_problem(q, k, v, Options(pairs))  # checks them
        other = problem
        if other_mask is not None:
            other = replace(problem, mask=intersect(problem.mask, other_mask))
        same = None if exact_mask is None else (exact_mask, exact_mask)
        compared = compare(problem, inputs, other, others, same)
    back = problem.shape_back
    return Divergence(**{name: back(x) for name, x in vars(compared).items()})


def compare(
    problem: Problem, inputs: Inputs, other: Problem, others: Inputs, exact: Exact = None
) -> Divergence:
    """Compare two calls that differ in keys, values and mask; `other` allows no pair that `problem`
    does not. With `exact` it reads the exact keys and values of these pairs, as in `mixed`."""
    with torch.no_grad(), no_autocast(problem.device):
        out = choose(problem, "auto").compute(problem, inputs)
        out2 = mixed(other, inputs, others, exact)
        calls, same = (problem, inputs, other, others), exact and exact[0]
        computed = None if CORE.why_not(problem) else core_divergences(*calls, same)
        numbers = _by_torch(*calls, same) if computed is None else computed
        z, z2 = (x.to(problem.wide) for x in (out, out2))
        error = (z2 - z).norm(dim=-1)
        error = torch.where(error == 0, 0.0, error / z.norm(dim=-1))
        return Divergence(out, out2, error, *numbers)


def mixed(p: Problem, inputs: Inputs, others: Inputs, exact: Exact) -> Tensor:
    """Compute attention that reads keys and values of `inputs` in the pairs that `exact` allows for
    keys and for values, and those of `others` elsewhere: (B, H, Tq, Dv).

    The pairs are divided into four calls, whose outputs are weighted by their sums of weights.
    """
    if exact is None:
        return choose(p, "auto").compute(p, others)
    outs, sums = [], []
    for of_keys, of_values in product((True, False), repeat=2):
        pairs = (x if same else ~x for x, same in zip(exact, (of_keys, of_values), strict=True))
        part = replace(p, mask=reduce(intersect, pairs, p.mask), sinks=None)
        k, v = (inputs if of_keys else others).k, (inputs if of_values else others).v
        x = Inputs(inputs.q, k, v)
        out, stats = answer(choose(part, "auto"), part, x, parse_stats(["lse"]))
        outs.append(out.to(p.wide))
        sums.append(cast(Tensor, stats["lse"]))
    if p.sinks is not None:
        sums.append(p.sinks.to(p.wide).reshape(1, -1, 1).expand_as(sums[0]))
    weights = torch.stack(sums).softmax(0).nan_to_num(0.0)  # 0 for a fully masked query
    return (torch.stack(outs) * weights[: len(outs), ..., None]).sum(0).to(p.dtype)


def _by_torch(
    p: Problem, inputs: Inputs, other: Problem, others: Inputs, exact: Mask | None
) -> Iterable[Tensor]:
    """Compute the numbers of both calls in float64, tile by tile."""
    both = (p, inputs), (other, others)
    lse, lse2 = (cast(Tensor, statistics_of(*of, ["lse"])["lse"]).double() for of in both)
    # In float32 a logit of 90 errs by 1e-5, as much as the divergence of a good cache.
    a, b = ((replace(of, dtype=torch.float64), x.k.double()) for of, x in both)
    q, parts = inputs.q.double(), query_tiles(range(p.Tq), TILE_QUERIES)
    tiles = [
        tuple(_compared(_logits(q, a, b, exact, part), lse[:, :, part], lse2[:, :, part]))
        for part in parts
    ]
    return [torch.cat(x, 2).to(p.wide) for x in zip(*tiles, strict=True)]


def _compared(
    logits: Iterable[tuple[Tensor, Tensor]], lse: Tensor, lse2: Tensor
) -> Iterator[Tensor]:
    """Yield KL(w || w'), KL(w' || w), the weight that both see and the largest lost, (B, H, q)."""
    lse, lse2 = (x.masked_fill(x == -torch.inf, 0.0) for x in (lse, lse2))  # of rows without keys
    # The sums of w and w', of w over the keys that both see, and of both times log (w / w').
    *sums, lost = (torch.zeros_like(lse) for _ in range(6))
    for x, y in logits:
        seen = y > -torch.inf
        gap = torch.where(seen, x - y, 0.0)
        w, w2 = ((z - of.unsqueeze(-1)).exp() for z, of in ((x, lse), (y, lse2)))
        both = torch.where(seen, w, 0.0)
        for total, part in zip(sums, (w, w2, both, both * gap, w2 * gap), strict=True):
            total += part.sum(-1)
        lost = torch.maximum(lost, (w - both).amax(-1))
    total, total2, mass, forth, back = sums
    # The gaps lack lse' - lse. With the sums of this pass for those of the engines:
    shift = (total2.log() + lse2) - (total.log() + lse)
    kl = (forth / total + shift).masked_fill(lost > 0, torch.inf)
    reverse = (-back / total2 - shift).masked_fill(total2 == 0, torch.inf)
    for x in kl.clamp(min=0), reverse.clamp(min=0), mass / total, lost / total:
        yield x.masked_fill(total == 0, 0.0) + 0.0  # no -0


def _logits(
    q: Tensor, call: Call, other_call: Call, exact: Mask | None, queries: slice
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits of both calls, (B, H, q, k), tile by tile, and those of the sink."""
    (p, k), (other, k2), q = call, other_call, q[:, :, queries]
    width = width_of_tiles(p, TILE_QUERIES, TILE_CELLS)
    for keys, tile in key_tiles(p, queries, width):
        other_tile = tile if other.mask is p.mask else other
        x, _ = tile.logits(q, k[:, :, keys], queries, keys)
        y, _ = other_tile.logits(q, k2[:, :, keys], queries, keys)
        if exact is not None:
            same = exact.key_ranges(p.grid, p.device).to_bool(queries, keys)
            y = torch.where(same & (y > -torch.inf), x, y)
        yield x, y
    if p.sinks is not None:
        sinks = p.sinks.double().reshape(1, -1, 1, 1).expand(p.B, p.H, q.shape[2], 1)
        yield sinks, sinks


def _must_be_like(name: str, x: object, exact: Tensor) -> None:
    gave = kind_of(x)
    if isinstance(x, Tensor):
        if (x.shape, x.dtype, x.device) == (exact.shape, exact.dtype, exact.device):
            return
        gave = f"{tuple(x.shape)}, {x.dtype} on {x.device}"
    rule = f"it matches the exact tensor: {tuple(exact.shape)}, {exact.dtype} on {exact.device}."
    hint = "convert it with .to(k); for dropped keys pass all of them, and other_mask."
    raise BadValue(f"divergence got {name} of {gave}.", rule, hint)
