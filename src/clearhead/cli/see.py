"""Commands that show attention on a text, and what its scaling is for."""

import json
import shutil
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import masks
from ..api.why_scale import why_scale
from ..errors import folder
from ..nn import lesson
from ..results.trace import Trace
from ..views import html, plot, text as terminal
from ..views.escape import visible
from ..views.text.follow import find
from . import checks
from .options import OTHER, Heads, Layer, MaskText, Model, Positions, Seed, Size, Text, say
from .text_input import text_of


def explain(
    context: typer.Context,
    text: Text = None,
    size: Size = 8,
    heads: Heads = 2,
    seed: Seed = 123,
    mask: MaskText = "everything",
    dropout: Annotated[float, typer.Option(help="Drop weights with this probability.")] = 0.0,
    scale: Annotated[
        float | None, typer.Option(help="Multiply scores by this; default 1/sqrt(head size).")
    ] = None,
    positions: Positions = True,
    model: Model = None,
    layer: Layer = 0,
    head: Annotated[int | None, typer.Option(help="Show only this head, from 0.")] = None,
    query: Annotated[
        str | None,
        typer.Option(
            help="Follow one query through one head, term by term: a token, or its number."
        ),
    ] = None,
    decimals: Annotated[int, typer.Option(min=0, max=12, help="Digits after the point.")] = 4,
    png: Annotated[
        Path | None, typer.Option(help="Also draw one head's steps, --head or 0, here.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Also write the interactive page here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """See attention computed on a text, step by step."""
    checks.explain_options(context, model)
    checks.json_options(context, as_json)
    checks.writable(png, page)
    if png is not None:
        plot.suffix_of(png)
    trace = _trace(
        text, size=size, heads=heads, seed=seed, mask=mask, dropout=dropout, scale=scale,
        positions=positions, model=model, layer=layer,
    )  # fmt: skip
    shown = 0 if head is None else checks.within("head", head, trace["weights"].shape[-3])
    told = trace if head is None else trace.head(shown)
    written = []  # before anything is printed: a pipe may close, as that of `head` does
    if png is not None:
        written.append(f"picture: {plot.save(plot.steps(trace, head=shown), png)}")
    if page is not None:
        begin = None if query is None else find(trace, query)[0]
        written.append(f"page: {_page(told, page, _note(model, seed), begin)}")
    if as_json:
        typer.echo(json.dumps(terminal.to_json(told), ensure_ascii=True, allow_nan=False))
    elif query is not None:
        terminal.follow(trace, query, head=shown, decimals=decimals)
    else:
        terminal.show(trace, heads=None if head is None else [head], decimals=decimals)
    for line in written:
        say(line)


def _trace(
    text: list[str] | None, *, model: Path | None, layer: int, mask: str, **options: Any
) -> Trace:
    words = text_of(text)
    if model is None:
        return lesson.explain_text(words, mask=masks.parse(mask), **options)
    if (checkpoint := _checkpoint(model)) is None:
        from ..storyteller import load

        return load(model).explain(words, layer)
    from ..hf import Checkpoint

    return Checkpoint(checkpoint).explain(words, layer)


def look(
    context: typer.Context,
    text: Text = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Look at this model: a Hugging Face checkpoint, or a trained storyteller."
        ),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Look at random weights, from which training begins.")
    ] = False,
    size: Annotated[int, typer.Option(help="With --random: features per token.")] = 32,
    heads: Annotated[
        int, typer.Option(help="With --random: number of heads; must divide the size.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="With --random: what the numbers start from.")] = 123,
    mask: Annotated[
        str, typer.Option(help="With --random: who may look at whom, e.g. 'causal & prefix(2)'.")
    ] = "causal",
    positions: Annotated[
        bool, typer.Option(help="With --random: add sinusoidal positions.")
    ] = True,
    tile: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER:HEAD:QUERIES:KEYS",
            help="With --model: exact weights of a part of a long text, e.g. 3:5:1024-1087:0-63.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the pictures and the page.")] = Path(
        "out"
    ),
) -> None:
    """See what every head looks at: here, as picture, as page.

    The heads are those of a trained model: the storyteller that comes with clearhead, unless
    --model names another.
    """
    checks.look_options(context, model, random)
    checkpoint = None if model is None else _checkpoint(model)
    if tile is not None and checkpoint is None:
        raise checks.no_tile()
    words = text_of(text)
    folder(out, "pictures and page are", OTHER)
    if random:
        trace = lesson.explain_text(
            words, size=size, heads=heads, seed=seed, mask=masks.parse(mask), positions=positions
        )
        _look_random(trace, out, seed)
    elif checkpoint is None:
        _look_teller(model, words, out)
    elif tile is not None:
        _look_tile(checkpoint, words, tile, out)
    else:
        _look_checkpoint(checkpoint, words, out)


def _checkpoint(model: Path) -> Path | None:
    """A model that is no storyteller; None for one."""
    from ..storyteller import is_storyteller

    return None if is_storyteller(model) else model


def _look_teller(model: Path | None, words: str, out: Path) -> None:
    from ..report import report_teller, write
    from ..storyteller import load

    teller = load(model)
    found = report_teller(teller, words)
    written = write(found, out)  # before anything is printed: a pipe may close
    typer.echo(f"After each word, what the storyteller expects next:\n\n{teller.read(words)}\n")
    typer.echo(f"{found}\n")
    for head in teller.heads:
        links = ", ".join(map(str, teller.links(words, head))) or "no word of this text asks it"
        typer.echo(f"{head}; here, right or wrong:\n{_wrapped(links)}\n")
        terminal.heat(teller.explain(words, head.layer), heads=[head.head])
        typer.echo()
    _say_written(written)


def _wrapped(line: str) -> str:
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def _look_tile(model: Path, words: str, asked: str, out: Path) -> None:
    from ..report import tile

    trace = tile(model, words, *checks.tile(asked))
    picture = plot.save(plot.heads(trace), out / "tile.png")
    typer.echo(f"{visible(model.name, 200)}, {trace.about}")
    terminal.heat(trace)
    say(f"picture  {picture}")


def _look_checkpoint(model: Path, words: str, out: Path) -> None:
    from ..report import report, write

    found = report(model, words)
    written = write(found, out)
    typer.echo(str(found))
    _say_written(written)


def _say_written(written: dict[str, Path]) -> None:
    for kind, path in written.items():
        say(f"{kind:<8} {path}")
    if not plot.can_draw():
        say("pictures none, without matplotlib: pip install 'clearhead[plot]'")


def _page(trace: Trace, path: Path, note: str, query: int | None = None) -> Path:
    """A page that has its text for a title."""
    words = " ".join(trace.queries or ())
    title = words if len(words) <= 60 else f"{words[:59]}…"
    return html.write_page(trace, path, title=title or "clearhead", note=note, query=query)


def _look_random(trace: Trace, out: Path, seed: int) -> None:
    note = _note(None, seed)
    picture = plot.save(plot.heads(trace), out / "heads.png")
    page = _page(trace, out / "look.html", note)
    terminal.heat(trace)
    say(f"\n{note}")
    say(f"picture  {picture}")
    say(f"page     {page}")


def _note(model: Path | None, seed: int) -> str:
    if model is not None:
        return f"Learned weights from {model}."
    return (
        f"The weights are random (seed {seed}): nothing has been learned yet, so the patterns mean "
        "nothing. A trained model looks at what it needs: verbs at their subjects, pronouns at "
        "their antecedents."
    )


def scale(
    size: Annotated[int, typer.Option(help="The head size d to show.")] = 256,
    keys: Annotated[int, typer.Option(help="How many random keys.")] = 32,
    seed: Annotated[int, typer.Option(help="What the random numbers start from.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Also draw it to this picture.")] = None,
) -> None:
    """Why divide by sqrt(d)? Numbers with and without the scaling."""
    checks.writable(png)
    report = why_scale(size, keys=keys, seed=seed)
    typer.echo(str(report))
    if png is not None:
        say(f"picture: {plot.save(plot.scaling(report), png)}")
