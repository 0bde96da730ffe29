"""`clearhead whatif`: a text read without and with edits of attention."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Text
from .output import say_loading
from .text_input import read_text

if TYPE_CHECKING:
    from clearhead.inspection import edits as edit
    from clearhead.masks import Mask

PLACE = re.compile(r"\s*(layer|head|row)s?\s+(-?\d+(?:\s*,\s*-?\d+)*)\s*")
EDGES = "EDGES is a mask, as in --mask, or 'QUERY -> KEY', tokens or their numbers."


def whatif(
    text: Text = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face checkpoint or a storyteller; default: the storyteller."),
    ] = None,
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
    """Read a text without and with edits of attention.

    Printed are the next words and the losses, before and after, and where weight moves; of a model
    that predicts no next word, how far its vectors turn.

    A PLACE is layers, heads and rows (queries), numbered from 0: 'layers 0,1 head 7 row 4'.

    \b
    Examples:
      clearhead whatif "There was a queen. She danced." --knock-out "layer 0 head 7: she -> queen"
      clearhead whatif story.txt --keep-only "layers 0,1: causal & window(before=4)"
      clearhead whatif story.txt --model DIR --ablate "layer 0 heads 1,3"
    """
    say_loading(model)
    from clearhead.errors import BadValue
    from clearhead.explorer.load import load_text_model
    from clearhead.formatting import visible
    from clearhead.inspection.whatif import whatif as read_twice

    words = read_text(text)
    reader = load_text_model(model)
    tokens, _ = reader.tokens_and_inputs(words)
    edits = [_edit(given, "knock_out", tokens) for given in knock_out or ()]
    edits += [_edit(given, "keep_only", tokens) for given in keep_only or ()]
    edits += [_edit(given, "ablate", tokens) for given in ablate or ()]
    if not edits:
        raise BadValue(
            "No edit was given.",
            "whatif shows what edits of attention change.",
            "pass for example --knock-out 'layer 0: prefix(1)' or --ablate 'layer 0 head 7'.",
        )
    found = str(read_twice(reader, words, edits))
    for given in (*(knock_out or ()), *(keep_only or ())):
        if ends := _ends(given.rpartition(":")[2], tokens):
            named = [", ".join(f"{visible(tokens[i])} ({i})" for i in some) for some in ends]
            typer.echo(f"{given} means {' -> '.join(named)}")
            if max(ends[0]) < min(ends[1]):
                typer.echo(
                    "The query stands before the key, where a causal model does not look; the "
                    f"other direction is {' -> '.join(reversed(named))}."
                )
    typer.echo(found)


def _edit(given: str, kind: str, tokens: list[str]) -> "edit.Edit":
    """An edit from ``layer 0 head 7: she -> queen``."""
    from clearhead.errors import BadValue
    from clearhead.inspection import edits as edit

    place, colon, edges = given.rpartition(":") if kind != "ablate" else (given, ":", "")
    option = f"--{kind.replace('_', '-')}"
    found: dict[str, list[int]] = {}
    at = 0
    while match := PLACE.match(place, at):
        if f"{match[1]}s" in found:
            raise BadValue(
                f"{option} {given!r} names {match[1]}s twice.",
                "a place names its layers, heads and rows once, in lists: 'layers 0,1 head 7'.",
                f"join them with a comma, or give {option} once for each place.",
            )
        found[f"{match[1]}s"] = [int(n) for n in match[2].split(",")]
        at = match.end()
    if at < len(place.strip()) or (colon and not found):
        raise BadValue(
            f"{option} {given!r} names no place.",
            "a place is layers, heads and rows with their numbers, and a colon before the edges.",
            "write for example 'layer 0 head 7: she -> queen', or 'layers 0,1: prefix(1)'.",
        )
    layers, heads, rows = (found.get(name) for name in ("layers", "heads", "rows"))
    if kind == "ablate":
        return edit.ablate(layers=layers, heads=heads, rows=rows)
    make = edit.knock_out if kind == "knock_out" else edit.keep_only
    return make(_mask(edges, tokens), layers=layers, heads=heads, rows=rows)


def _mask(edges: str, tokens: list[str]) -> "Mask":
    import torch

    from clearhead import masks
    from clearhead.masks import dense

    ends = _ends(edges, tokens)
    if ends is None:
        return masks.parse(edges)
    cells = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for q in ends[0]:
        cells[q, ends[1]] = True
    return dense(keep=cells)


def _ends(edges: str, tokens: list[str]) -> tuple[list[int], list[int]] | None:
    """The positions of the queries and keys of ``she -> queen``; None of a mask's notation."""
    query, arrow, key = (part.strip() for part in edges.partition("->"))
    return (_positions(query, tokens), _positions(key, tokens)) if arrow else None


def _positions(given: str, tokens: list[str]) -> list[int]:
    """Every position of a token, or the position that is given as a number."""
    from clearhead.errors import BadValue
    from clearhead.formatting import spellings, visible

    if given.isdecimal() and int(given) < len(tokens):
        return [int(given)]
    names = [{name.lower() for name in spellings(token)} for token in tokens]
    found = [i for i, known in enumerate(names) if given.lower() in known]
    if not found:
        raise BadValue(
            f"The token {given!r} is not in the text.",
            f"an edge goes from a token to a token: {', '.join(map(visible, tokens[:20]))}.",
            f"name one of these, or its number from 0 to {len(tokens) - 1}.",
        )
    return found
