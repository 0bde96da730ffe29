"""The bar that long work shows on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    doing: str, total: int | None, progress: bool | None, *, done: int = 0
) -> Iterator[Callable[[], None]]:
    """A function that advances a bar by one step; without `progress` it does nothing, and None
    means only in a terminal. `total` is None where the number of steps is not known, and `done`
    were done before."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    time = TimeElapsedColumn() if total is None else TimeRemainingColumn()
    columns = doing, BarColumn(), MofNCompleteColumn(), time
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda: bar.advance(task)
