"""Show on stderr how far a long computation is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    doing: str, total: int | None, progress: bool | None, *, done: int = 0, unit: str = " steps"
) -> Iterator[Callable[..., None]]:
    """Yield a function that advances a progress bar by one unit, or by `n`.

    With ``progress=False`` there is no bar; None shows it only in a terminal. Elsewhere, with True,
    it is written every 30 seconds. `total` is None if the number of units is unknown, and `done`
    units are already complete, which do not count for the rate.
    """
    from tqdm import tqdm

    in_terminal = sys.stderr.isatty()
    silent = not (in_terminal if progress is None else progress)
    every = 0.2 if in_terminal else 30.0  # seconds
    bar = tqdm(total=total, initial=done, desc=doing, unit=unit, disable=silent, mininterval=every)

    def advance(n: int = 1) -> None:
        # tqdm returns whether it has drawn, which as the result of a hook would replace an output.
        bar.update(n)

    with bar:
        yield advance
