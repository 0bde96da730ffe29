"""Commands whose programs are in a checkout of clearhead and not in the installed package."""

import importlib
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

_STORYTELLER = "examples.storyteller.commands"
PROGRAMS = {  # of each command: its module, and the first line of its help
    "train": (_STORYTELLER, "Train a storyteller, on its stories or on your text."),
    "measure": (_STORYTELLER, "Measure what each head does, and how well words are predicted."),
    "ablate": (_STORYTELLER, "Train without scaling, positions, mask or heads, and compare."),
    "bench": ("bench.command", "Time clearhead, its peers, and the limits of the hardware."),
}
imported: dict[str, Any] = {}  # the commands of the checkout that were used, by name


def command_of_checkout(name: str) -> Any:
    """Import a command of the checkout.

    Raises `BadValue` if clearhead was installed without its checkout.
    """
    module, root = PROGRAMS[name][0], Path(__file__).parents[2]
    if not root.joinpath(module.replace(".", "/")).with_suffix(".py").is_file():
        from clearhead.core.errors import BadValue

        rule = "benchmarks and the training of the included model are only in the repository."
        hint = "clone the repository, install it with pip install -e ., and repeat the command."
        raise BadValue(f"There is no {module} beside the installed package.", rule, hint)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    app = typer.Typer(rich_markup_mode=None)
    app.command(name)(getattr(importlib.import_module(module), name))
    return typer.main.get_command(app)


class Commands(TyperGroup):
    """The commands. One of the checkout is imported when it is used."""

    def resolve_command(self, context: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(context, args)
        if name in PROGRAMS:
            command = imported[name] = command_of_checkout(name)
        return name, command, rest
