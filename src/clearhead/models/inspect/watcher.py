"""Compute statistics of each attention call of a running model: `Watcher`."""

import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...core.errors import BadValue, as_index
from ...core.functional.ambient import (
    FollowedCall,
    full_output,
    of_all_tokens,
    over_ranks,
    statistics_of,
    token_positions,
)
from ...core.masks import Grid, everything
from ...core.masks.text_positions import Positions, per_text
from ...core.masks.without import WithoutEdges, edges_in_call
from ...core.problem.problem import Inputs, Problem
from ...core.stats import (
    Statistic,
    Statistics,
    TopWeights,
    Varying,
    exact_rows as ExactRows,
    map_tensors,
    parse_stats,
)
from ...core.stats.per_key import RELATIVE_VALUE
from ...core.torch_state import in_autograd_function, in_backward, in_transform, is_batched
from ..follow.coverage import warn_if_missed
from ..follow.layers import (
    MissingLayer,
    is_selected,
    never_called,
    no_attention_call,
    ran_in_other_thread,
    warn_if_compiled,
)
from ..follow.run import ModelFollower
from ..weights.value_norms import ValueNorms, norms
from .recording import Call


class _Begun(NamedTuple):
    """A call that began, with the statistics to compute.

    `real` is its problem without queries of padding, over which `sums` over queries are taken.
    `swept` are computed with the output if the engine can. `rows` are the `exact_rows` of each
    text, (B|1, n). `root` is that of `ValueNorms`. `names` are those of all statistics, in order.
    """

    layer: int
    name: str
    at: Positions
    real: Problem
    swept: Statistics
    sums: Statistics
    varying: tuple[Varying, ...]
    rows: Tensor | None
    root: Tensor | None
    names: list[str]


class Watcher(ModelFollower):
    """Computes statistics of the attention calls of the selected layers.

    It passes each call to `keep`, with the call as the engine computed it.
    """

    gradients = True  # whether statistics of a call that records gradients record them too

    def __init__(
        self,
        model: nn.Module,
        keep: Callable[[Call, FollowedCall], None],
        statistics: Statistics = (),
        layers: Sequence[int | str] | None = None,
        heads: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        outputs: bool = False,
        inputs: bool = False,
    ) -> None:
        super().__init__(model)
        self.keep, self.layers, self.heads = keep, layers, heads
        self.rows = None if rows is None else tuple(rows)
        self.outputs, self.inputs = outputs, inputs
        self.values: ValueNorms | None = None
        self._begun: _Begun | None = None
        self.grad_enabled = False  # when the model was called
        self.use(statistics)

    def use(self, statistics: Statistics) -> None:
        """Compute other statistics from now on."""
        self.statistics = statistics
        self._aligned: tuple[object, Statistics] = (None, statistics)
        if self.values is None and any(map(_needs_values, statistics)):
            self.values = ValueNorms(self.model)

    def hooked(self) -> AbstractContextManager[None]:
        """Compute statistics of the calls inside the `with` block."""
        # Only statistics of values need other modules: they compare what output projections return.
        return self.followed(self.values is None)

    def enter(self, name: str, *ran: Any) -> None:
        if not name or not self.running.inside:
            self.grad_enabled = torch.is_grad_enabled()
        super().enter(name, *ran)

    def leave(self, module: nn.Module, args: Sequence[Any], result: Any) -> Any:
        if self.values is not None and (name := self.running.current) is not None:
            self.values.verify(name, result)
        return super().leave(module, args, result)

    def begin(self, problem: Problem, inputs: Inputs) -> Statistics:
        """Begin a call. Returns the statistics to compute with its output."""
        self._begun = None
        if not self.running.inside or in_backward():
            return ()  # a checkpoint recomputes calls of the forward pass
        if is_batched(inputs.q, inputs.k):
            rule = "tensors created inside vmap cannot be used outside it."
            hint = "pass the examples as the batch of the model, or use watch outside vmap."
            raise BadValue("watch recorded a call inside torch.func.vmap.", rule, hint)
        layer, name = self.running.next_call()
        if not is_selected(self.layers, layer, name):
            return ()
        self._begun = self._requested(layer, name, problem, inputs)
        return self._begun.swept

    def _requested(self, layer: int, name: str, problem: Problem, inputs: Inputs) -> _Begun:
        at = self.running.texts.positions(problem)
        statistics, rows, root = self.aligned(problem, at), None, None
        if self.values is not None:
            root = self.values.root(name, problem)
            statistics = _with_norms(statistics, root, problem, inputs, at)
        if self.rows is not None:
            rows = self.rows_of(problem, at)
            statistics = parse_stats([*statistics, ExactRows(_columns(rows).tolist())])
        varying = tuple(s for s in statistics if isinstance(s, Varying))
        of_weights = [s for s in statistics if not isinstance(s, Varying)]
        real = without_padding(problem, at)
        sums = tuple(s for s in of_weights if real is not problem and s.axis != "queries")
        swept = parse_stats([s for s in of_weights if s not in sums], problem.grid)
        names = [s.name for s in (*of_weights, *varying)]
        return _Begun(layer, name, at, real, swept, sums, varying, rows, root, names)

    def receive(self, call: FollowedCall) -> None:
        """Compute the statistics that are left, and keep the call."""
        if (begun := self._begun) is not None:
            self._begun = None
            self.keep(self.call(begun, call), call)

    def call(self, begun: _Begun, call: FollowedCall) -> Call:
        """Return the statistics of a call."""
        problem, inputs, out = call.problem, call.inputs, call.out
        layer, name, at, rows = begun.layer, begun.name, begun.at, begun.rows
        if self.values is not None:
            self.values.expect(problem, out)
        masked = problem.fully_masked() if problem.masked else None
        # A checkpoint compares the tensors saved for backward by its two forward passes. Statistics
        # are computed in the first one only, so their tensors must bypass the checkpoint's hooks.
        unhooked = nullcontext() if in_transform() else saved_tensors_hooks(_unchanged, _unchanged)
        with torch.set_grad_enabled(problem.grad and self.gradients), unhooked:
            computed = call.stats
            if computed is None:
                computed = statistics_of(problem, inputs, begun.swept)
            if begun.sums:
                computed = computed | statistics_of(begun.real, inputs, begun.sums)
            for varying in begun.varying:
                assert begun.root is not None
                counts = at.is_real(problem.Tq).to(problem.device)
                counts = counts if masked is None else counts & ~masked
                z = out.reshape(problem.B, problem.H, out.shape[-2], problem.Dv).to(problem.wide)
                own = counts[..., token_positions(0, z.shape[2], torch.long, problem.device)]
                share = varying.of_output(z, begun.root, own, over_ranks)
                computed = {**computed, varying.name: of_all_tokens(share)}
            results = {n: computed[n] for n in begun.names}
            if rows is not None:
                results["exact_rows"] = _rows_of_texts(cast(Tensor, results["exact_rows"]), rows)
        if "topk" in results:
            top = cast(TopWeights, results["topk"])
            results["topk"] = TopWeights(top.weights, _keys_of_texts(top.keys, at))
        vectors: dict[str, Tensor] = {"output": full_output(out)} if self.outputs else {}
        if self.inputs:
            # Copies, because a cache of fixed size writes later tokens to the same memory.
            q, k, v = (x.clone() for x in call.received)
            vectors |= {"query": q, "key": k, "value": v}
        queries = None if self.rows is None else at.numbered(self.rows, problem.Tq)
        heads = None
        if self.heads is not None:
            rule = f"this layer has {problem.H} query heads, numbered from 0."
            hint = f"pass heads from 0 to {problem.H - 1}."
            picked = [as_index("head", h, problem.H, rule, hint) for h in self.heads]
            results = {
                n: map_tensors(result, lambda x: x[:, picked]) for n, result in results.items()
            }
            masked = masked[:, picked] if masked is not None and masked.shape[1] > 1 else masked
            vectors |= {n: x[:, picked] for n, x in vectors.items() if n in ("output", "query")}
            heads = tuple(picked)
        if self.grad_enabled and not torch.is_grad_enabled() and in_autograd_function():
            refuse = partial(_refuse_gradient, name)
            results = {n: map_tensors(result, refuse) for n, result in results.items()}
            vectors = {n: refuse(x) for n, x in vectors.items()}
        return Call(
            layer, name, problem.describe(), results, masked, heads, queries, at=at, site=None,
            **vectors,
        )  # fmt: skip

    def aligned(self, problem: Problem, at: Positions) -> Statistics:
        """Return the statistics with their groups of keys aligned to this call.

        The result of the last call is reused if the positions are the same, as in most layers,
        because masks cache their key ranges.
        """
        at = at if at.stated else at._replace(start=None)
        known = problem.grid, at
        if self._aligned[0] != known:
            change = partial(edges_in_call, grid=problem.grid, at=at)
            self._aligned = known, tuple(s.with_masks(change) for s in self.statistics)
        return self._aligned[1]

    def rows_of(self, problem: Problem, at: Positions) -> Tensor:
        """Convert the requested rows, which count from each text's first real token, to queries.

        Returns indices of queries of the call, (B|1, n); -1 where a text is too short.
        """
        assert self.rows is not None
        first, after = at.real_queries(problem.Tq)
        lengths = per_text(operator.sub, after, first)
        longest = lengths if isinstance(lengths, int) else max(lengths)
        ExactRows(self.rows).check(Grid(longest, problem.Tk))
        return at.rows(self.rows, problem.Tq)

    def check_recorded(self) -> None:
        """Raise `BadValue` if the model ran without an attention call or in another thread, or a
        selected layer made no call. Warn if the model did not run, if a part of it is compiled, or
        if modules computed attention without clearhead."""
        if self.values is not None:
            self.values.must_be_verified()
        running = self.running
        if not running.names:
            rule = "watch records calls through clearhead in its thread, outside compiled graphs."
            if running.ran:
                raise no_attention_call(self.model, rule)
            if running.ran_in_other_thread:
                raise ran_in_other_thread(self.model, rule)
            if not running.texts.missed:
                text = f"the {type(self.model).__name__} did not run, or ran in a compiled graph"
                warnings.warn(f"watch recorded nothing: {text}", stacklevel=4)
        warn_if_missed("watch", running.texts.missed, self.layers or (None,), stacklevel=4)
        if running.ran:
            warn_if_compiled(self.model, stacklevel=5)
        if self.running.ran and (missing := never_called(self.layers, self.running.names)):
            layers, last = list(self.layers or ()), len(self.running.names) - 1
            own = f"layers 0 to {last}" if last else "only layer 0"
            rule = f"a layer is an attention call; the {type(self.model).__name__} has {own}."
            hint = f"use these, or the modules {', '.join(dict.fromkeys(self.running.names))}."
            gave = f"watch got {layers=}; {missing[0]!r} called no attention."
            raise MissingLayer(gave, rule, hint)


def without_padding(problem: Problem, at: Positions) -> Problem:
    """Return the problem with padding queries fully masked, so that no statistic counts them."""
    if at.real_queries(problem.Tq) == (0, problem.Tq):
        return problem
    padding = ~at.is_real(problem.Tq).to(problem.device)
    if problem.masked and not bool((padding & ~problem.fully_masked()).any()):
        return problem
    return replace(problem, mask=WithoutEdges(problem.mask, everything, padding, "padding"))


def _needs_values(statistic: Statistic) -> bool:
    """Does the statistic need the output projection of the layer?"""
    return isinstance(statistic, Varying) or _norm_of(statistic) is not None


def _norm_of(statistic: Statistic) -> str | None:
    """Return which norm of values multiplies the weights of the statistic, if any."""
    return None if statistic.factors is None else statistic.factors.norm


def _with_norms(
    statistics: Statistics, root: Tensor, p: Problem, inputs: Inputs, at: Positions
) -> Statistics:
    """Return the statistics with the norms of the call's values that they name."""
    named = dict.fromkeys(map(_norm_of, statistics))  # in the same order on all ranks
    dropped = per_text(lambda key: max(key, 0), at.first_key)
    if RELATIVE_VALUE in named and dropped != 0:
        gave = f"A statistic has by={RELATIVE_VALUE!r}, and the cache has dropped the first tokens."
        rule = "values are relative to that of the text's first token."
        raise BadValue(gave, rule, 'run the text without a cache, or pass by="value".')
    first = per_text(lambda key: min(max(-key, 0), p.Tk - 1), at.first_key)
    numbers = {
        norm: of_all_tokens(norms(root, p, inputs, first if norm == RELATIVE_VALUE else None))
        for norm in named
        if norm is not None
    }
    return tuple(
        s if (norm := _norm_of(s)) is None else s.with_numbers(numbers[norm]) for s in statistics
    )


def _refuse_gradient(name: str, x: Tensor) -> Tensor:
    """Return `x` with a backward pass that raises `BadValue`."""
    if not x.is_floating_point():
        return x

    def refuse(gradient: Tensor) -> None:
        gave = f"A loss uses a statistic that watch recorded in {name or 'the model'}."
        rule = "a checkpoint with use_reentrant=True, or a reversible layer, records no gradients."
        hint = "pass use_reentrant=False (gradient_checkpointing_kwargs), or detach the statistic."
        raise BadValue(gave, rule, hint)

    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        leaf.register_hook(refuse)
        return leaf.clone()


def _columns(rows: Tensor) -> Tensor:
    """Return the queries of a call that are among the `rows` of its texts, in order."""
    return rows[rows >= 0].unique()


def _rows_of_texts(exact: Tensor, rows: Tensor) -> Tensor:
    """Select the `rows` of each text, (B, H, n, Tk), from the weights of their columns, (B, H, c,
    Tk). A row that a text does not have is 0."""
    columns = _columns(rows)
    if len(rows) == 1 and torch.equal(rows[0], columns):
        return exact
    index = torch.searchsorted(columns, rows).to(exact.device)
    exists = (rows >= 0).to(exact.device)[:, None, :, None]
    B, H, c, Tk = exact.shape
    index = index.clamp(max=max(c - 1, 0))[:, None, :, None].expand(B, H, -1, Tk)
    return exact.gather(2, index).masked_fill(~exists, 0.0)


def _keys_of_texts(keys: Tensor, at: Positions) -> Tensor:
    """Convert columns of keys, (B, H, Tq, n), to positions in their texts; -1 means no key."""
    if at.first_key == 0:
        return keys
    first = torch.tensor(at.first_key, device=keys.device).reshape(-1, 1, 1, 1)
    return torch.where(keys < 0, keys, (keys + first).clamp(min=-1))


def _unchanged(x: Tensor) -> Tensor:
    return x
