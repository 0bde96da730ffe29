"""Keep the numbers of a training in a folder of Parquet files, and read them again."""

import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import BadValue, needs, writable_folder
from ...core.files.atomic_io import temporary_for
from ...core.formatting import number, quantity
from .alarms import DEAD, METRIC_OF, SINK, Alarm, Alarms
from .metrics import METRICS

_FILE = re.compile(r"step-(\d+)\.parquet")
_NAME = re.compile(r"attention/L(\d+)/H(\d+)/(?!(?:step|layer|head)$)([a-zA-Z]\w*)")
_NAMED = 3  # heads in a finding
# What a head is at the end, by metric.
_ENDS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "output": ("Dead heads, which write less than a thousandth of others", lambda x: x < DEAD),
    "first": ("Sinks, with over 0.9 of their weight on the first token", lambda x: x > SINK),
}


def parquet(folder: str | Path) -> Callable[[dict[str, float], int], None]:
    """Return a `log` for `monitor` that writes each logged step to a file of a folder.

    >>> ch.monitor(model, log=ch.monitor.parquet("run/attention"))  # doctest: +SKIP

    Each file has a row for each head, with the columns step, layer, head and the metrics; NULL for
    a metric that the layer lacks. DuckDB, pandas and polars read such a folder as one table. A file
    is written under another name and then moved, so a process that is killed loses at most the step
    that it was writing. A step that cannot be written is lost with a warning, and so is one that
    another run wrote meanwhile; the training goes on. Over ranks, pass it to one of them alone.

    A resumed run goes on in the folder of the run that was stopped: steps from its first logged one
    on are replaced. The dict may have metrics of your own, such as the rate of a role at a
    checkpoint: ``attention/L0/H7/antecedent``.

    Raises `Missing` without DuckDB, and `BadValue` for a folder that cannot be written to. The
    first step raises `BadValue` if the folder has no earlier step, or other numbers of heads: its
    run is another one.
    """
    with needs("survey", "Parquet files are written with DuckDB."):
        import duckdb
    target, begun = writable_folder(folder, "numbers of a training are"), False

    def log(numbers: dict[str, float], step: int) -> None:
        nonlocal begun
        columns = _columns(numbers, step)
        if not begun:
            _go_on(target, step, Counter(columns["layer"]))
            begun = True
        path = target / f"step-{step:09d}.parquet"
        temporary = temporary_for(path)
        query = "select " + ", ".join(f'unnest(${name}) as "{name}"' for name in columns)
        try:
            with duckdb.connect(config={"threads": 1}) as connection:
                connection.sql(query, params=columns).write_parquet(str(temporary))
            if path.exists():
                raise FileExistsError("another run wrote it")
            os.replace(temporary, path)
        except (OSError, duckdb.Error) as error:
            temporary.unlink(missing_ok=True)
            warnings.warn(f"step {step} is not in {str(target)!r}: {error}", stacklevel=3)

    return log


def _go_on(folder: Path, step: int, heads: Counter[int]) -> None:
    """Remove the steps that a stopped run logged from this one on; `heads` are numbers by layer."""
    import duckdb

    files, wrong = _files(folder), ""
    earlier = [path for logged, path in files.items() if logged < step]
    if earlier:
        before = Counter[int]()
        with suppress(duckdb.Error):  # a file that a crash of the machine left empty
            query = "select layer from read_parquet($1)"
            before.update(x for (x,) in duckdb.execute(query, [_pattern(earlier[-1])]).fetchall())
        for layer in before.keys() & heads.keys():
            if before[layer] != heads[layer]:
                wrong = f"has {quantity(before[layer], 'head')} of layer {layer}, and this run "
                wrong += f"has {heads[layer]}"
    elif files:
        wrong = f"has the steps {min(files)} to {max(files)} of a run, and this one begins at step "
        wrong += str(step)
    if wrong:
        rule = "a resumed run goes on in its folder; another run has another folder."
        hint = "pass another folder, or remove that one."
        raise BadValue(f"{str(folder)!r} {wrong}.", rule, hint)
    for path in files.values():
        if path not in earlier:
            path.unlink()


def _pattern(path: Path) -> str:
    """Return a path for DuckDB, which takes each for a pattern."""
    return re.sub(r"([*?\[])", r"[\1]", str(path.absolute()))


def _files(folder: Path) -> dict[int, Path]:
    named = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(name[1]), path) for name, path in named if name is not None))


def _columns(numbers: dict[str, float], step: int) -> dict[str, list[Any]]:
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name, value in numbers.items():
        parts = _NAME.fullmatch(name)
        if parts is None:
            rule = "a column of the file is a name in letters, digits and underscores."
            hint = "call it for example attention/L0/H7/antecedent."
            raise BadValue(f"A number is called {name!r}.", rule, hint)
        rows.setdefault((int(parts[1]), int(parts[2])), {})[parts[3]] = value
    names = dict.fromkeys(name for row in rows.values() for name in row)
    metrics = {name: [row.get(name) for row in rows.values()] for name in names}
    layers, heads = ([site[i] for site in rows] for i in range(2))
    return {"step": [step] * len(rows), "layer": layers, "head": heads, **metrics}


class Finding(NamedTuple):
    """What became of heads: a sentence, and a head of it with a step, as numbers in `History`."""

    sentence: str
    metric: str
    head: int | None
    step: int | None


@dataclass(repr=False, eq=False)
class History:
    """The numbers of a training, read from the folder of `monitor.parquet`.

    Attributes:
        steps: the logged steps, in order.
        heads: (layer, head) of each head, in order.
        values: the numbers of each metric, (steps, heads); NaN where a head has none.
        logged: whether a head has a number of each metric, (steps, heads); it may be NaN.
    """

    steps: list[int]
    heads: list[tuple[int, int]]
    values: dict[str, np.ndarray]
    logged: dict[str, np.ndarray]

    @classmethod
    def read(cls, folder: str | Path) -> "History":
        """Read the steps of a folder. A run that goes on may still be writing to it.

        Raises `Missing` without DuckDB, and `BadValue` for a folder without steps.
        """
        with needs("survey", "Parquet files are read with DuckDB."):
            import duckdb
        path = Path(folder)
        if not (files := _files(path) if path.is_dir() else {}):
            rule = "the folder is that of ch.monitor(model, log=ch.monitor.parquet(folder))."
            hint = "look at its name, or wait for the first logged step."
            raise BadValue(f"{str(folder)!r} has no steps of a training.", rule, hint)
        connection, paths = duckdb.connect(config={"threads": 1}), [*map(_pattern, files.values())]
        columns = connection.read_parquet(paths, union_by_name=True).fetchnumpy()
        places = np.stack([columns.pop("layer"), columns.pop("head")], 1).astype(int)
        heads, at = np.unique(places, axis=0, return_inverse=True)
        steps, row = np.unique(columns.pop("step").astype(int), return_inverse=True)
        values = {name: np.full((len(steps), len(heads)), math.nan) for name in columns}
        logged = {name: np.zeros(x.shape, dtype=bool) for name, x in values.items()}
        for name, x in columns.items():
            values[name][row, at.ravel()] = np.ma.filled(x.astype(float), math.nan)
            logged[name][row, at.ravel()] = ~np.ma.getmaskarray(x)
        return cls(steps.tolist(), [(x, y) for x, y in heads.tolist()], values, logged)

    def name(self, head: int) -> str:
        """Return the name of a head by its number in `heads`, such as L0H7."""
        return "L{}H{}".format(*self.heads[head])

    def alarms(self) -> list[Alarm]:
        """Return the alarms that begin at each step, by the rules of `monitor`.

        A run that was resumed counts as one run.
        """
        rules, raised = Alarms(), []
        for i, step in enumerate(self.steps):
            layers: dict[int, dict[str, list[float]]] = {}
            for name, x in self.values.items():
                for head in np.flatnonzero(self.logged[name][i]).tolist():
                    of_layer = layers.setdefault(self.heads[head][0], {})
                    of_layer.setdefault(name, []).append(float(x[i, head]))
            raised += rules.check(step, layers)
        return raised

    def findings(self) -> list[Finding]:
        """Return what became of the heads, as sentences.

        - The head whose largest logit rose most from the first logged step to the last, and the
          step since which it has been past half of that. The same for each metric of your own: for
          the rate of a role, this is when the role appeared.
        - The heads that are dead at the last step, by the rule of `Alarms`, and those that are
          sinks; and since which step.
        - The heads that some logged steps lack, and the alarms.
        """
        findings, of = list[Finding](), f"of {quantity(len(self.heads), 'head')}"
        for metric in self.values:
            steps, x = self._finite(metric)
            if metric in _ENDS and steps:
                words, applies = _ENDS[metric]
                ends = [(_since(steps, y), h) for h, y in enumerate(applies(x).T) if y[-1]]
                ends.sort()
                parts = [f"{words}, at step {steps[-1]}: {len(ends) or 'none'} {of}"]
                parts += [f"{self.name(head)} since step {step}" for step, head in ends[:_NAMED]]
                parts += ["and so on"] * (len(ends) > _NAMED)
                step, head = ends[0] if ends else (None, None)
                findings.append(Finding(f"{', '.join(parts)}.", metric, head, step))
            elif steps and (metric == "max" or metric not in METRICS):
                rise = np.nan_to_num(x[-1] - x[0])
                head = int(rise.argmax())
                first, last = x[[0, -1], head]
                if rise[head] > 0:
                    step = _since(steps, x[:, head] >= (first + last) / 2)
                    words = f"{self.name(head)} rose most in {metric}: {first:.3g} at step "
                    words += f"{steps[0]}, {last:.3g} at step {steps[-1]}, "
                    words += f"more than half-way since step {step}."
                    findings.append(Finding(words, metric, head, step))
        has = np.any([*self.logged.values()], 0)
        for head in np.flatnonzero(~has.all(0))[:1].tolist():
            words = f"Some steps lack {(~has.all(0)).sum()} {of}; {self.name(head)} is in "
            words += f"{has[:, head].sum()} of {len(has)}."
            findings.append(Finding(words, next(iter(self.values)), head, None))
        for step, rule, layer, of_layer, _, sentence in self.alarms():
            which = None if of_layer is None else self.heads.index((layer, of_layer))
            findings.append(Finding(f"Step {step}: {sentence}.", METRIC_OF[rule], which, step))
        return findings

    def _finite(self, metric: str) -> tuple[list[int], np.ndarray]:
        """Return the steps with finite numbers of a metric, and these; NaN for others."""
        x = np.where(np.isfinite(self.values[metric]), self.values[metric], math.nan)
        has = ~np.isnan(x).all(1)
        return np.array(self.steps)[has].tolist(), x[has]

    def __repr__(self) -> str:
        lines = [
            f"{quantity(len(self.steps), 'logged step')}, {self.steps[0]} to {self.steps[-1]}, of "
            f"{quantity(len(self.heads), 'head')}",
            f"{'mean over heads':18}{'first':>10}{'last':>10}{'least':>10}{'most':>10}  of",
        ]
        for metric in self.values:
            steps, x = self._finite(metric)
            if not steps:
                continue
            at, head = np.unravel_index(np.nanargmax(x), x.shape)
            cells = np.nanmean(x[0]), np.nanmean(x[-1]), np.nanmin(x), np.nanmax(x)
            lines.append(
                f"{metric:18}{''.join(f'{number(float(c), 3):>10}' for c in cells)}"
                f"  {self.name(int(head))}, step {steps[at]}"
            )
        return "\n".join([*lines, *(finding.sentence for finding in self.findings())])


def _since(steps: list[int], holds: np.ndarray) -> int:
    """Return the step from which something holds, as it does at the last one."""
    return steps[0 if holds.all() else int(np.flatnonzero(~holds)[-1]) + 1]
