"""What is read off a model's output: numbers that `effects` measures, and the next words."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BadType, BadValue, kind_of, whole_number

Metric = Callable[[Any], Tensor]


def logits_of(output: Any) -> Tensor:
    """The logits (B, T, words) in what a model gave: its output, or a part named `logits`."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        what = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else kind_of(logits)
        raise BadValue(
            f"The model gave {what}.",
            "this metric reads logits, (B, T, words).",
            "pass a function of the output as metric=.",
        )
    return logits


def next_token_loss(inputs: Any) -> Metric:
    """The mean loss of the next token, in nats, over the ids (B, T) in `inputs` that are no
    padding: ``-log softmax(logits[b, t])[ids[b, t + 1]]``."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise BadType(
            "The loss of the next token was asked for, of inputs without ids (B, T).",
            "the next token is known from the ids that the model reads.",
            "pass ids, a dict with input_ids, or a function of the output as metric=.",
        )
    if ids.shape[1] < 2:
        raise BadValue(
            f"The loss of the next token was asked for, of ids {tuple(ids.shape)}.",
            "the first token follows no other, so it takes two.",
            "pass a longer text, or a function of the output as metric=.",
        )
    real = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    counts = torch.ones_like(ids[:, 1:]) if real is None else real[:, 1:] * real[:, :-1]

    def loss(output: Any) -> Tensor:
        logits = logits_of(output)[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        return (each * counts.flatten()).sum() / counts.sum()

    return loss


def logit_difference(right: int | Tensor, wrong: int | Tensor, at: int = -1) -> Metric:
    """A metric for `effects`: ``logits[b, at, right] - logits[b, at, wrong]``, the mean over b.

    `right` and `wrong` are ids of tokens, one or one per text (B,); `at` is the position whose next
    token is guessed. Raises `BadType` for what is no id.
    """
    for name, given in (("right", right), ("wrong", wrong)):
        if not (isinstance(given, Tensor) and given.dim() == 1) and whole_number(given) is None:
            raise BadType(
                f"logit_difference got {name}={given!r}.",
                "it is the id of a token, or one id per text, (B,).",
                "pass whole numbers.",
            )

    def difference(output: Any) -> Tensor:
        logits = logits_of(output)[:, at]
        of_each = torch.arange(len(logits), device=logits.device)
        picked = [logits[of_each, torch.as_tensor(x, device=logits.device)] for x in (right, wrong)]
        return (picked[0] - picked[1]).float().mean()

    return difference


def vectors_of(output: Any) -> Tensor:
    """The vectors after the last layer, (B, T, d), in what a model without logits gave."""
    vectors = getattr(output, "last_hidden_state", output)
    if not isinstance(vectors, Tensor) or vectors.dim() != 3:
        raise BadValue(
            f"The model gave {kind_of(output)}.",
            "this metric reads the vectors after the last layer, (B, T, d).",
            "pass a function of the output as metric=.",
        )
    return vectors


def turns(unedited: Any, edited: Any) -> Tensor:
    """How far the vector of each token after the last layer turns between two outputs of a model:
    ``1 - cosine``, from 0 to 2, (B, T)."""
    before, after = (vectors_of(output).double() for output in (unedited, edited))
    return 1 - F.cosine_similarity(after, before, dim=-1)


def turn(unedited: Any) -> Metric:
    """How far the vectors after the last layer turn from those of `unedited`, a model's output:
    the mean of `turns` over tokens."""

    def turn(output: Any) -> Tensor:
        return turns(unedited, output).mean()

    return turn


def most_probable(
    logits: Tensor, words: Sequence[str], count: int
) -> tuple[tuple[tuple[str, float], ...], ...]:
    """The `count` most probable words of each row of logits (T, words), with probabilities. Logits
    beyond the words, which some models have for padding, share in the softmax and are not shown."""
    top = logits.float().softmax(-1)[:, : len(words)].topk(min(count, len(words)))
    return tuple(
        tuple((words[i], p) for i, p in zip(ids, shares, strict=True))
        for ids, shares in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
