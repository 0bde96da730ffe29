"""Toy models for reports: nothing but attention calls, with given queries and keys."""

import torch
from torch import Tensor, nn

import clearhead as ch


class AttentionCalls(nn.Module):
    """Makes the calls that it is given as (q, k, keywords); the values are the keys."""

    def __init__(self, *calls):
        super().__init__()
        self.calls = calls

    def forward(self, ids):
        for q, k, keywords in self.calls:
            ch.attention(q, k, k, **keywords)


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pointing(T, where, strength=60.0):
    """A head whose query i looks at key where(i): one-hot keys, and queries that match them."""
    keys = torch.eye(T)
    return torch.stack([strength * keys[where(i)] for i in range(T)]), keys
