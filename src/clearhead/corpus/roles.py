"""What a head does, as a mix: how often its largest weight is on each kind of key."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .inference import LEAST_Q
from .looks import BEHAVIOURS
from .mixes import ALL, CLASS_NAMES, LEAST, TIMES_CHANCE

LARGEST_P = 0.025  # of a behaviour


class Share(NamedTuple):
    """How often the largest weight of a head is on one kind of key.

    Attributes:
        kind: the kind of key, of `basic.KINDS`.
        share: the fraction of the queries.
        low, high: its 95 % interval over texts, None for one text.
        alone: the fraction whose key has no other behaviour, None for a kind that is not one.
        chance: the fraction for a query that picks any of its keys; None as for `alone`.
        p: the p-value of the behaviour (`mixes`); None for one text.
    """

    kind: str
    share: float
    low: float | None
    high: float | None
    alone: float | None
    chance: float | None
    p: float | None

    @property
    def is_behaviour(self) -> bool:
        """Whether the head looks there in at least a tenth of its queries, and twice as often as by
        chance, at keys that have no other behaviour. A test over texts has p below 0.025; for one
        text, the fraction decides."""
        if self.kind not in BEHAVIOURS or self.alone is None or self.chance is None:
            return False
        if self.p is None:
            return self.alone >= max(LEAST, TIMES_CHANCE * self.chance)
        return self.p < LARGEST_P


Mix = tuple[Share, ...]


class Roles(NamedTuple):
    """The mix of a head, over all queries and by the class of their tokens.

    Attributes:
        layer, head: numbers of the head, from 0.
        mix: fractions of all queries that sum to 1, the largest first.
        by_class: the same for each class of `token_classes.CLASSES` that has queries.
        q: the p-value that it does more than one thing, corrected for the number of heads; None for
            one text. `mixes` describes the test.
        surest: the two surest behaviours, as (class, kind); the class is "all" for all queries.
        q_differ: the same for classes that differ.
        differ: two classes that differ, as (class, kind).
    """

    layer: int
    head: int
    mix: Mix
    by_class: dict[str, Mix]
    q: float | None
    surest: tuple[tuple[str, str], ...]
    q_differ: float | None
    differ: tuple[tuple[str, str], ...]

    @property
    def behaviours(self) -> tuple[str, ...]:
        """The kinds of keys at which the head looks more than by chance, over all queries."""
        return tuple(part.kind for part in self.mix if part.is_behaviour)

    @property
    def does_more_than_one_thing(self) -> bool:
        """Whether it has two behaviours, in one class or in two. Resting on the first token is not
        one."""
        return any(q is not None and q < LEAST_Q for q in (self.q, self.q_differ))

    @property
    def reason(self) -> str:
        """The two behaviours of a head that does more than one thing; "" for another head."""
        if not self.does_more_than_one_thing:
            return ""
        differs = self.q_differ is not None and self.q_differ < LEAST_Q
        return " and ".join(
            kind if token_class == ALL else f"{kind} in the class {token_class}"
            for token_class, kind in (self.differ if differs else self.surest)
        )

    def __repr__(self) -> str:
        parts = [
            f"{part.kind} {part.share:.2f}"
            + ("" if part.low is None else f" ({part.low:.2f} to {part.high:.2f})")
            for part in self.mix
            if part.share >= 0.005
        ]
        several = f"; does more than one thing: {self.reason}" if self.reason else ""
        return f"layer {self.layer}, head {self.head}: {', '.join(parts)}{several}"


def roles_of(mixes: Iterable[Mapping[str, Any]], row: Mapping[str, Any]) -> Roles:
    """Return the mix of a head, from its rows in the table `mixes`, and its row in `roles`."""
    by_class: dict[str, list[Share]] = {}
    for x in mixes:
        share = Share(*(x[name] for name in Share._fields))
        by_class.setdefault(x["token_class"], []).append(share)
    sorted_mixes = {
        name: tuple(sorted(by_class[name], key=lambda part: -part.share))
        for name in CLASS_NAMES
        if name in by_class
    }
    every = sorted_mixes.pop(ALL, ())
    surest, differ = (
        ((row[f"{name}class"], row[f"{name}kind"]),
         (row[f"{name}other_class"], row[f"{name}other_kind"]))
        if row[f"{name}kind"] else ()
        for name in ("", "differ_")
    )  # fmt: skip
    of_head = row["layer"], row["head"]
    return Roles(*of_head, every, sorted_mixes, row["q"], surest, row["q_differ"], differ)
