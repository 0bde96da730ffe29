"""Write files atomically: under a temporary name, then moved."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import BadValue, why_failed


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> Path:
    """Write tensors and metadata to one safetensors file.

    If the process is killed while it writes, the old file stays unchanged: the new file replaces it
    in one move, after it is on disk.
    """
    named = {name: t.detach().contiguous() for name, t in tensors.items()}
    return replace(path, save(named, {name: json.dumps(value) for name, value in about.items()}))


def write_json(path: Path, value: Any) -> Path:
    return replace(path, (json.dumps(value, indent=1) + "\n").encode())


def temporary_for(path: Path) -> Path:
    """Return a hidden path beside `path` that no other process uses, on any machine."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace the file at `path` in one move by the one that is written inside the `with` block.

    Raises `BadValue` if it cannot be written; then the old file stays.
    """
    temporary = temporary_for(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        gave = f"{str(path)!r} cannot be written: {why_failed(error)}."
        rule = "a file is written in an existing folder, under a temporary name, and then moved."
        hint = "check the folder and its permissions, and the free disk space."
        raise BadValue(gave, rule, hint) from error


def replace(path: Path, data: bytes) -> Path:
    """Replace the file at `path` by `data`, as `replacing` does."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def read(path: str | Path, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors whose names begin so, and the metadata, of a file that `write` wrote.

    Raises `BadValue` for a missing or unreadable file.
    """
    rule = "weights and checkpoints are safetensors files that clearhead wrote."
    try:
        with safe_open(str(path), framework="pt") as file:
            about = {n: json.loads(value) for n, value in (file.metadata() or {}).items()}
            names = [name for name in file.keys() if name.startswith(prefix)]
            return {name: file.get_tensor(name) for name in names}, about
    except FileNotFoundError as error:
        raise BadValue(f"There is no file {str(path)!r}.", rule, "check the path.") from error
    except (OSError, SafetensorError, ValueError) as error:
        hint = "pass another; to repeat an unfinished training, use another folder."
        raise BadValue(f"The file {str(path)!r} cannot be read: {error}.", rule, hint) from error
