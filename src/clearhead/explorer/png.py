"""A map of weights as a small picture, without a plotting library: for notebooks."""

import base64
import struct
import zlib

import torch
from torch import Tensor

from .colours import ink

PALETTE = torch.tensor([ink(i / 255) for i in range(256)], dtype=torch.uint8)
GREY = 158


def png(values: Tensor) -> str:
    """Weights (rows, columns) as base64 of a PNG, in the colours of the page: on a square root from
    0 to 1; NaN and infinity grey."""
    values = values.detach().float().cpu()
    lost = ~values.isfinite()
    shares = values.masked_fill(lost, 0.0).clamp(0, 1).sqrt()
    pixels = PALETTE[(255 * shares).round().long()].masked_fill(lost.unsqueeze(-1), GREY)
    # Each row begins with its filter: 0, none.
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)
    height, width = values.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    parts = (("IHDR", header), ("IDAT", zlib.compress(rows)), ("IEND", b""))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))).decode()


def _chunk(part: tuple[str, bytes]) -> bytes:
    kind, data = part[0].encode(), part[1]
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
