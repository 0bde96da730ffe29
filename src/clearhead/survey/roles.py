"""What a head does, as a mix: how often its largest weight is on each kind of key."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .basic import KINDS

LEAST, TIMES_CHANCE = 0.1, 2.0
# The kinds that are a behaviour, with the metric of their mass. "first" is where a head rests, and
# "near" and "far" are the keys of no other kind.
BEHAVIOURS = {
    "self": "self", "previous": "previous", "induction": "induction", "duplicate": "duplicate",
    "separator": "separators", "ahead": "ahead",
}  # fmt: skip


class Share(NamedTuple):
    """How often the largest weight of a head is on one kind of key.

    `share` is the fraction of its queries, and `low` and `high` its 95 % interval over texts, NaN
    for one text. `chance` is the fraction for a query that picks any of its keys, NaN for "near"
    and "far".
    """

    kind: str
    share: float
    low: float
    high: float
    chance: float

    @property
    def is_behaviour(self) -> bool:
        """Whether the head looks there in at least a tenth of its queries, and twice as often as by
        chance; by the lower end of the interval."""
        lowest = self.share if math.isnan(self.low) else self.low
        return self.kind in BEHAVIOURS and lowest >= max(LEAST, TIMES_CHANCE * self.chance)


class Roles(NamedTuple):
    """The mix of a head: fractions that sum to 1, the largest first."""

    layer: int
    head: int
    mix: tuple[Share, ...]

    @property
    def behaviours(self) -> tuple[str, ...]:
        """The kinds of keys at which the head looks more than by chance."""
        return tuple(part.kind for part in self.mix if part.is_behaviour)

    @property
    def does_more_than_one_thing(self) -> bool:
        """Whether it has two behaviours or more. Resting on the first token is not one."""
        return len(self.behaviours) > 1

    def __repr__(self) -> str:
        parts = [
            f"{part.kind} {part.share:.2f}"
            + ("" if math.isnan(part.low) else f" ({part.low:.2f} to {part.high:.2f})")
            for part in self.mix
            if part.share >= 0.005
        ]
        several = "; does more than one thing" if self.does_more_than_one_thing else ""
        return f"layer {self.layer}, head {self.head}: {', '.join(parts)}{several}"


def roles_of(layer: int, head: int, rows: Mapping[str, Mapping[str, Any]]) -> Roles:
    """Return the mix of a head, from its rows in the table of heads, by metric."""
    shares = []
    for kind in KINDS:
        row, mass = rows[f"looks_{kind}"], rows.get(BEHAVIOURS.get(kind, ""))
        # The chance is over all queries; those without such a key have 0.
        chance = 0.0 if mass is None else mass["uniform"] * mass["queries"] / row["queries"]
        chance = chance if kind in BEHAVIOURS else math.nan
        low, high = (math.nan if row[end] is None else row[end] for end in ("low", "high"))
        shares.append(Share(kind, row["mean"], low, high, chance))
    return Roles(layer, head, tuple(sorted(shares, key=lambda part: -part.share)))
