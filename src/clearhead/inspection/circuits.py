"""What heads do by their weights alone: `circuits`.

Letters: L layers, H heads, D head size, Dv value size, d model size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BadType, BadValue, as_index, kind_of, whole_number
from ..functional.sharding import must_not_be_sharded
from .attention_weights import ModelWeights, Rotary, read_weights
from .intervene import refuse_compiled
from .norms import Norm

Kind = Literal["Q", "K", "V"]


class Factored(NamedTuple):
    """A matrix of low rank, ``left @ right``, (d, r) and (r, d)."""

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """The matrix itself, (d, d)."""
        return self.left @ self.right

    def norm(self) -> float:
        """Its Frobenius norm."""
        return float(_product_norm(self.left, self.right))

    def singular_values(self) -> Tensor:
        """Its r singular values, the largest first."""
        a, b = (torch.linalg.qr(x).R for x in (self.left.double(), self.right.double().mT))
        return torch.linalg.svdvals(a @ b.mT).to(self.left.dtype)

    def eigenvalues(self) -> Tensor:
        """Its r eigenvalues that may differ from 0, complex, the largest first."""
        values = torch.linalg.eigvals(self.right.double() @ self.left.double())
        return values[values.abs().argsort(descending=True)]


class Baseline(NamedTuple):
    """Composition scores of random matrices: their mean and their standard deviation."""

    mean: float
    deviation: float


@dataclass(frozen=True, repr=False)
class Circuits:
    """The matrices of every head, in fp32, with the norms that read the stream folded in.

    W_Q and W_K are (L, H, d, D), W_V is (L, H, d, Dv), W_O is (L, H, Dv, d). `W_E`, (words, d), and
    `W_U`, (d, words), are embedding and unembedding; None for a model without. `modules` names the
    module of each layer. `inexact` says what the matrices leave out: a norm of queries and keys
    (Qwen3) is folded in by its gain, and its scale depends on the text; so does a norm after
    attention (Gemma 2), which is left out.
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
                at = int(scores.argmax())
                a, b, c, e = (int(x) for x in torch.unravel_index(torch.tensor(at), scores.shape))
                score, random = float(scores[a, b, c, e]), self.baseline(kind).mean
                lines.append(f"  {kind}  {a}.{b} -> {c}.{e}        {score:.3f}  {random:.3f}")
        lines += [f"not exact: {why}" for why in self.inexact]
        return "\n".join(lines)

    def ov(self, layer: int, head: int) -> Factored:
        """``W_V W_O``: what the head writes for what it reads, as (d, d) with x on the left."""
        at = self._at(layer, head)
        return Factored(self.W_V[at], self.W_O[at])

    def qk(self, layer: int, head: int, offset: int | None = None) -> Factored:
        """``W_Q W_K^T``: the score of a query (on the left) and a key, without biases and scale.

        `offset` is how far the key stands before the query, for models that rotate queries and
        keys; None means without rotation, as at offset 0.
        """
        at = self._at(layer, head)
        return Factored(self.W_Q[at], self._keys(at[0], offset)[at[1]].mT)

    def copying(self) -> Tensor:
        """How far a head lifts the token that it reads, (L, H): ``sum(re(e)) / sum(|e|)`` over the
        eigenvalues e of ``W_E W_V W_O W_U``. 1 copies, -1 suppresses, near 0 does neither.

        Raises `BadValue` for a model without embedding or unembedding. Source: Elhage et al. 2021,
        "A Mathematical Framework for Transformer Circuits".
        """
        if self.W_E is None or self.W_U is None:
            raise BadValue(
                "copying() of a model without a table of embeddings or without logits.",
                "a head copies if it lifts the logit of the token that it reads.",
                "pass the model with its head for the next token.",
            )
        around = self.W_U @ self.W_E  # (d, d): from what is written to what is read again
        inner = (self.W_O @ around @ self.W_V).double()
        values = torch.linalg.eigvals(inner)
        scores = values.real.sum(-1) / values.abs().sum(-1).clamp(min=1e-30)
        return scores.to(self.W_Q.dtype)

    def composition(self, kind: Kind, offset: int | None = None) -> Tensor:
        """How much of what a head writes a later head reads, (L, H, L, H), by the Frobenius norms
        ``|W_OV R| / (|W_OV| |R|)`` of the writer's W_OV and the reader's R: ``W_Q W_K^T`` for "Q",
        ``W_K W_Q^T`` for "K", ``W_V W_O`` for "V". 0 where the reader does not come later.

        Raw: random matrices have a score above 0 too, see `baseline`. `offset` as in `qk`.
        Raises `BadValue` for another kind. Source: Elhage et al. 2021; the scores are those of
        TransformerLens' `all_composition_scores`, of weights that it processed.
        """
        read, then = self._reader(kind, offset)
        L, H = self.W_Q.shape[:2]
        write = torch.linalg.qr(self.W_V).R @ self.W_O  # as long as W_V W_O, (L, H, Dv, d)
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
        """The composition scores of as many pairs of random matrices of the same shapes, with
        independent normal entries; about ``1 / sqrt(d)``. torch's generator is not used."""
        read, then = self._reader(kind, None)
        draw = torch.Generator().manual_seed(seed)

        def random(like: Tensor, stream: int) -> Tensor:  # the dimension that is the stream
            x = torch.randn(samples, *like.shape[-2:], generator=draw, dtype=torch.float64)
            return x - x.mean(stream, keepdim=True) if self.centred else x

        A, B = random(self.W_V, -2), random(self.W_O, -1)
        C, E = random(read, -2), random(then, -1)
        scores = _product_norm(A, B @ C @ E) / _product_norm(A, B) / _product_norm(C, E)
        return Baseline(float(scores.mean()), float(scores.std()))

    def _reader(self, kind: Kind, offset: int | None) -> tuple[Tensor, Tensor]:
        """The factors of what the reader does with the stream: (L, H, d, r) and (L, H, r, d)."""
        if kind not in ("Q", "K", "V"):
            raise BadValue(
                f"The composition {kind!r} was requested.",
                'a head composes with the queries "Q", the keys "K" or the values "V" of another.',
                "pass one of these.",
            )
        if kind == "V":
            return self.W_V, self.W_O
        keys = torch.stack([self._keys(layer, offset) for layer in range(len(self.W_K))])
        return (self.W_Q, keys.mT) if kind == "Q" else (keys, self.W_Q.mT)

    def _keys(self, layer: int, offset: int | None) -> Tensor:
        """W_K of a layer, (H, d, D), as a query sees it that is `offset` positions later."""
        rotary = self.rotary[layer]
        if offset is None or (rotary is None and offset == 0):
            return self.W_K[layer]
        number = whole_number(offset)
        if number is None:
            raise BadType(
                f"offset={offset!r}.", "it is a whole number.", "pass 1 for the token before."
            )
        if rotary is None:
            raise BadValue(
                f"offset={offset!r} for layer {layer}, which does not rotate.",
                "without rotation the matrix is the same at every offset.",
                "leave offset out.",
            )
        keys = self.W_K[layer].double()
        positions = torch.full(keys.shape[:-1], -float(number), dtype=torch.float64)
        return rotary.rotated(keys, positions.to(keys.device)).to(self.W_K.dtype)

    def _at(self, layer: int, head: int) -> tuple[int, int]:
        L, H = self.W_Q.shape[:2]
        return (
            as_index("Layer", layer, L, f"they are numbered from 0 to {L - 1}.", "pass one."),
            as_index("Head", head, H, f"they are numbered from 0 to {H - 1}.", "pass one."),
        )


def circuits(model: nn.Module) -> Circuits:
    """The QK and OV circuits of every head, from the weights of a model.

    >>> found = ch.circuits(model)  # doctest: +SKIP
    >>> found.copying()  # (L, H): which heads copy  # doctest: +SKIP
    >>> found.composition("K")[0, 3, 1]  # whose keys read head 0.3  # doctest: +SKIP

    The weights that read the residual stream take the gain of the norm before them; of layer norm
    also its centring, and then what writes into the stream is centred too, as in TransformerLens.
    Heads that share a key head each have a copy. Biases, positions and the scale of the scores are
    left out. The matrices are found by one run on eight ids, which compares what they compute with
    what the model computed.

    Raises `BadType` for something else than a module, and `BadValue` for norms after the sum
    (BERT), latent attention (MLA), an encoder and decoder, weights that are quantised or sharded,
    and layers of different sizes.
    """
    if not isinstance(model, nn.Module):
        raise BadType(
            f"circuits got {kind_of(model)}.",
            "it reads the weights of a model.",
            "pass a torch.nn.Module.",
        )
    must_not_be_sharded("circuits")
    refuse_compiled(model)
    return _folded(model, read_weights(model))


def _folded(model: nn.Module, weights: ModelWeights) -> Circuits:
    layers = weights.layers
    shapes = {tuple(x.shape for x in layer[1:5]) for layer in layers}
    if len(shapes) > 1:
        raise BadValue(
            f"The layers of the {type(model).__name__} have heads of different shapes.",
            "the matrices of all layers are one tensor, (L, H, d, D).",
            "pass a model whose layers are alike.",
        )
    norms = [layer.norm for layer in layers]
    centred = all(norm is not None and norm.centres for norm in norms)
    W_O = torch.stack([layer.W_O for layer in layers])
    W_E, W_U = weights.embedding, weights.unembedding
    d = W_O.shape[-1]
    if W_E is not None and W_E.shape[1] != d:
        W_E = None  # projected before it enters the stream
    if W_U is not None:
        W_U = _fold(W_U.mT, weights.final_norm) if W_U.shape[1] == d else None
    if W_U is not None:
        W_U = W_U - W_U.mean(-1, keepdim=True)  # a shift of all logits changes nothing
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
    """A matrix (..., d, n) that reads the stream through a norm, as one that reads it directly."""
    if norm is None:
        return matrix
    gain = norm.gain.unsqueeze(-1) if isinstance(norm.gain, Tensor) else norm.gain
    folded = matrix * gain
    return folded - folded.mean(-2, keepdim=True) if norm.centres else folded


def _product_norm(a: Tensor, b: Tensor) -> Tensor:
    """The Frobenius norm of ``a @ b`` without the product, for a tall a."""
    return (torch.linalg.qr(a).R @ b).flatten(-2).norm(dim=-1)
