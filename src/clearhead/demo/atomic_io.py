"""Files that are never half written: each is written under another name and then moved."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import BadValue


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> Path:
    """Write tensors and metadata to one safetensors file.

    A process that is killed while it writes leaves the old file as it was: the new one replaces it
    in one move, once it is on the disk.
    """
    named = {name: t.detach().contiguous() for name, t in tensors.items()}
    return replace(path, save(named, {name: json.dumps(value) for name, value in about.items()}))


def write_json(path: Path, value: Any) -> Path:
    return replace(path, (json.dumps(value, indent=1) + "\n").encode())


def replace(path: Path, data: bytes) -> Path:
    """Replace the file at `path` by `data` in one move."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file of `write`. Raises `BadValue` for a file that is
    missing or not such a file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about = {n: json.loads(value) for n, value in (file.metadata() or {}).items()}
            return {name: file.get_tensor(name) for name in file.keys()}, about
    except FileNotFoundError as error:
        raise BadValue(
            f"There is no file {str(path)!r}.",
            "weights and checkpoints are safetensors files that clearhead wrote.",
            "check the path.",
        ) from error
    except (OSError, SafetensorError, ValueError) as error:
        raise BadValue(
            f"The file {str(path)!r} cannot be read: {error}.",
            "weights and checkpoints are safetensors files that clearhead wrote.",
            "pass another; an unfinished training is begun anew in another folder.",
        ) from error
