"""Parse the edits in a page's request: from JSON to edits of `clearhead.edits`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ... import masks
from ...core.errors import BadType, BadValue, as_count, as_number, kind_of
from ...core.errors.limits import MOST_HEADS_OFF, MOST_MASK_LETTERS, MOST_SEED
from ...core.problem.problem import Inputs, Problem
from ...models.inspect import edits as edit
from ...models.inspect.edits.edit import Edited, EditSite
from ..html.edits import EDITS, fits


@dataclass(frozen=True, eq=False, repr=False)
class settings(edit.Edit):
    """Change numbers of a call: `scale` and `softcap` (None: the model's own), and `dropout` of the
    weights with a `seed`."""

    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0

    def arguments(self) -> list[str]:
        values = {name: getattr(self, name) for name in ("scale", "softcap", "dropout")}
        printed = [f"{name}={value:g}" for name, value in values.items() if value]
        return [*printed, f"seed={self.seed}"] if self.dropout else printed

    def edit_problem(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        dropout, seed = (self.dropout, self.seed) if self.dropout else (None, None)
        numbers = {"scale": self.scale, "softcap": self.softcap, "dropout": dropout, "seed": seed}
        changes: Any = {name: x for name, x in numbers.items() if x is not None}
        return replace(problem, **changes), inputs


def read_edits(request: object) -> list[edit.Edit]:
    """Return the edits of a request, in the order in which they apply.

    >>> read_edits({"off": [[0, 7], [0, 3]], "temperature": 2, "mask": "window(3, 0)"})
    [keep_only(window(before=3, after=0)), temperature(2), ablate(layers=[0], heads=[3, 7])]
    >>> read_edits({"softcap": 30, "dropout": 0.1, "seed": 7})
    [settings(softcap=30, dropout=0.1, seed=7)]

    `request` may have: off, a list of [layer, head]; temperature; scale; mask, the notation of
    `masks.parse`; softcap; dropout; seed. Missing entries, and None, do not change the model.
    Raises `BadType` or `BadValue` for anything else.
    """
    if request is None:
        return []
    if not isinstance(request, Mapping) or set(request) - set(EDITS):
        got = sorted(map(str, request)) if isinstance(request, Mapping) else kind_of(request)
        rule = f"edits are an object that may have {', '.join(EDITS)}."
        hint = 'send for example {"off": [[0, 7]], "temperature": 2}.'
        raise BadType(f"edits are {str(got)[:200]}.", rule, hint)
    return [*_mask(request.get("mask")), *_settings(request), *_off(request.get("off"))]


def _mask(notation: object) -> list[edit.Edit]:
    if notation is None:
        return []
    if not isinstance(notation, str) or len(notation) > MOST_MASK_LETTERS:
        size = f" of {len(notation):,} letters" if isinstance(notation, str) else ""
        rule = f"a mask has at most {MOST_MASK_LETTERS:,} letters, such as 'causal & window(3, 0)'."
        hint = "write a shorter one; in Python, a mask can have any size."
        raise BadValue(f"The mask is {kind_of(notation)}{size}.", rule, hint)
    return [edit.keep_only(masks.parse(notation))]


def _settings(request: Mapping[str, object]) -> list[edit.Edit]:
    edits: list[edit.Edit] = []
    temperature, scale, softcap, dropout = (
        _number(request, name) for name in ("temperature", "scale", "softcap", "dropout")
    )
    if temperature not in (None, 1.0):
        edits.append(edit.temperature(temperature))
    rule = f"the seed of dropout is {EDITS['seed']['rule']}."
    seed = 0 if request.get("seed") is None else request["seed"]
    seed = as_count("seed", seed, rule, "send for example 0.", most=MOST_SEED)
    if scale is not None or softcap is not None or dropout:
        edits.append(settings(scale, softcap, dropout or 0.0, seed))
    return edits


def _number(request: Mapping[str, object], name: str) -> float | None:
    value, offered = request.get(name), EDITS[name]
    if value is None:
        return None
    rule = f"the {name} is {offered['rule']}."
    hint = f"leave it out, or send for example {offered['example']}."
    return as_number(name, value, rule, hint, lambda x: fits(x, offered))


def _off(heads_off: object) -> list[edit.Edit]:
    """Return an edit for each layer with heads that are off."""
    pairs = [] if heads_off is None else heads_off
    if not isinstance(pairs, list) or len(pairs) > MOST_HEADS_OFF:
        size = f" of {len(pairs):,}" if isinstance(pairs, list) else ""
        rule = f"off is a list of at most {MOST_HEADS_OFF:,} pairs."
        raise BadValue(f"off is {kind_of(pairs)}{size}.", rule, "send for example [[0, 7]].")
    heads: dict[int, set[int]] = {}
    rule, hint = "a head that is off is [layer, head], numbered from 0.", "send for example [0, 7]."
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadType(f"off has {str(pair)[:80]!r}.", rule, hint)
        layer, head = (as_count("off has a number", x, rule, hint) for x in pair)
        heads.setdefault(layer, set()).add(head)
    return [edit.ablate(layers=[n], heads=sorted(some)) for n, some in sorted(heads.items())]
