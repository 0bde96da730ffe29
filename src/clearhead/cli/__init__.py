"""The command line: one file for each command, and for the three of the storyteller."""

import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import AttentionError, BadValue
from .bench import bench
from .doctor import doctor, installed_version
from .explain import explain
from .look import look
from .output import say
from .plan import plan
from .scale import scale
from .serve import serve
from .storyteller import ablate, measure, train
from .whatif import whatif

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (explain, look, serve, whatif, scale, train, measure, ablate, plan, bench, doctor)
for command in COMMANDS:
    app.command()(command)

# The base of usage errors, of click or, in newer versions of typer, of the copy of click in it.
UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command line. An error prints its three parts and exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # characters that an encoding lacks become "?"
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(prog_name="clearhead", standalone_mode=False))
    except AttentionError as error:
        _fail(error)
    except UsageError as error:
        _fail(_in_three_parts(error))
    except typer.Abort:
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        _fail(
            BadValue(
                f"Reading or writing failed: {error}.",
                "what is read exists, and what is written has room.",
                "check the path, its permissions and the space left on the disk.",
            )
        )


def _fail(error: AttentionError) -> None:
    screen = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    screen.print(f"Error: {error}")
    sys.exit(2)


def _in_three_parts(error: Any) -> BadValue:
    """A usage error of click: an unknown option or command, a missing or wrong argument."""
    names = [command.__name__ for command in COMMANDS]
    path, rule = "clearhead", f"the commands are {', '.join(names)}."
    if error.ctx is None and sys.argv[1] in names:  # click gives no context for a missing value
        path, rule = f"clearhead {sys.argv[1]}", "an option that takes a value is followed by it."
    elif error.ctx is not None and error.ctx.parent is not None:
        path = error.ctx.command_path
        rule = f"usage: {path} {' '.join(error.ctx.command.collect_usage_pieces(error.ctx))}"
    message = error.format_message()
    ending = "" if message.endswith((".", "?")) else "."
    return BadValue(message + ending, rule, f"see {path} --help.")


def _version(given: bool) -> None:
    if given:
        typer.echo(f"clearhead {installed_version('clearhead') or '(not installed)'}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def about(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which this is."),
    ] = False,
) -> None:
    """Attention with a clear head: type a sentence, see attention computed."""
    if context.invoked_subcommand is None:
        say(context.get_help())
        raise typer.Exit(2)
