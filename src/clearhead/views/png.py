"""Encode a map of weights as a small picture, without a plotting library, for notebooks."""

import base64
import struct
import zlib

import torch
from torch import Tensor

from .colours import ink

PALETTE = torch.tensor([ink(i / 255) for i in range(256)], dtype=torch.uint8)
GREY = 158


def png(values: Tensor) -> str:
    """Return weights (rows, columns) as a PNG in base64.

    The colours are those of the page: the square root, from 0 to 1; NaN and infinity are grey.
    """
    values = values.detach().float().cpu()
    lost = ~values.isfinite()
    roots = values.masked_fill(lost, 0.0).clamp(0, 1).sqrt()
    pixels = PALETTE[(255 * roots).round().long()].masked_fill(lost.unsqueeze(-1), GREY)
    # The first byte of a row is its filter; 0 means none.
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)
    height, width = values.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    parts = (("IHDR", header), ("IDAT", zlib.compress(rows)), ("IEND", b""))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))).decode()


def _chunk(part: tuple[str, bytes]) -> bytes:
    kind, data = part[0].encode(), part[1]
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
