"""Edits as a page asks for them: JSON in, edits of `clearhead.edits` out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ... import masks
from ...errors import BadType, BadValue, as_count, as_number, kind_of
from ...errors.limits import MOST_HEADS_OFF, MOST_MASK_LETTERS, MOST_SEED
from ...inspection import edits as edit
from ...inspection.edits.edit import EditSite
from ...problem.problem import Inputs, Problem
from ..html.edits import EDITS, fits


@dataclass(frozen=True, eq=False, repr=False)
class settings(edit.Edit):
    """Other numbers in the call: `scale` and `softcap` (None: the model's own), and `dropout`
    of the weights with a `seed`."""

    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0

    def arguments(self) -> list[str]:
        values = {name: getattr(self, name) for name in ("scale", "softcap", "dropout")}
        given = [f"{name}={value:g}" for name, value in values.items() if value]
        return [*given, f"seed={self.seed}"] if self.dropout else given

    def edit_problem(
        self, problem: Problem, inputs: Inputs, site: EditSite
    ) -> tuple[Problem, Inputs]:
        changes: dict[str, float | int] = {}
        if self.scale is not None:
            changes["scale"] = self.scale
        if self.softcap is not None:
            changes["softcap"] = self.softcap
        if self.dropout:
            changes |= {"dropout": self.dropout, "seed": self.seed}
        return replace(problem, **changes), inputs  # type: ignore[arg-type]  # each of its own kind


def read_edits(given: object) -> list[edit.Edit]:
    """The edits that a page asks for, in the order in which they apply.

    >>> read_edits({"off": [[0, 7], [0, 3]], "temperature": 2, "mask": "window(3, 0)"})
    [keep_only(window(before=3, after=0)), temperature(2), ablate(layers=[0], heads=[3, 7])]
    >>> read_edits({"softcap": 30, "dropout": 0.1, "seed": 7})
    [settings(softcap=30, dropout=0.1, seed=7)]

    `given` may have: off, a list of [layer, head]; temperature; scale; mask, the notation of
    `masks.parse`; softcap; dropout; seed. What is left out, or None, is as the model does it.
    Raises `BadType` or `BadValue` for anything else.
    """
    if given is None:
        return []
    if not isinstance(given, Mapping) or set(given) - set(EDITS):
        found = sorted(map(str, given)) if isinstance(given, Mapping) else kind_of(given)
        raise BadType(
            f"edits are {str(found)[:200]}.",
            f"edits are an object that may have {', '.join(EDITS)}.",
            'send for example {"off": [[0, 7]], "temperature": 2}.',
        )
    return [*_mask(given.get("mask")), *_settings(given), *_off(given.get("off"))]


def _mask(given: object) -> list[edit.Edit]:
    if given is None:
        return []
    if not isinstance(given, str) or len(given) > MOST_MASK_LETTERS:
        raise BadValue(
            f"The mask is {kind_of(given)}"
            + (f" of {len(given):,} letters." if isinstance(given, str) else "."),
            f"a mask is written in at most {MOST_MASK_LETTERS:,} letters, such as "
            "'causal & window(3, 0)'.",
            "write a shorter one; in Python a mask can be of any size.",
        )
    return [edit.keep_only(masks.parse(given))]


def _settings(given: Mapping[str, object]) -> list[edit.Edit]:
    found: list[edit.Edit] = []
    temperature, scale, softcap, dropout = (
        _number(given, name) for name in ("temperature", "scale", "softcap", "dropout")
    )
    if temperature not in (None, 1.0):
        found.append(edit.temperature(temperature))
    seed = given.get("seed")
    seed = as_count(
        "seed",
        0 if seed is None else seed,
        f"the seed of dropout is {EDITS['seed']['rule']}.",
        "send for example 0.",
        most=MOST_SEED,
    )
    if scale is not None or softcap is not None or dropout:
        found.append(settings(scale, softcap, dropout or 0.0, seed))
    return found


def _number(given: Mapping[str, object], name: str) -> float | None:
    value, offered = given.get(name), EDITS[name]
    if value is None:
        return None
    rule = f"the {name} is {offered['rule']}."
    way = f"leave it out, or send for example {offered['example']}."
    return as_number(name, value, rule, way, lambda x: fits(x, offered))


def _off(given: object) -> list[edit.Edit]:
    """One edit for each layer that has heads off."""
    pairs = [] if given is None else given
    if not isinstance(pairs, list) or len(pairs) > MOST_HEADS_OFF:
        raise BadValue(
            f"off is {kind_of(pairs)}"
            + (f" of {len(pairs):,}." if isinstance(pairs, list) else "."),
            f"the heads that are off are a list of at most {MOST_HEADS_OFF:,} pairs.",
            "send for example [[0, 7]].",
        )
    heads: dict[int, set[int]] = {}
    rule, way = "a head that is off is [layer, head], numbered from 0.", "send for example [0, 7]."
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadType(f"off has {str(pair)[:80]!r}.", rule, way)
        layer, head = (as_count("off has a number", x, rule, way) for x in pair)
        heads.setdefault(layer, set()).add(head)
    return [edit.ablate(layers=[n], heads=sorted(some)) for n, some in sorted(heads.items())]
