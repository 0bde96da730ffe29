"""Digests of values by what they hold: two that are equal hold the same, in any run of Python."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..masks import Mask
from .edits import Edit
from .recording import Call, Recording

PLAIN = (bool, int, float, str, bytes, range, Path, type(None))


class Digests:
    """Digests of numbers, tensors, edits, masks, recordings, and lists and dicts of them. What is
    none of these gets another digest each time, so that it is never taken for the same.

    Each value is read once, however many others hold it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str]] = {}  # a value that is kept keeps its id

    def of(self, value: object) -> str:
        if id(value) not in self._known:
            digest = hashlib.sha256(
                f"{type(value).__module__}.{type(value).__qualname__} ".encode()
            )
            for part in self._parts(value):
                digest.update(part)
            self._known[id(value)] = value, digest.hexdigest()[:16]
        return self._known[id(value)][1]

    def _parts(self, value: object) -> Iterator[bytes | memoryview]:
        if isinstance(value, Tensor):
            yield f"{tuple(value.shape)} {value.dtype}".encode()
            if not value.is_meta:
                yield value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data
        elif isinstance(value, PLAIN):
            yield repr(value).encode()
        elif isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else value
            for item in items:
                yield self.of(item).encode()
        elif isinstance(value, Edit | Mask | Recording | Call):
            for name, part in vars(value).items():
                if not name.startswith("_"):  # what it keeps for itself, made of the others
                    yield f"{name} {self.of(part)} ".encode()
        else:
            yield os.urandom(16)
