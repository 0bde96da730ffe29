"""Before any work the ranks compare their calls, and name the one that made another call."""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import AttentionError, BadValue
from ..masks import Mask
from ..masks.mask import Unchanged
from .layouts import Layout
from .transport import Transport

HEAD = struct.Struct("=4q")  # queries here, keys here, a number drawn here, bytes of text
TEXT_BYTES = 1500
LONGEST = 80  # letters of one part of a call


class Shards(NamedTuple):
    """How many queries and keys each rank holds, and what rank 0 drew."""

    queries: list[int]
    keys: list[int]
    drawn: int


def agree(
    transport: Transport, call: dict[str, object], Tq: int, Tk: int, drawn: int = 0
) -> Shards:
    """What every rank holds, once it is certain that all made the same call, `call`.

    Raises `BadValue` on every rank if one made another call, or refused its own.
    """
    lines = [f"{name}\t{_short(what)}" for name, what in call.items()]
    text = "\n".join(lines).encode()[:TEXT_BYTES]
    packed = HEAD.pack(Tq, Tk, drawn, len(text)) + text.ljust(TEXT_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(transport.device)
    rows = [x.cpu().numpy().tobytes() for x in transport.all_gather(mine)]
    heads = [HEAD.unpack(row[: HEAD.size]) for row in rows]
    texts = [row[HEAD.size : HEAD.size + head[3]] for row, head in zip(rows, heads, strict=True)]
    if len(set(texts)) > 1:
        raise _differs([text.decode(errors="replace") for text in texts])
    return Shards([h[0] for h in heads], [h[1] for h in heads], heads[0][2])


@contextmanager
def telling_others(transport: Transport) -> Iterator[None]:
    """An error inside the `with` block is told to the other ranks, which then need not wait for
    this one, and raised."""
    try:
        yield
    except AttentionError as error:
        with suppress(AttentionError):  # that of the ranks says less than the error itself
            agree(transport, {"refused": error.gave}, 0, 0)
        raise


def _differs(texts: list[str]) -> BadValue:
    most = Counter(texts).most_common(1)[0][1]
    usual = next(text for text in texts if texts.count(text) == most)
    other = next(r for r, text in enumerate(texts) if text != usual)
    theirs, ours = (_parts(text) for text in (texts[other], usual))
    if "refused" in theirs or "refused" in ours:
        by = other if "refused" in theirs else texts.index(usual)
        said = theirs.get("refused", ours.get("refused"))
        return BadValue(
            f"Rank {by} refused its call: {said}",
            "all ranks of a group answer one call together, or none does.",
            "correct the call on that rank.",
        )
    name = next(n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n))
    like = texts.index(usual)
    return BadValue(
        f"The ranks made different calls: {name} is {theirs.get(name, 'not there')} on "
        f"rank {other}, and {ours.get(name, 'not there')} on rank {like}.",
        "all ranks of a group make one call; only their shards differ.",
        f"pass the same {name} on every rank.",
    )


def _parts(text: str) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in text.split("\n") if "\t" in line)


def _short(what: object) -> str:
    text = " ".join((what if isinstance(what, str) else repr(what)).split())
    text = text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
    return f"{text} ({digest(what)})" if isinstance(what, (Mask, Layout)) else text


def digest(x: Mask | Layout) -> str:
    """Eight letters for all that a mask or a layout holds: equal ones have the same."""
    return _digest(Unchanged(x) if isinstance(x, Mask) else x)


@lru_cache(maxsize=8)
def _digest(x: Unchanged | Layout) -> str:
    found = hashlib.blake2b(digest_size=4)
    for part in _content(x.mask if isinstance(x, Unchanged) else x):
        found.update(part)
    return found.hexdigest()


def _content(x: object) -> Iterator[bytes]:
    if isinstance(x, Tensor):
        yield f"{tuple(x.shape)} {x.dtype}".encode()
        yield x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif is_dataclass(x):
        yield type(x).__name__.encode()
        for field in fields(x):
            yield from _content(getattr(x, field.name))
    else:
        yield repr(x).encode()
