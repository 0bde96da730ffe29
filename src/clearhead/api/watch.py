"""Look at everything a model asks of attention while it runs, layer by layer.

The model computes what it always computes: `watch` listens at the door and gathers statistics
beside the answer, so nothing changes but time.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..engines import compute_stats
from ..errors import BadType, BadValue, kind_of, whole_number
from ..masks import Grid, Mask
from ..masks.mask import common_align
from ..problem.problem import Inputs, Problem
from ..stats import Statistic, parse_stats, rows as exact_rows
from ..stats.statistics import each
from ..torch_state import in_backward, in_transform, is_batched
from .hooks import listening, module_hooks
from .layers import Layers, check_layers, means
from .recording import INDEX, Call, Recording, new_folder, write_call

GAUGES = ("entropy", "max")


@contextmanager
def watch(
    model: nn.Module,
    *,
    stats: Sequence[str | Statistic] = GAUGES,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    outputs: bool = False,
    to: str | Path | None = None,
) -> Iterator[Recording]:
    """Statistics of every attention call that `model` makes inside the `with` block.

    >>> with ch.watch(model, stats=["entropy", ch.topk(3)]) as seen:  # doctest: +SKIP
    ...     model(x)
    >>> seen[0].entropy  # (B, H, Tq) of the first layer  # doctest: +SKIP

    Sees layers of `clearhead.nn`, transformers models with ``attn_implementation="clearhead"``, and
    whatever else calls `attention` inside a module of the model, in this thread. The outputs of the
    model do not change. Statistics of calls that ask for gradients carry gradients. If those are
    asked for, the core gives those of `lse`, `entropy`, `effective`, `mass` and `received`; of the
    others torch counts again on the way back, several times as slow, and `topk` on the way there
    already.

    Groups of `mass` that leave `align` open stand where the call's own mask lets the queries stand,
    if its parts agree on one place; so they follow a cache. Queries on padding are queries like
    others: where they see keys (padding on the right), they count.

    Args:
        stats: what to gather, as in `look`.
        layers: only these: numbers as in `Call.layer`, strings are patterns for module names, such
            as ``"*.5.*"``. None means all.
        heads: keep only these query heads. None means all.
        rows: also keep the exact rows of these queries, which every call must have: a step of
            generation has one, -1. None means none.
        outputs: also keep the output of every head that is kept, (B, H, Tq, Dv), as `.output`.
        to: a folder; each call is then written to a file there (safetensors, and a line of
            `index.jsonl` that says what it holds) and not kept in memory: `seen.written` has the
            paths, for `safetensors.torch.load_file`. None keeps everything in `seen`.

    Raises:
        BadValue, BadType: unknown statistics, patterns that name no module, heads that a layer does
            not have, rows that a call does not have, a folder that cannot be written or holds what
            was seen before; and at the end of the block, if the model ran and never asked. If it
            asked, but in none of `layers`, that is a warning.
    """
    if not isinstance(model, nn.Module):
        raise BadType(
            f"watch got {kind_of(model)}.",
            "watch listens to the modules of a model.",
            "pass a torch.nn.Module; use look(...) for one call of attention.",
        )
    layers = None if layers is None else _checked_layers(layers, model)
    wanted = parse_stats(stats)
    if rows is not None:
        wanted = parse_stats([*wanted, exact_rows(rows)])
    heads = None if heads is None else _checked_heads(heads)
    place = None if to is None else new_folder(to)
    watcher = _Watcher(wanted, layers, heads, place, outputs)
    try:
        with (
            module_hooks(model, watcher.modules.enter, watcher.modules.leave),
            listening(watcher.on_call),
        ):
            yield watcher.seen
        watcher.must_have_heard(type(model).__name__)
    finally:
        if place is not None and not watcher.kept:
            (place / INDEX).unlink(missing_ok=True)


class _Watcher:
    """Follows a model from module to module, and gathers what is asked of attention inside."""

    def __init__(
        self,
        wanted: tuple[Statistic, ...],
        layers: list[int | str] | None,
        heads: list[int] | None,
        place: Path | None,
        outputs: bool,
    ) -> None:
        self.wanted, self.layers, self.heads, self.place = wanted, layers, heads, place
        self.outputs = outputs
        self.standing = _Standing(wanted)
        self.seen, self.kept = Recording(), 0
        self.modules = Layers()

    def on_call(self, problem: Problem, inputs: Inputs, out: Tensor) -> None:
        if not self.modules.inside or in_backward():
            return  # the same call, heard before
        if is_batched(inputs.q, inputs.k):
            raise BadValue(
                "watch heard a call inside of torch.func.vmap.",
                "what is counted there belongs to vmap, and ends with it.",
                "give the examples as the batch of the model instead, or watch outside of vmap.",
            )
        layer, name = self.modules.asks()
        if means(self.layers, layer, name):
            self.keep(self.call(layer, name, problem, inputs, out))

    def call(self, layer: int, name: str, problem: Problem, inputs: Inputs, out: Tensor) -> Call:
        """Count what is wanted of a call."""
        # A checkpoint compares what is kept for the way back with what is kept when it computes
        # again. What the statistics keep is hidden from it, so that they are counted once.
        hidden = nullcontext() if in_transform() else saved_tensors_hooks(_as_it_is, _as_it_is)
        with torch.set_grad_enabled(problem.grad), hidden:
            wanted = self.standing(problem.mask, problem.grid)
            found = compute_stats(problem, inputs, wanted).finish()
        blind = problem.key_ranges.keys_per_query() == 0 if problem.masked else None
        output = out.clone() if self.outputs else None
        queries = next(
            (tuple(s.places(problem.grid)) for s in wanted if isinstance(s, exact_rows)), None
        )
        heads = None
        if self.heads is not None:
            picked = _checked_here(self.heads, problem.H)
            found = {n: each(result, lambda x: x[:, picked]) for n, result in found.items()}
            blind = blind[:, picked] if blind is not None and blind.shape[1] > 1 else blind
            output = None if output is None else output[:, picked]
            heads = tuple(picked)
        return Call(layer, name, problem.describe(), found, blind, heads, queries, output)

    def keep(self, call: Call) -> None:
        if self.place is None:
            self.seen.calls.append(call)
        else:
            statistics = [repr(s) if vars(s) else s.name for s in self.wanted]
            file = write_call(self.place, self.kept, call, statistics)
            self.seen.written.append(file)
        self.kept += 1

    def must_have_heard(self, model: str) -> None:
        if self.modules.ran and not self.modules.names:
            raise BadValue(
                f"The {model} ran, and never asked clearhead for attention.",
                "watch sees attention calls that go through clearhead, in this thread and outside "
                "of compiled graphs.",
                'load it with attn_implementation="clearhead", build it from clearhead.nn, or '
                "watch the model that is not compiled; some transformers models compute "
                "attention themselves, whatever they are loaded with.",
            )
        if self.modules.ran and not self.kept:
            calls = f"{len(self.modules.names)} call{'s' * (len(self.modules.names) != 1)}"
            warnings.warn(
                f"the {model} made {calls} in a run, none of layers={self.layers!r}", stacklevel=4
            )


class _Standing:
    """What is wanted, where the queries of a call stand: after a cache, say. The layers of a model
    mostly stand in one place, and masks keep what they found out, so those of the last are kept."""

    def __init__(self, wanted: tuple[Statistic, ...]) -> None:
        self.wanted = wanted
        self.last: tuple[object, tuple[Statistic, ...]] = (None, wanted)

    def __call__(self, rule: Mask, grid: Grid) -> tuple[Statistic, ...]:
        corner = common_align(rule, grid)
        if corner is None:
            return self.wanted
        place = tuple(corner.tolist()) if isinstance(corner, Tensor) else corner
        if self.last[0] != place:
            self.last = place, tuple(s.with_align(corner) for s in self.wanted)
        return self.last[1]


def _checked_heads(heads: Sequence[int]) -> list[int]:
    listed = isinstance(heads, Iterable) and not isinstance(heads, str)
    numbers = [whole_number(h) for h in heads] if listed else [None]
    if None in numbers:
        raise BadType(
            f"heads is {heads!r}.",
            "heads is a list of the numbers of query heads.",
            "pass for example heads=[0, 3].",
        )
    return [h for h in numbers if h is not None]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _checked_layers(layers: Iterable[int | str], model: nn.Module) -> list[int | str]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise BadType(
            f"layers is {layers!r}.",
            "layers is a list of numbers and of patterns for module names.",
            f"pass layers=[{layers!r}].",
        )
    return check_layers(list(layers), model)


def _checked_here(heads: list[int], H: int) -> list[int]:
    for h in heads:
        if not -H <= h < H:
            raise BadValue(
                f"head {h} was asked for.",
                f"this layer has {H} query heads, numbered from 0.",
                f"pass heads from 0 to {H - 1}.",
            )
    return [h % H for h in heads]
