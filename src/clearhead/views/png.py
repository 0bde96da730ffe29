"""A map of weights as a small picture, without a plotting library: for notebooks."""

import base64
import struct
import zlib

import torch
from torch import Tensor

from .panels import VIRIDIS

COLOURS = torch.tensor(VIRIDIS, dtype=torch.float32)
GREY = 158


def png(values: Tensor) -> str:
    """(rows, columns) as base64 of a PNG: 0 is dark, the largest bright, what is no number grey."""
    values = values.detach().float().cpu()
    lost = ~values.isfinite()
    values = values.masked_fill(lost, 0.0)
    top = float(values.max()) if values.numel() else 0.0
    place = (values / (top or 1.0)).clamp(0, 1) * (len(COLOURS) - 1)
    low = place.floor().long().clamp(max=len(COLOURS) - 2)
    mixed = torch.lerp(COLOURS[low], COLOURS[low + 1], (place - low).unsqueeze(-1))
    pixels = mixed.masked_fill(lost.unsqueeze(-1), GREY).round().to(torch.uint8)
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)
    height, width = values.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (("IHDR", header), ("IDAT", zlib.compress(rows)), ("IEND", b""))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))).decode()


def _chunk(part: tuple[str, bytes]) -> bytes:
    kind, data = part[0].encode(), part[1]
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
