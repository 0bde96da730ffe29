"""`clearhead explain`: compute attention on a text, step by step."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import MaskText, Text, refuse
from .output import check_writable, say, say_loading
from .text_input import read_text

if TYPE_CHECKING:
    from clearhead.core.functional.trace import Trace


def explain(
    context: typer.Context,
    text: Text = None,
    size: Annotated[int, typer.Option(help="Features per token.")] = 8,
    heads: Annotated[int, typer.Option(help="Number of heads; must divide the size.")] = 2,
    seed: Annotated[
        int, typer.Option(help="The seed of the random embeddings and projections.")
    ] = 123,
    mask: MaskText = "everything",
    dropout: Annotated[float, typer.Option(help="Drop weights with this probability.")] = 0.0,
    scale: Annotated[
        float | None,
        typer.Option(help="Multiply scores by this number; default 1/sqrt(head size)."),
    ] = None,
    positions: Annotated[
        bool, typer.Option(help="Add sinusoidal positions to the embeddings.")
    ] = True,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Use tokens, Q, K and V of a Hugging Face checkpoint or a trained storyteller."
        ),
    ] = None,
    layer: Annotated[int, typer.Option(help="With --model: the layer, from 0.")] = 0,
    head: Annotated[int | None, typer.Option(min=0, help="Show only this head, from 0.")] = None,
    query: Annotated[
        str | None,
        typer.Option(
            help="Follow one query through one head, term by term: a token or its position."
        ),
    ] = None,
    decimals: Annotated[int, typer.Option(min=0, max=12, help="Digits after the point.")] = 4,
    png: Annotated[
        Path | None,
        typer.Option(help="Also draw the steps of one head (--head, or 0) to this file."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Also write the interactive page to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compute attention on a text, step by step.

    \b
    Examples:
      clearhead explain "The cat sat on the mat"
      clearhead explain "The cat sat" --query sat --head 1
      clearhead explain story.txt --mask 'causal & window(before=3)' --html steps.html
      clearhead explain "The cat sat" --model DIR --layer 2 --json
    """
    if model is not None:
        say_loading(model)
    from clearhead import masks
    from clearhead.nn.explain_text import explain_text
    from clearhead.views import plot, text as terminal
    from clearhead.views.load import load_text_model
    from clearhead.views.text.follow import find

    _check_options(context, model, as_json)
    check_writable(png, page)
    if png is not None:
        plot.suffix_of(png)
    words = read_text(text)
    if model is not None:
        trace = load_text_model(model).explain(words, layer)
    else:
        trace = explain_text(
            words, size=size, heads=heads, seed=seed, mask=masks.parse(mask), dropout=dropout,
            scale=scale, positions=positions,
        )  # fmt: skip
    selected = trace if head is None else trace.head(head)
    written = []  # before printing, because a pipe may close, as with `| head`
    if png is not None:
        written.append(f"picture: {plot.save(plot.steps(trace, head=head or 0), png)}")
    if page is not None:
        note = f"Learned weights from {model}." if model is not None else random_note(seed)
        begin = None if query is None else find(trace, query)[0]
        written.append(f"page: {write_page(selected, page, note, begin)}")
    if as_json:
        typer.echo(json.dumps(terminal.to_json(selected), ensure_ascii=True, allow_nan=False))
    elif query is not None:
        terminal.follow(trace, query, head=head or 0, decimals=decimals)
    else:
        terminal.show(trace, heads=None if head is None else [head], decimals=decimals)
    for line in written:
        say(line)


def _check_options(context: typer.Context, model: Path | None, as_json: bool) -> None:
    """Refuse options that would be ignored."""
    if model is None:
        rule = "only a model has several layers."
        hint = "add --model DIR, or leave {} out."
        refuse(context, ("layer",), "without --model", rule, hint)
    else:
        names = ("size", "heads", "seed", "mask", "dropout", "scale", "positions")
        rule = "a model has its own size, heads, mask and weights."
        hint = "leave {} out, or explain the text without --model."
        refuse(context, names, "with --model", rule, hint)
    if as_json:
        rule, hint = "JSON has every number in full, for programs.", "leave {} or --json out."
        refuse(context, ("query", "decimals"), "with --json", rule, hint)


def write_page(trace: "Trace", path: Path, note: str, query: int | None = None) -> Path:
    """Write the page of a trace, with its text as the title."""
    from clearhead.views import html

    words = " ".join(trace.queries or ())
    title = words if len(words) <= 60 else f"{words[:59]}…"
    return html.write_page(trace, path, title=title or "clearhead", note=note, query=query)


def random_note(seed: int) -> str:
    return (
        f"The weights are random (seed {seed}), so the patterns mean nothing. In a trained model, "
        "heads have tasks: verbs look at their subjects, pronouns at their antecedents."
    )
