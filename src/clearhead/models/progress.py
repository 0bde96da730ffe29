"""Show a progress bar on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    doing: str, total: int | None, progress: bool | None, *, done: int = 0
) -> Iterator[Callable[[], None]]:
    """Yield a function that advances a progress bar by one step.

    With ``progress=False`` there is no bar; None shows it only in a terminal. `total` is None if
    the number of steps is unknown, and `done` steps are already complete.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda: None
        return
    import rich.progress as bars
    from rich.console import Console

    time = bars.TimeElapsedColumn() if total is None else bars.TimeRemainingColumn()
    columns = doing, bars.BarColumn(), bars.MofNCompleteColumn(), time
    with bars.Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda: bar.advance(task)
