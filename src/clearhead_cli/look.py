"""`clearhead look`: show what every head of a model looks at, as text, as a picture, as a page."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import HEAD, OTHER_FOLDER, Model, Text, refuse
from .output import say, say_loading, say_written, terminal_width, wrapped
from .text_input import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clearhead import Why
    from clearhead.models.report import Report
    from clearhead.models.report.text_model import TextModel

SHORT_TABLE = 24  # heads of which the table fits a screen


def look(
    context: typer.Context,
    text: Text = None,
    model: Model = None,
    beside: Annotated[
        Path | None, typer.Option(help="Another model, for comparison on the page.")
    ] = None,
    effects: Annotated[
        bool,
        typer.Option(
            "--effects",
            help="Measure the effect of each head by running without it. Always on for the "
            "storyteller.",
        ),
    ] = False,
    repeated_tokens: Annotated[
        bool, typer.Option("--repeated-tokens", help="Also score heads on random repeated tokens.")
    ] = False,
    all: Annotated[
        bool, typer.Option("--all", help="Print the table of all heads, however many they are.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Write the table of all heads to this file.")
    ] = None,
    tile: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER:HEAD:QUERIES:KEYS",
            help="Show exact weights of a part of a long text, e.g. 3:5:1024-1087:0-63.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the pictures and the page.")] = Path(
        "out"
    ),
) -> None:
    """Show what every head looks at: as text, as a picture, as a page.

    The model is the included storyteller, unless --model names another.

    \b
    Examples:
      clearhead look "The cat sat because it was tired."
      clearhead look story.txt --model DIR --out pictures
      clearhead look "The cat sat." --model DIR --effects
      clearhead look story.txt --model DIR --repeated-tokens --csv heads.csv
      clearhead look book.txt --model DIR --tile 0:3:64-127:0-63
      clearhead look story.txt --beside out/storyteller
      clearhead look photo.jpg --model DIR
      clearhead look speech.wav --model DIR
    """
    say_loading(model)
    from clearhead.core.errors import writable_folder
    from clearhead.views.load import load_text_model

    if tile is not None:
        names = "beside", "effects", "repeated_tokens", "all", "csv"
        rule, hint = "a tile is a part of the weights of one head.", "leave {} or --tile out."
        refuse(context, names, "with --tile", rule, hint)
    file = _image_or_sound(text)
    words = read_text(text) if file is None else file
    writable_folder(out, "pictures and page are", OTHER_FOLDER)
    # The other model first: if it cannot be loaded, no report is computed.
    other = None if beside is None else load_text_model(beside)
    reader = load_text_model(model) if file is None else _reader_of(file, model)
    if tile is not None:
        _look_at_tile(reader, words, tile, out)
        return
    from clearhead.hf import SoundCheckpoint
    from clearhead.models.report import report, summary, word_times
    from clearhead.views import text as terminal
    from clearhead.views.html.why import why_ahead
    from clearhead.views.report_files import write

    compared = None if other is None else report(other, words)
    result = report(
        reader, words, effects=effects or reader.is_small, repeated_tokens=repeated_tokens,
        next_token=True,
    )  # fmt: skip
    if model is not None and not model.exists():  # a name of the hub, which the page shows too
        result = replace(result, folder=str(model))
    times = word_times(reader, words) if isinstance(reader, SoundCheckpoint) else None
    if times is not None and times.heads:
        best = result[times.heads[0][:2]]
        result = replace(result, begin=(best.layer, best.head, best.links[0].query))
    ahead = _without_writers(reader, words, result)
    why = why_ahead(reader, result, words)
    # Written before anything is printed, because a pipe may close.
    written = write(result, out, beside=compared, ahead=ahead, why=why)
    if csv is not None:
        written["table"] = _write_csv(result, csv)
    width = terminal_width()
    typer.echo(summary(result, min(80, width or 80)))
    if times is not None:
        typer.echo(f"\n{wrapped(str(times))}")
    if why:
        typer.echo(f"\n{wrapped(_why_line(result, why))}")
    if all or len(result.heads) <= SHORT_TABLE:
        typer.echo(f"\n{result.to_text(width)}")
    else:
        typer.echo("\nAll heads: add --all for the table, --csv FILE for a file, or open the page.")
    for remark in reader.remarks(str(words)):
        typer.echo(f"\n{wrapped(remark.sentence)}")
        if remark.trace is not None:
            typer.echo()
            terminal.heat(remark.trace, heads=[remark.head], layer=remark.layer)
    say_written(written)


def _image_or_sound(words: "list[str] | None") -> Path | None:
    from clearhead.hf.image_checkpoint import SUFFIXES
    from clearhead.hf.sound_checkpoint import SOUNDS

    path = Path(words[0]) if words and len(words) == 1 else None
    is_known = path is not None and path.suffix.lower() in (*SUFFIXES, *SOUNDS)
    return path if path and is_known and path.is_file() else None


def _reader_of(file: Path, model: Path | None) -> "TextModel":
    from clearhead.core.errors import BadValue
    from clearhead.hf import ImageCheckpoint, SoundCheckpoint
    from clearhead.hf.sound_checkpoint import SOUNDS
    from clearhead.views.load import load_text_model

    reader = load_text_model(model, pictures=True)
    is_sound = file.suffix.lower() in SOUNDS
    if isinstance(reader, SoundCheckpoint if is_sound else ImageCheckpoint):
        return reader
    gave = f"{reader.name} cannot read {str(file)!r}, {'a sound' if is_sound else 'an image'}."
    rule = "an image is read by a vision model with its image processor, a sound by a Whisper."
    raise BadValue(gave, rule, "pass --model FOLDER, for example that of a DINOv2.")


def _why_line(result: "Report", why: "Sequence[Why] | str") -> str:
    """Say why the head to begin with looks at its key."""
    if isinstance(why, str):
        return f"Why it looks there is unknown. {why}"
    own = result.layers[why[0].layer]
    tokens = None if own.cross_attention else own.key_tokens
    return f"Why: {replace(why[0], tokens=tokens).sentence()}"


def _without_writers(model: "TextModel", words: "str | Path", result: "Report") -> "Report | None":
    """Read the text without the heads that write the next token, for a page without the model."""
    from clearhead import edits, intervene
    from clearhead.core.errors.limits import MOST_COMPARED_TOKENS
    from clearhead.models.report import report

    if result.model is not None or not result.writers or len(result.tokens) > MOST_COMPARED_TOKENS:
        return None
    off = [edits.ablate(layers=[x.layer], heads=[x.head]) for x in result.writers]
    with intervene(model.predictor or model.module, off):
        return report(model, words)


def _write_csv(result: "Report", path: Path) -> Path:
    """Write a row for each head."""
    import csv

    from clearhead.core.errors import writable_folder

    writable_folder(path.parent, "the table is", "pass another path to --csv.")
    rows = result.as_rows()
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def _look_at_tile(model: "TextModel", words: "str | Path", tile: str, out: Path) -> None:
    from clearhead.core.formatting import visible
    from clearhead.models.report import tile as exact_weights
    from clearhead.views import plot, text as terminal
    from clearhead.views.report_files import file_stem

    trace = exact_weights(model, words, *_parse_tile(tile))
    picture = plot.save(plot.heads(trace), out / f"{file_stem(model.name)}-tile.png")
    typer.echo(f"{visible(model.name, 200)}, {trace.about}")
    terminal.heat(trace)
    say(f"picture  {picture}")


def _parse_tile(tile: str) -> tuple[int, int, range, range]:
    """Parse ``0:3:64-127:0-63`` as layer, head, queries and keys; ranges include their ends."""
    from clearhead.core.errors import BadValue

    match = re.fullmatch(rf"{HEAD}:(\d+)-(\d+):(\d+)-(\d+)", tile)
    if match is None:
        rule = "a tile is HEAD:QUERIES:KEYS: a head as L0H3 or 0:3, the others as FIRST-LAST."
        hint = "pass for example --tile L0H3:64-127:0-63."
        raise BadValue(f"--tile {tile!r} is not a tile.", rule, hint)
    layer, head, first, last, left, right = map(int, match.groups())
    return layer, head, range(first, last + 1), range(left, right + 1)
