"""`clearhead whatif`: run a model on a text without and with edits of attention."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from .options import HEAD, Model, Text
from .output import say_loading
from .text_input import read_text

if TYPE_CHECKING:
    from clearhead.core.masks import Mask
    from clearhead.models.inspect import edits as edit

PLACE = re.compile(r"\s*(layer|head|row)s?\s+(-?\d+(?:\s*,\s*-?\d+)*)\s*")
EDGES = "EDGES is a mask, as in --mask, or 'QUERY -> KEY', tokens or their positions."


def whatif(
    text: Text = None,
    model: Model = None,
    knock_out: Annotated[
        list[str] | None,
        typer.Option(
            "--knock-out",
            metavar="[PLACE:] EDGES",
            help="Remove these edges, e.g. 'layer 0 head 7: she -> queen' or 'prefix(1)'. " + EDGES,
        ),
    ] = None,
    keep_only: Annotated[
        list[str] | None,
        typer.Option("--keep-only", metavar="[PLACE:] EDGES", help="Remove all other edges."),
    ] = None,
    ablate: Annotated[
        list[str] | None,
        typer.Option("--ablate", metavar="PLACE", help="Set outputs to 0, e.g. 'layer 0 head 7'."),
    ] = None,
) -> None:
    """Run a model on a text without and with edits of attention.

    Prints the next words and the losses before and after, and how much weight moves. For a model
    that predicts no next word, prints how far its vectors turn.

    A PLACE is layers, heads and rows (queries), numbered from 0: 'layers 0,1 head 7 row 4'; or one
    head, 'L0H7'.

    \b
    Examples:
      clearhead whatif "There was a queen. She danced." --knock-out "layer 0 head 7: she -> queen"
      clearhead whatif story.txt --keep-only "layers 0,1: causal & window(before=4)"
      clearhead whatif story.txt --model DIR --ablate "layer 0 heads 1,3"
    """
    say_loading(model)
    from clearhead.core.errors import BadValue
    from clearhead.core.formatting import visible
    from clearhead.models.report.whatif import whatif as read_twice
    from clearhead.views.load import load_text_model

    words = read_text(text)
    reader = load_text_model(model)
    tokens, _ = reader.tokens_and_inputs(words)
    options = {"knock_out": knock_out, "keep_only": keep_only, "ablate": ablate}
    edits = [_edit(x, kind, tokens) for kind, passed in options.items() for x in passed or ()]
    if not edits:
        rule = "whatif compares a run with edits to one without."
        hint = "pass for example --knock-out 'layer 0: prefix(1)' or --ablate 'layer 0 head 7'."
        raise BadValue("No edit was passed.", rule, hint)
    comparison = str(read_twice(reader, words, edits))
    for option in (*(knock_out or ()), *(keep_only or ())):
        if ends := _ends(option.rpartition(":")[2], tokens):
            named = [", ".join(f"{visible(tokens[i])} ({i})" for i in some) for some in ends]
            typer.echo(f"{option} means {' -> '.join(named)}")
            if max(ends[0]) < min(ends[1]):
                typer.echo(
                    "The query is before the key, where a causal model does not look; the other "
                    f"direction is {' -> '.join(reversed(named))}."
                )
    typer.echo(comparison)


def _edit(text: str, kind: str, tokens: list[str]) -> "edit.Edit":
    """Parse an edit such as ``layer 0 head 7: she -> queen``."""
    from clearhead.core.errors import BadValue
    from clearhead.models.inspect import edits as edit

    selection, colon, edges = text.rpartition(":") if kind != "ablate" else (text, ":", "")
    option = f"--{kind.replace('_', '-')}"
    if "layer" not in selection:
        selection = re.sub(rf"^\s*{HEAD}\b", r"layer \1 head \2 ", selection)
    numbers: dict[str, list[int]] = {}
    at = 0
    while match := PLACE.match(selection, at):
        if f"{match[1]}s" in numbers:
            rule = "PLACE names layers, heads and rows once each, as lists: 'layers 0,1 head 7'."
            hint = f"join them with a comma, or repeat {option}."
            raise BadValue(f"{option} {text!r} names {match[1]}s twice.", rule, hint)
        numbers[f"{match[1]}s"] = [int(n) for n in match[2].split(",")]
        at = match.end()
    if at < len(selection.strip()) or (colon and not numbers):
        rule = "PLACE is layers, heads and rows with their numbers, and a colon before the edges."
        hint = "write for example 'layer 0 head 7: she -> queen', or 'layers 0,1: prefix(1)'."
        raise BadValue(f"{option} {text!r} has no valid PLACE.", rule, hint)
    layers, heads, rows = (numbers.get(name) for name in ("layers", "heads", "rows"))
    if kind == "ablate":
        return edit.ablate(layers=layers, heads=heads, positions=rows)
    make = edit.knock_out if kind == "knock_out" else edit.keep_only
    return make(_mask(edges, tokens), layers=layers, heads=heads, positions=rows)


def _mask(edges: str, tokens: list[str]) -> "Mask":
    import torch

    from clearhead import masks
    from clearhead.core.masks import dense

    ends = _ends(edges, tokens)
    if ends is None:
        return masks.parse(edges)
    cells = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for q in ends[0]:
        cells[q, ends[1]] = True
    return dense(keep=cells)


def _ends(edges: str, tokens: list[str]) -> tuple[list[int], list[int]] | None:
    """Return the positions of queries and keys of ``she -> queen``; None for a mask."""
    query, arrow, key = (part.strip() for part in edges.partition("->"))
    return (positions_of(query, tokens), positions_of(key, tokens)) if arrow else None


def positions_of(token: str, tokens: list[str]) -> list[int]:
    """Return all positions of a token, or the position if `token` is a number."""
    from clearhead.core.errors import BadValue
    from clearhead.core.formatting import spellings, visible

    if token.isdecimal() and int(token) < len(tokens):
        return [int(token)]
    names = [{name.lower() for name in spellings(other)} for other in tokens]
    positions = [i for i, known in enumerate(names) if token.lower() in known]
    if not positions:
        rule = f"an edge connects two tokens: {', '.join(map(visible, tokens[:20]))}."
        hint = f"use one of these, or its position from 0 to {len(tokens) - 1}."
        raise BadValue(f"The token {token!r} is not in the text.", rule, hint)
    return positions
