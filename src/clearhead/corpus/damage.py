"""The error for a file of a survey whose contents are not those that were written."""

from pathlib import Path

from ..core.errors import BadValue


def damaged(path: Path, why: str) -> BadValue:
    return BadValue(
        f"{str(path)!r} is damaged: {why}.",
        "a file of a survey has the contents that were written, which its digest shows.",
        "delete the file, and run the same survey again, which writes it.",
    )
