"""The file of measured effects, from which an interrupted call of `effects` resumes."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...core.errors import BadValue, as_path, why_failed
from ...core.functional.ambient import ambient
from ..follow.copies import leaves
from ..inspect.edits import Edit
from .digest import Undigested, digest, weights_digest

REPEATED = 2  # effects of a file, before the others are used


class EffectsFile:
    """The metric of each edited run, by name, and the file that stores them.

    The first line identifies the model by its weights, the inputs, the edits of blocks around the
    call, and the metric by its name and its number in the unedited run. Each other line has the
    digest of its edits, and is used only for equal edits. `effects` repeats the `largest` of those
    that are used, which shows a change of code or settings that no digest has. Without a digest,
    nothing is used, and a warning gives the reason.
    """

    def __init__(
        self, path: str | Path, model: nn.Module, inputs: Any, metric: str, unedited: float,
        groups: Mapping[str, Sequence[Edit]],
    ) -> None:  # fmt: skip
        self.path, self.values = as_path("effects(to=)", path), dict[str, float]()
        self._unedited, self._unknown = unedited, list[str]()
        around = [edit for x in ambient().editors for edit in getattr(x, "edits", ())]
        self._header = {
            "model": type(model).__name__,
            "weights": weights_digest(model),
            "inputs": self._digest("the inputs", [(x.path, x.value) for x in leaves(inputs)]),
            "around": self._digest("the edits around", around),
            "metric": metric,
            "unedited": unedited,
        }
        is_known = None not in self._header.values()
        self.edits = {
            name: self._digest(f"the edits {name!r}", edits) if is_known else None
            for name, edits in groups.items()
        }
        lines = self._read()
        for number, line in enumerate(lines, 2):
            if not line:
                continue
            name, edits, value = self._parsed(number, line)
            if edits is not None and self.edits.get(name) == edits:
                self.values[name] = value
        text = [json.dumps(self._header), *lines]
        self._write("".join(f"{line}\n" for line in text), "w")
        if self._unknown:
            what = f"{self._unknown[0]}, which cannot be compared with an earlier one."
            warnings.warn(f"effects does not read {str(self.path)!r}, for {what}", stacklevel=3)

    def _digest(self, what: str, value: object) -> str | None:
        try:
            return digest(value)
        except Undigested as error:
            self._unknown.append(f"{what}: {error}")
            return None

    def largest(self) -> list[str]:
        """Return the names of the `REPEATED` largest effects that are used."""
        return sorted(self.values, key=lambda x: -abs(self.values[x] - self._unedited))[:REPEATED]

    def must_repeat(self, name: str, value: float, eps: float) -> None:
        """Raise `BadValue` if an effect is not that in the file, but for rounding."""
        if not _is_same(value, self.values[name], eps):
            raise self._other(f"the metric with {name!r} was {self.values[name]}, and is {value}")

    def _read(self) -> list[str]:
        """Return the lines after the header, without a last line that is incomplete."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("read", error) from error
        first, *rest = text.split("\n")
        if text:
            self._must_be_equal(first)
        return rest[:-1]

    def _must_be_equal(self, first: str) -> None:
        try:
            header = dict(json.loads(first))
            unedited = float(header["unedited"])
        except (ValueError, TypeError, KeyError):
            raise self._other(f"its first line is {first[:200]!r}") from None
        for name, value in self._header.items():
            same = header.get(name) == value
            if not same and not (name == "unedited" and _is_same(self._unedited, unedited)):
                raise self._other(f"{name} was {header.get(name)}, and is {value}")

    def _other(self, difference: str) -> BadValue:
        gave = f"The file {str(self.path)!r} has other effects: {difference}."
        rule = "a file is for one model, its code and settings, inputs, other edits and metric."
        return BadValue(gave, rule, "pass another file as to=, or delete this one.")

    def _parsed(self, number: int, line: str) -> tuple[str, str | None, float]:
        try:
            fields = json.loads(line)
            return str(fields["name"]), fields["edits"], float(fields["value"])
        except (ValueError, TypeError, KeyError) as error:
            gave = f"Line {number} of the file {str(self.path)!r} is not an effect: {line[:200]}"
            rule = "each line after the first was written by effects."
            raise BadValue(gave, rule, "delete the line, or pass another file as to=.") from error

    def add(self, name: str, value: float) -> None:
        self.values[name] = value
        line = json.dumps({"name": name, "edits": self.edits[name], "value": value})
        self._write(f"{line}\n", "a")

    def _write(self, text: str, mode: str) -> None:
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise self._failed("written", error) from error

    def _failed(self, verb: str, error: OSError) -> BadValue:
        gave = f"The file {str(self.path)!r} cannot be {verb}: {why_failed(error)}."
        rule = "to= is a file to which each effect is appended."
        return BadValue(gave, rule, "pass a file in an existing folder with write permission.")


def _is_same(now: float, before: float, eps: float = 1e-6) -> bool:
    return str(now) == str(before) or math.isclose(
        now, before, rel_tol=10 * max(eps, 1e-6), abs_tol=10 * max(eps, 1e-6)
    )
