"""The decoder: embeddings, blocks of causal attention, and logits for the next word; also as data.

Letters: B batch, T tokens, d features, H heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ..core.engines.reference import WHY
from ..core.errors import BadValue
from ..models.report.live_model import LiveModel
from ..nn import RelativePositions, TokenEmbedding, TransformerBlock


@dataclass(frozen=True)
class Config:
    """The sizes of a decoder. The last three are for ablation: False removes a part."""

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
    """A decoder: ids (B, T) or (T) to logits for the next word, (B, T, words) or (T, words).

    ``x = E[ids]; x = block_i(x) for each block; logits = norm(x) W``. The only positions are
    `RelativePositions`, one learned bias per distance: a head can look by distance, by content, or
    by both, and every pair of words trains the bias of its distance.

    Raises `BadValue` for more tokens than the context, and any error of the layers.
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
                undo = Multiply((config.d // config.heads) ** 0.5)
                block.attention.W_query = nn.Sequential(block.attention.W_query, undo)  # type: ignore[assignment]  # replaces a Linear

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits, (..., T) -> (..., T, words). Raises `BadValue` for a longer text."""
        if input_ids.shape[-1] > self.config.context:
            rule = f"the context of this model is {self.config.context} tokens."
            hint = "pass a shorter text, for example its last sentences."
            raise BadValue(f"The text has {input_ids.shape[-1]} tokens.", rule, hint)
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def untrained(config: Config, seed: int = 0) -> Decoder:
    """Return a model with the initial weights of a seed. torch's global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(config)


class Multiply(nn.Module):
    """Multiplies queries by sqrt(D), which cancels the scaling by 1/sqrt(D)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


MOST_WEIGHTS = 700_000  # of a model in a page: 2.8 MB


def live_model(model: Decoder, words: Sequence[str]) -> LiveModel | None:
    """Return the model for the page; None if it is large, or if a part of it was removed."""
    config, weights = model.config, model.state_dict()
    usual = config.positions and config.causal and config.scaled
    if not usual or sum(x.numel() for x in weights.values()) > MOST_WEIGHTS:
        return None
    relative = next(x for x in model.modules() if isinstance(x, RelativePositions))
    sizes = config.heads, config.context, relative.near, relative.longest
    return LiveModel(tuple(words), *sizes, WHY, weights)
