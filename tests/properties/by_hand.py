"""The oracle: attention by hand, which transformers models run in place of their own.

It forms every matrix in plain torch, and edits it as the definition of the edit says. Only
`Edit.for_clearhead` calls clearhead.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

import clearhead as ch


def short_repr(x: Any) -> str:
    """The repr of a dataclass, without the fields that have their default."""
    shown = [f"{f.name}={v!r}" for f in fields(x) if (v := getattr(x, f.name)) != f.default]
    return f"{type(x).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class Edit:
    """One edit of attention; None means all layers, heads, rows or texts."""

    what: str
    amount: float | None = None  # tokens of the prefix, width of the window, or the factor
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    batch: range | None = None

    __repr__ = short_repr

    def for_clearhead(self, recording: ch.Recording | None = None) -> ch.edits.Edit:
        at = dict(layers=self.layers, heads=self.heads, positions=self.rows, batch=self.batch)
        match self.what:
            case "knock out prefix":
                return ch.edits.knock_out(ch.prefix(self.amount), **at)
            case "keep window":
                return ch.edits.keep_only(ch.window(before=self.amount), **at)
            case "ablate":
                return ch.edits.ablate(**at)
            case "scale":
                return ch.edits.scale(self.amount, **at)
            case "patch":
                return ch.edits.patch(recording, **at)
            case "freeze":
                return ch.edits.freeze(recording, **at)
        raise AssertionError(f"no such edit: {self}")


@dataclass
class Call:
    """One call of attention. Positions count from each text's first real token."""

    layer: int
    logits: Tensor  # (B, H, Tq, Tk), scaled and with soft cap and bias
    sees: Tensor  # (B|1, 1, Tq, Tk)
    value: Tensor  # (B, H, Tk, D), key heads repeated
    queries: Tensor  # (B, Tq), the position of each query
    keys: Tensor  # (B, Tk)
    real: Tensor  # (B, Tq), which queries are not padding
    weights: Tensor | None = None  # (B, H, Tq, Tk)
    out: Tensor | None = None  # (B, H, Tq, D)

    def attend(self, edits: Sequence[Edit], recorded: "Calls") -> tuple[Tensor, Tensor]:
        """The edited weights and output: first edges go, then weights and then outputs change."""
        edits = [e for e in edits if self.has(e)]
        sees = self.visible(edits)
        weights = self.logits.masked_fill(~sees, -1e9).softmax(-1) * sees  # 0 where nothing is seen
        for e in edits:
            if e.what == "freeze":  # the rows of real queries are recorded
                frozen = self.where(e) & self.real[:, None, :, None]
                weights = torch.where(frozen, recorded[self.layer].weights, weights)
        out = weights @ self.value
        for e in edits:
            if e.what in ("ablate", "scale"):
                out = torch.where(self.where(e), out * (e.amount or 0.0), out)
            elif e.what == "patch":
                out = torch.where(self.where(e), recorded[self.layer].out, out)
        return weights, out

    def visible(self, edits: Sequence[Edit]) -> Tensor:
        """Who sees whom once the edits have removed edges."""
        sees = self.sees
        for e in edits:
            if self.has(e):
                sees = sees & ~(self.where(e) & self.removed(e))
        return sees

    def has(self, e: Edit) -> bool:
        """Is the edit about this layer?"""
        return e.layers is None or self.layer in e.layers

    def where(self, e: Edit) -> Tensor:
        """The queries that the edit is about, (B, H, Tq, 1)."""
        B, H, Tq, _ = self.logits.shape
        found = torch.ones(B, H, Tq, 1, dtype=torch.bool)
        if e.heads is not None:
            found &= _among(torch.arange(H), e.heads).view(1, H, 1, 1)
        if e.batch is not None:
            found &= _among(torch.arange(B), e.batch).view(B, 1, 1, 1)
        if e.rows is not None:
            last = self.queries.where(self.real, -1).amax(-1, keepdim=True)
            counted = _among(self.queries, [row for row in e.rows if row >= 0])
            from_the_end = _among(self.queries - last - 1, [row for row in e.rows if row < 0])
            found &= ((counted | from_the_end) & self.real).view(B, 1, Tq, 1)
        return found

    def removed(self, e: Edit) -> Tensor:
        """The edges that the edit removes, (B, 1, Tq|1, Tk)."""
        q, k = self.queries[:, None, :, None], self.keys[:, None, None, :]
        if e.what == "knock out prefix":
            return k < e.amount
        if e.what == "keep window":
            return q - k > e.amount
        return torch.zeros_like(k, dtype=torch.bool)


Calls = Mapping[int, Call]


def _among(x: Tensor, wanted: Sequence[int]) -> Tensor:
    return torch.isin(x, torch.tensor(list(wanted), dtype=torch.long))


@dataclass
class _Run:
    """The run of a model inside `by_hand`."""

    edits: Sequence[Edit]
    recorded: Calls
    real: Tensor
    past: int
    decoder_from: int  # the first layer of an encoder-decoder's decoder
    layers: dict[nn.Module, int] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)


_run: _Run


@contextmanager
def by_hand(
    model: PreTrainedModel, edits: Sequence[Edit], recorded: Calls, real: Tensor, past: int
) -> Iterator[Calls]:
    """Inside the `with` block, compute the model's attention by hand, with these edits.

    `recorded` are the calls that `patch` and `freeze` take; `real`, (B, T), says which tokens are
    not padding, those in a cache included; and `past` is how many are in the cache. Yields the
    calls by layer, as soon as they are made.
    """
    global _run
    config = model.config
    decoder_from = config.num_hidden_layers if config.is_encoder_decoder else 1000
    _run = _Run(edits, recorded, real, past, decoder_from)
    model.set_attn_implementation("by_hand")
    try:
        yield _run.calls
    finally:
        model.set_attn_implementation("clearhead")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if position_bias is not None:
        logits = logits + position_bias
    if attention_mask is None:
        attention_mask = torch.zeros(1, 1, *logits.shape[2:])
    sees = attention_mask == 0  # it is added to the logits
    layer = _run.layers.setdefault(module, len(_run.layers))
    call = Call(layer, logits, sees, value, *_positions(layer, query.shape[2], key.shape[2]))
    call.weights, call.out = call.attend(_run.edits, _run.recorded)
    _run.calls[layer] = call
    return call.out.transpose(1, 2).contiguous(), call.weights


def _positions(layer: int, Tq: int, Tk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The positions of queries (B, Tq) and keys (B, Tk), and which queries are not padding."""
    B, T = _run.real.shape
    first = _run.real.int().argmax(-1, keepdim=True)
    queries, keys = (torch.arange(n).expand(B, n) for n in (Tq, Tk))
    if layer < _run.decoder_from:
        dropped = max(0, T - Tk)  # by the cache of a sliding window
        return _run.past + queries - first, dropped + keys - first, _run.real[:, _run.past :]
    is_cross = (layer - _run.decoder_from) % 2 == 1
    return queries, keys - first if is_cross else keys, torch.ones(B, Tq, dtype=torch.bool)


AttentionInterface.register("by_hand", _attention)
AttentionMaskInterface.register("by_hand", eager_mask)
