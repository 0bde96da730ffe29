"""Compress arrays of a state: numbers column by column, and byte by byte of equal significance.

Neighbours in a column differ little, so their high bytes are almost all equal.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def packed(array: np.ndarray) -> Tensor:
    """Compress the numbers of an array; `unpacked` needs their dtype."""
    numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    planes = numbers.reshape(-1, array.itemsize).T
    return torch.frombuffer(bytearray(zlib.compress(planes.tobytes())), dtype=torch.uint8)


def unpacked(data: Tensor, dtype: np.dtype) -> np.ndarray:
    """Return the numbers, (n,)."""
    planes = np.frombuffer(zlib.decompress(data.numpy().tobytes()), np.uint8)
    return planes.reshape(dtype.itemsize, -1).T.copy().view(dtype).reshape(-1)


def packed_records(name: str, records: np.ndarray, fields: Sequence[str]) -> dict[str, Tensor]:
    """Compress some fields of an array of records, as tensors named `name`.`field`."""
    return {f"{name}.{field}": packed(records[field]) for field in fields}


def unpacked_records(
    name: str, tensors: dict[str, Tensor], dtype: np.dtype, fields: Sequence[str]
) -> np.ndarray:
    """Return records with the fields that `packed_records` compressed; the others are 0."""
    columns = {x: unpacked(tensors[f"{name}.{x}"], dtype[x].base) for x in fields}
    count = len(columns[fields[0]]) // int(np.prod(dtype[fields[0]].shape))
    records = np.zeros(count, dtype)
    for field, column in columns.items():
        records[field] = column.reshape(count, *dtype[field].shape)
    return records
