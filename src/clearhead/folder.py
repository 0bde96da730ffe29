"""Folders to write to, found fit before anything is computed."""

import os
from pathlib import Path

from .errors import BadValue


def folder(path: str | Path, what: str, way: str = "pass another folder.") -> Path:
    """The folder of that name, made if need be. `what` will be written there, and `way` says how to
    name another one. Raises `BadValue` if it cannot be made or written to."""
    made, fails = Path(path), "cannot be made"
    try:
        made.mkdir(parents=True, exist_ok=True)
        fails = "cannot be written to"
        trial = made / f".trial.{os.getpid()}"
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise BadValue(
            f"The folder {str(path)!r} {fails}: {error.strerror}.",
            f"{what} written to a folder.",
            way,
        ) from error
    return made
