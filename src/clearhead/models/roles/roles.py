"""Find the roles of heads: groups of keys with more of a head's weight than chance explains.

A head has a role if
1. the queries that have a choice put at least `MIN_MASS` of their weight on its keys, and
   `TIMES_UNIFORM` times as much as uniform weights would; and
2. chance explains this with a probability of at most 1 in 1000, divided among all roles.

For roles that depend on the query, each query votes: is its largest weight on a key of the role?
Queries of one word are one vote, and so are queries that look at one word. The smaller number of
words counts, and the smaller fraction of votes (`chance_of_votes`). Roles of fixed keys are tested
by how much more weight their words receive than other words (`chance_of_column`).

The keys of a found role are set aside, and the other roles are tested again on the rest, until no
role is added. So a head may have several roles, and weight on a sink does not hide the others.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .role import NOT_NUMBERS, Role
from .role_keys import COLUMNS, RoleKeys, RoleQueries
from .role_tests import chance_of_column, chance_of_votes, interval
from .table import LABELS, OFFSETS, PLACES, REPEATS, WINDOW_ROLES, WINDOWS

MIN_MASS, TIMES_UNIFORM = 0.2, 2.0
# The largest probability that a head without a role gets one, for all roles with votes and for all
# roles of fixed keys, in equal parts (Bonferroni).
VOTED_CHANCE, COLUMN_CHANCE = 6e-4, 4e-4
FEWEST_QUERIES = 8  # that may look at a word, because its weight depends too much on fewer
SPREAD, SHARP = 0.8, 0.35  # entropy divided by that of uniform weights
NEARLY_ALL = 0.9  # the fraction of the mass of a larger window that selects a smaller one


@dataclass
class RoleWeights:
    """The weights from which the roles of heads are found.

    `mass[role]` is the weight of each query on the keys of a role, (H, n). `received[""]` is the
    weight that each key receives from queries beyond all offsets, relative to uniform weights,
    (H, Tk). `received[role]` is its part on the keys of a role in `REPEATS`. `top` has the keys of
    the largest weights of each query in falling order, (H, n, m), and -1 for no key.
    """

    top: Tensor
    mass: dict[str, list[Tensor]] = field(default_factory=dict)
    received: dict[str, Tensor] = field(default_factory=dict)

    def add(self, weights: Tensor, keys: RoleKeys, rows: slice) -> None:
        """Add the weights of some queries, (H, rows, Tk)."""
        H, n, Tk = weights.shape
        scale = keys.choices[rows].to(weights)
        received = {"": (weights * (keys.far[rows] * scale.unsqueeze(-1))).sum(1)}
        for name, column in keys.columns.items():
            self.mass.setdefault(name, []).append(weights @ column.to(weights))
        for name in keys.voted:  # few cells, so they are gathered
            query, key = keys.cells(name, rows)
            cells = weights[:, query, key]
            self.mass.setdefault(name, []).append(cells.new_zeros(H, n).index_add_(1, query, cells))
            if name in REPEATS:
                cells = cells * (keys.far[rows][query, key] * scale[query])
                received[name] = cells.new_zeros(H, Tk).index_add_(1, key, cells)
        for name, part in received.items():
            self.received[name] = self.received.get(name, 0) + part


def find_roles(weights: RoleWeights, keys: RoleKeys) -> tuple[list[tuple[Role, ...]], list[str]]:
    """Find the roles of each head, the leading one first, and the nearest role that it lacks.

    The latter is a text, or "" if no other role has the mass.
    """
    return _Search(weights, keys).run()


class _Search:
    def __init__(self, weights: RoleWeights, keys: RoleKeys) -> None:
        self.keys, self.top = keys, weights.top
        self.mass = {name: torch.cat(parts, 1) for name, parts in weights.mass.items()}
        self.received = weights.received
        self.H = len(self.top)
        self.free = (self.top >= 0) & (self.top != keys.first)  # not on keys of a found role
        self.roles: list[dict[str, Role]] = [{} for _ in range(self.H)]
        self.nearest: list[tuple[float, str]] = [(0.0, "")] * self.H
        self.means = {name: _mean(self.mass[name], asked) for name, asked in keys.tested.items()}

    def run(self) -> tuple[list[tuple[Role, ...]], list[str]]:
        names = [name for name in self.means if name not in WINDOW_ROLES]
        while any([self._try(name) for name in names]):
            pass
        self._try_windows()
        roles = [self._ordered(h) for h in range(self.H)]
        return roles, [
            "" if role else text for role, (_, text) in zip(roles, self.nearest, strict=True)
        ]

    def _try(self, name: str) -> bool:
        """Give a role to the heads that have it, and return whether there is a new one."""
        new = ~self._having(name) & self.means[name].is_large
        if not new.any():
            return False
        role = (self._column if name in COLUMNS else self._voted)(name, self.means[name])
        holds = new & role.holds
        self._give(name, role, holds)
        for h in (new & ~holds).nonzero().flatten().tolist():
            if float(role.mean.mass[h]) > self.nearest[h][0]:
                self.nearest[h] = float(role.mean.mass[h]), role.doubt(name, h)
        if name not in COLUMNS:
            self.free &= ~(self._among_top(name) & holds.view(-1, 1, 1))
        elif name != "first":
            column = self.keys.columns[name][self.top.clamp(min=0)]
            self.free &= ~(column & holds.view(-1, 1, 1))
        return bool(holds.any())

    def _try_windows(self) -> None:
        """Give each head the smallest window with nearly all of the mass of its largest window.

        The offsets of the head in the window do not count.
        """
        tested = {}
        for name in (name for name in WINDOW_ROLES if name in self.means):
            rest = self.mass[name].clone()
            offsets = OFFSETS if name in WINDOWS else PLACES  # all are inside each window
            for offset in offsets:
                rest -= self.mass[offset] * self._having(offset).unsqueeze(-1)
            tested[name] = self._voted(name, _mean(rest, self.keys.tested[name]))
        for h in range(self.H):
            holding = {n: float(x.mean.mass[h]) for n, x in tested.items() if bool(x.holds[h])}
            if holding:
                least = NEARLY_ALL * max(holding.values())
                name = next(name for name, mass in holding.items() if mass >= least)
                self._give(name, tested[name], torch.arange(self.H) == h)

    def _having(self, name: str) -> Tensor:
        """Return which heads have the role, (H,)."""
        return torch.tensor([name in roles for roles in self.roles])

    def _give(self, name: str, role: "_Tested", heads: Tensor) -> None:
        for h in heads.nonzero().flatten().tolist():
            self.roles[h][name] = role.of_head(name, h)

    def _among_top(self, name: str) -> Tensor:
        """Return which of the largest weights are on keys of the role, (H, n, m)."""
        cells = self.keys.voted[name].expand(self.H, -1, -1)
        return cells.gather(2, self.top.clamp(min=0)) & (self.top >= 0)

    def _voted(self, name: str, mean: "_Mean") -> "_Tested":
        keys, (voters, words, _) = self.keys, self.keys.tested[name]
        free = self.free[:, voters]
        best = free.float().argmax(-1, keepdim=True)  # the first that is free: the largest weight
        looks = free.any(-1)
        hit = self._among_top(name)[:, voters].gather(2, best).squeeze(-1) & looks
        key = self.top[:, voters].gather(2, best).squeeze(-1).clamp(min=0)
        none = int(keys.key_words.max()) + 1  # the number that means no key
        seen = keys.key_words[key].where(looks, none)
        rate, count = _by_word(hit.float(), words.expand(self.H, -1), int(words.max()) + 1)
        rate_seen, count_seen = _by_word(hit.float(), seen, none + 1)
        chance, _ = _by_word(keys.chance[name][voters][None], words[None], int(words.max()) + 1)
        fewer = torch.minimum(count, count_seen)
        probability = chance_of_votes(torch.minimum(rate, rate_seen), fewer, float(chance))
        return _Tested(mean, probability, VOTED_CHANCE / len(keys.voted), hit, words)

    def _column(self, name: str, mean: "_Mean") -> "_Tested":
        keys, (chooses, words, _) = self.keys, self.keys.tested[name]
        received = self.received[""].clone()
        queries = keys.far.sum(0).expand(self.H, -1).clone().float()
        for other in (n for n in REPEATS if n in self.received):
            has = self._having(other).unsqueeze(-1)
            received -= self.received[other] * has
            queries -= (keys.voted[other] & keys.far).sum(0) * has
        # Each sink counts as a separate word. A sink is tested alone and with the others, since one
        # mechanism makes all of them.
        are_sinks = keys.columns["first"] | keys.columns.get("sinks", keys.columns["first"])
        unit = keys.key_words + int(are_sinks.sum())
        unit[are_sinks] = torch.arange(int(are_sinks.sum()))
        size = int(unit.max()) + 1
        received, queries = (
            torch.zeros(self.H, size).index_add_(1, unit, x) for x in (received, queries)
        )
        excess = (received / queries.clamp(min=1)).clamp(min=1e-30).log()
        groups, chances = [keys.columns[name]], []
        if name in ("first", "sinks") and "sinks" in keys.columns:
            groups.append(are_sinks)
        for column in groups:
            is_role = torch.zeros(size, dtype=torch.bool)
            is_role[unit[column]] = True
            chances.append(chance_of_column(excess, is_role, queries >= FEWEST_QUERIES))
        probability = len(chances) * torch.stack(chances).amin(0)
        hit = keys.columns[name][self.top[:, chooses, 0].clamp(min=0)]
        level = COLUMN_CHANCE / (len(COLUMNS) - ("sinks" not in keys.columns))
        return _Tested(mean, probability, level, hit, words)

    def _ordered(self, head: int) -> tuple[Role, ...]:
        """Sort roles by falling mass, those that repeat first, because many heads have a sink.

        Before other roles the sink leads only if the queries of the first one prefer it.
        """
        roles = sorted(self.roles[head].values(), key=lambda x: (x.name not in REPEATS, -x.mass))
        sink = self.roles[head].get("first")
        others = [role for role in roles if role is not sink]
        if sink is None or not others or others[0].name in REPEATS:
            return tuple(roles)
        leads = others[0]
        tested = self.keys.tested
        queries = tested.get(leads.name, tested["first"]).queries
        if float(self.mass["first"][head, queries].mean()) <= leads.mass:
            return (leads, *(role for role in roles if role is not leads))
        return (sink, *others)


class _Mean(NamedTuple):
    """The mean weight of each head on the keys of a role, half the width of its interval, and
    whether the role needs no larger one, (H,) each."""

    mass: Tensor
    half: Tensor
    is_large: Tensor


def _mean(mass: Tensor, tested: RoleQueries) -> _Mean:
    mean, half = interval(mass[:, tested.queries], tested.words)
    return _Mean(mean, half, mean >= max(MIN_MASS, TIMES_UNIFORM * tested.uniform))


@dataclass
class _Tested:
    """The test of a role for all heads.

    `chance` is the probability of each, (H,), and `level` the largest of a head with the role.
    `hit`, (H, v), are the queries with their largest weight on a key of the role, and `words` the
    numbers of their words.
    """

    mean: _Mean
    chance: Tensor
    level: float
    hit: Tensor
    words: Tensor

    @property
    def holds(self) -> Tensor:
        """Which heads have the role, (H,)."""
        return self.mean.is_large & (self.chance <= self.level)

    def of_head(self, name: str, h: int) -> Role:
        mass, half, _ = (float(x[h]) for x in self.mean)
        hit = self.hit[h]
        return Role(
            name=name,
            label=LABELS[WINDOW_ROLES.get(name, name)],
            mass=mass,
            low=max(0.0, mass - half),
            high=min(1.0, mass + half),
            chance=float(self.chance[h]),
            hits=int(hit.sum()),
            queries=len(hit),
            words=len(self.words[hit].unique()),
        )

    def doubt(self, name: str, h: int) -> str:
        hit = self.hit[h]
        return (
            f"Possibly {LABELS[name]}: {int(hit.sum())} of {len(hit)} tokens look there most, but "
            "a head that prefers certain words may do so by chance."
        )


def _by_word(x: Tensor, words: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Average x (H, n) over the queries of each word, and then over words; also count the words."""
    total = torch.zeros(len(x), size).scatter_add_(1, words, x)
    count = torch.zeros(len(x), size).scatter_add_(1, words, torch.ones_like(x))
    different = (count > 0).sum(-1)
    return (total / count.clamp(min=1)).sum(-1) / different.clamp(min=1), different


def with_sink_logit(roles: tuple[Role, ...], mass: float, queries: int) -> tuple[Role, ...]:
    """Add the role of a sink logit, which has no word, so chance cannot explain it."""
    if not mass >= MIN_MASS:
        return roles
    sink = Role("sink", LABELS["sink"], mass, mass, mass, 0.0, queries, queries, 0)
    return tuple(sorted((*roles, sink), key=lambda role: -role.mass))


def label_of_evenness(evenness: float) -> str:
    """Return the label of a head without a role, from its entropy over that of uniform weights."""
    if math.isnan(evenness):
        return NOT_NUMBERS
    return "spread" if evenness >= SPREAD else "sharp" if evenness <= SHARP else "mixed"
