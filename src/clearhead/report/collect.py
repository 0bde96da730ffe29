"""From an attention call to a `Layer`: the statistics, gathered while streaming."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from ..api.explain import explain_problem
from ..engines import compute_stats
from ..errors import BadValue
from ..masks import Mask, window
from ..masks.mask import common_align
from ..problem.problem import Inputs, Problem
from ..results.report import Head, Layer, Link
from ..results.trace import Trace
from ..stats import Statistic, Top, map as pooled_map, mass, topk
from ..views.html.steps import MAP_SIDE
from ..views.panels import evenly
from .cross_attention import Place, Texts
from .head_label import LABELS, REPEATS, label_of, separates
from .induction import repeats

EXACT = 32  # tokens: 12 heads x 6 layers of them make 2 MB of steps in a page
ONE_HEAD = 512  # tokens: one head's matrices are 1 MB each, and let go after the page
LINKS = 8  # weights kept of each query
KEPT = 512  # queries whose largest weights are kept, evenly spaced in a longer text
STRONGEST = 10  # links named for each head


@dataclass(frozen=True, eq=False)
class _Found:
    """The statistics of one call on one text: no batch dimension, and sums as means.

    `entropy` is (H, Tq), `sees` (Tq,): which queries may look at anything. `shares` are (H,), of
    all weight, for each group. `map` is (H, r, c), `received` (H, Tk).
    """

    entropy: Tensor
    sees: Tensor
    shares: dict[str, Tensor]
    map: Tensor
    received: Tensor
    best: Top | None

    @property
    def count(self) -> int:
        return max(1, int(self.sees.sum()))


@dataclass
class Listener:
    """Hears each attention call, and makes a `Layer` of it."""

    texts: Texts
    layers: list[Layer]
    evens: list[tuple[Mask, tuple[object, ...], _Found]] = field(default_factory=list)

    def on_call(self, problem: Problem, inputs: Inputs) -> None:
        if problem.B != 1:
            raise BadValue(
                f"The model was run on a batch of {problem.B}.",
                "a report is about one text.",
                "pass one text, B = 1; for a batch, use watch(model, stats=[...]).",
            )
        if not problem.Tq or not problem.Tk:
            raise BadValue(
                f"The model was run on {problem.Tq} queries and {problem.Tk} keys.",
                "a report is about a text, of one token or more.",
                "pass a text that is not empty.",
            )
        place = self.texts.place(problem.Tq, problem.Tk)
        found, even = self.found(problem, inputs, place, topk(LINKS)), self.even(problem, place)
        assert found.best is not None
        weights, keys = (x[0].cpu() for x in found.best)
        most = float(even.entropy.mean(0).sum()) / even.count
        chance = {name: float(share.nanmean()) for name, share in even.shares.items()}
        # A query with one key to look at, or none, says nothing by looking at it.
        free = (even.entropy.amax(0) > 1e-6).cpu()
        heads = []
        for h in range(problem.H):
            shares = {name: float(share[h]) for name, share in found.shares.items()}
            shares = {n: x for n, x in shares.items() if n not in REPEATS or not math.isnan(x)}
            entropy = float(found.entropy[h].sum()) / found.count
            effective = float(found.entropy[h][found.sees].exp().sum()) / found.count
            label, number = label_of(shares, chance, entropy / most if most else 0.0)
            links = _strongest(weights[h].masked_fill(~free[:, None], -1.0), keys[h])
            heads.append(
                Head(len(self.layers), h, label, number, entropy, effective, shares, links)
            )
        kept = sorted(
            {*evenly(problem.Tq, KEPT), *(link.query for head in heads for link in head.links)}
        )
        trace, traced = self.trace(problem, inputs, heads, place)
        self.layers.append(
            Layer(
                number=len(self.layers),
                module=place.module,
                crosses=place.crosses,
                query_tokens=place.queries,
                key_tokens=place.keys,
                question=problem.describe(),
                queries=problem.Tq,
                key_heads=problem.G,
                most=most,
                heads=tuple(heads),
                map=found.map.float().cpu(),
                seen=(even.map > 0).any(0).cpu(),
                received=found.received.float().cpu(),
                kept=tuple(kept),
                weights=weights[:, kept].float(),
                keys=keys[:, kept].int(),
                trace=trace,
                traced=traced,
            )
        )

    def found(self, problem: Problem, inputs: Inputs, place: Place, *more: topk) -> _Found:
        said = common_align(problem.mask, problem.grid)
        corner = "end" if said is None else said
        groups = {
            "previous": window(before=1, align=corner) & ~window(before=0, align=corner),
            "next": window(after=1, align=corner) & ~window(after=0, align=corner),
            "same": window(before=0, after=0, align=corner),
        }
        wanted: list[str | Statistic] = [
            "entropy",
            "max",
            "received",
            pooled_map(MAP_SIDE, MAP_SIDE),
            *more,
        ]
        one_text = not place.crosses and _of_one_text(problem)
        if one_text:
            wanted.append(mass(groups))
        numbers = compute_stats(problem, inputs, wanted).finish()
        largest, entropy, received, maps = (
            cast(Tensor, numbers[name])[0] for name in ("max", "entropy", "received", "map")
        )
        sees = torch.isfinite(largest).any(0)
        seeing = max(1, int(sees.sum()))
        by_query = cast(dict[str, Tensor], numbers.get("mass", {}))
        shares = {name: x[0].sum(-1) / seeing for name, x in by_query.items()}
        # These are the same keys for every query, so the weight they receive tells.
        first = _first_key(problem)
        apart = _separators(place.keys, problem.Tk, first).to(received.device)
        shares["first"] = received[:, first] / seeing
        shares["separators"] = received[:, apart].sum(-1) / seeing
        if one_text and place.keys is not None and problem.Tq == problem.Tk:
            shares |= repeats(problem, inputs, place.keys, first)
        if problem.sinks is not None:
            shares["sink"] = 1 - received.sum(-1) / seeing
        best = cast(Top, numbers["topk"]) if more else None
        return _Found(entropy, sees, shares, maps, received, best)

    def even(self, problem: Problem, place: Place) -> _Found:
        """What even weights would give under the same mask: a head whose queries are all 0 has
        them, so it is asked the same. Layers that share their mask share the answer."""
        like = problem.Tq, problem.Tk, place.crosses, place.keys
        for mask, same, found in self.evens:
            if mask is problem.mask and same == like:
                return found
        H = problem.key_ranges.keys_per_query().shape[1] if problem.masked else 1
        asked = replace(
            problem, H=H, G=1, D=1, Dv=1, bias=None, softcap=None, sinks=None, dropout=0.0
        )
        q = torch.zeros(1, H, problem.Tq, 1, device=problem.device, dtype=problem.dtype)
        k = torch.zeros(1, 1, problem.Tk, 1, device=problem.device, dtype=problem.dtype)
        found = self.found(asked, Inputs(q, k, k), place)
        self.evens.append((problem.mask, like, found))
        return found

    def trace(
        self, problem: Problem, inputs: Inputs, heads: Sequence[Head], place: Place
    ) -> tuple[Trace | None, tuple[int, ...]]:
        """Every step of all heads of a short text, of the most telling one of a longer."""
        longest = max(problem.Tq, problem.Tk)
        if longest > ONE_HEAD:
            return None, ()
        whole = explain_problem(problem, inputs, place.queries, place.keys)
        if longest <= EXACT:
            return whole, tuple(range(problem.H))
        chosen = max(heads, key=lambda head: (head.label in LABELS.values(), head.number)).head
        one = whole.head(chosen)  # copied, so that the other heads are let go
        steps = tuple(replace(step, tensor=step.tensor.clone()) for step in one)
        return replace(one, steps=steps), (chosen,)


def _separators(keys: Sequence[str] | None, Tk: int, first: int) -> Tensor:
    """Which keys are punctuation or special, the first not among them: it counts by itself."""
    if keys is None:
        return torch.zeros(Tk, dtype=torch.bool)
    apart = torch.tensor([separates(key) for key in keys])
    apart[first] = False
    return apart


def _of_one_text(problem: Problem) -> bool:
    """Do queries and keys count along one text? Not where they are as many as in two texts, and the
    mask is the same for every query: then it is cross-attention, and no key is the one before."""
    if problem.Tq == problem.Tk or not problem.masked or not problem.Tq:
        return problem.Tq == problem.Tk
    ranges = problem.key_ranges
    edges = (ranges.lo, ranges.hi) if ranges.bits is None else (ranges.lo, ranges.hi, ranges.bits)
    return not all(bool((x == x[..., :1, :]).all()) for x in edges)


def _first_key(problem: Problem) -> int:
    """The first key that anybody may look at: what stands before it is padding."""
    if not problem.masked or not problem.Tk:
        return 0
    some, _ = problem.key_ranges.tiles(slice(0, problem.Tq), 1)
    return int(some.int().argmax())


def _strongest(weights: Tensor, keys: Tensor) -> tuple[Link, ...]:
    """The heaviest link of each query, and of these the heaviest; ties to the earlier query."""
    order = weights[:, 0].argsort(descending=True, stable=True)[:STRONGEST].tolist()
    found = (Link(q, int(keys[q, 0]), float(weights[q, 0])) for q in order)
    return tuple(link for link in found if link.key >= 0 and link.weight >= 0)
