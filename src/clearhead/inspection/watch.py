"""Statistics of every attention call that a model makes while it runs: `watch`.

The model computes what it always computes; the statistics are computed beside it, after each call.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import BadType, BadValue, as_index, kind_of, refuse_keywords
from ..functional.ambient import listening
from ..functional.sharding import full_output, statistics_of
from ..masks import Grid
from ..masks.text_positions import Positions, per_text
from ..masks.without import edges_in_call
from ..problem.problem import Inputs, Problem
from ..stats import (
    DEFAULT_STATISTICS,
    Statistic,
    TopWeights,
    exact_rows as ExactRows,
    map_tensors,
    parse_stats,
)
from ..torch_state import in_autograd_function, in_backward, in_transform, is_batched
from .layers import (
    Layers,
    check_layers,
    checked_list,
    is_selected,
    module_hooks,
    never_called,
    no_attention_call,
    warn_if_compiled,
)
from .recording import INDEX, Call, Recording, new_folder, write_call


@contextmanager
def watch(
    model: nn.Module,
    *,
    stats: Sequence[str | Statistic] = DEFAULT_STATISTICS,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    exact_rows: Sequence[int] | None = None,
    outputs: bool = False,
    to: str | Path | None = None,
    **unknown: NoReturn,
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
    parts have the same; so they follow a cache.

    Positions, those of groups, of `exact_rows` and of the keys of `topk`, count from the first real
    token of each text, where the call carries its padding: a 2-D `attention_mask` of
    transformers, the `key_padding_mask` of torch.nn.MultiheadAttention, or `lengths`. Otherwise
    they are columns. The dimensions Tq and Tk of a result are columns always; `Call.at` says where
    texts begin.

    Inside `distributed.sharded` all ranks watch alike, and every rank gets the numbers of the whole
    text, without gradients; a folder is given on one rank.

    Args:
        stats: which statistics, as in `look`.
        layers: only these: numbers as in `Call.layer`, strings are patterns for module names, such
            as ``"*.5.*"``. None means all.
        heads: keep only these query heads. None means all.
        exact_rows: also keep the weights of these queries, counted from each text's first token
            in the call, and from its last if negative. A call must have them: a step of generation
            has one, -1. A row that only longer texts of the batch have is 0. None means none.
        outputs: also keep the output of every head that is kept, (B, H, Tq, Dv), as `.output`.
        to: a folder; each call is then written to a file there (safetensors, and a line of
            `index.jsonl` that says what it holds) and not kept in memory: `recording.written` has
            the paths, for `safetensors.torch.load_file`. None keeps everything in memory.

    Raises:
        BadValue, BadType: unknown statistics, patterns that match no module, heads that a layer
            does not have, rows that a call does not have, a folder that cannot be written or holds
            an earlier recording; and at the end of the block, if the model ran and made no
            attention call, or one of `layers` made none. A part of the model that is compiled is
            a warning.
    """
    if unknown:
        refuse_keywords(watch, unknown)
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
    if exact_rows is not None:
        statistics = parse_stats([*statistics, ExactRows(exact_rows)])
    exact = next((s for s in statistics if isinstance(s, ExactRows)), None)
    rows = None if exact is None else exact.queries
    statistics = tuple(s for s in statistics if s is not exact)
    folder = None if to is None else new_folder(to)
    watcher = _Watcher(statistics, layers, heads, rows, outputs, folder)
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
        rows: Sequence[int] | None,
        outputs: bool,
        folder: Path | None,
    ) -> None:
        self.statistics, self.layers, self.heads = statistics, layers, heads
        self.rows = None if rows is None else tuple(rows)
        self.outputs, self.folder = outputs, folder
        self.running = Layers()
        self.recording, self.recorded = Recording(), 0
        self.grad_enabled = False  # where the model was called
        self._placed: tuple[object, tuple[Statistic, ...]] = (None, statistics)

    def enter(self, name: str, module: nn.Module, *given: Any) -> None:
        if not name or not self.running.inside:
            self.grad_enabled = torch.is_grad_enabled()
        self.running.enter(name, module, *given)

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
        at = self.running.texts.positions(problem)
        statistics, rows = self.placed(problem, at), None
        if self.rows is not None:
            rows = self.rows_of(problem, at)
            columns = sorted({*rows.flatten().tolist()} - {-1})
            statistics = parse_stats([*statistics, ExactRows(columns)])
        # A checkpoint compares the tensors that are saved for backward in the forward pass with
        # those of its second forward pass. Statistics are computed in the first one only, so what
        # they save must not pass through the checkpoint's hooks.
        unhooked = nullcontext() if in_transform() else saved_tensors_hooks(_unchanged, _unchanged)
        with torch.set_grad_enabled(problem.grad), unhooked:
            found = statistics_of(problem, inputs, statistics)
            if rows is not None:
                found["exact_rows"] = _rows_of_texts(
                    cast(Tensor, found["exact_rows"]), columns, rows
                )
        if "topk" in found:
            top = cast(TopWeights, found["topk"])
            found["topk"] = TopWeights(top.weights, _keys_of_texts(top.keys, at))
        blind = problem.key_ranges.keys_per_query() == 0 if problem.masked else None
        output = full_output(out) if self.outputs else None
        queries = None if self.rows is None else at.numbered(self.rows, problem.Tq)
        heads = None
        if self.heads is not None:
            rule = f"this layer has {problem.H} query heads, numbered from 0."
            hint = f"pass heads from 0 to {problem.H - 1}."
            picked = [as_index("head", h, problem.H, rule, hint) for h in self.heads]
            found = {n: map_tensors(result, lambda x: x[:, picked]) for n, result in found.items()}
            blind = blind[:, picked] if blind is not None and blind.shape[1] > 1 else blind
            output = None if output is None else output[:, picked]
            heads = tuple(picked)
        if self.grad_enabled and not torch.is_grad_enabled() and in_autograd_function():
            found = {
                n: map_tensors(result, partial(_refuse_gradient, name))
                for n, result in found.items()
            }
            output = None if output is None else _refuse_gradient(name, output)
        return Call(layer, name, problem.describe(), found, blind, heads, queries, output, at)

    def placed(self, problem: Problem, at: Positions) -> tuple[Statistic, ...]:
        """The statistics, with groups of keys as this call sees them. Most layers stand alike, and
        masks cache their key ranges, so those of the last call are kept."""
        at = at if at.stated else at._replace(start=None)
        known = problem.grid, at
        if self._placed[0] != known:
            change = partial(edges_in_call, grid=problem.grid, at=at)
            self._placed = known, tuple(s.with_masks(change) for s in self.statistics)
        return self._placed[1]

    def rows_of(self, problem: Problem, at: Positions) -> Tensor:
        """The queries of the call that the rows are, (B|1, n); -1 where a text has no such row."""
        assert self.rows is not None
        first, after = at.real_queries(problem.Tq)
        lengths = per_text(operator.sub, after, first)
        longest = lengths if isinstance(lengths, int) else max(lengths)
        ExactRows(self.rows).check(Grid(longest, problem.Tk))
        return at.rows(self.rows, problem.Tq)

    def keep(self, call: Call) -> None:
        if self.folder is None:
            self.recording.calls.append(call)
        else:
            statistics = [repr(s) if vars(s) else s.name for s in self.statistics]
            statistics += [] if self.rows is None else [repr(ExactRows(self.rows))]
            file = write_call(self.folder, self.recorded, call, statistics)
            self.recording.written.append(file)
        self.recorded += 1

    def check_recorded(self, model: nn.Module) -> None:
        """Raise `BadValue` if the model ran without an attention call, or one of the selected
        layers made none. Warn if a part of it is compiled."""
        if self.running.ran and not self.running.names:
            raise no_attention_call(
                model,
                "watch sees attention calls that go through clearhead, in this thread and outside "
                "of compiled graphs.",
            )
        if self.running.ran:
            warn_if_compiled(model, stacklevel=5)
        if self.running.ran and (missing := never_called(self.layers, self.running.names)):
            layers, last = list(self.layers or ()), len(self.running.names) - 1
            raise BadValue(
                f"watch got layers={layers!r}; {missing[0]!r} called no attention.",
                f"a layer is a place that calls attention; the {type(model).__name__} has layers 0"
                + (f" to {last}." if last else " alone."),
                "name these, or the modules that call attention: "
                f"{', '.join(dict.fromkeys(self.running.names))}.",
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


def _rows_of_texts(exact: Tensor, columns: list[int], rows: Tensor) -> Tensor:
    """Of the rows of some queries of all texts, (B, H, c, Tk), those of each text, (B, H, n, Tk);
    0 where it has none."""
    if len(rows) == 1 and rows[0].tolist() == columns:
        return exact
    index = torch.searchsorted(torch.tensor(columns, dtype=torch.long), rows).to(exact.device)
    there = (rows >= 0).to(exact.device)[:, None, :, None]
    B, H, c, Tk = exact.shape
    index = index.clamp(max=max(c - 1, 0))[:, None, :, None].expand(B, H, -1, Tk)
    return exact.gather(2, index).masked_fill(~there, 0.0)


def _keys_of_texts(keys: Tensor, at: Positions) -> Tensor:
    """The positions of keys, (B, H, Tq, n), from their columns; -1 where there is none."""
    if at.first_key == 0:
        return keys
    first = torch.tensor(at.first_key, device=keys.device).reshape(-1, 1, 1, 1)
    return torch.where(keys < 0, keys, (keys + first).clamp(min=-1))


def _unchanged(x: Tensor) -> Tensor:
    return x
