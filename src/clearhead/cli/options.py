"""Options of `explain` and of several commands, and where commands speak."""

from pathlib import Path
from typing import Annotated

import typer

OTHER = "pass another folder with --out."

Text = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TEXT]",
        help="The text, or the path of a text file; - or nothing reads standard input.",
    ),
]
Size = Annotated[int, typer.Option(help="Features per token.")]
Heads = Annotated[int, typer.Option(help="Number of heads; must divide the size.")]
Seed = Annotated[int, typer.Option(help="What the random embeddings and projections start from.")]
MaskText = Annotated[
    str, typer.Option("--mask", help="Who may look at whom, e.g. 'causal & window(before=3)'.")
]
Positions = Annotated[bool, typer.Option(help="Add sinusoidal positions to the embeddings.")]
Model = Annotated[
    Path | None,
    typer.Option(
        help="Take tokens, Q, K and V from a Hugging Face checkpoint, or a trained storyteller."
    ),
]
Layer = Annotated[int, typer.Option(help="With --model: which layer, from 0.")]


def say(line: str) -> None:
    """What is said beside the result goes to standard error, so that pipes get the result alone."""
    typer.echo(line, err=True)
