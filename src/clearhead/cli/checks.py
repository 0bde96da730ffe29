"""What the shell may ask, checked before anything is computed or printed: no option is ignored, and
nothing that is written fails at the end."""

import os
import re
from pathlib import Path

import typer

from ..errors import BadValue


def explain_options(context: typer.Context, model: Path | None) -> None:
    """Refuse options that would be ignored: a checkpoint decides its own sizes and mask."""
    mine = {"size", "heads", "seed", "mask", "dropout", "scale", "positions"}
    wrong = mine if model is not None else {"layer"}
    for name in wrong.intersection(n for n in context.params if _typed(context, n)):
        if model is not None:
            raise BadValue(
                f"--{name} was given together with --model.",
                "a checkpoint decides its own size, heads, mask and weights.",
                f"leave --{name} out, or explain the text without --model.",
            )
        raise BadValue(
            f"--{name} was given without --model.",
            "only a checkpoint has layers to choose from.",
            f"add --model DIR, or leave --{name} out.",
        )


def json_options(context: typer.Context, as_json: bool) -> None:
    """Refuse options that shape what is read, where a program reads everything."""
    for name in ("query", "decimals"):
        if as_json and _typed(context, name):
            raise BadValue(
                f"--{name} was given together with --json.",
                "JSON holds every number in full, for programs.",
                f"leave --{name} or --json out.",
            )


def look_options(context: typer.Context, model: Path | None, random: bool) -> None:
    """Refuse options that would be ignored: a trained model decides its own sizes and mask."""
    if random and model is not None:
        raise BadValue(
            "--random was given together with --model.",
            "a model has trained weights.",
            "leave one of the two out.",
        )
    for name in ("size", "heads", "seed", "mask", "positions"):
        if not random and _typed(context, name):
            raise BadValue(
                f"--{name} was given without --random.",
                "a trained model decides its own size, heads, mask and weights.",
                f"leave --{name} out, or add --random for weights that have learned nothing.",
            )


def _typed(context: typer.Context, name: str) -> bool:
    """Was the option typed, or is its value the default?"""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def tile(asked: str) -> tuple[int, int, range, range]:
    """ "0:3:64-127:0-63" as layer, head, and two runs of positions, their last included."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+)-(\d+):(\d+)-(\d+)", asked)
    if match is None:
        raise BadValue(
            f"--tile {asked!r} names no part of a head.",
            "a tile is LAYER:HEAD:QUERIES:KEYS, and queries and keys are FIRST-LAST.",
            "pass for example --tile 0:3:64-127:0-63.",
        )
    layer, head, first, last, left, right = map(int, match.groups())
    return layer, head, range(first, last + 1), range(left, right + 1)


def no_tile() -> BadValue:
    return BadValue(
        "--tile was given without a checkpoint.",
        "a tile is cut out of what a Hugging Face model makes of a long text; other texts are "
        "short and shown whole.",
        "add --model DIR, or leave --tile out.",
    )


def within(name: str, index: int, count: int) -> int:
    if not 0 <= index < count:
        raise BadValue(
            f"{name} {index} was asked for.",
            f"there are {count} {name}s, numbered from 0.",
            f"pass a {name} from 0 to {count - 1}.",
        )
    return index


def writable(*paths: Path | None) -> None:
    """Refuse files that could not be written, before anything is computed or printed."""
    given = [path.resolve() for path in paths if path is not None]
    if len(set(given)) < len(given):
        raise BadValue(
            f"One file, {str(given[0])!r}, is to hold both the picture and the page.",
            "the second would be written over the first.",
            "name two files.",
        )
    for path in (p for p in paths if p is not None):
        folder = path.parent
        if not folder.is_dir():
            why = f"there is no folder {str(folder)!r}"
        elif path.is_dir():
            why = "it is a folder"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            why = "permission denied"
        else:
            continue
        raise BadValue(
            f"The file {str(path)!r} cannot be written: {why}.",
            "what is written goes to a file, in a folder that exists and may be written to.",
            "make the folder first, or name another file.",
        )
