"""A small model of two blocks, with random weights."""

import torch
from torch import nn

import clearhead as ch

T, WORDS = 7, 19


class TwoBlocks(nn.Module):
    """Grouped heads in the first block, biases in the second, a last norm, and logits of words."""

    def __init__(self, norm="pre", after=True):
        super().__init__()
        self.embed = ch.nn.TokenEmbedding(WORDS, 12)
        self.first = ch.nn.TransformerBlock(12, 3, kv_heads=1, causal=True, norm=norm)
        self.second = ch.nn.TransformerBlock(12, 3, causal=True, norm=norm, qkv_bias=True)
        self.norm = nn.LayerNorm(12) if after else nn.Identity()
        self.head = nn.Linear(12, WORDS)

    def forward(self, ids):
        return self.head(self.norm(self.second(self.first(self.embed(ids)))))


def randomised(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(std=0.5)
    return model.eval()


def ids(count=T):
    return torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(1))
