"""Record one run of a model in which the scores of one attention call are sums of parts.

The run cuts the graph of autograd at every module that writes into the residual stream, and takes
the scales of the norms as constants, as `logit_attribution` does. Up to its queries and keys, the
call is then linear in what was written: through norms, W_Q and W_K, norms of queries and keys,
latent projections (MLA) and rotations. The part of a component in ``v . k_j`` is what it wrote
times the gradient of ``v . k_j`` with respect to it.

Letters: C components, H heads, G KV heads, Tq queries, Tk keys, D head dimension, Dv value size, d
model size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import BadValue, as_index
from ...core.functional.ambient import FollowedCall
from ...core.functional.matrix import Matrix
from ...core.problem.problem import Inputs, Problem, repeat_heads
from ...core.torch_state import loadable
from ...nn.token_ids import run_with_known_ids
from ..follow.copies import fresh
from ..follow.refused_models import no_random_numbers
from ..follow.run import AttentionCall, ModuleRun
from ..inspect.watch import watch
from ..weights.direct_paths import DirectPaths, HeadsPart, Part, cut
from ..weights.logit_attribution import block_of
from ..weights.norms_and_rotations import Rotary, is_norm
from .linear_graph import nonlinear_step

Side = Literal["key", "query"]


@loadable
class Component(NamedTuple):
    """What wrote a part of the residual stream.

    `kind` is "embedding", "head", "mlp", "bias", or "distance" for a position bias of the call
    (ALiBi, T5). `layer` is the attention call of a head, and for other modules that of their block;
    None for an embedding. `module` is the name of the module that wrote.
    """

    kind: str
    layer: int | None
    head: int | None
    module: str

    def __str__(self) -> str:
        if self.kind == "head":
            return f"L{self.layer}H{self.head}"
        if self.kind == "mlp":
            return f"L{self.layer} MLP"
        return f"{self.kind} {self.module}".strip()


class _Reached(BaseException):
    """Ends a run of the model at the call that is split."""


class ScorePaths(DirectPaths):
    """Collects the parts of a run for some attention calls, `layers`. It ends at the last of them.

    `modules` are those of all calls.
    """

    def __init__(self, model: nn.Module, modules: Sequence[str], layers: Sequence[int]) -> None:
        super().__init__(model)
        self.modules, self.layers, self.runs = modules, layers, list[ScoreRun]()
        self.prefixes = tuple({f"{modules[i]}." if modules[i] else "" for i in layers})
        self.inside: list[ModuleRun] = []

    def on_call(self, call: AttentionCall) -> None:
        super().on_call(call)
        self.attention = call

    def receive(self, call: FollowedCall) -> None:
        number = self.calls
        super().receive(call)
        if self.calls > number and number in self.layers:
            written = [*self.heads], [*self.others], [*self.biases]
            of_call = self.attention, call.problem, call.inputs, self.inside
            self.runs.append(ScoreRun(self.model, self.modules, number, *of_call, *written))
            self.inside = []
        if self.calls > self.layers[-1]:
            raise _Reached

    def after(self, ran: ModuleRun) -> Tensor | None:
        """Cut the graph as `DirectPaths` does, but not between the stream and a target's call."""
        is_inside = ran.name.startswith(self.prefixes)
        if is_inside:
            self.inside.append(ran)
        constant = _is_table(ran.module) and ran.result.is_floating_point()
        if constant and not ran.result.requires_grad:
            written, returned = cut(ran.result)
            self.others.append(Part(ran.name, self.calls, written))
            return returned
        projects = is_inside and not ran.projects and not is_norm(ran.module)
        if not projects or isinstance(ran.module, nn.Embedding):
            return super().after(ran)
        bias = getattr(ran.module, "bias", None)
        if not isinstance(bias, Tensor) or not ran.result.is_floating_point():
            return None
        written, returned = cut(bias.expand_as(ran.result))
        self.biases.append(Part(ran.name, self.calls, written))
        return ran.result + (returned - returned.detach())  # adds 0, with a gradient to the bias


def _is_table(module: nn.Module) -> bool:
    """Does the module write positions into the stream without parameters?"""
    return "sinusoid" in type(module).__name__.lower() and not any(
        True for _ in module.parameters()
    )


def record_scores(
    model: nn.Module, inputs: Tensor | Mapping[str, Any], layer: int | None
) -> "list[ScoreRun]":
    """Run the model twice: to find the modules of all calls, and to record the parts.

    Returns the run of a layer, or with None those of all layers, which may not be linear. Raises
    `BadValue` for a layer that does not exist, and for padding.
    """
    with no_random_numbers(model):
        with torch.no_grad(), watch(model, stats=[]) as calls:
            one = inputs
            if isinstance(inputs, Tensor) and not inputs.is_floating_point():  # ids
                one = inputs[:, :1]
            run_with_known_ids(model, fresh(one))
        modules, count = [call.module for call in calls], len(calls)
        rule = f"the model makes {count} attention calls, 0 to {count - 1}."
        layers: Sequence[int] = range(count)
        if layer is not None:
            layers = [as_index("Layer", layer, count, rule)]
        if any(calls[i].at.padded for i in layers):
            gave = "why got a text with padding."
            hint = "pass the tokens of the text alone."
            raise BadValue(gave, "means over queries and keys would count padding as tokens.", hint)
        paths = ScorePaths(model, modules, layers)
        with suppress(_Reached), paths.recorded():
            run_with_known_ids(model, fresh(inputs))
    return paths.runs


@dataclass(eq=False)
class ScoreRun:
    """A call's queries (1, H, Tq, D) and keys (1, G, Tk, D), with graphs to the components.

    `inside` has the modules that ran in its module. `heads`, `others` and `biases` wrote before it.
    """

    model: nn.Module
    modules: Sequence[str]  # those of all attention calls
    layer: int
    attention: AttentionCall
    problem: Problem
    inputs: Inputs
    inside: Sequence[ModuleRun]
    heads: Sequence[HeadsPart]
    others: Sequence[Part]
    biases: Sequence[Part]
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        self.q, self.k = self.inputs.q, self.inputs.k
        self.written: list[HeadsPart | Part] = [*self.heads, *self.others, *self.biases]
        self.leaves = [x.written for x in self.written]
        of_parts: list[list[Component]] = []
        for layer, (call, _) in enumerate(self.heads):
            own = [Component("head", layer, head, call.module) for head in range(call.problem.H)]
            if call.projection.bias is not None:
                own.append(Component("bias", layer, None, call.projection.module))
            of_parts.append(own)
        of_parts += ([self._component(x)] for x in self.others)
        of_parts += ([Component("bias", self._layer(x), None, x.module)] for x in self.biases)
        self.components = [x for own in of_parts for x in own]
        self.counts = [*map(len, of_parts)]

    def must_be_linear(self) -> None:
        """Raise `BadValue` for several texts, and for a step to the scores that is not linear."""
        if self.problem.B != 1:
            rule = "it reads one score of one text."
            hint = "call why once for each text, without padding."
            raise BadValue(f"why got {self.problem.B} texts.", rule, hint)
        for of, x in ("queries", self.q), ("keys", self.k):
            is_part = x.requires_grad
            step = nonlinear_step(x, self.leaves) if is_part else "a cache, or a graph that ends"
            if step is None:
                continue
            gave = f"In {self.modules[self.layer]}, {step} is between the stream and the {of}."
            rule = "only sums, products with constants, norms, linear modules and rotations may be."
            hint = "no other score is a sum of parts; choose a layer without it, and pass no cache."
            raise BadValue(gave, rule, hint)

    def _component(self, part: Part) -> Component:
        module = self.model.get_submodule(part.module)
        if not part.calls or isinstance(module, nn.Embedding) or _is_table(module):
            return Component("embedding", None, None, part.module)
        return Component("mlp", self._layer(part), None, part.module)

    def _layer(self, part: Part) -> int | None:
        """Return the attention call of a part's block: the last one before it, or else the first
        one after it; without a block, the last call before it."""
        block = block_of(part.module)
        inside = [i for i, name in enumerate(self.modules) if block and block_of(name) == block]
        before = [i for i in inside or range(part.calls) if i < part.calls]
        return before[-1] if before else inside[0] if inside else None

    def gradients(self, of: Side, direction: Tensor) -> Sequence[Tensor | None]:
        """Compute the derivatives of ``sum(direction * queries)`` or keys by what was written; None
        for what is not before these."""
        root = self.q if of == "query" else self.k
        return torch.autograd.grad(
            root, self.leaves, direction.to(root.dtype), retain_graph=True, allow_unused=True
        )

    @torch.no_grad()
    def parts(self, of: Side, direction: Tensor, at: slice = slice(None)) -> Tensor:
        """Compute each component's part of ``direction . x`` at each position, (C, n).

        x are the queries or keys, and the direction has their shape. `at` selects positions.
        """
        n = direction.shape[2]
        parts = self.q.new_zeros(len(self.components), len(range(n)[at]), dtype=torch.float64)
        for part, gradient, own in self._with_gradients(of, direction, parts):
            g = _by_position(gradient, n, at).double()
            if isinstance(part, Part):
                own += (_by_position(part.written, n, at) * g).sum(-1)
                continue
            z, bias = part.call.z[0, :, at].double(), part.call.projection.bias
            own[: len(z)] = (z * along(part.call, g)).sum(-1)
            if bias is not None:
                own[-1] = g @ bias.double()
        return parts

    def _with_gradients(
        self, of: Side, direction: Tensor, parts: Tensor
    ) -> Iterator[tuple[HeadsPart | Part, Tensor, Tensor]]:
        """Yield what was written before queries or keys, its gradient, and its rows of parts."""
        gradients = self.gradients(of, direction)
        for x, g, own in zip(self.written, gradients, parts.split(self.counts), strict=True):
            if g is not None:
                yield x, g, own

    @torch.no_grad()
    def totals(self, of: Side, direction: Tensor) -> Tensor:
        """Sum ``direction . x`` of each component over positions, (C,), in the dtype of softmax."""
        n, wide = direction.shape[2], self.problem.wide
        totals = self.q.new_zeros(len(self.components), dtype=torch.float64)
        known: dict[Any, tuple[Tensor, Tensor, Tensor | None]] = {}  # of parts of one stream
        for part, gradient, own in self._with_gradients(of, direction, totals):
            if (same := (gradient.data_ptr(), gradient.shape, gradient.stride())) not in known:
                x = _by_position(gradient, n).to(wide)
                known[same] = x, *_factors(x, self.problem.D)
            x, left, right = known[same]
            if isinstance(part, Part):
                own += (_by_position(part.written, n) * x).sum(-1).double().sum()
                continue
            weight, bias = part.call.projection.weight.to(wide), part.call.projection.bias
            sums = part.call.z[0].to(wide).transpose(1, 2) @ left  # (H, Dv, r)
            sums *= weight if right is None else weight @ right.T
            own[: len(sums)] = sums.sum((1, 2))
            if bias is not None:
                own[-1] = (x @ bias.to(wide)).double().sum()
        return totals

    def sources(self, of: Side, direction: Tensor, layer: int) -> Tensor:
        """Split the parts of an earlier layer's heads by the token that they read from, (H, T).

        Part t is sum_j A_jt (v_t W_O) . g_j, with the gradients g_j of `parts`.
        """
        gradient = self.gradients(of, direction)[layer]
        call = self.heads[layer].call
        values = repeat_heads(call.inputs.v, call.problem.H)[0].double()
        if gradient is None:
            return values.new_zeros(values.shape[:2])
        with torch.no_grad():
            to = along(call, _by_position(gradient, call.problem.Tq).double())
            weights = Matrix(replace(call.problem, input_dims=4), call.inputs)
            return (values * (weights.T @ to[None])[0].double()).nan_to_num(nan=0.0).sum(-1)


def _factors(x: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """Return factors of x, (n, d): (n, r) and (r, d), or x and None for the identity.

    The gradients of one head are combinations of the `size` rows of its matrix, so r random
    combinations of them span all. A few more than rows keep rounding small (Halko et al. 2011).
    """
    r = size + 16
    if len(x) > r and x.shape[1] > 2 * r:
        some = torch.randn(r, len(x), generator=torch.Generator().manual_seed(0)).to(x)
        right = torch.linalg.qr((some @ x).T).Q.T
        left = x @ right.T
        if float((left @ right - x).norm()) <= 16 * torch.finfo(x.dtype).eps * float(x.norm()):
            return left, right
    return x, None


def along(call: AttentionCall, gradient: Tensor) -> Tensor:
    """Map gradients (n, d) with respect to what a layer wrote to its heads' outputs, (H, n, Dv)."""
    return torch.einsum("hvd,td->htv", call.projection.weight.double(), gradient)


def _by_position(x: Tensor, n: int, at: slice = slice(None)) -> Tensor:
    """Return what was written at some of n positions, (m, d). Raises `BadValue` if n differs."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if len(rows) != n:
        gave = f"A part of the stream has {len(rows)} positions, and the scores have {n}."
        hint = "pass a model whose layers read all positions, and inputs without a cache."
        raise BadValue(gave, "each position of the stream is a query or a key of its own.", hint)
    return rows[at]


class ScoreRows(NamedTuple):
    """The scores of n queries, (n, Tk) each, in fp64.

    `raw` is scale q . k, `bias` the position bias, `scores` what enters softmax, and `visible` the
    keys that a query may look at.
    """

    raw: Tensor
    bias: Tensor
    scores: Tensor
    visible: Tensor
    sink: Tensor | None

    def weights_of(self, raw: Tensor, p: Problem) -> Tensor:
        """Compute the weights for other values of `raw`; those of a fully masked query are 0."""
        if p.softcap is not None:
            raw = p.softcap * torch.tanh(raw / p.softcap)
        scores = (raw + self.bias).masked_fill(~self.visible, -torch.inf)
        if self.sink is not None:
            scores = torch.cat([scores, self.sink.double().expand(len(scores), 1)], -1)
        weights = scores.softmax(-1)[:, : raw.shape[-1]]
        weights[~self.visible.any(-1)] = 0.0
        return weights


@torch.no_grad()
def score_rows(run: ScoreRun, at: slice, h: int) -> tuple[ScoreRows, Tensor]:
    """Compute the scores and the weights of some queries of a head.

    Raises `BadValue` for NaN, and unless the weights of the first query are those of the call.
    """
    p = run.problem
    raw = p.scale * run.q[0, h, at].double() @ run.k[0, h // (p.H // p.G)].double().T
    keys, size = slice(0, p.Tk), (1, p.H, len(raw), p.Tk)
    bias = raw.new_zeros(()).expand_as(raw)
    visible = torch.ones_like(raw, dtype=torch.bool)
    if p.bias is not None:
        like = torch.empty((), dtype=p.wide, device=raw.device)
        bias = p.bias.block(p.grid, at, keys, like).expand(size)[0, h].double()
        visible = bias > -1e30  # -inf, or the lowest number of the dtype
        bias = bias.masked_fill(~visible, 0.0)
    if p.masked:
        keep = p.key_ranges.to_bool(at, keys).to(raw.device)
        visible = visible & keep.expand(size)[0, h]
    raw = raw.masked_fill(~visible, 0.0)
    scores = raw if p.bias is None else raw + bias
    rows = ScoreRows(raw, bias, scores, visible, None if p.sinks is None else p.sinks[h])
    weights = rows.weights_of(raw, p)
    of_call = Matrix(replace(p, input_dims=4), Inputs(*(x.detach() for x in run.inputs)))
    first = of_call.rows([at.start])[0, h, 0].double()
    missed = float((weights[0] - first).abs().max() + 0 * weights.sum())  # NaN if any weight is
    if not missed <= max(1e-4, 8 * torch.finfo(p.dtype).eps):
        gave = f"The weights of the call differ from the softmax of its scores by {missed:.1g}."
        rule = "the parts are those of the scores from which the weights follow."
        hint = "check the inputs for NaN, and call why without edits of this layer."
        raise BadValue(gave, rule, hint)
    return rows, weights
