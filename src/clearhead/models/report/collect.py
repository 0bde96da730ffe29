"""Collect a `Layer` of the report from an attention call: statistics, largest weights, steps."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...core.errors import BadValue
from ...core.errors.limits import (
    MOST_RANKED_QUERIES,
    MOST_TRACED_CELLS,
    MOST_TRACED_TOKENS,
    ROLE_CELLS,
)
from ...core.formatting import MAP_SIDE, evenly
from ...core.functional.ambient import ambient, rows_of, statistics_of
from ...core.functional.explain import explain_problem
from ...core.functional.trace import Trace
from ...core.masks import Mask, prefix, window
from ...core.masks.mask import common_align
from ...core.problem.problem import Inputs, Problem
from ...core.stats import (
    Result,
    Statistic,
    Statistics,
    TopWeights,
    mass,
    parse_stats,
    pooled,
    topk,
    value_weighted,
)
from ..follow.cross_attention import CallSite, TextTracker
from ..follow.picture import stream_norms
from ..follow.uniform import uniform_call
from ..inspect.watcher import without_padding
from ..roles.call_roles import CallRoles, role_keys, roles_of
from ..roles.role_keys import RoleKeys, columns
from ..roles.roles import label_of_evenness, with_sink_logit
from ..roles.table import REPEATS
from .findings import REGISTER_NORM, REGISTER_WEIGHT, Head, Layer, Link, Register
from .norms import Norms
from .result import Report

LINKS = 8  # weights per query
STRONGEST = 10  # links per head
MOST_CELLS = 600  # of the rows of a map with an image; with more tokens, patches share cells


@dataclass(frozen=True, eq=False)
class _Statistics:
    """The statistics of one call on one text, without a batch dimension.

    `entropy` is (H, Tq). `active`, (Tq,), is True for queries that are not fully masked; `count` is
    their number, or 1 if there are none. `shares` has the fraction of all weight on each group of
    keys, (H,). `pooled` is (H, r, c), `received` (H, Tk), and `top` (H, Tq, n), on the CPU, or
    None.
    """

    entropy: Tensor
    active: Tensor
    count: int
    shares: dict[str, Tensor]
    pooled: Tensor
    received: Tensor
    top: TopWeights | None

    @property
    def mean_entropy(self) -> float:
        """The mean over heads and active queries."""
        return float(self.entropy.mean(0).sum()) / self.count


class BegunCall(NamedTuple):
    """A call that began, at its `site`: its problem, and without queries of padding `real`.

    `statistics` are those of `real` to compute; `norms` are those of what its values write.
    """

    problem: Problem
    inputs: Inputs
    site: CallSite
    real: Problem
    statistics: Statistics
    norms: Norms


class _Uniform(NamedTuple):
    """The statistics of uniform weights under a mask, and the roles of the keys under it."""

    statistics: _Statistics
    roles: tuple[RoleKeys, ...]


@dataclass
class Collector:
    """Collects a `Layer` from each attention call."""

    texts: TextTracker
    layers: list[Layer] = field(default_factory=list)
    uniform_cache: list[tuple[Mask, tuple[object, ...], _Uniform]] = field(default_factory=list)

    def begin(self, problem: Problem, inputs: Inputs, norms: Norms) -> BegunCall:
        """Begin a call. Raises `BadValue` for a batch of texts and for an empty text."""
        _must_be_one_text(problem)
        site = self.texts.call_site(problem)
        real = without_padding(problem, site.at)
        requested = _requested(real, site, topk(LINKS))
        if norms.norms is not None and _is_one_text(real, site):
            first = _first_key(site)
            groups = {**_near(real, site), "first": prefix(first + 1) & ~prefix(first)}
            requested.append(value_weighted(groups, by=norms.norms[None]))
        return BegunCall(problem, inputs, site, real, parse_stats(requested, real.grid), norms)

    def add_layer(self, begun: BegunCall, numbers: dict[str, Result] | None = None) -> None:
        """Add the layer of a call. `numbers` are its statistics; None computes them."""
        problem, inputs, site, real, _, norms = begun
        if numbers is None:
            numbers = statistics_of(real, inputs, begun.statistics)
        statistics = _statistics(numbers, real, inputs, site)
        uniform, keys = self.uniform(problem, inputs, site)
        stack = self.texts.stack
        stream = None
        if not site.cross_attention:
            stream = stream_norms(stack.running, stack.calls, problem.Tk)
        registers = self._registers(site, stream, statistics.received, uniform.received)
        sinks = tuple(x.token for x in registers)
        assert statistics.top is not None
        masks = tuple(of_mask.with_sinks(sinks) for of_mask in keys)
        roles = roles_of(real, inputs, masks, statistics.top.keys)
        by_group = cast(dict[str, Tensor], numbers.get("value_weighted", {}))
        moved = {n: x[0].sum(-1).double() / statistics.count for n, x in by_group.items()}
        heads = _heads(len(self.layers), real, statistics, uniform, roles, moved)
        trace, traced_heads = _trace(problem, inputs, heads, site)
        linked = {link.query for head in heads for link in head.links}
        ranked = sorted({*evenly(problem.Tq, MOST_RANKED_QUERIES), *linked})
        self.layers.append(
            Layer(
                number=len(self.layers),
                module=site.module,
                cross_attention=site.cross_attention,
                query_tokens=site.query_tokens,
                key_tokens=site.key_tokens,
                problem=problem.describe(),
                queries=problem.Tq,
                key_heads=problem.G,
                max_entropy=uniform.mean_entropy,
                heads=heads,
                pooled=statistics.pooled.float().cpu(),
                allowed=(uniform.pooled > 0).any(0).cpu(),
                received=statistics.received.float().cpu(),
                kept_queries=tuple(ranked),
                top_weights=statistics.top.weights[:, ranked].float(),
                top_keys=statistics.top.keys[:, ranked].int(),
                trace=trace,
                traced_heads=traced_heads,
                value_norms=None if norms.norms is None else norms.norms.float().cpu(),
                norms_withheld=norms.withheld,
                in_decoder=site.in_decoder,
                picture=site.picture,
                block=_block(site),
                stream_norms=None if stream is None else stream.float().cpu(),
                registers=registers,
            )
        )

    def _registers(
        self, site: CallSite, stream: Tensor | None, received: Tensor, even: Tensor
    ) -> tuple[Register, ...]:
        """Return the patches that this layer uses as registers, or the tokens of a text that it
        uses as sinks besides the first; none if that is unknown.

        Keys received the weight `received`, (H, Tk), and from uniform weights `even`.
        """
        text = site.picture, site.in_decoder
        of_text = (x for x in self.layers if (x.picture, x.in_decoder) == text)
        first = next((x.stream_norms for x in of_text if not x.cross_attention), None)
        if stream is None or first is None or first.shape != stream.shape:
            return ()
        Tk = len(stream)
        if site.picture is None:
            at = site.at.is_real_key(Tk).flatten().expand(Tk).nonzero().flatten()[1:]
        else:
            at = torch.arange(Tk)[site.picture.patches]
        before, norm = (x.cpu()[at] for x in (first, stream))
        before, norm = (x / x.median().clamp(min=1e-30) for x in (before, norm))
        weight = (received.mean(0) / even.mean(0)).cpu()[at]
        is_register = (norm >= REGISTER_NORM) & (weight >= REGISTER_WEIGHT)
        is_register &= before < REGISTER_NORM
        names = site.key_tokens or tuple(map(str, range(Tk)))
        rows = zip(at.tolist(), norm.tolist(), weight.tolist(), strict=True)
        chosen = itertools.compress(rows, is_register.tolist())
        return tuple(Register(len(self.layers), t, names[t], *numbers) for t, *numbers in chosen)

    def report(self, name: str) -> Report:
        """Return the report of the layers, with the tokens of the text, or numbers if unknown.

        Raises `BadValue` for tokens whose number fits no call.
        """
        self.texts.check_tokens()
        count = self.layers[0].received.shape[-1]
        patches = self.layers[0].picture and self.layers[0].key_tokens
        tokens = self.texts.tokens["tokens"] or patches or tuple(map(str, range(count)))
        return Report(name, tokens, tuple(self.layers))

    def uniform(self, problem: Problem, inputs: Inputs, site: CallSite) -> _Uniform:
        """Return the statistics of uniform weights under the same mask, from queries that are 0,
        and the roles of its keys.

        They are computed once for layers with the same mask.
        """
        key = problem.Tq, problem.Tk, site.cross_attention, site.key_tokens, site.at, site.picture
        for mask, cached_key, cached in self.uniform_cache:
            if mask == problem.mask and cached_key == key:
                return cached
        real = without_padding(problem, site.at)
        zero, zeros = uniform_call(real, inputs)
        offset = _offset(problem) if _is_one_text(problem, site) else None
        numbers = statistics_of(zero, zeros, _requested(zero, site))
        keys = role_keys(real, site, _first_key(site), offset)
        uniform = _Uniform(_statistics(numbers, zero, zeros, site), keys)
        self.uniform_cache.append((problem.mask, key, uniform))
        return uniform


def _must_be_one_text(problem: Problem) -> None:
    if problem.B != 1:
        rule = "a report describes one text, and not windows (Swin) or crops of an image."
        hint = "pass B = 1, or use report_batch."
        raise BadValue(f"The model was run on a batch of {problem.B}.", rule, hint)
    if not problem.Tq or not problem.Tk:
        gave = f"The model was run on {problem.Tq} queries and {problem.Tk} keys."
        rule = "a report describes a text of one token or more."
        raise BadValue(gave, rule, "pass a text that is not empty.")


def _requested(problem: Problem, site: CallSite, *more: Statistic) -> list[str | Statistic]:
    """Return the statistics of a call that `_statistics` reads, and `more`."""
    near = [mass(_near(problem, site))] if _is_one_text(problem, site) else []
    block = _block(site)
    side = max(MAP_SIDE, problem.Tk) if block == 1 else MAP_SIDE
    maps = [pooled(side, side)] if block in (None, 1) else []
    return ["entropy", "max", "received", *maps, *near, *more]


def _block(site: CallSite) -> int | None:
    """Return the `Layer.block` of a call."""
    return None if site.picture is None else site.picture.block(MOST_CELLS)


def _of_blocks(problem: Problem, inputs: Inputs, cells: Tensor) -> Tensor:
    """Return the map whose rows are means over the queries of a cell, and whose columns are sums
    over its keys, (H, c, c), from exact weights of some queries at a time."""
    count = cells.bincount()
    maps = torch.zeros(problem.H, len(count), len(count), dtype=torch.float64)
    for some in torch.arange(problem.Tq).split(max(1, ROLE_CELLS // (problem.H * problem.Tk))):
        rows = rows_of(problem, inputs, some.to(problem.device))[0].double().cpu()
        by_key = rows.new_zeros(problem.H, len(some), len(count)).index_add_(2, cells, rows)
        maps.index_add_(1, cells[some], by_key)
    return maps / count.unsqueeze(-1)


def _statistics(
    numbers: dict[str, Result], problem: Problem, inputs: Inputs, site: CallSite
) -> _Statistics:
    largest, entropy, received = (
        cast(Tensor, numbers[name])[0] for name in ("max", "entropy", "received")
    )
    if site.picture is not None and "pooled" not in numbers:
        maps = _of_blocks(problem, inputs, site.picture.cells(cast(int, _block(site))))
    else:
        maps = cast(Tensor, numbers["pooled"])[0]
    active = (largest != -math.inf).any(0)  # NaN counts, so that it appears in every mean
    count = max(1, int(active.sum()))
    by_query = cast(dict[str, Tensor], numbers.get("mass", {}))
    shares = {name: x[0].sum(-1) / count for name, x in by_query.items()}
    # These groups have the same keys for every query, so their fraction follows from the weight
    # that each key receives.
    for name, column in columns(site.key_tokens, problem.Tk, _first_key(site)).items():
        shares[name] = received[:, column.to(received.device)].sum(-1) / count
    if problem.sinks is not None:
        shares["sink"] = 1 - received.sum(-1) / count
    of_text = None
    if "topk" in numbers:
        of_text = TopWeights(*(x[0].cpu() for x in cast(TopWeights, numbers["topk"])))
    return _Statistics(entropy, active, count, shares, maps, received, of_text)


def _near(problem: Problem, site: CallSite) -> dict[str, Mask]:
    """Return the groups of keys beside a query; of an image only the query itself."""
    stated = common_align(problem.mask, problem.grid)
    align = "end" if stated is None else stated
    same: dict[str, Mask] = {"same": window(before=0, after=0, align=align)}
    if site.picture is not None and not site.picture.in_text:
        return same
    return {
        "previous": window(before=1, align=align) & ~window(before=0, align=align),
        "next": window(after=1, align=align) & ~window(after=0, align=align),
        **same,
    }


def _heads(
    layer: int,
    problem: Problem,
    statistics: _Statistics,
    uniform: _Statistics,
    roles: CallRoles,
    moved: dict[str, Tensor],
) -> tuple[Head, ...]:
    """Return the heads of a layer with their roles. `moved` is their `Head.norm_weighted`."""
    assert statistics.top is not None
    weights, keys = statistics.top
    max_entropy = uniform.mean_entropy
    # A query with at most one visible key has no choice, so its weight does not describe the head.
    has_choice = (uniform.entropy.amax(0) > 1e-6).cpu()
    every_share = statistics.shares | roles.repeat_shares
    heads = []
    for h in range(problem.H):
        shares = {name: float(share[h]) for name, share in every_share.items()}
        shares = {n: x for n, x in shares.items() if n not in REPEATS or not math.isnan(x)}
        entropy = float(statistics.entropy[h].sum()) / statistics.count
        effective = float(statistics.entropy[h][statistics.active].exp().sum()) / statistics.count
        evenness = entropy / max_entropy if max_entropy else 0.0
        own = with_sink_logit(roles.roles[h], shares.get("sink", 0.0), statistics.count)
        compared = has_choice[:, None] & ~weights[h].isnan()
        heads.append(
            Head(
                layer=layer,
                head=h,
                labels=(own[0].label if own else label_of_evenness(evenness),),
                number=own[0].mass if own else evenness,
                entropy=entropy,
                effective=effective,
                shares=shares,
                links=_strongest(weights[h].masked_fill(~compared, -1.0), keys[h]),
                roles=own,
                evidence=" ".join(role.evidence for role in own),
                withheld="" if own else roles.nearest[h],
                norm_weighted={name: float(share[h]) for name, share in moved.items()},
            )
        )
    return tuple(heads)


def _trace(
    problem: Problem, inputs: Inputs, heads: Sequence[Head], site: CallSite
) -> tuple[Trace | None, tuple[int, ...]]:
    """Return the steps of some heads, and the indices of these heads.

    For a short text these are all heads; for a longer one, the head with the clearest label; for a
    long one, none.
    """
    if max(problem.Tq, problem.Tk) > MOST_TRACED_TOKENS or ambient().ranks is not None:
        return None, ()
    trace = explain_problem(problem, inputs, site.query_tokens, site.key_tokens)
    if problem.H * problem.Tq * problem.Tk <= MOST_TRACED_CELLS:
        return trace, tuple(range(problem.H))
    chosen = max(heads, key=lambda head: (bool(head.roles), head.number)).head
    return trace.head(chosen), (chosen,)


def _is_one_text(problem: Problem, site: CallSite) -> bool:
    """Return whether queries and keys belong to one text.

    They do not in cross-attention, where no key is "the token before". A call is also taken for
    cross-attention if Tq and Tk differ and every query has the same mask.
    """
    if site.cross_attention or problem.Tq == problem.Tk:
        return not site.cross_attention
    if not problem.masked:
        return False
    ranges = problem.key_ranges
    edges = (ranges.lo, ranges.hi) if ranges.bits is None else (ranges.lo, ranges.hi, ranges.bits)
    return not all(bool((x == x[..., :1, :]).all()) for x in edges)


def _offset(problem: Problem) -> int:
    """Return the position of query 0 among the keys."""
    stated = common_align(problem.mask, problem.grid)
    return problem.Tk - problem.Tq if stated is None else int(stated)


def _first_key(site: CallSite) -> int:
    """Return the column of the text's first token among the keys; 0 if it is not among them."""
    first = site.at.first_key
    assert isinstance(first, int)  # because there is one text
    return max(0, -first)


def _strongest(weights: Tensor, keys: Tensor) -> tuple[Link, ...]:
    """Return the largest of the queries' largest weights; ties go to earlier queries."""
    order = weights[:, 0].argsort(descending=True, stable=True)[:STRONGEST].tolist()
    strongest = (Link(q, int(keys[q, 0]), float(weights[q, 0])) for q in order)
    return tuple(link for link in strongest if link.key >= 0 and link.weight >= 0)
