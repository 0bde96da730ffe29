"""What `watch(to=...)` leaves: a folder with one file for each call, and an index of them."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import BadValue
from .folder import folder
from .stats import Top
from .stats.wanted import Result

END = b"\n]}\n"  # of the index, which is whole after every call


def unused(to: str | Path) -> Path:
    """The folder, made, with an index that no other watch can take."""
    made = folder(to, "statistics are", "pass another folder as to=.")
    try:
        with (made / "index.json").open("xb") as index:
            index.write(b'{"calls": [' + END)
    except FileExistsError:
        raise BadValue(
            f"The folder {str(to)!r} holds what was seen before.",
            "what was seen is never written over.",
            "pass another folder as to=, or delete this one.",
        ) from None
    return made


def _flat(found: dict[str, Result]) -> dict[str, Tensor]:
    """Statistics as named tensors for a file."""
    tensors: dict[str, Tensor] = {}
    for name, result in found.items():
        if isinstance(result, Top):
            tensors[f"{name}.weights"], tensors[f"{name}.keys"] = result.weights, result.keys
        elif isinstance(result, dict):
            tensors |= {f"{name}.{group}": x for group, x in result.items()}
        else:
            tensors[name] = result
    return {name: x.detach().contiguous().clone() for name, x in tensors.items()}


def write(
    place: Path,
    number: int,
    about: dict[str, object],
    found: dict[str, Result],
    blind: Tensor | None,
) -> Path:
    """A call's statistics to a file of their own, and a line to the index, which stays whole."""
    file = f"{number:05d}.safetensors"
    line = {"file": file, **about}
    said = (",\n" if number else "\n").encode() + json.dumps(line).encode() + END
    try:
        extra = {} if blind is None else {"blind": blind.contiguous()}
        save_file(_flat(found) | extra, place / file)
        with (place / "index.json").open("r+b", buffering=0) as index:
            end = index.seek(-len(END), 2)
            if index.write(said) < len(said):
                index.seek(end)
                index.write(END)
                index.truncate()
                raise OSError("no room for a line of the index")
    except (OSError, SafetensorError) as error:
        raise BadValue(
            f"What was seen could not be written to {str(place)!r}: {error}.",
            "each call is written to a file of its own, and needs room.",
            "make room, or watch fewer statistics; the calls before this one are there.",
        ) from error
    return place / file
