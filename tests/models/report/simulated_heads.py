"""Heads without a role, drawn from a model of them, and heads with planted roles.

A text has words as in a language: the word of rank r with probability proportional to 1 / r; the
two most frequent are a comma and a full stop. The scores of a head without a role are normal
numbers of one key word ("words"), of a pair of words ("pairs"), half and half ("both"), or of a
cell ("none"). A planted role takes a part of each query's weight that has keys of it; the rest
stays as it is.
"""

import math

import torch
from torch import Tensor

from clearhead.models.report.findings import Role
from clearhead.models.roles.role_keys import RoleKeys, columns, word_numbers
from clearhead.models.roles.roles import RoleWeights, find_roles

KINDS = ("words", "pairs", "both", "none")
WINDOW = 8
ROLES = {
    "previous": ("previous",),
    "two before": ("before2",),
    "window of 8": ("window8",),
    "self": ("same",),
    "first": ("first",),
    "later sinks": ("sinks",),
    "first and later sinks": ("first", "sinks"),
    "separators": ("separators",),
    "induction": ("induction",),
    "duplicate": ("duplicate",),
    "first and previous": ("first", "previous"),
    "induction and previous": ("induction", "previous"),
}


def text(T: int, seed: int, words: int = 100) -> list[str]:
    odds = 1 / torch.arange(1.0, words + 1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(odds, T, replacement=True, generator=generator)
    return [{0: ",", 1: "."}.get(x, f"w{x}") for x in drawn.tolist()]


def keys_of(tokens: list[str], causal: bool = True, sinks: tuple[int, ...] = ()) -> RoleKeys:
    T = len(tokens)
    keep = torch.ones(T, T, dtype=torch.bool)
    at, words = torch.arange(T), word_numbers(tokens)
    keep = keep.tril() if causal else keep
    keys = RoleKeys(at, at, words, words, keep, columns(tokens, T, 0), 0, True)
    return keys.with_sinks(sinks)


def without_role(kind: str, heads: int, keys: RoleKeys, strength: float, seed: int) -> Tensor:
    """The weights of heads whose scores have the standard deviation `strength`, (heads, T, T)."""
    generator = torch.Generator().manual_seed(seed)
    words, T = keys.key_words, len(keys.key_words)
    count = int(words.max()) + 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(heads, *shape, generator=generator)

    if kind == "none":
        scores = normal(T, T)
    elif kind == "words":
        scores = normal(1, count)[:, :, words].expand(heads, T, T)
    else:
        scores = normal(count, count)
        if kind == "both":
            scores = (scores + normal(1, count)) / math.sqrt(2)
        scores = scores[:, words][:, :, words]
    return (strength * scores).masked_fill(~keys.keep, -math.inf).softmax(-1)


def planted(weights: Tensor, keys: RoleKeys, names: tuple[str, ...], mass: float) -> Tensor:
    """The weights with `mass` on the keys of the roles, in equal parts."""
    cells = keys.voted | {name: keys.keep & x for name, x in keys.columns.items()}
    rest = torch.ones(weights.shape[1], 1)
    added = torch.zeros(weights.shape[1:])
    for name in names:
        has = cells[name].any(-1, keepdim=True)
        added += mass / len(names) * cells[name] / cells[name].sum(-1, keepdim=True).clamp(min=1)
        rest -= mass / len(names) * has
    return weights * rest + added


def roles_of(weights: Tensor, keys: RoleKeys) -> list[tuple[Role, ...]]:
    top = weights.topk(min(8, weights.shape[-1]))
    found = RoleWeights(top.indices.masked_fill(top.values <= 0, -1))
    found.add(weights, keys, slice(0, weights.shape[1]))
    return find_roles(found, keys)[0]
