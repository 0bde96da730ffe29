"""Find the roles of the heads of an attention call, from the exact weights of some queries."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.errors.limits import LEAST_REPEAT_QUERIES, MOST_ROLE_QUERIES, ROLE_CELLS
from ...core.formatting import evenly
from ...core.functional.ambient import rows_of
from ...core.problem.problem import Inputs, Problem
from ..follow.cross_attention import CallSite
from .role import Role
from .role_keys import RoleKeys, columns, repeated, word_numbers
from .roles import RoleWeights, find_roles
from .table import REPEATS


class CallRoles(NamedTuple):
    """The roles of each head, the role that it nearly has, and its mean weight on `REPEATS`, (H,).

    The mean is over the queries that may look at such keys, and NaN if they are too few.
    """

    roles: list[tuple[Role, ...]]
    nearest: list[str]
    repeat_shares: dict[str, Tensor]


def role_keys(
    problem: Problem, site: CallSite, first: int, offset: int | None
) -> tuple[RoleKeys, ...]:
    """Return, for each mask of a call, which keys belong to each role of some queries.

    A call has one mask, or one for each head.

    `offset` is the position of query 0 among the keys, or None if they are from two texts. In a
    long text only some queries are used: evenly spaced ones, and some whose word has an earlier
    copy.
    """
    Tq, Tk = problem.Tq, problem.Tk
    key_words = torch.arange(Tk) if site.key_tokens is None else word_numbers(site.key_tokens)
    real = site.at.is_real(Tq).flatten().expand(Tq).nonzero().flatten()
    chosen = real[evenly(len(real), MOST_ROLE_QUERIES)]
    at = None
    if offset is not None:
        again = real[repeated(key_words, first)[real + offset]]
        again = again[evenly(len(again), MOST_ROLE_QUERIES)]
        chosen = torch.cat([chosen, again]).unique()
        at = chosen + offset
        words = key_words[at]
    else:
        tokens = site.query_tokens
        words = (torch.arange(Tq) if tokens is None else word_numbers(tokens))[chosen]
    keep = problem.key_ranges.to_bool(chosen.to(problem.device), slice(0, Tk))[0].cpu()
    known = columns(site.key_tokens, Tk, first)
    repeats = site.key_tokens is not None
    picture = site.picture
    places = None if picture is None or picture.in_text else picture.places
    keys = RoleKeys(chosen, at, words, key_words, keep[0], known, first, repeats, places)
    return tuple(replace(keys, keep=of_head) for of_head in keep)


def roles_of(
    problem: Problem, inputs: Inputs, masks: tuple[RoleKeys, ...], top: Tensor
) -> CallRoles:
    """Find the roles of the heads of a call; `top`, (H, Tq, n), has the keys of the top weights."""
    queries, H = masks[0].queries, problem.H
    heads = [slice(h, h + 1) for h in range(H)] if len(masks) > 1 else [slice(0, H)]
    weights = [RoleWeights(top[part][:, queries].long()) for part in heads]
    for rows in torch.arange(len(queries)).split(max(1, ROLE_CELLS // (H * problem.Tk))):
        exact = rows_of(problem, inputs, queries[rows].to(problem.device))[0].float().cpu()
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        for own, keys, of_heads in zip(heads, masks, weights, strict=True):
            of_heads.add(exact[own], keys, part)
    roles: list[tuple[Role, ...]] = []
    nearest: list[str] = []
    for of_heads, keys in zip(weights, masks, strict=True):
        some_roles, some_nearest = find_roles(of_heads, keys)
        roles += some_roles
        nearest += some_nearest
    shares = {
        name: torch.cat([_mean(w, k, name) for w, k in zip(weights, masks, strict=True)])
        for name in REPEATS
        if name in masks[0].voted
    }
    return CallRoles(roles, nearest, shares)


def _mean(weights: RoleWeights, keys: RoleKeys, name: str) -> Tensor:
    sees = keys.voted[name].any(-1)
    mass = torch.cat(weights.mass[name], 1)[:, sees]
    few = int(sees.sum()) < LEAST_REPEAT_QUERIES
    return torch.full((len(mass),), math.nan) if few else mass.mean(-1)
