"""`clearhead look`: what every head of a model looks at, as text, as pictures, as a page."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .explain import random_note, write_page
from .options import OTHER_FOLDER, Text, refuse
from .output import say, say_loading, say_written, wrapped
from .text_input import read_text

if TYPE_CHECKING:
    from clearhead.inspection.report import Report


def look(
    context: typer.Context,
    text: Text = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Look at this model: a Hugging Face checkpoint, a GGUF file, or a storyteller."
        ),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(help="Another model, to compare with on the page."),
    ] = None,
    effects: Annotated[
        bool,
        typer.Option(
            "--effects",
            help="Run again without each head, to see what it causes. The storyteller always is.",
        ),
    ] = False,
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

    \b
    Examples:
      clearhead look "The cat sat because it was tired."
      clearhead look story.txt --model DIR --out pictures
      clearhead look "The cat sat." --model DIR --effects
      clearhead look book.txt --model DIR --tile 0:3:64-127:0-63
      clearhead look story.txt --beside out/storyteller
      clearhead look "The cat sat" --random
    """
    if not random:
        say_loading(model)
    from clearhead.demo import is_storyteller
    from clearhead.errors import BadValue, writable_folder
    from clearhead.explorer.report_files import write
    from clearhead.inspection.report import report

    _check_options(context, model, random)
    checkpoint = model if model is not None and not is_storyteller(model) else None
    if tile is not None and checkpoint is None:
        raise BadValue(
            "--tile was given without a checkpoint.",
            "a tile is cut out of what a Hugging Face model makes of a long text; other texts are "
            "short and shown in full.",
            "add --model DIR, or leave --tile out.",
        )
    words = read_text(text)
    writable_folder(out, "pictures and page are", OTHER_FOLDER)
    if random:
        _look_at_random(words, size, heads, seed, mask, positions, out)
    elif checkpoint is None:
        _look_at_storyteller(model, words, out, _report(beside, words))
    elif tile is not None:
        _look_at_tile(checkpoint, words, tile, out)
    else:
        other = _report(beside, words)  # first: what is wrong with it then costs no report
        found = report(checkpoint, words, effects=effects)
        written = write(found, out, beside=other)
        typer.echo(str(found))
        say_written(written)


def _check_options(context: typer.Context, model: Path | None, random: bool) -> None:
    """Refuse options that would be ignored."""
    from clearhead.errors import BadValue

    if random and model is not None:
        raise BadValue(
            "--random was given together with --model.",
            "a model has trained weights.",
            "leave one of the two out.",
        )
    if random or context.params["tile"] is not None:
        rule, way = "it says more about the heads of a trained model.", "leave {} out."
        refuse(context, ["beside", "effects"], "with --random or --tile", rule, way)
    if not random:
        names = ("size", "heads", "seed", "mask", "positions")
        rule = "a trained model decides its own size, heads, mask and weights."
        way = "leave {} out, or add --random for weights that have learned nothing."
        refuse(context, names, "without --random", rule, way)


def _report(model: Path | None, words: str) -> "Report | None":
    """The report of a model that stands beside another; None for none."""
    from clearhead.demo import is_storyteller, load
    from clearhead.explorer.storyteller_report import report_teller
    from clearhead.inspection.report import report

    if model is None:
        return None
    if is_storyteller(model):
        return report_teller(load(model), words, name=_name(model))
    return report(model, words)


def _look_at_storyteller(
    model: Path | None, words: str, out: Path, beside: "Report | None"
) -> None:
    from clearhead.demo import load
    from clearhead.explorer import text as terminal
    from clearhead.explorer.report_files import write
    from clearhead.explorer.storyteller_report import report_teller

    teller = load(model)
    found = report_teller(teller, words, name=_name(model), effects=True)
    if model is not None:
        found = replace(found, folder=str(model.resolve()))
    written = write(found, out, beside=beside)  # before anything is printed: a pipe may close
    typer.echo(f"After each word, what the storyteller expects next:\n\n{teller.read(words)}\n")
    typer.echo(f"{found}\n")
    # That it finds whom a pronoun means shows most plainly what attention is.
    for head in sorted(teller.heads, key=lambda head: head.label != "antecedent"):
        links = ", ".join(map(str, teller.links(words, head))) or "no word of this text needs it"
        typer.echo(f"{head}; here, right or wrong:\n{wrapped(links)}\n")
        terminal.heat(teller.explain(words, head.layer), heads=[head.head], layer=head.layer)
        typer.echo()
    say_written(written)


def _name(model: Path | None) -> str:
    """The name of a storyteller: that of its folder."""
    if model is None:
        return "storyteller"
    path = model.resolve()
    return (path if path.is_dir() else path.parent).name


def _look_at_tile(model: Path, words: str, tile: str, out: Path) -> None:
    from clearhead.explorer import plot, text as terminal
    from clearhead.explorer.report_files import file_stem
    from clearhead.formatting import visible
    from clearhead.hf import Checkpoint
    from clearhead.inspection.report import tile as exact_weights

    checkpoint = Checkpoint(model)
    trace = exact_weights(checkpoint, words, *_parse_tile(tile))
    picture = plot.save(plot.heads(trace), out / f"{file_stem(checkpoint.name)}-tile.png")
    typer.echo(f"{visible(checkpoint.name, 200)}, {trace.about}")
    terminal.heat(trace)
    say(f"picture  {picture}")


def _parse_tile(tile: str) -> tuple[int, int, range, range]:
    """Layer, head, queries and keys of ``0:3:64-127:0-63``, where ranges include their ends."""
    from clearhead.errors import BadValue

    match = re.fullmatch(r"(\d+):(\d+):(\d+)-(\d+):(\d+)-(\d+)", tile)
    if match is None:
        raise BadValue(
            f"--tile {tile!r} names no part of a head.",
            "a tile is LAYER:HEAD:QUERIES:KEYS, and queries and keys are FIRST-LAST.",
            "pass for example --tile 0:3:64-127:0-63.",
        )
    layer, head, first, last, left, right = map(int, match.groups())
    return layer, head, range(first, last + 1), range(left, right + 1)


def _look_at_random(
    words: str, size: int, heads: int, seed: int, mask: str, positions: bool, out: Path
) -> None:
    from clearhead import masks
    from clearhead.explorer import plot, text as terminal
    from clearhead.nn.explain_text import explain_text

    trace = explain_text(
        words, size=size, heads=heads, seed=seed, mask=masks.parse(mask), positions=positions
    )
    note = random_note(seed)
    picture = plot.save(plot.heads(trace), out / "heads.png")
    page = write_page(trace, out / "look.html", note)
    terminal.heat(trace)
    say(f"\n{note}")
    say_written({"picture": picture, "page": page})
