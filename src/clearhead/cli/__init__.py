"""The same verbs, from a shell."""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from ..errors import AttentionError, BadValue
from .machine import bench, doctor, plan
from .see import explain, look, scale
from .storyteller import ablate, measure, train

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (explain, look, scale, train, measure, ablate, plan, bench, doctor):
    app.command()(verb)


def main() -> None:
    """Run the command line. An error prints its three parts and exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what an encoding lacks becomes a question mark
            stream.reconfigure(errors="replace")
    try:
        app()
    except AttentionError as error:
        _fail(error)
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


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clearhead {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which this is."),
    ] = False,
) -> None:
    """Attention with a clear head: type a sentence, see attention computed."""
