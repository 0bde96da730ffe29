"""The metrics of `effects`: the loss, a difference of logits, how far vectors turn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.errors import BadType, BadValue, as_index, kind_of, whole_number
from ...core.errors.limits import MASK_QUERIES_AT_ONCE
from ...core.problem.problem import Problem
from ...hf.architectures import TARGETS
from ..follow.outputs import AS_METRIC, logits_of, own_loss_of, turns
from ..inspect.edits.edit import EditSite

Metric = Callable[[Any], Tensor]


CHOICES = (
    "pass labels= in the inputs for the model's own loss, metric=logit_difference(...), or a "
    "function of the output as metric=."
)


def loss_metric(
    model: nn.Module, inputs: Any, output: Any, calls: Sequence[tuple[Problem, EditSite]]
) -> tuple[str, Metric]:
    """Return the name of the metric "loss", and the metric.

    It is the model's own loss if its output has one, as it does with labels; otherwise, for a
    decoder, the next-token loss. `output` and `calls` are those of the unedited run. Raises
    `BadValue` or `BadType` for any other model or inputs.
    """

    def own_loss(output: Any) -> Tensor:
        loss = own_loss_of(model, output)
        assert loss is not None
        return loss

    if own_loss_of(model, output) is not None:
        return "the model's loss", own_loss
    named = inputs if isinstance(inputs, Mapping) else {}
    kind = type(model).__name__
    if labels := [n for n, x in named.items() if x is not None and any(p in n for p in TARGETS)]:
        gave = f"The inputs have {' and '.join(labels)}, and the {kind} returned no loss."
        rule = 'with labels, "loss" is what the model itself computes and returns as `loss`.'
        raise BadValue(gave, rule, "leave labels out, or pass a function of the output as metric=.")
    metric = next_token_loss(inputs)
    ids = named["input_ids"] if named else inputs
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or any(
        name.startswith("decoder_") and x is not None for name, x in named.items()
    ):
        raise _no_next_token(f"The {kind} is an encoder-decoder")
    own = [(problem, site) for problem, site in calls if problem.Tq == ids.shape[1]]
    if any(problem.Tk == problem.Tq and sees_later(problem, site) for problem, site in own):
        raise _no_next_token(f"In the {kind} a token looks at those after it")
    if calls and all(sees_later(problem, site) for problem, site in own):
        raise _no_next_token(f"It is unknown whether a token of the {kind} looks at those after it")
    return "loss", metric


def _no_next_token(gave: str) -> BadValue:
    rule = 'without labels, "loss" is the next-token loss of a decoder, with causal attention.'
    return BadValue(f"{gave}, and its inputs have no labels.", rule, CHOICES)


def sees_later(problem: Problem, site: EditSite) -> bool:
    """Return whether a query may look at a key after it."""
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
    """Return the metric "mean next-token loss", in nats, of the ids (B, T) in `inputs`.

    The loss of a token is ``-log softmax(logits[b, t])[ids[b, t + 1]]``. Padding, which is 0 in
    `attention_mask`, (B, T) or (B, past + T), does not count.
    """
    named = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    ids, real = named.get("input_ids"), named.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        gave = "The inputs have no ids (B, T), from which to compute the next-token loss."
        rule = "the next token is one of the ids that the model reads."
        hint = "pass labels=, or metric=, such as lambda output: output.logits[:, 3].mean()."
        raise BadType(gave, rule, hint)
    B, T = ids.shape
    if T < 2:
        rule = "the first token has no loss, so the loss needs two tokens or more."
        hint = "pass a longer text, or a function of the output as metric=."
        raise BadValue(f"The next-token loss was requested for ids {tuple(ids.shape)}.", rule, hint)
    if real is None:
        counts = torch.ones_like(ids[:, 1:])
    elif isinstance(real, Tensor) and real.dim() == 2 and len(real) == B and real.shape[1] >= T:
        real = real[:, -T:] != 0
        counts = (real[:, 1:] & real[:, :-1]).to(ids.dtype)
    else:
        what = f"of shape {tuple(real.shape)}" if isinstance(real, Tensor) else kind_of(real)
        gave = f"The next-token loss was requested with an attention_mask {what}."
        rule = f"the mask marks padding of the ids {tuple(ids.shape)}, so it has shape (B, T)."
        hint = "pass labels= with -100 for padding, or a function of the output as metric=."
        raise BadValue(gave, rule, hint)

    def loss(output: Any) -> Tensor:
        logits = logits_of(output, AS_METRIC)
        if logits.shape[:2] != ids.shape:
            gave = f"The model returned logits {tuple(logits.shape)} for ids {tuple(ids.shape)}."
            rule = "the next-token loss needs logits (B, T, words) of every token."
            hint = "leave out logits_to_keep=, pass labels=, or metric= a function of the output."
            raise BadValue(gave, rule, hint)
        flat = logits[:, :-1].flatten(0, 1).float()
        losses = F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none")
        return (losses * counts.flatten()).sum() / counts.sum()

    return loss


def logit_difference(right: int | Tensor, wrong: int | Tensor, at: int = -1) -> Metric:
    """Return a metric for `effects`: the mean of ``logits[b, at, right] - logits[b, at, wrong]``.

    `right` and `wrong` are token ids, one for all texts or one per text, (B,). `at` is the position
    whose next token is predicted. Raises `BadType` for anything that is not an id, and `BadValue`
    for negative ids or if both are equal. The metric raises `BadValue` for ids and positions that
    the logits do not have.
    """
    for name, value in (("right", right), ("wrong", wrong)):
        if not _is_ids(value) and whole_number(value) is None:
            rule = "it is the id of a token, or one id per text, (B,)."
            raise BadType(f"logit_difference got {name}={value!r}.", rule, "pass whole numbers.")
    ids = [torch.as_tensor(x, device="cpu") for x in (right, wrong)]
    least, most = min(int(x.min()) for x in ids), max(int(x.max()) for x in ids)
    texts = {len(x) for x in ids if x.dim()}
    if least < 0 or len(texts) > 1 or bool((ids[0] == ids[1]).any()):
        rule = "they are two different ids, from 0 on, or two for each text."
        hint = "pass two ids, for example from a tokenizer."
        raise BadValue(f"logit_difference got right={right!r} and wrong={wrong!r}.", rule, hint)

    def difference(output: Any) -> Tensor:
        logits = logits_of(output, AS_METRIC)
        B, T, words = logits.shape
        position = as_index("Position", at, T, f"the logits have {T}.", "pass one of them as at=.")
        if most >= words or not texts <= {B}:
            gave = f"logit_difference has {right=}, {wrong=} and logits {tuple(logits.shape)}."
            rule = f"ids are below the number of words {words}: one for all texts, or one for each."
            raise BadValue(gave, rule, "pass ids of this model's words.")
        texts_of_batch = torch.arange(B, device=logits.device)
        picked = [logits[texts_of_batch, position, x.to(logits.device)] for x in ids]
        return (picked[0] - picked[1]).float().mean()

    difference.tokens = ids  # type: ignore[attr-defined]  # a function's own, for logit_attribution
    return difference


def _is_ids(x: object) -> bool:
    """Return whether `x` is a tensor of ids, one per text."""
    if not isinstance(x, Tensor) or x.dim() != 1 or not len(x):
        return False
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def turn(unedited: Any) -> Metric:
    """Return a metric: the mean over tokens of `turns` from `unedited`, a model's output."""

    def turn(output: Any) -> Tensor:
        return turns(unedited, output).mean()

    return turn
