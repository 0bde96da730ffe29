"""Options that several commands have, and what is checked of them."""

from collections.abc import Iterable
from typing import Annotated

import typer

OTHER_FOLDER = "pass another folder with --out."

Text = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT",
        help="The text, or the path of a text file; - or nothing reads standard input.",
    ),
]
MaskText = Annotated[
    str, typer.Option("--mask", help="Who may look at whom, e.g. 'causal & window(before=3)'.")
]


def refuse(context: typer.Context, names: Iterable[str], where: str, rule: str, way: str) -> None:
    """Raise `BadValue` for the first option that was typed though it would be ignored."""
    from clearhead.errors import BadValue

    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise BadValue(f"--{name} was given {where}.", rule, way.format(f"--{name}"))
