"""The manifest of a survey: what its numbers depend on, and its list of shards.

A folder has one survey. A run with another model, tokenizer, setting or version is refused, and the
error names the value that differs. Texts may be added after those that it has.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.engines import cpu
from ..core.errors import BadValue
from ..core.files import atomic_io
from ..core.formatting import quantity
from .corpus import FOLDER, read_shard
from .metric import Metric
from .reader import Reader
from .tables import SCHEMA

FILE, FORMAT = "manifest.json", 9
# Fixed values of the machine, which change how numbers are rounded.
MACHINE = ("batch tokens", "threads of a worker", "device", "dtype", "instruction level",
           "torch uses", "versions")  # fmt: skip
# Other fixed values that may differ between surveys that are compared, besides digests.
OWN = "model", "seed", "metrics"


class ShardEntry(NamedTuple):
    """A shard in the manifest: its files, its numbers of tokens and contexts, and the numbers of
    the text and context with which it begins.

    The name of the file of its `state` has a digest of its contexts, and the name of its file in
    the `corpus` a digest of the names of its texts too.
    """

    state: str
    corpus: str
    tokens: int
    contexts: int
    text: int
    context: int


@dataclass(frozen=True)
class Manifest:
    """What a survey depends on, and what it consists of.

    `fixed` cannot change: the model, the tokenizer, the settings, the metrics with their versions,
    and the versions of the software. `corpus` counts texts, and describes how they were cut.
    `requested` has the names of metrics and sets, for workers; None if some were objects.
    """

    fixed: dict[str, Any]
    corpus: dict[str, Any]
    metrics: list[dict[str, Any]]
    shards: list[ShardEntry]
    requested: list[str] | None = None

    def write(self, out: Path) -> None:
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        head = {"format": FORMAT, "digest": digest_of(value)}
        atomic_io.write_json(out / FILE, head | value)

    def origin(self, shard: ShardEntry) -> str:
        """Return a digest of all on which the state of a shard depends."""
        return digest_of([self._fixed, shard.state])

    def origin_of(self, part: range) -> str:
        """Return a digest of all on which the tables of consecutive shards depend."""
        return digest_of(
            [self._fixed, [entry[:2] for entry in self.shards[part.start : part.stop]]]
        )

    @cached_property
    def _fixed(self) -> str:
        return digest_of([self.fixed, self.metrics])

    @cached_property
    def digest(self) -> str:
        """A digest of all on which the tables depend."""
        return digest_of([self.fixed, self.metrics, [entry[:2] for entry in self.shards]])

    def must_continue(
        self, fixed: dict[str, Any], metrics: list[dict[str, Any]], out: Path
    ) -> None:
        """Raise `BadValue` if this survey, in `out`, cannot be continued with these values.

        Its metrics have the same order and bins too: the states of shards are arrays of these.
        """
        known, new = (
            _flat(values | {f"metric {i}": row for i, row in enumerate(rows, 1)})
            for values, rows in ((self.fixed, self.metrics), (fixed, metrics))
        )
        for name in {**known, **new}:
            if known.get(name) != new.get(name):
                a, b = (values.get(name, "missing") for values in (known, new))
                gave = f"The survey in {str(out)!r} has {name} {a!r}, and this run {b!r}."
                rule = "one survey has one model, tokenizer, set of settings and versions."
                raise BadValue(gave, rule, "use the same value, or another folder as out=.")

    def must_have_added(self, new: "Manifest", out: Path) -> None:
        """Raise `BadValue` if the texts of this survey are not the first ones of the new texts."""
        last = len(self.shards) - 1
        known, states = ([entry.state for entry in manifest.shards] for manifest in (self, new))
        same = len(states) > last and known[:last] == states[:last]
        if same:
            before, after = (
                read_shard(out / FOLDER / manifest.shards[last].corpus).tensors
                for manifest in (self, new)
            )
            names = {"ids", "pixels"} & {*before}
            same = all(before[name].equal(after[name][: len(before[name])]) for name in names)
        if not same:
            rule = "texts can be added after those of a survey, and not changed or left out."
            hint = "pass the same texts first, or another folder as out=."
            raise BadValue(f"The survey in {str(out)!r} has other texts.", rule, hint)

    def must_have_read_the_same(self, other: "Manifest") -> None:
        """Raise `BadValue` unless two surveys have the same contexts, and versions of metrics.

        The settings of metrics that both have are the same too. Names of texts may differ.
        """
        pairs: list[tuple[str, Any, Any]] = [
            (name, value, other.fixed[name])
            for name, value in self.fixed.items()
            if name in other.fixed and name not in (*MACHINE, *OWN) and "digest" not in name
        ]
        a, b = (
            {x["metric"]: (x["version"], x["formula"]) for x in s.metrics} for s in (self, other)
        )
        pairs += [(f"the metric {name}", a[name], b[name]) for name in a if name in b]
        for name, value, theirs in pairs:
            if value != theirs:
                gave = f"One survey has {name} {value!r}, and the other {theirs!r}."
                rule = "a difference between surveys is one between models."
                raise BadValue(gave, rule, "survey both models with the same settings.")
        states, theirs = ([entry.state for entry in manifest.shards] for manifest in (self, other))
        if states != theirs:  # their names have digests of the contexts
            own, theirs = (quantity(x.corpus["texts"], "text") for x in (self, other))
            gave = f"The surveys have {own} and {theirs}, and their tokens are not the same."
            hint = "survey the same texts, in the same order, with two models of one tokenizer."
            raise BadValue(gave, "two surveys are compared text by text.", hint)

    def machines_that_differ(self, other: "Manifest") -> list[str]:
        """Return the values of the machines of two surveys that differ, with their names."""
        a, b = (_flat({name: survey.fixed[name] for name in MACHINE}) for survey in (self, other))
        return [
            f"{name} {value!r} and {b[name]!r}" for name, value in a.items() if value != b[name]
        ]


def fixed_values(
    reader: Reader, metrics: Sequence[Metric], settings: dict[str, Any], threads: int
) -> dict[str, Any]:
    """Return the values on which all numbers of a survey depend."""
    before, after = reader.around
    grid = None if reader.pictures is None else reader.pictures.grid
    parameters = list(reader.module.parameters())
    dtypes = sorted(
        {str(x.dtype).removeprefix("torch.") for x in parameters if x.dtype.is_floating_point}
    )
    return {
        "model": reader.name,
        "model digest": reader.model_digest,
        "tokenizer digest": reader.tokenizer_digest,
        "tokens before each context": before,
        "tokens after each context": after,
        **({} if grid is None else {"grid": [list(grid.before), grid.rows, grid.columns]}),
        **settings,
        "metrics": {metric.name: metric.version for metric in metrics},
        **{name: value for metric in metrics for name, value in metric.settings.items()},
        "threads of a worker": threads,
        "device": parameters[0].device.type if parameters else "cpu",
        "dtype": ", ".join(dtypes),
        "instruction level": cpu.level() or "none" if cpu.core is not None else "none",
        "torch uses": torch.backends.cpu.get_cpu_capability(),
        "versions": {"clearhead": _version("clearhead"), "torch": str(torch.__version__),
                     "transformers": _version("transformers")},
    }  # fmt: skip


def describe(metric: Metric) -> dict[str, Any]:
    """Return what the tables state about a metric."""
    about, bins = (metric.name, metric.formula, metric.source, metric.version), metric.bins
    of_bins = bins.low, bins.high, bins.count, bins.log, *bins.limits
    return dict(zip(SCHEMA["metrics"], (*about, *of_bins, metric.examples), strict=True))


def read_manifest(out: Path) -> Manifest:
    """Read the manifest of a survey. Raises `BadValue` for a folder without one."""
    path = out / FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if (written := value.pop("format")) != FORMAT:
            raise ValueError(f"it has format {written}, and this version writes {FORMAT}")
        if value.pop("digest") != digest_of(value):
            raise ValueError("it was changed after it was written")
        shards = [ShardEntry(*entry) for entry in value.pop("shards")]
        return Manifest(**value, shards=shards)
    except FileNotFoundError as error:
        rule = f"the folder of a survey has a {FILE}."
        hint = "check the path, or begin a survey with clearhead survey TEXTS --out FOLDER."
        raise BadValue(f"{str(out)!r} has no survey.", rule, hint) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = "the manifest of a survey is written by this version of clearhead."
        hint = "use another folder, or the version that wrote it."
        raise BadValue(f"{str(path)!r} cannot be read: {error}.", rule, hint) from error


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}: {key}": x for key, x in value.items()}
        else:
            flat[name] = value
    return flat


def digest_of(value: Any) -> str:
    """Return a digest of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
