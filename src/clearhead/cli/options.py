"""Options that several commands have, and what is checked of them."""

from collections.abc import Iterable
from typing import Annotated

import typer

from ..errors import BadValue

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


def typed(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of the options that were typed, and do not have their default value."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def refuse(context: typer.Context, names: Iterable[str], where: str, rule: str, way: str) -> None:
    """Raise `BadValue` for an option that was typed and would be ignored."""
    for name in typed(context, names):
        raise BadValue(f"--{name} was given {where}.", rule, way.format(name=name))
