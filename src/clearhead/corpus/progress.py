"""Show how far a survey is: tokens, tokens per second, and the time left."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from ..core.formatting import quantity


@contextmanager
def token_progress(
    total: int, progress: bool | None, before: int = 0
) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds a number of tokens.

    `before` is the number that earlier runs did; it does not count for the rate. In a terminal it
    moves a bar; elsewhere, with ``progress=True``, it prints a line every 30 seconds. None shows
    the bar only in a terminal.
    """
    if sys.stderr.isatty() and progress is not False:
        yield from _bar(total, before)
    elif progress:
        yield _Lines(total, before).add
    else:
        yield lambda tokens: None


def _bar(total: int, before: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    count = TextColumn("{task.completed:,} of {task.total:,} tokens, {task.fields[rate]} tokens/s")
    columns = "survey", BarColumn(), count, TimeRemainingColumn()
    started, done = time.monotonic(), 0
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        task = bar.add_task("", total=total, completed=before, rate="-")

        def add(tokens: int) -> None:
            nonlocal done
            done += tokens
            rate = f"{done / max(time.monotonic() - started, 1e-9):,.0f}"
            bar.update(task, advance=tokens, rate=rate)

        yield add


class _Lines:
    EVERY = 30.0  # seconds

    def __init__(self, total: int, before: int) -> None:
        self.total, self.done, self.before = total, before, before
        self.started = self.printed = time.monotonic()

    def add(self, tokens: int) -> None:
        self.done += tokens
        now = time.monotonic()
        if now - self.printed < self.EVERY and self.done < self.total:
            return
        self.printed = now
        rate = (self.done - self.before) / max(now - self.started, 1e-9)
        left = timedelta(seconds=round((self.total - self.done) / rate))
        done = f"{self.done:,} of {quantity(self.total, 'token')}"
        line = f"{done}, {rate:,.0f} tokens/s, {left} left"
        print(line, file=sys.stderr, flush=True)
