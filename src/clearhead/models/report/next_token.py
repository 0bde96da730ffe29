"""Find the heads that write the predicted next token: `find_next_token`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.functional.ambient import without_followers
from ..follow.outputs import logits_of
from ..inspect.edits import ablate
from ..inspect.intervene import intervene
from ..weights.logit_attribution import logit_attribution
from ..weights.logit_parts import LogitAttribution
from .findings import Layer, NextToken, Writer

WRITERS, LEAST_WRITTEN = 8, 0.25  # listed heads, and what one writes relative to the first
# The clearest writer: the least probability of the token; the least weight of its key, and the
# least fraction of all positive parts that it writes from there; the least fall of the probability
# without it; and the number of heads whose fall is measured.
LEAST_PROBABILITY, LEAST_WEIGHT, LARGE_PART, LEAST_FALL, TRIED = 0.1, 0.3, 0.02, 0.01, 3


def find_next_token(
    model: nn.Module, inputs: Tensor | Mapping[str, Any], start: Callable[[], Any], logits: Tensor,
    words: Sequence[str], layers: Sequence[Layer],
) -> NextToken:  # fmt: skip
    """Split the logit of the most probable next token by head, and name the heads that write it.

    `start` runs the model on `inputs`, `logits` are those of the last position, (words,), and
    `layers` describe the run. Nobody follows the further runs. Raises any error of
    `logit_attribution`, and `BadValue` if its layers are not those of the report.
    """
    target = int(logits[: len(words)].argmax())
    with without_followers():
        parts = logit_attribution(model, inputs, target, center=True)
        if parts.heads.shape[:2] != (len(layers), len(layers[0].heads)):
            gave = f"{len(layers)} attention calls are reported; {len(parts.heads)} write logits."
            rule = "the heads of a report are those that write the logits."
            raise BadValue(gave, rule, "call logit_attribution for a part of the calls.")
        probability = float(logits.float().softmax(-1)[target])
        writers = {(x.layer, x.head): x for x in _writers(parts)}
        clear = [x for x in writers.values() if _is_clear(x, parts, layers, words[target])]
        clearest = None
        for writer in clear[: TRIED if probability >= LEAST_PROBABILITY else 0]:
            edit = ablate(layers=[writer.layer], heads=[writer.head])
            with torch.no_grad(), intervene(model, [edit]):
                edited = logits_of(start())[0, -1]
            without = float(edited.float().softmax(-1)[target])
            writer = replace(writer, without=without)
            writers[writer.layer, writer.head] = writer
            if probability - without >= LEAST_FALL:
                clearest = writer
                break
    return NextToken(words[target], probability, tuple(writers.values()), clearest)


def _writers(parts: LogitAttribution) -> tuple[Writer, ...]:
    """Return the heads with the largest parts of the logit of the last position, ordered by what
    the token that adds most adds to each."""
    at_end = parts.heads[:, :, -1]
    largest = at_end.flatten().topk(min(WRITERS, at_end.numel()))
    writers = []
    for part, index in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
        layer, head = divmod(index, at_end.shape[1])
        sources = parts.sources(layer, head, -1)
        key = int(sources.argmax())
        writers.append(Writer(layer, head, part, key, float(sources[key])))
    writers.sort(key=lambda x: -x.from_key)
    least = LEAST_WRITTEN * writers[0].from_key
    return tuple(x for x in writers if x.part > 0 and x.from_key >= least)


def _is_clear(writer: Writer, parts: LogitAttribution, layers: Sequence[Layer], token: str) -> bool:
    """Return whether a head looks most at an earlier token, and writes a large part from there.

    The first token counts only if it is the predicted one, because it is a sink of many heads.
    """
    others = [parts.heads[:, :, -1].flatten(), parts.mlps[:, -1], parts.embedding[-1:],
              parts.bias[-1:]]  # fmt: skip
    total = float(torch.cat([x.double() for x in others]).clamp(min=0).sum())
    layer = layers[writer.layer]
    last = layer.received.shape[-1] - 1
    keys = layer.key_tokens
    is_sink = writer.key == 0 and (keys is None or keys[0].strip() != token.strip())
    looks_there = (
        int(layer.top_keys[writer.head, -1, 0]) == writer.key
        and float(layer.top_weights[writer.head, -1, 0]) >= LEAST_WEIGHT
    )
    is_large = writer.from_key >= LARGE_PART * total
    return looks_there and is_large and writer.key < last and not is_sink
