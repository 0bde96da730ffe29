"""Compress arrays of a state: numbers column by column, and byte by byte of equal significance.

Neighbours in a column differ little, so their high bytes are almost all equal.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import BadValue


def packed(array: np.ndarray) -> Tensor:
    """Compress the numbers of an array; `unpacked` needs their dtype."""
    numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    planes = numbers.reshape(-1, array.itemsize).T
    return torch.frombuffer(bytearray(zlib.compress(planes.tobytes())), dtype=torch.uint8)


def unpacked(data: Tensor, dtype: np.dtype, path: Path) -> np.ndarray:
    """Return the numbers, (n,). Raises `BadValue` if the data of the file `path` are damaged."""
    try:
        planes = np.frombuffer(zlib.decompress(data.numpy().tobytes()), np.uint8)
        return planes.reshape(dtype.itemsize, -1).T.copy().view(dtype).reshape(-1)
    except (zlib.error, ValueError) as error:
        raise BadValue(
            f"{str(path)!r} is damaged: {error}.",
            "a state has the bytes that a worker wrote.",
            "delete the file, and run the same survey again, which computes it.",
        ) from error


def packed_records(name: str, records: np.ndarray, fields: Sequence[str]) -> dict[str, Tensor]:
    """Compress some fields of an array of records, as tensors named `name`.`field`."""
    return {f"{name}.{field}": packed(records[field]) for field in fields}


def unpacked_records(
    name: str, tensors: dict[str, Tensor], dtype: np.dtype, fields: Sequence[str], path: Path
) -> np.ndarray:
    """Return records with the fields that `packed_records` compressed; the others are 0.

    Raises `BadValue` as `unpacked` does.
    """
    columns = {x: unpacked(tensors[f"{name}.{x}"], dtype[x].base, path) for x in fields}
    count = len(columns[fields[0]]) // int(np.prod(dtype[fields[0]].shape))
    records = np.zeros(count, dtype)
    for field, column in columns.items():
        records[field] = column.reshape(count, *dtype[field].shape)
    return records
