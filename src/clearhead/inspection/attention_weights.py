"""The matrices of every head of a model: W_Q, W_K, W_V and W_O, and how the stream is read.

They are found by one run on a few ids, and by what they compute: a matrix is W_V of a layer if its
product with what it was given is the values of the attention call. So neither names nor the order
inside of a fused projection are trusted.

Letters: T tokens, H query heads, G key heads, D head size, Dv value size, d model size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BadValue
from ..functional.ambient import listening
from ..hf.projections import (
    OutputProjection,
    input_width,
    matrix_of,
    output_projection,
    readable_matrix,
)
from ..nn import RotaryPositions
from ..nn.token_ids import run_with_known_ids
from ..problem.problem import Inputs, Problem
from .layers import Layers, module_hooks, no_attention_call
from .metrics import logits_of
from .norms import Norm, is_norm, read_norm

_IDS = 8  # of the run


class Rotary(NamedTuple):
    """A rotation of pairs of features by their position times a frequency. The pairs are i and
    i + r/2, or interleaved 2i and 2i + 1, of the first r features, for r/2 frequencies."""

    frequencies: Tensor
    interleaved: bool

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """(..., D) at `positions`, which broadcast to x without its last dimension."""
        r = 2 * len(self.frequencies)
        angles = positions.unsqueeze(-1) * self.frequencies.to(x.dtype)
        cos, sin = angles.cos(), angles.sin()
        if self.interleaved:
            a, b = x[..., :r].unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = x[..., :r].chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([turned, x[..., r:]], -1)


class HeadWeights(NamedTuple):
    """The matrices of a layer's heads, in fp32, as the model holds them: W_Q, W_K (H, d, D), W_V
    (H, d, Dv) and W_O (H, Dv, d). Key heads are repeated for the query heads that share them, and a
    norm of queries or keys is folded in by its gain. `norm` is what the stream is read through,
    None if it is read as it is; `rotary` turns queries and keys, None if nothing does. `inexact`
    says what the matrices leave out."""

    module: str
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    norm: Norm | None
    rotary: Rotary | None
    inexact: tuple[str, ...]


class ModelWeights(NamedTuple):
    """The layers, the rows of embedding and unembedding, (words, d), and the norm before the
    unembedding; None where there is none."""

    layers: tuple[HeadWeights, ...]
    embedding: Tensor | None
    unembedding: Tensor | None
    final_norm: Norm | None
    inexact: tuple[str, ...]


def read_weights(model: nn.Module) -> ModelWeights:
    """The matrices of a model. Raises `BadValue` where a head's queries, keys or values are not a
    linear map of what a layer reads (MLA), or the layer's output is not one of its heads; for norms
    after the sum, whose stream is not a sum; for an encoder and decoder."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise BadValue(
            f"The {type(model).__name__} is an encoder and a decoder.",
            "the heads of a circuit write to one residual stream and read from it.",
            "pass its encoder: model.get_encoder().",
        )
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    ids = torch.arange(min([_IDS, *tables])).flip(0)  # not the positions
    run = _Run(model, ids.to(next(model.parameters()).device))
    with (
        torch.no_grad(),
        module_hooks(model, run.enter, run.leave),
        listening(run.on_call),
    ):
        output = run_with_known_ids(model, run.ids[None])
    if not run.calls:
        raise no_attention_call(model, "circuits are made of the attention calls of a model.")
    with torch.no_grad():
        layers = tuple(run.layer(call) for call in run.calls)
        unembedding, final_norm = run.unembedding(output)
    return ModelWeights(layers, run.embedding, unembedding, final_norm, run.embedding_norms())


class _Ran(NamedTuple):
    """A module that ran, what it was given and what it gave."""

    name: str
    module: nn.Module
    given: Tensor
    result: Tensor


class _Call(NamedTuple):
    """An attention call, and the linear modules that ran inside of its module before."""

    module: str
    problem: Problem
    inputs: Inputs
    z: Tensor
    projection: OutputProjection
    linears: Sequence[_Ran]
    written: Any = None  # what the module of the projection returned


class _Found(NamedTuple):
    """A matrix (n, d, size) of n heads, and how the stream reaches it and its product the call."""

    weight: Tensor
    given: Tensor
    norm: str  # of queries or keys; "" if there is none
    rotary: Rotary | None


class _Run:
    """Records a run of a model on a few ids."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.tracker = Layers()
        self.calls: list[_Call] = []
        self.embedding: Tensor | None = None
        self._norms: list[tuple[int, _Ran]] = []  # with the number of calls before
        self._linears: dict[str, _Ran] = {}
        self._last_linear: _Ran | None = None
        self._stack: list[tuple[str, list[Tensor]]] = []
        self._expected: dict[str, _Call] = {}

    def enter(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.tracker.enter(name, module, args, kwargs)
        self._stack.append((name, [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]))

    def leave(self, module: nn.Module, args: Sequence[Any], result: Any) -> None:
        self.tracker.leave()
        name, given = self._stack.pop()
        if name in self._expected:
            call = self._expected.pop(name)
            call.projection.check(call.z, result)
            self.calls.append(call._replace(written=result))
        result = result[0] if isinstance(result, tuple) and result else result
        if not given or not isinstance(result, Tensor):
            return
        ran = _Ran(name, module, given[0], result)
        if is_norm(module):
            self._norms.append((len(self.calls), ran))
        elif input_width(module) is not None:
            self._linears[name] = self._last_linear = ran
        elif isinstance(module, nn.Embedding) and torch.equal(given[0].flatten(), self.ids):
            self.embedding = module.weight.detach().float()

    def on_call(self, problem: Problem, inputs: Inputs, out: Tensor) -> None:
        if not self.tracker.inside:
            return
        _, name = self.tracker.next_call()
        projection = output_projection(self.model, name, problem.H, problem.Dv)
        inside = [x for n, x in self._linears.items() if n.startswith(f"{name}." if name else "")]
        self._expected[projection.module] = _Call(name, problem, inputs, out, projection, inside)

    def layer(self, call: _Call) -> HeadWeights:
        p = call.problem
        rotaries = [None, *_rotaries(self.model)]
        q = self._find(call, "queries", call.inputs.q, rotaries)
        k = self._find(call, "keys", call.inputs.k, [q.rotary])
        v = self._find(call, "values", call.inputs.v, [None])
        norm = self._read_through(call.module, q.given)
        inexact = [f"{name} scales queries or keys" for name in (q.norm, k.norm) if name]
        if isinstance(call.written, Tensor):
            after = [x.name for _, x in self._norms if torch.equal(x.given, call.written)]
            inexact += [f"{name} scales what the heads write" for name in after]
        for found in (k, v):
            if not torch.equal(found.given, q.given):
                raise _not_linear(call.module, "keys or values", "of what queries are made of")
        each = p.H // p.G
        return HeadWeights(
            call.module, q.weight, k.weight.repeat_interleave(each, 0),
            v.weight.repeat_interleave(each, 0), call.projection.weight,
            norm, q.rotary, tuple(inexact),
        )  # fmt: skip

    def _find(
        self, call: _Call, what: str, wanted: Tensor, rotaries: Sequence[Rotary | None]
    ) -> _Found:
        """The matrix that made the queries, keys or values `wanted`, (1, n, T, size)."""
        T, size = wanted.shape[2:]
        wanted = wanted[0].transpose(0, 1).double()  # (T, n, size)
        positions = torch.arange(T, device=wanted.device).unsqueeze(-1)
        prefix = f"{call.module}." if call.module else ""
        norms = [x for _, x in self._norms if x.name.startswith(prefix)] if what != "values" else []
        for linear in call.linears:
            made = linear.result.reshape(T, -1)
            for columns in _columns(call.problem, what, made.shape[-1]):
                raw = made[:, columns]
                for norm in (None, *norms):
                    normed = raw if norm is None else _by_head(norm.module, raw)
                    if normed is None:
                        continue
                    for rotary in rotaries:
                        if rotary is not None and 2 * len(rotary.frequencies) > size:
                            continue  # of another kind of layer
                        turned = normed.double()
                        turned = turned if rotary is None else rotary.rotated(turned, positions)
                        if _proportional(turned, wanted, wanted_eps=linear.result.dtype):
                            matrix, _ = matrix_of(linear.module, linear.name)
                            weight = matrix[:, columns].permute(1, 0, 2)
                            if norm is not None:
                                weight = weight * self._gain(norm, size)
                            given = linear.given.reshape(T, -1)
                            return _Found(weight, given, norm.name if norm else "", rotary)
        raise _not_linear(call.module, what, "of one linear module inside of it")

    def _gain(self, norm: _Ran, size: int) -> Tensor | float:
        read = read_norm(norm.module, norm.given, norm.result)
        if read is None:
            raise _unknown_norm(norm.name)
        if not isinstance(read.gain, Tensor):
            return read.gain
        return read.gain.reshape(-1, 1, size)

    def _read_through(self, module: str, given: Tensor) -> Norm | None:
        """The norm through which a module reads the stream; None if it reads it as it is."""
        ran = self._gave(given)
        if ran is None:
            return None
        parent = ran.name.rpartition(".")[0]
        if parent and not module.startswith(f"{parent}."):
            raise BadValue(
                f"{module or 'The model'} reads what the norm {ran.name} of another block gave.",
                "in a residual stream, heads write into a sum, and a norm is read from it; with "
                "the norm after the sum the stream is no sum of what heads wrote.",
                "pass a model whose blocks begin with a norm.",
            )
        norm = read_norm(ran.module, ran.given, ran.result)
        if norm is None:
            raise _unknown_norm(ran.name)
        return norm

    def _gave(self, x: Tensor) -> _Ran | None:
        """The norm that gave x, (T, d)."""
        for _, ran in self._norms:
            if ran.result.numel() == x.numel() and torch.equal(ran.result.reshape(x.shape), x):
                return ran
        return None

    def unembedding(self, output: Any) -> tuple[Tensor | None, Norm | None]:
        """The rows of the unembedding and the norm before it; None for a model without logits."""
        try:
            logits = logits_of(output)
        except BadValue:
            return None, None
        last = self._last_linear
        if last is None or last.result.shape != logits.shape:
            return None, None
        ran = self._gave(last.given.reshape(-1, last.given.shape[-1]))
        norm = None if ran is None else read_norm(ran.module, ran.given, ran.result)
        if ran is not None and norm is None:
            raise _unknown_norm(ran.name)
        return readable_matrix(last.module, last.name)[0].T.float(), norm

    def embedding_norms(self) -> tuple[str, ...]:
        """What the matrices leave out of the way from the embedding to the first layer."""
        first = self.calls[0].module
        parents = [ran.name.rpartition(".")[0] for calls, ran in self._norms if not calls]
        outside = [p for p in parents if p and not f"{first}.".startswith(f"{p}.")]
        return tuple(f"a norm of {parent} follows the embedding" for parent in outside)


def _columns(p: Problem, what: str, width: int) -> Iterator[Tensor]:
    """Which outputs of a linear module may be queries, keys or values, (n, size): all of them, or
    a part of a fused projection, one after the other (GPT-2) or head by head (GPT-NeoX)."""
    n, size = {"queries": (p.H, p.D), "keys": (p.G, p.D), "values": (p.G, p.Dv)}[what]
    every = torch.arange(width)
    if width == n * size:
        yield every.reshape(n, size)
    widths = [p.H * p.D, p.G * p.D, p.G * p.Dv]
    if width == sum(widths):
        number = ("queries", "keys", "values").index(what)
        yield every.split(widths)[number].reshape(n, size)
        if p.D == p.Dv:
            by_group = every.reshape(p.G, -1, p.D)  # the queries of a group, its key, its value
            parts = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
            yield parts[number].reshape(n, size)
    if width == p.G * (p.D + p.Dv) and what != "queries":
        number = ("keys", "values").index(what)
        yield every.split([p.G * p.D, p.G * p.Dv])[number].reshape(n, size)


def _by_head(norm: nn.Module, x: Tensor) -> Tensor | None:
    """What a norm gives for x, (T, n, size): of each head, or of all of them together."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[-1] == x.shape[-1]:
        fits = not isinstance(weight, Tensor) or weight.dim() == 1 or len(weight) == x.shape[1]
        return norm.forward(x) if fits else None
    if weight.shape == (x.shape[1] * x.shape[2],):
        return norm.forward(x.flatten(1)).reshape(x.shape)
    return None


def _proportional(a: Tensor, b: Tensor, wanted_eps: torch.dtype) -> bool:
    """Is b a positive number times a? Some models scale queries before the call."""
    factor = float((a * b).sum() / a.square().sum().clamp(min=1e-30))
    tolerance = max(1e-4, 8 * torch.finfo(wanted_eps).eps)
    return factor > 0 and bool((a * factor - b).abs().max() <= tolerance * b.abs().max())


def _rotaries(model: nn.Module) -> list[Rotary]:
    """The rotations that the modules of a model may make."""
    frequencies: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, RotaryPositions):
            half = torch.arange(0, module.head_size, 2, dtype=torch.float64)
            frequencies.append(module.base ** (-half / module.head_size))
        frequencies += [x for n, x in module.named_buffers(recurse=False) if n.endswith("inv_freq")]
    distinct: list[Tensor] = []
    for x in frequencies:
        x = x.detach().double()
        if not any(x.shape == y.shape and torch.allclose(x, y, rtol=1e-6) for y in distinct):
            distinct.append(x)
    # NanoChat turns the other way.
    return [Rotary(y, inside) for x in distinct for y in (x, -x) for inside in (False, True)]


def _not_linear(module: str, what: str, rest: str) -> BadValue:
    return BadValue(
        f"The {what} of {module or 'the model'} are not the product {rest}.",
        "a circuit is made of matrices: each head's queries, keys and values are what the layer "
        "reads times W_Q, W_K and W_V, then perhaps normed and rotated.",
        "latent attention (MLA), adapters and convolutions before attention are not supported.",
    )


def _unknown_norm(name: str) -> BadValue:
    return BadValue(
        f"The norm {name} computes something else than layer norm or RMS norm.",
        "a norm is folded into the weights that read it: its gain, and its mean.",
        "pass a model with norms of these kinds.",
    )
