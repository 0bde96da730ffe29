"""Read the matrices W_Q, W_K, W_V and W_O of every head of a model, and the norms before them.

One run on a few ids identifies them by what they compute: a matrix is the W_V of a layer if its
product with its input is the values of the attention call. So the result does not depend on the
names of modules or on the order in a fused projection.

Letters: T tokens, H query heads, G KV heads, D head dimension, Dv value size, d model size.
"""

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.problem.problem import Problem
from ...hf.projections import input_width, matrix_of
from ...nn.token_ids import run_with_known_ids
from ..follow.layers import no_attention_call
from ..follow.outputs import logits_of
from ..follow.refused_models import weights_must_be_whole
from ..follow.run import AttentionCall, ModuleRun, RecordedRun
from .norms_and_rotations import Norm, Rotary, growing_rotations, is_norm, read_norm, rotations_of
from .unembedding import find_unembedding

_IDS = 8  # the number of ids of the run
_POSITIONS = 32  # of a longer run, the positions that are compared


class HeadWeights(NamedTuple):
    """The matrices of a layer's heads, in fp32: W_Q, W_K (H, d, D), W_V (H, d, Dv), W_O (H, Dv, d).

    KV heads are repeated for the query heads that share them, and the gain of a norm of queries or
    keys is folded in. `norm` is the norm between the stream and the matrices, or None. `rotary`
    rotates queries and keys, or is None. `inexact` lists what the matrices leave out.
    """

    module: str
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    norm: Norm | None
    rotary: Rotary | None
    inexact: tuple[str, ...]


class ModelWeights(NamedTuple):
    """The layers, the rows of embedding and unembedding, (words, d), and the final norm.

    `embedding`, `unembedding` and `final_norm` are None in a model without them, and
    `embedding` if the stream begins with anything else than its rows, as with an adapter.
    """

    layers: tuple[HeadWeights, ...]
    embedding: Tensor | None
    unembedding: Tensor | None
    final_norm: Norm | None
    inexact: tuple[str, ...]


def read_weights(model: nn.Module) -> ModelWeights:
    """Read the matrices of a model.

    Raises `BadValue` if queries, keys or values are not a linear map of a layer's input (MLA), or
    if its output is not a linear map of its heads; for norms after the residual sum, with which the
    stream is not a sum; for an encoder and decoder, and a model that does not read ids; and for
    weights that are divided over ranks or offloaded.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        rule = "the heads of a circuit read and write one residual stream."
        hint = "pass its encoder: model.get_encoder()."
        raise BadValue(f"The {type(model).__name__} is an encoder and a decoder.", rule, hint)
    main_input = getattr(model, "main_input_name", "input_ids")  # of a transformers model
    if main_input != "input_ids" and "input_ids" not in signature(model.forward).parameters:
        rule = "circuits runs a model once, on the ids of eight tokens."
        hint = "pass a model that reads ids of tokens, such as a language model."
        raise BadValue(f"The {type(model).__name__} reads {main_input}, and not ids.", rule, hint)
    run, output = _recorded(model, _ids(model))
    with torch.no_grad():
        layers = tuple(run.layer(call) for call in run.calls)
        unembedding, final_norm = run.unembedding(output)
    inexact = (*run.embedding_norms(), *growing_rotations(model))
    return ModelWeights(layers, _embedding(run), unembedding, final_norm, inexact)


def rotary_of_layer(model: nn.Module, layer: int) -> Rotary | None:
    """Return the rotation of the queries and keys of a layer, or None.

    Raises `BadValue` if the queries are not a linear map of the layer's input, perhaps with a norm,
    and a rotation by the position alone.
    """
    if not rotations_of(model):
        return None
    run, _ = _recorded(model, _ids(model))
    return rotary_of_call(model, run.calls[layer].attention, run.ran(run.calls[layer]))


@torch.no_grad()
def rotary_of_call(
    model: nn.Module, call: AttentionCall, ran: Sequence[ModuleRun]
) -> Rotary | None:
    """Return the rotation of the queries of a call by positions from 0, or None.

    `ran` has the modules that ran inside the module of the call. Raises as `rotary_of_layer` does.
    """
    if growing := growing_rotations(model):
        rule = "a rotation by the position alone has the same frequencies in every text."
        hint = "use the vectors after rotation."
        raise BadValue(f"In the {type(model).__name__}, {growing[0]}.", rule, hint)
    return _queries(model, call, ran).rotary


def _ids(model: nn.Module) -> Tensor:
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    ids = torch.arange(min([_IDS, *tables])).flip(0)  # which differ from the positions
    return ids.to(next(model.parameters()).device)


def _recorded(model: nn.Module, ids: Tensor) -> "tuple[_Run, Any]":
    """Run a model on a few ids. Returns what is recorded, and the output."""
    weights_must_be_whole("circuits", model)
    run = _Run(model, ids)
    with torch.no_grad(), run.recorded():
        output = run_with_known_ids(model, run.ids[None])
    if not run.calls:
        raise no_attention_call(model, "circuits needs the attention calls of a model.")
    return run, output


@torch.no_grad()
def _embedding(run: "_Run") -> Tensor | None:
    """Return the table of embeddings, if its rows are what the tokens write into the stream.

    A run with other ids at the same positions shows it, because positions add the same to both.
    """
    rows, first = run.embedding, run.stream()
    if rows is None or rows.shape[1] != first.shape[1] or run.embedding_norms():
        return rows
    if _proportional(rows[run.ids].double(), first.double(), first.dtype):
        return rows
    other, _ = _recorded(run.model, run.ids.roll(1))
    of_rows = rows[run.ids].double() - rows[other.ids].double()
    of_stream = first.double() - other.stream().double()
    return rows if _proportional(of_rows, of_stream, first.dtype) else None


class _Call(NamedTuple):
    """An attention call, and the linear modules that ran before it in the same module.

    `written` is the output of the module of its projection.
    """

    attention: AttentionCall
    linears: Sequence[ModuleRun]
    written: Tensor


class _Matrix(NamedTuple):
    """A matrix (n, d, size) of n heads, its input, and the norm and rotation that follow it."""

    weight: Tensor
    input: Tensor
    norm: str  # the name of the norm of queries or keys, or ""
    rotary: Rotary | None


class _Run(RecordedRun):
    """Records a run of a model on a few ids."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        super().__init__(model)
        self.ids = ids
        self.calls: list[_Call] = []
        self.embedding: Tensor | None = None
        self._norms: list[tuple[int, ModuleRun]] = []  # with the number of attention calls before
        self._linears: dict[str, ModuleRun] = {}
        self._last_linear: ModuleRun | None = None
        self._inside: dict[str, list[ModuleRun]] = {}  # the linear modules of a call, by module

    def on_call(self, call: AttentionCall) -> None:
        linears = [x for x in self._linears.values() if _is_inside(x.name, call.module)]
        self._inside[call.module] = linears

    def after(self, ran: ModuleRun) -> None:
        if (call := ran.projects) is not None:
            self.calls.append(_Call(call, self._inside.pop(call.module), ran.result))
        if not ran.inputs:
            return
        if is_norm(ran.module):
            self._norms.append((len(self.calls), ran))
        elif input_width(ran.module) is not None:
            self._linears[ran.name] = self._last_linear = ran
        elif isinstance(ran.module, nn.Embedding):
            if torch.equal(ran.inputs[0].flatten(), self.ids):
                self.embedding = ran.module.weight.detach().float()

    def layer(self, call: _Call) -> HeadWeights:
        module, projection, _, p, inputs = call.attention
        ran = self.ran(call)
        q = _queries(self.model, call.attention, ran)
        k = _find(call.attention, ran, "keys", inputs.k, [q.rotary])
        v = _find(call.attention, ran, "values", inputs.v, [None])
        norm = self._norm_before(module, q.input)
        inexact = [f"{name} scales queries or keys" for name in (q.norm, k.norm) if name]
        after = [x.name for _, x in self._norms if torch.equal(x.inputs[0], call.written)]
        inexact += [f"{name} scales the output of the heads" for name in after]
        for matrix in (k, v):
            if not torch.equal(matrix.input, q.input):
                raise _not_linear(module, "keys or values", "of the input of the queries")
        W_K, W_V = (x.weight.repeat_interleave(p.H // p.G, 0) for x in (k, v))
        return HeadWeights(
            module, q.weight, W_K, W_V, projection.weight, norm, q.rotary, tuple(inexact)
        )

    def stream(self) -> Tensor:
        """Return the input of the first layer, before its norm, (T, d)."""
        x = _queries(self.model, self.calls[0].attention, self.ran(self.calls[0])).input
        norm = self._norm_with_output(x)
        return x if norm is None else norm.inputs[0].reshape(x.shape)

    def ran(self, call: _Call) -> list[ModuleRun]:
        """Return the linear modules of a call, and all norms."""
        return [*call.linears, *(x for _, x in self._norms)]

    def _norm_before(self, module: str, x: Tensor) -> Norm | None:
        """Return the norm between the stream and the input x of a module, or None."""
        ran = self._norm_with_output(x)
        if ran is None:
            return None
        parent = ran.name.rpartition(".")[0]
        if parent and not module.startswith(f"{parent}."):
            gave = f"{module or 'The model'} reads the norm {ran.name} of another block."
            rule = "the residual stream must be a sum of outputs, without a norm after the sum."
            raise BadValue(gave, rule, "pass a model whose blocks begin with a norm.")
        return _norm_of(ran)

    def _norm_with_output(self, x: Tensor) -> ModuleRun | None:
        """Return the norm whose output is x, (T, d), or None."""
        for _, ran in self._norms:
            if ran.result.numel() == x.numel() and torch.equal(ran.result.reshape(x.shape), x):
                return ran
        return None

    def unembedding(self, output: Any) -> tuple[Tensor | None, Norm | None]:
        """Return the rows of the unembedding and the norm before it; None without logits."""
        try:
            logits = logits_of(output)
        except BadValue:
            return None, None
        last = self._last_linear
        if last is None or last.result.shape != logits.shape:
            return None, None
        ran = self._norm_with_output(last.inputs[0].flatten(0, -2))
        norm = None if ran is None else _norm_of(ran)
        return find_unembedding(self.model, last, logits).rows.float(), norm

    def embedding_norms(self) -> tuple[str, ...]:
        """Describe norms between embedding and first layer, which the matrices leave out."""
        first = self.calls[0].attention.module
        parents = [ran.name.rpartition(".")[0] for calls, ran in self._norms if not calls]
        outside = [p for p in parents if p and not f"{first}.".startswith(f"{p}.")]
        return tuple(f"a norm of {parent} follows the embedding" for parent in outside)


def _queries(model: nn.Module, call: AttentionCall, ran: Sequence[ModuleRun]) -> _Matrix:
    """Find the matrix of the queries, and their norm and rotation."""
    return _find(call, ran, "queries", call.inputs.q, [None, *rotations_of(model)])


def _find(
    call: AttentionCall, ran: Sequence[ModuleRun], what: str, wanted: Tensor,
    rotaries: Sequence[Rotary | None],
) -> _Matrix:  # fmt: skip
    """Find the matrix that computed the queries, keys or values `wanted`, (1, n, T, size).

    It compares the first positions, because a rotation by a large angle is rounded.
    """
    length, size = wanted.shape[2:]
    wanted = wanted[0, :, :_POSITIONS].transpose(0, 1).double()  # (T, n, size)
    positions = torch.arange(len(wanted), device=wanted.device).unsqueeze(-1)
    inside = [x for x in ran if _is_inside(x.name, call.module)]
    norms = [x for x in inside if is_norm(x.module) and what != "values"]
    for linear in inside:
        outputs = linear.result.flatten(0, -2)
        if input_width(linear.module) is None or len(outputs) != length:
            continue
        for columns in _columns(call.problem, what, outputs.shape[-1]):
            raw = outputs[:_POSITIONS, columns]
            for norm in (None, *norms):
                normed = raw if norm is None else _by_head(norm.module, raw)
                if normed is None:
                    continue
                for rotary in rotaries:
                    if rotary is not None and 2 * len(rotary.frequencies) > size:
                        continue  # a rotation of other layers
                    product = normed.double()
                    product = product if rotary is None else rotary.rotated(product, positions)
                    if _proportional(product, wanted, wanted_eps=linear.result.dtype):
                        matrix, _ = matrix_of(linear.module, linear.name)
                        weight = matrix[:, columns].permute(1, 0, 2)
                        if norm is not None:
                            gain = _norm_of(norm).gain
                            if isinstance(gain, Tensor):
                                gain = gain.reshape(-1, 1, size)
                            weight = weight * gain
                        x = linear.inputs[0].flatten(0, -2)
                        return _Matrix(weight, x, norm.name if norm else "", rotary)
    raise _not_linear(call.module, what, "of one linear module in it")


def _columns(p: Problem, what: str, width: int) -> Iterator[Tensor]:
    """Yield the outputs of a linear module that may be queries, keys or values, (n, size).

    They are all outputs, or a part of a fused projection, one after the other (GPT-2) or head by
    head (GPT-NeoX).
    """
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
    """Apply a norm to x, (T, n, size): to each head, or to all heads together."""
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


def _not_linear(module: str, what: str, rest: str) -> BadValue:
    gave = f"The {what} of {module or 'the model'} are not the product {rest}."
    rule = "they must be the layer's input times W_Q, W_K and W_V, perhaps normed and rotated."
    hint = "pass a model without latent attention (MLA), adapters or convolutions before it."
    return BadValue(gave, rule, hint)


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}." if module else "")


def _norm_of(ran: ModuleRun) -> Norm:
    """Return the norm that a module computed. Raises `BadValue` if it is unknown."""
    norm = read_norm(ran.module, ran.inputs[0], ran.result)
    if norm is None:
        rule = "the gain and the centring of a norm are folded into the weights after it."
        hint = "pass a model with layer norms or RMS norms."
        raise BadValue(f"The norm {ran.name} is neither a layer norm nor an RMS norm.", rule, hint)
    return norm
