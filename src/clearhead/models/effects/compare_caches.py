"""What a cache that rounds or drops keys costs: head by head, and in the loss."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.files.results import Savable, data_frame
from ...core.formatting import ShownInNotebook, aligned
from ...core.functional.ambient import editing
from ...core.functional.divergence import compare
from ...core.torch_state import loadable
from ...nn.token_ids import run_with_known_ids
from ..follow.copies import fresh
from ..follow.coverage import warn_if_missed
from ..follow.layers import module_hooks, must_be_runnable, no_attention_call
from ..follow.refused_models import no_random_numbers
from ..inspect.edits import Edit, cache, keep_only, knock_out
from ..inspect.edits.cache import BITS
from ..inspect.edits.edit import edited_call, in_order
from .effect_table import Effects
from .effects import checked_inputs, effects, named_edits
from .estimate import Recorder, UneditedCall
from .metrics import Metric

if TYPE_CHECKING:
    import pandas

Cache = str | Edit | Sequence[Edit]
MEASURES = ("kl", "reverse_kl", "error", "mass", "lost")


@loadable
class HeadDamage(NamedTuple):
    """What a cache does to one query head, whose keys are those of `key_head`.

    `kl`, `reverse_kl`, `error` and `mass` are means over the queries of all texts, `lost` is the
    largest, of the numbers of `divergence`.
    """

    cache: str
    layer: int
    head: int
    key_head: int
    kl: float
    reverse_kl: float
    error: float
    mass: float
    lost: float


@loadable
@dataclass(frozen=True)
class CacheDamage(ShownInNotebook, Savable):
    """What each cache does to each head, and to the metric of the model.

    Attributes:
        heads: a `HeadDamage` for each cache and query head, in layers that the cache changes. Each
            layer has exact inputs.
        effects: the metric of the model with each cache in all its layers, so that each layer has
            the inputs that the caches before it give. None if no metric was requested.
        bits: the mean bits of a number of keys and values, by cache; None if unknown.
    """

    heads: tuple[HeadDamage, ...]
    effects: Effects | None
    bits: dict[str, float | None]

    @property
    def all_kept(self) -> bool:
        """Does no cache drop a key with weight, so that every `kl` is finite?"""
        return all(head.lost == 0 for head in self.heads)

    def grid(self, cache: str, by: str = "kl") -> Tensor:
        """Return one measure of a cache by layer and head, NaN where it changes nothing.

        `by` is "kl", "reverse_kl", "error", "mass" or "lost". Raises `BadValue` for any other, and
        for an unknown cache.
        """
        if cache not in self.bits or by not in MEASURES:
            rule = f"the caches are {', '.join(self.bits)}, and the measures {', '.join(MEASURES)}."
            raise BadValue(f"grid got {cache!r} and by={by!r}.", rule, "pass one of each.")
        rows = 1 + max(head.layer for head in self.heads)
        columns = 1 + max(head.head for head in self.heads)
        grid = torch.full((rows, columns), math.nan, dtype=torch.float64)
        for head in (x for x in self.heads if x.cache == cache):
            grid[head.layer, head.head] = getattr(head, by)
        return grid

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with one row per cache and head. Raises `Missing` without pandas."""
        return data_frame([head._asdict() for head in self.heads])

    def __str__(self) -> str:
        changes = {} if self.effects is None else {e.name: e.exact for e in self.effects}
        metric = [] if self.effects is None else [self.effects.metric]
        # KL(w || w') is infinite where a cache drops keys.
        by, kl = ("kl", "KL(w || w')") if self.all_kept else ("reverse_kl", "KL(w' || w)")
        table = [["cache", "bits", *metric, kl, "error", "mass", "most damaged"]]
        for name, bits in self.bits.items():
            own = sorted((x for x in self.heads if x.cache == name), key=lambda x: -getattr(x, by))
            means = (float(self.grid(name, x).nanmean()) for x in (by, "error", "mass"))
            worst = (f"L{x.layer}H{x.head} {getattr(x, by):.3g}" for x in own[:3])
            size = "" if bits is None else f"{bits:g}"
            change = [f"{changes[name]:+.4f}" for _ in metric]
            table.append([name, size, *change, *(f"{x:.3g}" for x in means), ", ".join(worst)])
        lines = aligned(table)
        if self.effects is not None:
            lines.insert(0, f"{self.effects.metric} is {self.effects.baseline:.4f} without a cache")
        return "\n".join(lines)

    __repr__ = __str__


def compare_caches(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    caches: Cache | Sequence[Cache] | Mapping[str, Cache],
    *,
    metric: str | Metric | None = "loss",
    progress: bool | None = None,
) -> CacheDamage:
    """Measure what caches that round or drop keys and values do to each head, and to the loss.

    >>> damage = ch.compare_caches(model, ids, ["q8_0", "q4_0"])  # doctest: +SKIP
    >>> print(damage)  # loss, mean divergence, the most damaged heads  # doctest: +SKIP
    >>> recent = ch.window(before=255, after=0) | ch.prefix(4)  # doctest: +SKIP
    >>> edit = ch.edits.keep_only(recent)  # doctest: +SKIP
    >>> ch.compare_caches(model, ids, {"256 and a sink": edit})  # doctest: +SKIP

    The numbers of a head are "local": each layer has exact inputs, and `divergence` compares its
    attention with attention on what the cache returns. The metric is "end to end": the model runs
    with the cache in all layers.

    Args:
        model: as in `effects`.
        inputs: likewise.
        caches: a list of formats of `edits.cache` ("q8_0", for keys and values), and of the edits
            `cache`, `keep_only` and `knock_out`; or a dict that maps names to one, or to a list of
            edits that apply together.
        metric: as in `effects`; None means none, and one run of the model for all caches.
        progress: as in `effects`.

    Raises:
        BadValue, BadType: an unknown format; an edit of another kind; what `effects` raises.
    """
    must_be_runnable("compare_caches", model, "compare_caches runs a model.", ", then its inputs")
    rule = "a cache is a format, or the edits cache, keep_only and knock_out."
    hint = f"pass a list of formats ({', '.join(BITS)}) and edits, or a dict of names and these."
    several = [caches] if isinstance(caches, str | Edit) else caches
    groups = named_edits("compare_caches", several, (cache, keep_only, knock_out), rule, hint)
    for name, group in groups.items():
        if len(group) > 1 and sum(getattr(edit, "residual", None) is not None for edit in group):
            rule = "a cache with residual= has one edit, for keys and values."
            hint = "compare it alone, or leave residual out."
            raise BadValue(f"The cache {name!r} has {len(group)} edits.", rule, hint)
    recorder = Recorder(grad=False)
    hooks = module_hooks(model, recorder.layers.enter, recorder.layers.leave)
    with torch.no_grad(), editing(recorder), no_random_numbers(model), hooks:
        run_with_known_ids(model, fresh(checked_inputs(inputs)))
    if not recorder.calls:
        raise no_attention_call(model, "compare_caches follows calls that go through clearhead.")
    heads = [x for call in recorder.calls for x in _compared(call, groups)]
    for name in groups.keys() - {head.cache for head in heads}:
        rule = "a cache is compared in the layers, heads and positions that its edits name."
        hint = f"the layers are 0 to {len(recorder.layers.names) - 1}."
        raise BadValue(f"The cache {name!r} changes no call of {type(model).__name__}.", rule, hint)
    if metric is None:
        warn_if_missed("compare_caches", recorder.layers.texts.missed, (None,), stacklevel=2)
        measured = None
    else:
        measured = effects(model, inputs, metric, groups, estimate=False, progress=progress)
    bits = {
        name: group[0].bits if len(group) == 1 and isinstance(group[0], cache) else None
        for name, group in groups.items()
    }
    return CacheDamage(tuple(heads), measured, bits)


def _compared(call: UneditedCall, caches: Mapping[str, Sequence[Edit]]) -> Iterator[HeadDamage]:
    """Yield what each cache that applies to a call does to its heads."""
    problem, inputs, site = call.problem, call.inputs, call.site
    counts = site.at.is_real(problem.Tq).to(problem.device)
    if problem.masked:
        counts = counts & ~problem.fully_masked()
    counts = counts.expand(problem.B, problem.H, problem.Tq)
    for cached, edits in caches.items():
        applied = [edits[number] for number in in_order(edits, problem, site)]
        other, others, exact = *edited_call(applied, problem, inputs, site), None
        for edit in applied:
            if isinstance(edit, cache) and edit.residual:
                others, exact = edit.rounded(other, others, site), edit.exact(other, site)
        if other is problem and others is inputs:
            continue
        compared = compare(problem, inputs, other, others, exact)
        for head in (h for h in range(problem.H) if counts[:, h].any()):
            of_head = (getattr(compared, by)[:, head][counts[:, head]] for by in MEASURES)
            *means, lost = (x.double() for x in of_head)
            numbers = *(float(x.mean()) for x in means), float(lost.max())
            key_head = head // (problem.H // problem.G)
            yield HeadDamage(cached, site.layer, head, key_head, *numbers)
