"""What is read off a model's output: numbers that `effects` measures, and the next words."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import BadType, BadValue, as_index, kind_of, whole_number
from ..errors.limits import MASK_QUERIES_AT_ONCE
from ..problem.problem import Problem
from .edits.edit import CallSite

Metric = Callable[[Any], Tensor]


def logits_of(output: Any) -> Tensor:
    """The logits (B, T, words) in what a model gave: its output, or a part named `logits`."""
    if isinstance(output, Mapping):
        logits = output.get("logits", output)
    else:
        logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        what = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else kind_of(logits)
        raise BadValue(
            f"The model gave {what}.",
            "this metric reads logits, (B, T, words).",
            "pass a function of the output as metric=.",
        )
    return logits


CHOICES = (
    "pass labels= in the inputs for the model's own loss, metric=logit_difference(...), or a "
    "function of the output as metric=."
)
LABELS = ("label", "start_positions", "end_positions")  # in the names of what a loss is computed of


def loss_metric(
    model: nn.Module, inputs: Any, output: Any, calls: Sequence[tuple[Problem, CallSite]]
) -> tuple[str, Metric]:
    """The metric "loss" and its name: the model's own loss if it gives one, as it does for labels;
    else the loss of the next token, of a decoder. `output` and `calls` are of the unedited run.

    Raises `BadValue` or `BadType` for anything else.
    """

    def own_loss(output: Any) -> Tensor:
        loss = own_loss_of(model, output)
        assert loss is not None
        return loss

    if own_loss_of(model, output) is not None:
        return "the model's loss", own_loss
    named = inputs if isinstance(inputs, Mapping) else {}
    kind = type(model).__name__
    if labels := [n for n, x in named.items() if x is not None and any(p in n for p in LABELS)]:
        raise BadValue(
            f"The inputs hold {' and '.join(labels)}, and the {kind} gave no loss.",
            'of inputs with labels, "loss" is the loss that the model itself computes: its output '
            "has one, as `loss`.",
            "leave the labels out, or pass a function of the output as metric=.",
        )
    metric = next_token_loss(inputs)
    ids = named["input_ids"] if named else inputs
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or any(
        name.startswith("decoder_") and x is not None for name, x in named.items()
    ):
        raise _no_next_token(f"The {kind} is an encoder and a decoder")
    own = [(problem, site) for problem, site in calls if problem.Tq == ids.shape[1]]
    if any(problem.Tk == problem.Tq and sees_later(problem, site) for problem, site in own):
        raise _no_next_token(f"In the {kind} a token looks at those after it")
    if calls and all(sees_later(problem, site) for problem, site in own):
        raise _no_next_token(f"Of the {kind} it is not known whether a token sees those after it")
    return "loss", metric


def _no_next_token(gave: str) -> BadValue:
    return BadValue(
        f"{gave}, and its inputs have no labels.",
        '"loss" is the model\'s own loss if the inputs have labels, and without them the loss of '
        "the next token, of a decoder, whose tokens see none after them.",
        CHOICES,
    )


def own_loss_of(model: nn.Module, output: Any) -> Tensor | None:
    """The loss in what a model gave: its part `loss`, or of a transformers model that returns a
    tuple, the number that this begins with. None if it has none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, tuple) and output and hasattr(model, "config") and loss is None:
        loss = output[0] if isinstance(output[0], Tensor) and not output[0].dim() else None
    return loss if isinstance(loss, Tensor) else None


def sees_later(problem: Problem, site: CallSite) -> bool:
    """May a query look at a key that stands after it?"""
    column = problem.Tk - problem.Tq if site.at.column is None else site.at.column
    queries = torch.arange(problem.Tq, device=problem.device) - site.at.dropped
    queries = queries + torch.tensor(column, device=problem.device).reshape(-1, 1, 1)
    ranges = problem.key_ranges
    if ranges.bits is None:
        last = ranges.hi.masked_fill(ranges.lo >= ranges.hi, 0).amax(-1) - 1
        return bool((last > queries).any())
    keys = torch.arange(problem.Tk, device=problem.device)
    size = MASK_QUERIES_AT_ONCE
    blocks = (slice(i, i + size) for i in range(0, problem.Tq, size))
    return any(
        bool((ranges.to_bool(block) & (keys > queries[..., block].unsqueeze(-1))).any())
        for block in blocks
    )


def next_token_loss(inputs: Any) -> Metric:
    """The mean loss of the next token, in nats, over the ids (B, T) in `inputs` that are not
    padding: ``-log softmax(logits[b, t])[ids[b, t + 1]]``. Padding is what `attention_mask`, (B, T)
    or (B, past + T), marks with 0."""
    named = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    ids, real = named.get("input_ids"), named.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise BadType(
            "The loss of the next token was asked for, of inputs without ids (B, T).",
            "the next token is known from the ids that the model reads.",
            CHOICES,
        )
    B, T = ids.shape
    if T < 2:
        raise BadValue(
            f"The loss of the next token was asked for, of ids {tuple(ids.shape)}.",
            "the first token follows no other, so it takes two.",
            "pass a longer text, or a function of the output as metric=.",
        )
    if real is None:
        counts = torch.ones_like(ids[:, 1:])
    elif isinstance(real, Tensor) and real.dim() == 2 and len(real) == B and real.shape[1] >= T:
        real = real[:, -T:] != 0
        counts = (real[:, 1:] & real[:, :-1]).to(ids.dtype)
    else:
        what = f"of shape {tuple(real.shape)}" if isinstance(real, Tensor) else kind_of(real)
        raise BadValue(
            f"The loss of the next token was asked for, with an attention_mask {what}.",
            f"which of the ids {tuple(ids.shape)} are padding is known from a mask (B, T).",
            "pass labels= in the inputs, -100 where a token does not count, or a function of the "
            "output as metric=.",
        )

    def loss(output: Any) -> Tensor:
        logits = logits_of(output)
        if logits.shape[:2] != ids.shape:
            raise BadValue(
                f"The model gave logits {tuple(logits.shape)} for ids {tuple(ids.shape)}.",
                "the loss of the next token needs logits (B, T, words), of every token.",
                "leave out logits_to_keep=, pass labels= in the inputs, or a function of the "
                "output as metric=.",
            )
        flat = logits[:, :-1].flatten(0, 1).float()
        each = F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none")
        return (each * counts.flatten()).sum() / counts.sum()

    return loss


def logit_difference(right: int | Tensor, wrong: int | Tensor, at: int = -1) -> Metric:
    """A metric for `effects`: ``logits[b, at, right] - logits[b, at, wrong]``, the mean over b.

    `right` and `wrong` are ids of tokens, one or one per text (B,); `at` is the position whose next
    token is guessed. Raises `BadType` for what is no id, and `BadValue` for ids below 0 and for one
    id twice; the metric raises `BadValue` for ids and positions that the logits do not have.
    """
    for name, given in (("right", right), ("wrong", wrong)):
        if not _is_ids(given) and whole_number(given) is None:
            raise BadType(
                f"logit_difference got {name}={given!r}.",
                "it is the id of a token, or one id per text, (B,).",
                "pass whole numbers.",
            )
    ids = [torch.as_tensor(x, device="cpu") for x in (right, wrong)]
    least, most = min(int(x.min()) for x in ids), max(int(x.max()) for x in ids)
    texts = {len(x) for x in ids if x.dim()}
    if least < 0 or len(texts) > 1 or bool((ids[0] == ids[1]).any()):
        raise BadValue(
            f"logit_difference got right={right!r} and wrong={wrong!r}.",
            "they are the ids of two tokens, from 0 on, or of two for each text.",
            "pass two ids, for example from a tokenizer.",
        )

    def difference(output: Any) -> Tensor:
        logits = logits_of(output)
        B, T, words = logits.shape
        place = as_index("Position", at, T, f"the logits have {T}.", "pass one of them as at=.")
        if most >= words or not texts <= {B}:
            raise BadValue(
                f"logit_difference has right={right!r} and wrong={wrong!r}; the logits are "
                f"{tuple(logits.shape)}.",
                f"an id is below the number of words, {words}, and there is one for all texts or "
                "one for each.",
                "pass ids of this model's words.",
            )
        of_each = torch.arange(B, device=logits.device)
        picked = [logits[of_each, place, x.to(logits.device)] for x in ids]
        return (picked[0] - picked[1]).float().mean()

    return difference


def _is_ids(x: object) -> bool:
    """Is it a tensor of ids, one for each text?"""
    if not isinstance(x, Tensor) or x.dim() != 1 or not len(x):
        return False
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


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
