"""Keep the numbers of a training in a folder of Parquet files, and read them again."""

import math
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...core.errors import BadValue, needs, writable_folder
from ...core.files.atomic_io import temporary_for
from ...core.formatting import number, quantity
from .alarms import Alarm, Alarms
from .metrics import METRICS

_FILE = re.compile(r"step-(\d+)\.parquet")
_NAME = re.compile(r"attention/L(\d+)/H(\d+)/(\w+)")


def parquet(folder: str | Path) -> Callable[[dict[str, float], int], None]:
    """Return a `log` for `monitor` that writes each logged step to a file of a folder.

    >>> ch.monitor(model, log=ch.monitor.parquet("run/attention"))  # doctest: +SKIP

    Each file has a row for each head, with the columns step, layer, head and the metrics; NaN for a
    metric that the layer lacks. DuckDB, pandas and polars read such a folder as one table. A file
    is written under another name and then moved, so a process that is killed loses at most the step
    that it was writing. A step that cannot be written is lost with a warning; the training goes on.

    A resumed run goes on in the folder of the run that was stopped: steps from its first logged one
    on are replaced.

    Raises `Missing` without DuckDB, and `BadValue` for a folder that cannot be written to. The
    first step raises `BadValue` if the folder has no earlier step: its run is another one.
    """
    with needs("survey", "Parquet files are written with DuckDB."):
        import duckdb
    target, begun = writable_folder(folder, "numbers of a training are"), False

    def log(numbers: dict[str, float], step: int) -> None:
        nonlocal begun
        if not begun:
            _go_on(target, step)
            begun = True
        path = target / f"step-{step:09d}.parquet"
        temporary = temporary_for(path)
        try:
            with duckdb.connect(config={"threads": 1}) as connection:
                connection.register("rows", _columns(numbers, step))
                connection.table("rows").write_parquet(str(temporary))
            os.replace(temporary, path)
        except (OSError, duckdb.Error) as error:
            temporary.unlink(missing_ok=True)
            warnings.warn(f"step {step} is not in {str(target)!r}: {error}", stacklevel=3)

    return log


def _go_on(folder: Path, step: int) -> None:
    """Remove the steps that a stopped run logged from this one on."""
    files = _files(folder)
    if files and min(files) >= step:
        raise BadValue(
            f"{str(folder)!r} has the steps {min(files)} to {max(files)} of a run, and this one "
            f"begins at step {step}.",
            "a resumed run goes on in its folder; another run has another folder.",
            "pass another folder, or remove that one.",
        )
    for later, path in files.items():
        if later >= step:
            path.unlink()


def _files(folder: Path) -> dict[int, Path]:
    named = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(name[1]), path) for name, path in named if name is not None))


def _columns(numbers: dict[str, float], step: int) -> dict[str, np.ndarray]:
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name, value in numbers.items():
        parts = _NAME.fullmatch(name)
        assert parts is not None, name
        rows.setdefault((int(parts[1]), int(parts[2])), {})[parts[3]] = value
    layers, heads = np.array(list(rows), dtype=np.int32).reshape(-1, 2).T
    columns = {"step": np.full(len(rows), step), "layer": layers, "head": heads}
    for name in METRICS:
        if any(name in row for row in rows.values()):
            columns[name] = np.array([row.get(name, math.nan) for row in rows.values()])
    return columns


class History:
    """The numbers of a training, read from the folder of `monitor.parquet`.

    Attributes:
        steps: the logged steps, in order.
        heads: (layer, head) of each head, in order.
        values: the numbers of each metric, (steps, heads); NaN where a head has none.
    """

    def __init__(
        self, steps: list[int], heads: list[tuple[int, int]], values: dict[str, np.ndarray]
    ) -> None:
        self.steps, self.heads, self.values = steps, heads, values

    @classmethod
    def read(cls, folder: str | Path) -> "History":
        """Read the steps of a folder. A run that goes on may still be writing to it.

        Raises `Missing` without DuckDB, and `BadValue` for a folder without steps.
        """
        with needs("survey", "Parquet files are read with DuckDB."):
            import duckdb
        path = Path(folder)
        if not (files := _files(path) if path.is_dir() else {}):
            raise BadValue(
                f"{str(folder)!r} has no steps of a training.",
                "the folder is that of ch.monitor(model, log=ch.monitor.parquet(folder)).",
                "look at its name, or wait for the first logged step.",
            )
        # DuckDB takes each path for a pattern.
        patterns = [re.sub(r"([*?\[])", r"[\1]", str(file.absolute())) for file in files.values()]
        connection = duckdb.connect(config={"threads": 1})
        table = connection.read_parquet(patterns, union_by_name=True).order("step, layer, head")
        columns = {
            name: np.ma.filled(x.astype(float), math.nan) for name, x in table.fetchnumpy().items()
        }
        places = np.stack([columns.pop("layer"), columns.pop("head")], 1).astype(int)
        heads, at = np.unique(places, axis=0, return_inverse=True)
        steps, row = np.unique(columns.pop("step").astype(int), return_inverse=True)
        values = {name: np.full((len(steps), len(heads)), math.nan) for name in columns}
        for name, x in columns.items():
            values[name][row, at.ravel()] = x
        return cls(steps.tolist(), [(int(layer), int(head)) for layer, head in heads], values)

    def alarms(self) -> list[Alarm]:
        """Return the alarms that begin at each step, by the rules of `monitor`."""
        rules, raised = Alarms(), []
        for i, step in enumerate(self.steps):
            layers: dict[int, dict[str, list[float]]] = {}
            for name, x in self.values.items():
                for (layer, _), value in zip(self.heads, x[i].tolist(), strict=True):
                    layers.setdefault(layer, {}).setdefault(name, []).append(value)
            raised += rules.check(step, layers)
        return raised

    def __repr__(self) -> str:
        lines = [
            f"{quantity(len(self.steps), 'logged step')}, {self.steps[0]} to {self.steps[-1]}, of "
            f"{quantity(len(self.heads), 'head')}",
            f"{'mean over heads':18}{'first':>10}{'last':>10}{'least':>10}{'most':>10}  of",
        ]
        for name, x in self.values.items():
            rows = x[~np.isnan(x).all(1)]
            if not len(rows):
                continue
            at, head = np.unravel_index(np.nanargmax(x), x.shape)
            cells = np.nanmean(rows[0]), np.nanmean(rows[-1]), np.nanmin(x), np.nanmax(x)
            layer, of_layer = self.heads[head]
            lines.append(
                f"{name:18}{''.join(f'{number(float(c), 3):>10}' for c in cells)}"
                f"  L{layer}H{of_layer}, step {self.steps[at]}"
            )
        lines += [f"step {alarm.step}: {alarm.sentence}" for alarm in self.alarms()]
        return "\n".join(lines)
