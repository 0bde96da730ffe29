"""The file of measured effects, from which an interrupted call of `effects` resumes."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...core.errors import BadValue, as_path, why_failed
from ...core.functional.ambient import ambient
from ..follow.copies import fresh
from ..inspect.edits import Edit
from .digest import Digests, Undigested
from .metrics import Metric


class EffectsFile:
    """The metric of each edited run, by name, and the file that stores them.

    The first line identifies the model, its inputs, the metric, and the edits of blocks around the
    call. Each other line has the digest of its edits, and is used only for equal edits. Without a
    digest of one of these, nothing is used, and a warning gives the reason.
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module,
        inputs: Any,
        metric: str | Metric,
        name: str,
        baseline: float,
        groups: Mapping[str, Sequence[Edit]],
    ) -> None:
        self.path, self.values = as_path("effects(to=)", path), dict[str, float]()
        self._digests, self._unknown = Digests(), list[str]()
        around = [getattr(editor, "edits", None) for editor in ambient().editors]
        digests = {
            what: self._digest(f"the {what}", value)
            for what, value in (
                ("model", model), ("metric", metric), ("inputs", fresh(inputs)),
                ("edits around", around),
            )
        }  # fmt: skip
        header = json.dumps(
            {
                "model": type(model).__name__,
                "metric": name,
                "baseline": round(baseline, 5),
                "digests": digests,
            }
        )
        self.edits = {name: self._digest(f"the edits {name!r}", x) for name, x in groups.items()}
        if None in digests.values():
            self.edits = dict.fromkeys(groups)
        lines = self._read(header)
        for number, line in enumerate(lines, 2):
            if not line:
                continue
            name, edits, value = self._parsed(number, line)
            if edits is not None and self.edits.get(name) == edits:
                self.values[name] = value
        self._write("".join(f"{line}\n" for line in [header, *lines]), "w")
        if self._unknown:
            warnings.warn(
                f"effects measures anew, and does not read {str(self.path)!r}, for "
                f"{self._unknown[0]}, which cannot be compared with an earlier one.",
                stacklevel=3,
            )

    def _digest(self, what: str, value: object) -> str | None:
        try:
            return self._digests.of(value)
        except Undigested as error:
            self._unknown.append(f"{what}: {error}")
            return None

    def _read(self, header: str) -> list[str]:
        """Return the lines after the header, without a last line that is incomplete."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("read", error) from error
        first, *rest = text.split("\n")
        if text and first != header:
            raise BadValue(
                f"The file {str(self.path)!r} has other effects: {first[:400]}",
                "a file is for one model with its weights, code and settings, for inputs, and for "
                f"a metric with all that it refers to: {header}",
                "pass another file as to=, or delete this one.",
            )
        return rest[:-1]

    def _parsed(self, number: int, line: str) -> tuple[str, str | None, float]:
        try:
            fields = json.loads(line)
            return str(fields["name"]), fields["edits"], float(fields["value"])
        except (ValueError, TypeError, KeyError) as error:
            raise BadValue(
                f"Line {number} of the file {str(self.path)!r} is not an effect: {line[:200]}",
                "each line after the first was written by effects.",
                "delete the line, or pass another file as to=.",
            ) from error

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
        return BadValue(
            f"The file {str(self.path)!r} cannot be {verb}: {why_failed(error)}.",
            "to= is a file to which each effect is appended.",
            "pass a file in an existing folder with write permission.",
        )
