"""`circuits`: compute the QK and OV circuits of heads from the weights alone.

Letters: L layers, H heads, D head dimension, Dv value size, d model size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import BadType, BadValue, as_count, as_index, must_be_among, whole_number
from ...core.torch_state import own_dtypes
from ..follow.layers import must_be_runnable
from .attention_weights import ModelWeights, read_weights
from .norms_and_rotations import Norm, Rotary

Kind = Literal["Q", "K", "V"]


class Factored(NamedTuple):
    """A matrix of low rank, ``left @ right``, (d, r) and (r, d)."""

    left: Tensor
    right: Tensor

    @own_dtypes()
    def dense(self) -> Tensor:
        """Compute the matrix, (d, d)."""
        return self.left @ self.right

    @own_dtypes()
    def norm(self) -> float:
        """Compute the Frobenius norm."""
        return float(_product_norm(self.left, self.right))

    def singular_values(self) -> Tensor:
        """Compute the r singular values, the largest first."""
        a, b = (torch.linalg.qr(x).R for x in (self.left.double(), self.right.double().mT))
        return torch.linalg.svdvals(a @ b.mT).to(self.left.dtype)

    def eigenvalues(self) -> Tensor:
        """Compute the r eigenvalues that can differ from 0, complex, the largest first."""
        values = torch.linalg.eigvals(self.right.double() @ self.left.double())
        return values[values.abs().argsort(descending=True)]


class Baseline(NamedTuple):
    """The mean and standard deviation of composition scores of random matrices."""

    mean: float
    deviation: float


@dataclass(frozen=True, repr=False)
class Circuits:
    """The matrices of every head, in fp32, with the norms before them folded in.

    W_Q and W_K are (L, H, d, D), W_V is (L, H, d, Dv), W_O is (L, H, Dv, d). `W_E`, (words, d), and
    `W_U`, (d, words), are embedding and unembedding; None for a model without them, and `W_E` if a
    token writes anything else into the stream, as with an adapter. `modules` names the module of
    each layer. `inexact` lists what the matrices leave out: the scale of a norm of
    queries and keys (Qwen3), a norm after attention (Gemma 2), and the frequencies of a rotation in
    long texts (Phi-3), which depend on the text.
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    W_E: Tensor | None
    W_U: Tensor | None
    modules: tuple[str, ...]
    inexact: tuple[str, ...]
    rotary: tuple[Rotary | None, ...]
    centred: bool

    def __repr__(self) -> str:
        L, H, d, D = self.W_Q.shape
        lines = [f"{L} layers x {H} heads of size {D}, model size {d}"]
        if L > 1:
            lines.append("largest compositions  score  random")
            for kind in ("Q", "K", "V"):
                scores = self.composition(kind)
                a, b, c, e = map(int, torch.unravel_index(scores.argmax(), scores.shape))
                score, random = float(scores.max()), self.baseline(kind).mean
                lines.append(f"  {kind}  {a}.{b} -> {c}.{e}        {score:.3f}  {random:.3f}")
        lines += [f"not exact: {why}" for why in self.inexact]
        return "\n".join(lines)

    def ov(self, layer: int, head: int) -> Factored:
        """Return ``W_V W_O``, (d, d), which maps what a head reads to what it writes: x W_V W_O.

        Raises `BadValue` for a head that the model does not have, `BadType` for other indices.
        """
        at = self._at(layer, head)
        return Factored(self.W_V[at], self.W_O[at])

    def qk(self, layer: int, head: int, offset: int | None = None) -> Factored:
        """Return ``W_Q W_K^T``, the score of a query (left) and a key, without biases and scale.

        `offset` is the distance from the query back to the key, for models that rotate queries and
        keys. None means no rotation, as at offset 0. Rotations that depend on the length of the
        text, which `inexact` names, are those of a short one. Raises the errors of `ov`, and
        `BadValue` for an offset in a layer that does not rotate.
        """
        at = self._at(layer, head)
        return Factored(self.W_Q[at], self._keys(at[0], offset)[at[1]].mT)

    @own_dtypes()
    def copying(self) -> Tensor:
        """Compute how much a head raises the logit of the token that it reads, (L, H).

        It is ``sum(re(e)) / sum(|e|)`` over the eigenvalues e of ``W_E W_V W_O W_U``. 1 means that
        a head copies, -1 that it suppresses, and 0 neither.

        Raises `BadValue` for a model without embedding or unembedding. Source: Elhage et al. 2021,
        "A Mathematical Framework for Transformer Circuits".
        """
        if self.W_E is None or self.W_U is None:
            gave = "copying() got a model without logits, or whose tokens write no rows of a table."
            rule = "a head copies if it raises the logit of the token that it reads."
            hint = "pass the model with its head for the next token; merge adapters into it."
            raise BadValue(gave, rule, hint)
        back = self.W_U @ self.W_E  # (d, d): from the stream to words, and to the stream
        values = torch.linalg.eigvals((self.W_O @ back @ self.W_V).double())
        scores = values.real.sum(-1) / values.abs().sum(-1).clamp(min=1e-30)
        return scores.to(self.W_Q.dtype)

    @own_dtypes()
    def composition(self, kind: Kind, offset: int | None = None) -> Tensor:
        """Compute how much of a head's output a later head reads, (L, H, L, H).

        The score is ``|W_OV R| / (|W_OV| |R|)`` with Frobenius norms, for the writer's W_OV and the
        reader's R: ``W_Q W_K^T`` for "Q", ``W_K W_Q^T`` for "K", ``W_V W_O`` for "V". It is 0 if
        the reader is not in a later layer. Random matrices also have a score above 0, see
        `baseline`. `offset` is as in `qk`.

        Raises `BadValue` for another kind. Source: Elhage et al. 2021; the scores are those of
        TransformerLens' `all_composition_scores` for its processed weights.
        """
        read, then = self._reader(kind, offset)
        L, H = self.W_Q.shape[:2]
        write = torch.linalg.qr(self.W_V).R @ self.W_O  # (L, H, Dv, d), with the norm of W_V W_O
        read = read @ torch.linalg.qr(then.mT).R.mT  # (L, H, d, r)
        scores = torch.zeros(L, H, L, H, dtype=read.dtype, device=read.device)
        lengths = read.flatten(-2).norm(dim=-1)
        for layer in range(L - 1):
            later = read[layer + 1 :]
            for head in range(H):
                product = write[layer, head] @ later  # (L', H, Dv, r)
                norms = product.flatten(-2).norm(dim=-1)
                norms = norms / lengths[layer + 1 :] / write[layer, head].norm()
                scores[layer, head, layer + 1 :] = norms
        return scores

    def baseline(self, kind: Kind, samples: int = 64, seed: int = 0) -> Baseline:
        """Compute the composition scores of `samples` pairs of random matrices of the same shapes.

        Their entries are independent and normal, and the scores are about ``1 / sqrt(d)``. `seed`
        determines them, and torch's generator is not used. Raises `BadValue` for an unknown kind,
        and fewer than two samples.
        """
        read, then = self._reader(kind, None)
        rule, hint = "two or more samples are drawn from a seed of 0 or more.", "pass samples=64."
        samples = as_count("baseline got samples", samples, rule, hint, least=2)
        seed = as_count("baseline got seed", seed, rule, "pass seed=0.", most=2**63 - 1)
        draw = torch.Generator().manual_seed(seed)

        def random(like: Tensor, stream: int) -> Tensor:  # `stream` is the dimension of the stream
            x = torch.randn(samples, *like.shape[-2:], generator=draw, dtype=torch.float64)
            return x - x.mean(stream, keepdim=True) if self.centred else x

        A, B = random(self.W_V, -2), random(self.W_O, -1)
        C, E = random(read, -2), random(then, -1)
        scores = _product_norm(A, B @ C @ E) / _product_norm(A, B) / _product_norm(C, E)
        return Baseline(float(scores.mean()), float(scores.std()))

    def _reader(self, kind: Kind, offset: int | None) -> tuple[Tensor, Tensor]:
        """Return the factors of the reader's matrix, (L, H, d, r) and (L, H, r, d)."""
        rule = 'a head composes with the queries "Q", keys "K" or values "V" of another head.'
        must_be_among(
            ("Q", "K", "V"), "The composition was requested with kind", kind, rule, "pass one."
        )
        if kind == "V":
            return self.W_V, self.W_O
        keys = torch.stack([self._keys(layer, offset) for layer in range(len(self.W_K))])
        return (self.W_Q, keys.mT) if kind == "Q" else (keys, self.W_Q.mT)

    def _keys(self, layer: int, offset: int | None) -> Tensor:
        """Return W_K of a layer, (H, d, D), rotated for a query `offset` positions later."""
        rotary = self.rotary[layer]
        if offset is None or (rotary is None and offset == 0):
            return self.W_K[layer]
        if (number := whole_number(offset)) is None:
            rule, hint = "offset is a whole number.", "pass 1 for the token before."
            raise BadType(f"offset={offset!r}.", rule, hint)
        if rotary is None:
            gave = f"offset={offset!r} for layer {layer}, which does not rotate."
            rule = "without rotation, the matrix is the same at every offset."
            raise BadValue(gave, rule, "leave offset out.")
        keys = self.W_K[layer].double()
        positions = torch.full(keys.shape[:-1], -float(number), dtype=torch.float64)
        return rotary.rotated(keys, positions.to(keys.device)).to(self.W_K.dtype)

    def _at(self, layer: int, head: int) -> tuple[int, int]:
        L, H = self.W_Q.shape[:2]
        return as_index("Layer", layer, L), as_index("Head", head, H)


@own_dtypes()
def circuits(model: nn.Module) -> Circuits:
    """Read the QK and OV circuits of every head from the weights of a model.

    >>> model_circuits = ch.circuits(model)  # doctest: +SKIP
    >>> model_circuits.copying()  # (L, H): which heads copy  # doctest: +SKIP
    >>> model_circuits.composition("K")[0, 3, 1]  # whose keys read head 0.3  # doctest: +SKIP

    The gain of a norm is folded into the weights after it. With layer norm, its centring is folded
    in too, and the weights that write into the stream are centred, as in TransformerLens. Each head
    has its own copy of a shared KV head. Biases, positions and the scale of the scores are left
    out. One run on eight ids finds the matrices, by comparing their products with those of the
    model.

    Raises `BadType` for an object that is not a module. Raises `BadValue` for norms after the sum
    (BERT), latent attention (MLA), an encoder and decoder, a model that reads no ids, quantised,
    sharded or offloaded weights, and layers of different sizes.
    """
    must_be_runnable("circuits", model, "circuits reads the weights of a model.")
    return _folded(model, read_weights(model))


def _folded(model: nn.Module, weights: ModelWeights) -> Circuits:
    layers = weights.layers
    if len({tuple(x.shape for x in layer[1:5]) for layer in layers}) > 1:
        gave = f"The layers of the {type(model).__name__} have heads of different shapes."
        rule = "the matrices of all layers are one tensor, (L, H, d, D)."
        raise BadValue(gave, rule, "pass a model whose layers are alike.")
    norms = [layer.norm for layer in layers]
    centred = all(norm is not None and norm.centres for norm in norms)
    W_O = torch.stack([layer.W_O for layer in layers])
    W_E, W_U = weights.embedding, weights.unembedding
    d = W_O.shape[-1]
    if W_E is not None and W_E.shape[1] != d:
        W_E = None  # the embedding is projected before it enters the stream
    if W_U is not None:
        W_U = _fold(W_U.mT, weights.final_norm) if W_U.shape[1] == d else None
    if W_U is not None:
        W_U = W_U - W_U.mean(-1, keepdim=True)  # a shift of all logits has no effect
    if centred:
        W_O = W_O - W_O.mean(-1, keepdim=True)
        W_E = None if W_E is None else W_E - W_E.mean(-1, keepdim=True)
    inexact = dict.fromkeys(why for layer in layers for why in layer.inexact)
    return Circuits(
        _read([layer.W_Q for layer in layers], norms),
        _read([layer.W_K for layer in layers], norms),
        _read([layer.W_V for layer in layers], norms),
        W_O, W_E, W_U,
        tuple(layer.module for layer in layers),
        (*weights.inexact, *inexact),
        tuple(layer.rotary for layer in layers),
        centred,
    )  # fmt: skip


def _read(matrices: Sequence[Tensor], norms: Sequence[Norm | None]) -> Tensor:
    return torch.stack([_fold(x, norm) for x, norm in zip(matrices, norms, strict=True)])


def _fold(matrix: Tensor, norm: Norm | None) -> Tensor:
    """Fold a norm into the matrix (..., d, n) after it, except for its scale."""
    if norm is None:
        return matrix
    gain = norm.gain.unsqueeze(-1) if isinstance(norm.gain, Tensor) else norm.gain
    folded = matrix * gain
    return folded - folded.mean(-2, keepdim=True) if norm.centres else folded


def _product_norm(a: Tensor, b: Tensor) -> Tensor:
    """Compute the Frobenius norm of ``a @ b`` without the product, for a tall a."""
    return (torch.linalg.qr(a).R @ b).flatten(-2).norm(dim=-1)
