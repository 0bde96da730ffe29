"""Print messages and results of commands, and check that files can be written."""

import os
import shutil
import sys
import textwrap
from pathlib import Path

import typer


def say(line: str) -> None:
    """Print a message to standard error, so that a pipe gets only the result."""
    typer.echo(line, err=True)


def say_loading(model: Path | None) -> None:
    """Print that a model is being loaded, which takes seconds; only in a terminal.

    Called before clearhead is imported.
    """
    if sys.stderr.isatty():
        say(f"loading {'the storyteller' if model is None else model} ...")


def say_written(paths: dict[str, Path]) -> None:
    """Print the paths of written files, and whether pictures are missing."""
    from clearhead.core.errors import how_to_install
    from clearhead.views import plot

    for kind, path in paths.items():
        say(f"{kind:<8} {path}" + "  (open it in a browser)" * (kind == "page"))
    if not plot.can_draw():
        say(f"no pictures, because matplotlib is missing: {how_to_install('plot')}")


def terminal_width() -> int | None:
    """Return the columns of the terminal, or of COLUMNS; None without both."""
    return shutil.get_terminal_size((0, 0)).columns or None


def wrapped(text: str, indent: int = 0) -> str:
    """Wrap the lines of a text to the width of the terminal, or to 80 columns without one.

    Continuation lines are indented.
    """
    width = shutil.get_terminal_size().columns
    wrap = textwrap.TextWrapper(
        width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(line if len(line) <= width else wrap.fill(line) for line in text.splitlines())


def check_writable(*paths: Path | None) -> None:
    """Raise `BadValue` for files that cannot be written, before anything is computed or printed."""
    from clearhead.core.errors import BadValue

    resolved = [path.resolve() for path in paths if path is not None]
    if len(set(resolved)) < len(resolved):
        gave = f"The picture and the page have the same file, {str(resolved[0])!r}."
        raise BadValue(gave, "the second would overwrite the first.", "name two files.")
    for path in (p for p in paths if p is not None):
        folder = path.parent
        if not folder.is_dir():
            why = f"there is no folder {str(folder)!r}"
        elif path.is_dir():
            why = "it is a folder"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            why = "permission denied"
        else:
            continue
        rule = "a result is written to a file, in an existing folder with write permission."
        hint = "create the folder first, or name another file."
        raise BadValue(f"The file {str(path)!r} cannot be written: {why}.", rule, hint)
