"""From a sentence to a `Trace`: tokens, embeddings, positions, projections, then attention.

Nothing is learned here: embeddings and projections are drawn from a seed, so that every number can
be followed and made again.
"""

import re
from dataclasses import replace

import torch

from .errors import BadValue
from .masks import Mask
from .nn import MultiHeadAttention, SinusoidalPositions, TokenEmbedding
from .trace import Step, Trace

LONGEST = 2048


def tokenize(text: str) -> list[str]:
    """Words and punctuation marks, as they stand: ``"It's late."`` -> It's, late, ."""
    return re.findall(r"\w+(?:['\u2019]\w+)*|[^\w\s]", text)


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

    Equal words have equal embeddings, (T, size); with `positions`, sinusoids are added to them. Q,
    K and V are projected from the sum for `heads` heads of size / heads features each. `mask=None`
    lets everyone look at everything, `scale=None` means 1/sqrt(size / heads). Dropout drops the
    cells that `seed` decides.

    Raises `BadValue` for a text without words or with more than 2048, and for heads that do not
    divide the size.
    """
    tokens = tokenize(text)
    if not tokens:
        raise BadValue(
            f"The text {text!r} has no words.",
            "attention needs at least one token.",
            "pass some words.",
        )
    if len(tokens) > LONGEST:
        raise BadValue(
            f"The text has {len(tokens)} tokens.",
            f"explain holds every matrix it shows, for at most {LONGEST} tokens.",
            "pass a shorter text.",
        )
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    ids = torch.tensor([vocabulary[token] for token in tokens])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        embed = TokenEmbedding(len(vocabulary), size)
        attend = MultiHeadAttention(size, heads)
        x = embed(ids)
        before = [
            Step("ids", "vocabulary[token]", "Each different word gets a number.", "q", ids),
            Step("embeddings", "E[ids]", "Each word is looked up as a row of numbers; equal words "
                 "have equal rows.", "q e", x),
        ]  # fmt: skip
        if positions:
            place = SinusoidalPositions(size)
            wave = place(torch.zeros_like(x))
            x = place(x)
            before.append(
                Step("positions", "sin(p / 10000^(2i/d)), cos(p / 10000^(2i/d))", "Attention does "
                     "not know order, so each position adds its own pattern.", "q e", wave)
            )  # fmt: skip
        trace = attend.explain(x, tokens=tokens, mask=mask, scale=scale, dropout=dropout, seed=seed)
    return replace(trace.before(*before), about=f"{len(tokens)} tokens, seed {seed}: {trace.about}")
