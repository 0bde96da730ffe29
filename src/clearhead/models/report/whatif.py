"""Run a model on a text without and with edits of attention, and compare: `whatif`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from warnings import catch_warnings, filterwarnings

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import BadValue
from ...core.errors.limits import MOST_COMPARED_TOKENS
from ...core.formatting import number, visible
from ..follow.outputs import most_probable, turns
from ..inspect.edits import Edit
from ..inspect.intervene import Intervention, intervene
from ..inspect.watch import watch
from .text_model import TextModel

GUESSES, MOST_HEADS = 5, 8
LEAST_MOVED = 5e-5  # of a head's weight; prints as 0.01%
TURNED = (
    "This model predicts no next token, so it has no loss. The table shows how far the vectors\n"
    "after its last layer turn, as 1 - cosine."
)
UNMOVED = (
    "No head moves 0.01% of its attention weight. An edit of outputs moves weight only in\n"
    "later layers."
)


@dataclass(frozen=True, eq=False)
class WhatIf:
    """A printable comparison of a model with and without edits, on one text.

    `losses` is (2, T - 1): the loss of each token but the first, in nats, without and with the
    edits. `guesses` are the most probable next tokens after the last, without and with. Both are
    None for a model that predicts no next token. Only for such a model, `turns` is (T,): how far
    the vector of each token after the last layer turns, ``1 - cosine``. `moved` is (layers, heads):
    the fraction of attention weight that moves to other keys, the mean over queries of half the sum
    of ``|w' - w|``. `name` is that of the model.
    """

    tokens: tuple[str, ...]
    losses: Tensor | None
    turns: Tensor | None
    guesses: tuple[tuple[tuple[str, float], ...], ...] | None
    moved: Tensor
    done: Intervention
    name: str = ""

    def __str__(self) -> str:
        lines = [visible(self.name, 200)] if self.name else []
        lines += [repr(self.done), ""]
        if self.losses is not None:
            lines.append(f"{'loss of':<18}{'before':>9}{'after':>9}{'change':>9}")
            losses = zip(self.tokens[1:], self.losses.T.tolist(), strict=True)
            for position, (token, (before, after)) in enumerate(losses, 1):
                lines.append(_losses(f"{visible(token)} ({position})", before, after))
            lines += [_losses("all, the mean", *self.losses.mean(1).tolist()), ""]
        elif self.turns is None:
            lines += ["This model predicts no next token, so it has no loss.", ""]
        else:
            lines += [TURNED, "", f"{'vector of':<18}{'turns by':>9}"]
            turns_by_token = zip(self.tokens, self.turns.tolist(), strict=True)
            for position, (token, by) in enumerate(turns_by_token):
                lines.append(_turn(f"{visible(token)} ({position})", by))
            lines += [_turn("all, the mean", float(self.turns.mean())), ""]
        if self.guesses is not None:
            # Two tokens may differ only in the space before them, which is written then.
            alike = Counter(map(visible, {token for ranked in self.guesses for token, _ in ranked}))
            for when, ranked in zip(("before", "after"), self.guesses, strict=True):
                names = [visible(str(x) if alike[visible(x)] > 1 else x) for x, _ in ranked]
                words = ", ".join(f"{x} {p:.1%}" for x, (_, p) in zip(names, ranked, strict=True))
                lines.append(f"next token {when:<7} {words}")
            lines.append("")
        order = self.moved.flatten().argsort(descending=True, stable=True)[:MOST_HEADS].tolist()
        heads = [divmod(i, self.moved.shape[1]) for i in order]
        if heads := [head for head in heads if not self.moved[head] < LEAST_MOVED]:
            lines.append("attention weight that moves to other keys, largest first:")
            lines += [f"  L{x}H{y}  {float(self.moved[x, y]):.2%}" for x, y in heads]
        else:
            lines.append(UNMOVED)
        return "\n".join(lines)


def whatif(model: TextModel, text: str, edits: Sequence[Edit]) -> WhatIf:
    """Run a model on a text without and with edits.

    Raises `BadValue` for fewer than 2 or more than 1024 tokens, and what `intervene` raises.
    """
    tokens, inputs = model.tokens_and_inputs(text)
    module = model.predictor or model.module
    if not 2 <= len(tokens) <= MOST_COMPARED_TOKENS:
        rule = f"whatif compares the attention matrices of 2 to {MOST_COMPARED_TOKENS} tokens."
        hint = "pass another text; intervene and watch work at any length."
        raise BadValue(f"The text has {len(tokens)} token{'s' * (len(tokens) != 1)}.", rule, hint)
    ids = next(iter(inputs.values()))
    outputs, matrices = [], []
    for some in ([], edits):
        with torch.no_grad(), catch_warnings(), intervene(module, some) as done:
            # The printed record of the edits reports this.
            filterwarnings("ignore", ".*removed no visible edge")
            with watch(module, stats=["max"], exact_rows=range(len(tokens))) as seen:
                outputs.append(model.run(inputs, predict=True))
        matrices.append(torch.cat([call.statistics["exact_rows"] for call in seen]))  # type: ignore[misc]  # rows are a tensor, (H, T, T)
    moved = (matrices[1] - matrices[0]).abs().sum(-1).mean(-1) / 2
    logits = [getattr(output, "logits", output) for output in outputs]
    if not isinstance(logits[0], Tensor) or logits[0].dim() != 3:
        distances = turns(*outputs)[0] if hasattr(outputs[0], "last_hidden_state") else None
        return WhatIf(tuple(tokens), None, distances, None, moved, done, model.name)
    guesses = tuple(most_probable(x[0, -1:], model.words, GUESSES)[0] for x in logits)
    losses = torch.stack([F.cross_entropy(x[0, :-1], ids[0, 1:], reduction="none") for x in logits])
    return WhatIf(tuple(tokens), losses, None, guesses, moved, done, model.name)


def _losses(name: str, before: float, after: float) -> str:
    return f"{name:<18}{before:>9.3f}{after:>9.3f}{after - before:>+9.3f}"


def _turn(name: str, by: float) -> str:
    return f"{name:<18}{number(by, 5):>9}"
