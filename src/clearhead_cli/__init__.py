"""The command line: one file for each command of the package.

It is a package beside clearhead, and its functions import clearhead when they run, so that
`--help`, `--version` and completion do not load torch.
"""

import re
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .checkout import PROGRAMS, Commands, imported
from .doctor import doctor, installed_version
from .explain import explain
from .look import look
from .monitor import monitor
from .output import say
from .plan import plan
from .serve import serve
from .survey import survey
from .whatif import whatif
from .why import why

if TYPE_CHECKING:
    from clearhead.core.errors import AttentionError

app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_OF_PACKAGE = (explain, look, survey, serve, whatif, why, monitor, plan, doctor)
COMMANDS = [*(command.__name__ for command in _OF_PACKAGE), *PROGRAMS]
for command in _OF_PACKAGE:
    app.command()(command)
for name, (_, line) in PROGRAMS.items():
    app.command(name, help=line)(lambda: None)

# An argument of Python in an error, such as seed=0; not inside a call, where it may have brackets.
ARGUMENT = re.compile(r"(?<![\w(])([a-z_]+)=(?:clearhead\.)?(?=([^\s.,;:]?))")

# The base of usage errors: click's, or in newer versions of typer, that of its copy of click.
UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command line. An error prints its three parts and exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # characters that an encoding lacks become "?"
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(prog_name="clearhead", standalone_mode=False))
    except (typer.Abort, BrokenPipeError):
        sys.exit(1)
    except Exception as error:
        if (user_error := _in_three_parts(error)) is None:
            raise
        from rich.console import Console

        screen = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        screen.print(f"Error: {user_error}")
        sys.exit(2)


def _in_three_parts(error: Exception) -> "AttentionError | None":
    """Return an error that the user can fix, with its three parts; None for any other."""
    from clearhead.core.errors import AttentionError, BadValue

    if isinstance(error, UsageError):
        return _usage(error)
    if isinstance(error, OSError):
        rule = "a file to read must exist, and a file to write needs disk space."
        hint = "check the path, its permissions and the free disk space."
        return BadValue(f"Reading or writing failed: {error}.", rule, hint)
    return _with_options(error) if isinstance(error, AttentionError) else None


def _with_options(error: "AttentionError") -> "AttentionError":
    """Return the error with options of the command in place of arguments of Python.

    ``pass for example context=128.`` becomes ``pass for example --context 128.``
    """
    name = sys.argv[1]
    group: Any = typer.main.get_command(app)
    command = imported.get(name, group.commands.get(name))
    names = [] if command is None else [option for x in command.params for option in x.opts]
    options = {name[2:].replace("-", "_"): name for name in names if name.startswith("--")}

    def option(match: re.Match[str]) -> str:
        name = options.get(match[1])
        return match[0] if name is None else name + " " * bool(match[2])

    return type(error)(*(ARGUMENT.sub(option, x) for x in (error.gave, error.rule, error.hint)))


def _usage(error: Any) -> "AttentionError":
    """Convert a usage error of click: an unknown option or command, a missing or wrong argument."""
    from clearhead.core.errors import BadValue

    path, rule = "clearhead", f"the commands are {', '.join(COMMANDS)}."
    if error.ctx is None and sys.argv[1] in COMMANDS:  # click has no context for a missing value
        path, rule = f"clearhead {sys.argv[1]}", "an option that takes a value is followed by it."
    elif error.ctx is not None and error.ctx.parent is not None:
        path = error.ctx.command_path
        rule = f"usage: {path} {' '.join(error.ctx.command.collect_usage_pieces(error.ctx))}"
    message = error.format_message()
    ending = "" if message.endswith((".", "?")) else "."
    return BadValue(message + ending, rule, f"see {path} --help.")


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"clearhead {installed_version('clearhead') or '(not installed)'}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def about(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Type a sentence, and see attention computed step by step."""
    if context.invoked_subcommand is None:
        say(context.get_help())
        raise typer.Exit(2)
