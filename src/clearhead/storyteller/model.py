"""The decoder: embeddings, blocks of causal attention, and a guess at the next word.

Letters: B batch, T tokens, d features, H heads, D head size.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ..errors import BadValue
from ..nn import RelativePositions, TokenEmbedding, TransformerBlock


@dataclass(frozen=True)
class Config:
    """The sizes of a decoder. The last three are there to be taken away, one at a time."""

    words: int
    d: int = 128
    layers: int = 2
    heads: int = 8
    context: int = 128
    positions: bool = True
    causal: bool = True
    scaled: bool = True

    def as_dict(self) -> dict[str, int | bool]:
        return asdict(self)


class Decoder(nn.Module):
    """Ids (B, T) or (T) -> logits for the next word, (B, T, words) or (T, words).

    ``x = E[ids]; x = block_i(x) for each block; logits = norm(x) W``. Where words stand is known
    from `RelativePositions` alone: a head can look by distance, by meaning, or by both, and looking
    by distance is one number, which all words train.

    Raises `BadValue` for more tokens than the context, and what the layers raise.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = TokenEmbedding(config.words, config.d)
        blocks = [
            TransformerBlock(
                config.d,
                config.heads,
                causal=config.causal,
                qkv_bias=True,
                relative=RelativePositions(config.heads) if config.positions else None,
            )
            for _ in range(config.layers)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.d)
        self.head = nn.Linear(config.d, config.words, bias=False)
        nn.init.normal_(self.embed.table.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)
        if not config.scaled:
            for block in blocks:
                undo = Times((config.d // config.heads) ** 0.5)
                block.attention.W_query = nn.Sequential(block.attention.W_query, undo)  # type: ignore[assignment]  # a module in the place of another

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[-1] > self.config.context:
            raise BadValue(
                f"The text has {ids.shape[-1]} tokens.",
                f"this model reads at most {self.config.context} tokens at a time.",
                "pass a shorter text, for example its last sentences.",
            )
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def untrained(config: Config, seed: int = 0) -> Decoder:
    """A model with the weights that a seed begins with. The caller's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(config)


class Times(nn.Module):
    """Queries times sqrt(D): what the scaling divides by, undone, so that scores are unscaled."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor
