"""Read what a model returns: its logits, its loss, its vectors after the last layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...core.errors import BadValue, kind_of

AS_METRIC = "pass a function of the output as metric=."


def logits_of(
    output: Any,
    hint: str = "pass a model with a head for the next token, such as one of AutoModelForCausalLM.",
) -> Tensor:
    """Return the logits (B, T, words) of a model's output: the output, or its part `logits`.

    Raises `BadValue` with `hint` for another output, such as that of a classifier.
    """
    if isinstance(output, Mapping):
        logits = output.get("logits", output)
    else:
        logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        is_tensor = isinstance(logits, Tensor)
        what = f"a tensor of shape {tuple(logits.shape)}" if is_tensor else kind_of(logits)
        rule = "logits of the next token at every position are (B, T, words)."
        raise BadValue(f"The model returned {what}.", rule, hint)
    return logits


def own_loss_of(model: nn.Module, output: Any) -> Tensor | None:
    """Return the loss in a model's output, or None.

    It is the part `loss`; in a tuple of a transformers model, a first item that is one number.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, tuple) and output and hasattr(model, "config") and loss is None:
        loss = output[0] if isinstance(output[0], Tensor) and not output[0].dim() else None
    return loss if isinstance(loss, Tensor) else None


def vectors_of(output: Any) -> Tensor:
    """Return the vectors after the last layer, (B, T, d), of a model's output without logits."""
    vectors = getattr(output, "last_hidden_state", output)
    if not isinstance(vectors, Tensor) or vectors.dim() != 3:
        rule = "this metric reads the vectors after the last layer, (B, T, d)."
        raise BadValue(f"The model returned {kind_of(output)}.", rule, AS_METRIC)
    return vectors


def turns(unedited: Any, edited: Any) -> Tensor:
    """Return how far each token's vector after the last layer turns between two outputs.

    This is ``1 - cosine``, from 0 to 2, (B, T).
    """
    before, after = (vectors_of(output).double() for output in (unedited, edited))
    return 1 - F.cosine_similarity(after, before, dim=-1)


def most_probable(
    logits: Tensor, words: Sequence[str], count: int
) -> tuple[tuple[tuple[str, float], ...], ...]:
    """Return the `count` most probable words of each row of logits, (T, words), with probabilities.

    Logits beyond the words, which some models have for padding, count in the softmax but are not
    returned.
    """
    top = logits.float().softmax(-1)[:, : len(words)].topk(min(count, len(words)))
    return tuple(
        tuple((words[i], p) for i, p in zip(ids, probabilities, strict=True))
        for ids, probabilities in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
