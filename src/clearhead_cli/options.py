"""Options that several commands share, and their checks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

OTHER_FOLDER = "pass another folder with --out."

# A head: L0H7, 0:7, 0,7, 0.7 or layer 0 head 7.
HEAD = r"(?i:layer\s*|L)?(\d+)\s*(?:[.:,]\s*|,?\s*(?i:head|H)\s*)(\d+)"

Text = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT",
        help="A text, or the path of a text file; - or nothing reads standard input.",
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="A checkpoint, a GGUF file, a cached model of the hub, or a storyteller (the default)."
    ),
]
MaskText = Annotated[
    str,
    typer.Option(
        "--mask", help="Which keys a query may look at, e.g. 'causal & window(before=3)'."
    ),
]


def refuse(context: typer.Context, names: Iterable[str], where: str, rule: str, hint: str) -> None:
    """Raise `BadValue` for the first option among `names` on the command line."""
    from clearhead.core.errors import BadValue

    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise BadValue(f"{option} was passed {where}.", rule, hint.format(option))
