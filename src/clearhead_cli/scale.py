"""`clearhead scale`: show why scores are divided by sqrt(d)."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from .output import check_writable, say


def scale(
    size: Annotated[int, typer.Option(help="The head size d to show.")] = 256,
    keys: Annotated[int, typer.Option(help="The number of random keys.")] = 32,
    seed: Annotated[int, typer.Option(help="The seed of the random numbers.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Also draw it to this file.")] = None,
) -> None:
    """Show why scores are divided by sqrt(d), with and without it.

    \b
    Examples:
      clearhead scale
      clearhead scale --size 64 --png scale.png
    """
    from clearhead.core.functional.why_scale import why_scale
    from clearhead.views import plot

    check_writable(png)
    scaling = why_scale(size, keys=keys, seed=seed)
    typer.echo(scaling.text(shutil.get_terminal_size().columns))
    if png is not None:
        say(f"picture: {plot.save(plot.scaling(scaling), png)}")
