"""A text read twice, without and with edits of attention: what changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.edits import Edit
from ..api.intervene import Intervention, intervene
from ..api.recording import Recording
from ..api.watch import watch
from ..errors import BadValue
from ..hf import Checkpoint
from ..hf.register import NAME, transformers
from ..storyteller import Storyteller
from ..views.escape import visible

MOST_TOKENS = 1024  # whose attention matrices are kept, twice
GUESSES, MOST_HEADS = 5, 8


@dataclass(frozen=True, eq=False)
class WhatIf:
    """What edits change for one text; prints itself.

    `losses` is (2, T - 1): the loss of each token but the first, in nats, without and with the
    edits. `guesses` are the most probable next tokens after the last, without and with. Both are
    None for a model that predicts no next token. `moved` is (layers, heads): the share of attention
    weight that lies elsewhere, the mean over queries of half the sum of ``|w' - w|``.
    """

    tokens: tuple[str, ...]
    losses: Tensor | None
    guesses: tuple[tuple[tuple[str, float], ...], ...] | None
    moved: Tensor
    done: Intervention

    def __str__(self) -> str:
        lines = [repr(self.done), ""]
        if self.losses is not None:
            lines.append(f"{'loss of':<18}{'before':>9}{'after':>9}{'change':>9}")
            for token, (before, after) in zip(self.tokens[1:], self.losses.T.tolist(), strict=True):
                lines.append(_row(visible(token), before, after))
            lines += [_row("all, the mean", *self.losses.mean(1).tolist()), ""]
        for when, ranked in zip(("before", "after"), self.guesses or (), strict=False):
            words = ", ".join(f"{visible(token)} {p:.1%}" for token, p in ranked)
            lines.append(f"next token {when:<7} {words}")
        lines += ["", "attention weight that lies elsewhere, largest first:"]
        order = self.moved.flatten().argsort(descending=True, stable=True)[:MOST_HEADS].tolist()
        for layer, head in (divmod(i, self.moved.shape[1]) for i in order):
            lines.append(f"  layer {layer} head {head}  {float(self.moved[layer, head]):.1%}")
        return "\n".join(lines)


def whatif(model: Checkpoint | Storyteller, text: str, edits: Sequence[Edit]) -> WhatIf:
    """Read a text without and with edits. If a checkpoint was trained to predict the next token,
    the head that does so is loaded, too.

    Raises `BadValue` for fewer than 2 or more than 1024 tokens, and what `intervene` raises.
    """
    module: torch.nn.Module
    words: Sequence[str] | None = None
    if isinstance(model, Storyteller):
        encoded = model.encode(text)
        tokens, given = encoded.labels(), {"ids": torch.tensor([encoded.ids])}
        module, words = model.model, model.vocabulary.words
    else:
        tokens, given = model.read(text)
        module = _with_head(model)
    if not 2 <= len(tokens) <= MOST_TOKENS:
        raise BadValue(
            f"The text has {len(tokens)} tokens.",
            f"whatif compares the attention matrices of 2 to {MOST_TOKENS} tokens.",
            "pass another text; intervene and watch work at any length.",
        )
    ids = next(iter(given.values()))
    outputs, matrices = [], []
    for some in ([], edits):
        with torch.no_grad(), intervene(module, some) as done:
            with watch(module, stats=["max"], rows=range(len(tokens))) as seen:
                outputs.append(module(**given))
        matrices.append(_matrices(seen))
    moved = (matrices[1] - matrices[0]).abs().sum(-1).mean(-1) / 2
    logits = [getattr(output, "logits", output) for output in outputs]
    if not isinstance(logits[0], Tensor) or logits[0].dim() != 3:
        return WhatIf(tuple(tokens), None, None, moved, done)
    guesses = tuple(_guesses(x[0, -1], words, model) for x in logits)
    losses = torch.stack([F.cross_entropy(x[0, :-1], ids[0, 1:], reduction="none") for x in logits])
    return WhatIf(tuple(tokens), losses, guesses, moved, done)


def _matrices(seen: Recording) -> Tensor:
    """The matrices of every layer, (layers, H, T, T)."""
    return torch.cat([call.found["rows"] for call in seen])  # type: ignore[misc]  # rows are a tensor


def _guesses(
    logits: Tensor, words: Sequence[str] | None, model: Checkpoint | Storyteller
) -> tuple[tuple[str, float], ...]:
    top = logits.softmax(-1).topk(min(GUESSES, len(logits)))
    if words is None:
        assert isinstance(model, Checkpoint)
        words = model.tokenizer.convert_ids_to_tokens(range(len(logits)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple((str(words[i]), p) for i, p in pairs)


def _with_head(checkpoint: Checkpoint) -> torch.nn.Module:
    """The model, with the head that predicts the next token if it was trained with one."""
    trained_as = getattr(checkpoint.model.config, "architectures", None) or [""]
    if not trained_as[0].endswith(("ForCausalLM", "LMHeadModel")):
        model = checkpoint.model.get_encoder() if checkpoint.has_decoder else checkpoint.model
        assert isinstance(model, torch.nn.Module)
        return model
    loaded = transformers().AutoModelForCausalLM.from_pretrained(
        Path(checkpoint.folder),
        attn_implementation=NAME,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    assert isinstance(loaded, torch.nn.Module)
    return loaded.eval()


def _row(name: str, before: float, after: float) -> str:
    return f"{name:<18}{before:>9.3f}{after:>9.3f}{after - before:>+9.3f}"
