"""Statistics of every attention call that a model makes while it runs: `watch`.

The model computes what it always computes; the statistics are computed beside it, after each call.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import BadType, BadValue, as_index, kind_of
from ..masks import Grid, Mask
from ..masks.mask import common_align
from ..problem.problem import Inputs, Problem
from ..stats import Statistic, each, parse_stats, rows as exact_rows
from ..torch_state import in_autograd_function, in_backward, in_transform, is_batched
from .hooks import active_ranks, listening, module_hooks, statistics_of
from .layers import (
    Layers,
    check_layers,
    checked_list,
    is_selected,
    no_attention_call,
    warn_if_compiled,
)
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

    >>> with ch.watch(model, stats=["entropy", ch.topk(3)]) as recording:  # doctest: +SKIP
    ...     model(x)
    >>> recording[0].entropy  # (B, H, Tq) of the first layer  # doctest: +SKIP

    Sees layers of `clearhead.nn`, transformers models with ``attn_implementation="clearhead"``, and
    whatever else calls `attention` inside a module of the model, in this thread. The outputs of the
    model do not change.

    Where a call records gradients, its statistics carry gradients. The core computes those of
    `lse`, `entropy`, `effective`, `mass` and `received`. The other statistics torch computes again
    in the backward pass, several times as slow; `topk` it computes in the forward pass already.
    A checkpoint with ``use_reentrant=True`` records no gradients in its forward pass: there a
    backward pass through a statistic raises `BadValue`.

    Groups of `mass` that leave `align` open take the alignment of the call's own mask, if all its
    parts have the same; so they follow a cache. Queries on padding are queries like others: where
    they see keys (padding on the right), they count.

    Inside `distributed.sharded` all ranks watch alike, and every rank gets the numbers of the whole
    text, without gradients; a folder is given on one rank.

    Args:
        stats: which statistics, as in `look`.
        layers: only these: numbers as in `Call.layer`, strings are patterns for module names, such
            as ``"*.5.*"``. None means all.
        heads: keep only these query heads. None means all.
        rows: also keep the exact rows of these queries, which every call must have: a step of
            generation has one, -1. None means none.
        outputs: also keep the output of every head that is kept, (B, H, Tq, Dv), as `.output`.
        to: a folder; each call is then written to a file there (safetensors, and a line of
            `index.jsonl` that says what it holds) and not kept in memory: `recording.written` has
            the paths, for `safetensors.torch.load_file`. None keeps everything in memory.

    Raises:
        BadValue, BadType: unknown statistics, patterns that match no module, heads that a layer
            does not have, rows that a call does not have, a folder that cannot be written or holds
            an earlier recording; and at the end of the block, if the model ran and made no
            attention call. If it made calls, but in none of `layers`, that is a warning; a part of
            the model that is compiled is one, too.
    """
    if not isinstance(model, nn.Module):
        raise BadType(
            f"watch got {kind_of(model)}.",
            "watch listens to the modules of a model.",
            "pass a torch.nn.Module; use look(...) for one call of attention.",
        )
    if layers is not None:
        layers = checked_list("layers", layers, patterns=True)
        check_layers(layers, model)
    if heads is not None:
        heads = checked_list("heads", heads)
    statistics = parse_stats(stats)
    if rows is not None:
        statistics = parse_stats([*statistics, exact_rows(rows)])
    folder = None if to is None else new_folder(to)
    watcher = _Watcher(statistics, layers, heads, outputs, folder)
    try:
        with (
            module_hooks(model, watcher.enter, watcher.running.leave),
            listening(watcher.on_call),
        ):
            yield watcher.recording
        watcher.check_recorded(model)
    finally:
        if folder is not None and not watcher.recorded:
            (folder / INDEX).unlink(missing_ok=True)


class _Watcher:
    """Records the attention calls of the selected layers."""

    def __init__(
        self,
        statistics: tuple[Statistic, ...],
        layers: Sequence[int | str] | None,
        heads: Sequence[int] | None,
        outputs: bool,
        folder: Path | None,
    ) -> None:
        self.statistics, self.layers, self.heads = statistics, layers, heads
        self.outputs, self.folder = outputs, folder
        self.running = Layers()
        self.recording, self.recorded = Recording(), 0
        self.grad_enabled = False  # where the model was called
        self._aligned: tuple[object, tuple[Statistic, ...]] = (None, statistics)

    def enter(self, name: str, module: nn.Module, *given: object) -> None:
        if not name or not self.running.inside:
            self.grad_enabled = torch.is_grad_enabled()
        self.running.enter(name, module)

    def on_call(self, problem: Problem, inputs: Inputs, out: Tensor) -> None:
        if not self.running.inside or in_backward():
            return  # in the backward pass a checkpoint repeats calls of the forward pass
        if is_batched(inputs.q, inputs.k):
            raise BadValue(
                "watch recorded a call inside of torch.func.vmap.",
                "tensors that are made inside of vmap cannot be used outside of it.",
                "give the examples as the batch of the model instead, or watch outside of vmap.",
            )
        layer, name = self.running.next_call()
        if is_selected(self.layers, layer, name):
            self.keep(self.call(layer, name, problem, inputs, out))

    def call(self, layer: int, name: str, problem: Problem, inputs: Inputs, out: Tensor) -> Call:
        """The statistics of a call."""
        # A checkpoint compares the tensors that are saved for backward in the forward pass with
        # those of its second forward pass. Statistics are computed in the first one only, so what
        # they save must not pass through the checkpoint's hooks.
        unhooked = nullcontext() if in_transform() else saved_tensors_hooks(_unchanged, _unchanged)
        with torch.set_grad_enabled(problem.grad), unhooked:
            statistics = self.aligned(problem.mask, problem.grid)
            found = statistics_of(problem, inputs, statistics)
        blind = problem.key_ranges.keys_per_query() == 0 if problem.masked else None
        output = None
        if self.outputs:
            ranks = active_ranks()
            output = out.clone() if ranks is None else ranks.unshard(out.detach())
        queries = next(
            (tuple(s.places(problem.grid)) for s in statistics if isinstance(s, exact_rows)), None
        )
        heads = None
        if self.heads is not None:
            rule = f"this layer has {problem.H} query heads, numbered from 0."
            way_out = f"pass heads from 0 to {problem.H - 1}."
            picked = [as_index("head", h, problem.H, rule, way_out) for h in self.heads]
            found = {n: each(result, lambda x: x[:, picked]) for n, result in found.items()}
            blind = blind[:, picked] if blind is not None and blind.shape[1] > 1 else blind
            output = None if output is None else output[:, picked]
            heads = tuple(picked)
        if self.grad_enabled and not torch.is_grad_enabled() and in_autograd_function():
            found = {
                n: each(result, partial(_refuse_gradient, name)) for n, result in found.items()
            }
            output = None if output is None else _refuse_gradient(name, output)
        return Call(layer, name, problem.describe(), found, blind, heads, queries, output)

    def aligned(self, mask: Mask, grid: Grid) -> tuple[Statistic, ...]:
        """The statistics, with the mask's alignment where they leave it open. Most layers share one
        alignment, and masks cache their key ranges, so those of the last call are kept."""
        align = common_align(mask, grid)
        if align is None:
            return self.statistics
        known = tuple(align.tolist()) if isinstance(align, Tensor) else align
        if self._aligned[0] != known:
            self._aligned = known, tuple(s.with_align(align) for s in self.statistics)
        return self._aligned[1]

    def keep(self, call: Call) -> None:
        if self.folder is None:
            self.recording.calls.append(call)
        else:
            statistics = [repr(s) if vars(s) else s.name for s in self.statistics]
            file = write_call(self.folder, self.recorded, call, statistics)
            self.recording.written.append(file)
        self.recorded += 1

    def check_recorded(self, model: nn.Module) -> None:
        """Raise `BadValue` if the model ran without an attention call. Warn if a part of it is
        compiled, and if the selected layers made none."""
        if self.running.ran and not self.running.names:
            raise no_attention_call(
                model,
                "watch sees attention calls that go through clearhead, in this thread and outside "
                "of compiled graphs.",
            )
        if self.running.ran:
            warn_if_compiled(model, stacklevel=5)
        if self.running.ran and not self.recorded:
            count = len(self.running.names)
            calls = f"{count} call{'s' * (count != 1)}"
            warnings.warn(
                f"the {type(model).__name__} made {calls} in a run, none of layers={self.layers!r}",
                stacklevel=4,
            )


def _refuse_gradient(name: str, x: Tensor) -> Tensor:
    """The same numbers, with a backward pass that raises."""
    if not x.is_floating_point():
        return x
    with torch.enable_grad():
        found: Tensor = _RefusedGradient.apply(x, torch.empty(0, requires_grad=True), name)
    return found


class _RefusedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise BadValue(
            f"A statistic that watch recorded in {ctx.name or 'the model'} is part of a loss.",
            "a checkpoint with use_reentrant=True records no gradients in the forward pass, where "
            "statistics are computed, and neither do reversible layers.",
            "pass use_reentrant=False; in transformers, "
            'gradient_checkpointing_kwargs={"use_reentrant": False}. Or detach the statistic.',
        )


def _unchanged(x: Tensor) -> Tensor:
    return x
