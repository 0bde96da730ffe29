"""`clearhead monitor`: show the numbers of a training that `ch.monitor` logged."""

from pathlib import Path
from typing import Annotated

import typer

from .output import check_writable, say_written


def monitor(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="That of monitor.parquet.")],
    metric: Annotated[str, typer.Option(help="The metric that the picture shows.")] = "max",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a picture (.png, .svg, .pdf) or a page (.html)."),
    ] = None,
) -> None:
    """Show the numbers of a training: of each metric, of heads, and the alarms.

    The page shows every metric, as a film of heads over the steps.

    \b
    Examples:
      clearhead monitor run/attention
      clearhead monitor run/attention --metric entropy --out entropy.png
      clearhead monitor run/attention --out film.html
    """
    check_writable(out)
    import clearhead
    from clearhead.views import html, plot

    history = clearhead.monitor.read(folder)
    typer.echo(repr(history))
    if out is not None and out.suffix.lower() == ".html":
        say_written({"page": html.write_training(history, out, title=f"Training {folder}")})
    elif out is not None:
        plot.save(plot.training(history, metric), out)
        say_written({"picture": out})
