"""Explain attention on a sentence: tokens, embeddings, positions, projections, attention.

Embeddings and projections are random, drawn from a seed, so that every number can be reproduced.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..core.errors import BadValue, as_count, must_be_of, whole_number
from ..core.errors.limits import MOST_LESSON_FEATURES, MOST_LESSON_TOKENS, MOST_SEED
from ..core.functional.trace import Step, Trace
from ..core.masks import Mask
from . import MultiHeadAttention, SinusoidalPositions, TokenEmbedding
from .tokenize import tokenize

MOST_SHOWN = 64  # features up to which the matrices of the projections are steps


def explain_text(
    text: str,
    *,
    size: int = 8,
    heads: int = 2,
    seed: int = 123,
    mask: Mask | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    positions: bool = True,
) -> Trace:
    """Explain self-attention over the words of a text, with random embeddings and projections.

    Equal words have equal embeddings, (T, size), drawn in the order in which words first appear.
    With `positions`, sinusoids are added to them. Q, K and V are projections of the sum, for
    `heads` heads of size / heads features. Up to size 64 the projection matrices are also steps
    (`W_query`, (H, size, size / H), and so on). `mask=None` lets every query look at every key, and
    `scale=None` means 1/sqrt(size / heads). `seed` also determines the weights that dropout drops.

    Raises `BadValue` for a text without words or with more than 2048, for a size or a seed out of
    range, and for heads that do not divide the size.
    """
    rule = "a text is one string, which explain_text splits into words."
    hint = "pass a string; for your own tokens use explain(q, k, v, tokens=[...])."
    must_be_of(str, "explain_text", text, rule, hint)
    tokens = tokenize(text)
    if not tokens:
        gave = f"The text {text!r} has no words."
        raise BadValue(gave, "attention needs at least one token.", "pass a text with words.")
    seed = _between("seed", seed, 0, MOST_SEED)
    size = _between("size", size, 1, MOST_LESSON_FEATURES)
    if (count := whole_number(heads)) is None or count < 1 or size % count:
        rule = "each head has size / heads features, so the number of heads divides the size."
        raise BadValue(f"size={size} and heads={heads}.", rule, "pass another number of either.")
    if len(tokens) > MOST_LESSON_TOKENS:
        rule = f"explain_text holds every matrix, for at most {MOST_LESSON_TOKENS} tokens."
        raise BadValue(f"The text has {len(tokens)} tokens.", rule, "pass a shorter text.")
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        ids = torch.tensor([vocabulary[token] for token in tokens])
        torch.default_generator.manual_seed(seed)
        x = TokenEmbedding(len(vocabulary), size)(ids)
        layer = MultiHeadAttention(size, count, out_bias=False)
        before = [
            Step("ids", "vocabulary[token]", "Each different word gets a number.", "q", ids),
            Step("embeddings", "E[ids]", "Each word is looked up as a row of numbers; equal words "
                 "have equal rows.", "q e", x),
        ]  # fmt: skip
        if positions:
            sinusoids = SinusoidalPositions(size)(torch.zeros_like(x))
            x = x + sinusoids
            before.append(
                Step("positions", "sin(p / 10000^(2i/d)) in column 2i, cos in column 2i + 1",
                     "Attention does not know order, so each position p adds its own pattern of d "
                     "features.", "q e", sinusoids)
            )  # fmt: skip
        trace = layer.explain(x, tokens=tokens, mask=mask, scale=scale, dropout=dropout, seed=seed)
    steps = [*before, *_with_matrices(trace, layer, " + ".join(s.name for s in before[1:]))]
    length = f"{len(tokens)} token{'s' * (len(tokens) != 1)}"
    return replace(trace, steps=tuple(steps), about=f"{length}, seed {seed}: {trace.about}")


def _between(name: str, value: int, least: int, most: int) -> int:
    rule = f"the {name} of a lesson is a whole number from {least} to {most}."
    return as_count(name, value, rule, "pass a number in between.", least, most)


def _with_matrices(trace: Trace, layer: MultiHeadAttention, source: str) -> Iterator[Step]:
    """Yield the layer's steps, with `source` as the formula of its inputs.

    Before each projection comes its matrix, if it has at most `MOST_SHOWN` features.
    """
    heads, with_matrices = layer.heads, layer.d <= MOST_SHOWN
    axes = {"query": "h e d", "key": "g e d", "value": "g e v"}
    for step in trace:
        if step.name == "inputs":
            step = replace(step, formula=f"X = {source}")
        if with_matrices and step.name in axes:
            name = f"W_{step.name}"
            matrix = getattr(layer, name).weight.detach().T.unflatten(1, (heads, -1)).movedim(1, 0)
            why = f"A random matrix, which turns a token into a {step.name}. Each head has its own."
            yield Step(name, "", why, axes[step.name], matrix)
        if with_matrices and step.name == "projected":
            matrix = layer.out_proj.weight.detach().T.unflatten(0, (heads, -1))
            why = "A random matrix, which mixes the outputs of the heads. Each head has its rows."
            yield Step("W_out", "", why, "h v e", matrix)
        yield step
