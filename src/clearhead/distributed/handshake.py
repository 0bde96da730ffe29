"""Before any work the ranks meet: they compare their calls, and name who made another one.

Every rank sends every other one record. It holds what the others must know to begin, and a digest
of all that must agree; only where digests differ do the ranks send each other the whole text. A
rank that cannot answer says so in its record, and does not wait for those of the others.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import AttentionError, BadValue
from ..masks import Mask
from ..masks.mask import Unchanged
from .layouts import Layout
from .transport import Transport, summary

HEAD = struct.Struct("=5q16s8s")  # the numbers of a record, and its two digests
REASON_BYTES = 424  # of why a rank does not answer
LONGEST = 80  # letters of one part of a call that are shown


UNKNOWN = bytes(8)


class Kind(IntEnum):
    """What a rank came to say."""

    CALL = 0
    END = 1  # it is at the end of a `sharded` block
    REFUSED = 2  # it does not answer this call
    LEFT = 3  # it left a `sharded` block by an error


class Record(NamedTuple):
    """What one rank sends."""

    kind: Kind
    queries: int
    keys: int
    drawn: int
    size: int  # of the call in words
    digest: bytes  # of the call
    text: bytes  # a digest of the text that was cut, if it is known
    reason: str  # why a rank does not answer

    def packed(self) -> Tensor:
        head = HEAD.pack(*self[:7])
        reason = self.reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
        return torch.frombuffer(bytearray(head + reason), dtype=torch.uint8)

    @staticmethod
    def read(packed: Tensor) -> "Record":
        content = packed.cpu().numpy().tobytes()
        kind, *numbers, digest, text = HEAD.unpack(content[: HEAD.size])
        reason = content[HEAD.size :].rstrip(b"\0").decode(errors="ignore")
        queries, keys, drawn, size = numbers
        return Record(Kind(kind), queries, keys, drawn, size, digest, text, reason)


class Shards(NamedTuple):
    """How many queries and keys each rank holds, and what rank 0 drew."""

    queries: list[int]
    keys: list[int]
    drawn: int


def agree(
    transport: Transport,
    call: dict[str, object],
    Tq: int,
    Tk: int,
    drawn: int = 0,
    kind: Kind = Kind.CALL,
    text: bytes = UNKNOWN,
) -> Shards:
    """What every rank holds, once it is certain that all made the same call, `call`.

    Raises `BadValue` on every rank if one made another call, or refused its own.
    """
    history = transport.history
    if history.ended_block:
        raise BadValue(
            f"The block of distributed.sharded has ended: {history.ended_block}",
            "the ranks leave a block together.",
            "leave the block, and enter a new one.",
        )
    words = written(call)
    digest = hashlib.blake2b(words, digest_size=16).digest()
    record = Record(kind, Tq, Tk, drawn, len(words), digest, text, "")
    mine = record.packed().to(transport.device)
    with transport.answering():
        records = [Record.read(x) for x in transport.all_gather(mine)]
        history.meetings += 1
        history.unread.clear()  # records come in the order in which they were sent
        absent = next((n for n, r in enumerate(records) if r.kind >= Kind.REFUSED), None)
        differ = absent is None and len({r.digest for r in records}) > 1
        texts = _texts(transport, words, [r.size for r in records]) if differ else []
    error = _does_not_answer(absent, records[absent]) if absent is not None else None
    if differ:
        error = _differs(texts)
    if error is None:
        error = _other_text([r.text for r in records])
    left = any(record.kind in (Kind.END, Kind.LEFT) for record in records)
    if error and left and history.blocks and kind is Kind.CALL:
        history.ended_block = summary(error)
    if error:
        raise error
    return Shards([r.queries for r in records], [r.keys for r in records], records[0].drawn)


def written(call: dict[str, object]) -> bytes:
    """All of a call that must agree, in words and digests."""
    return "\n".join(f"{name}\t{_shown(what)}" for name, what in call.items()).encode()


def excuse(transport: Transport, kind: Kind, error: BaseException) -> None:
    """Meet the others to say that this rank does not answer, without waiting for them."""
    if transport.history.ended_block:
        return
    reason = summary(error)
    with suppress(AttentionError):  # the error itself says more than that a rank was lost
        transport.leave_word(reason)
        record = Record(kind, 0, 0, 0, 0, bytes(16), UNKNOWN, reason).packed().to(transport.device)
        work, _ = transport.start_all_gather(record)
        transport.history.meetings += 1
        transport.history.unread.append(work)


@contextmanager
def telling_others(transport: Transport) -> Iterator[None]:
    """An error inside the `with` block is told to the other ranks, which then need not wait for
    this one, and raised."""
    try:
        yield
    except Exception as error:
        excuse(transport, Kind.REFUSED, error)
        raise


def _texts(transport: Transport, mine: bytes, sizes: list[int]) -> list[str]:
    """What the ranks called, in words."""
    padded = torch.frombuffer(bytearray(mine.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    every = transport.all_gather(padded.to(transport.device))
    return [x.cpu().numpy().tobytes()[:size].decode() for x, size in zip(every, sizes, strict=True)]


def _does_not_answer(rank: int, record: Record) -> BadValue:
    if record.kind is Kind.REFUSED:
        return BadValue(
            f"Rank {rank} refused its call: {record.reason}",
            "all ranks of a group answer one call together, or none does.",
            "correct the call on that rank.",
        )
    return BadValue(
        f"Rank {rank} left its block of distributed.sharded: {record.reason}",
        "all ranks of a group make the same calls in a block, and leave it together.",
        "correct what failed on that rank; the next block can be entered by all of them.",
    )


def _differs(texts: list[str]) -> BadValue:
    most = Counter(texts).most_common(1)[0][1]
    usual = next(text for text in texts if texts.count(text) == most)
    other = next(r for r, text in enumerate(texts) if text != usual)
    theirs, ours = (_parts(text) for text in (texts[other], usual))
    name = next(n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n))
    like = texts.index(usual)
    return BadValue(
        f"The ranks made different calls: {name} is {theirs.get(name, 'not there')} on "
        f"rank {other}, and {ours.get(name, 'not there')} on rank {like}.",
        "all ranks of a group make one call; only their shards differ.",
        f"pass the same {name} on every rank.",
    )


def _other_text(texts: list[bytes]) -> BadValue | None:
    """The error if two ranks cut different texts."""
    known = {text: rank for rank, text in reversed([*enumerate(texts)]) if text != UNKNOWN}
    if len(known) < 2:
        return None
    first, second, *_ = sorted(known.values())
    return BadValue(
        f"part.shard was given another tensor on rank {second} than on rank {first}.",
        "every rank passes the whole text, which is the same on all of them.",
        "look for a step that one rank left out: its next one is then taken for this one.",
    )


def digest_of_text(x: Tensor) -> bytes:
    """A digest of a whole text: of all its numbers, or of the signs of some if they are floating,
    whose last bits other processors round otherwise."""
    if x.is_floating_point() or x.is_complex():
        x = x[tuple(slice(None, None, n // 10 + 1) for n in x.shape)]
        x = (x.real if x.is_complex() else x) > 0
    found = hashlib.blake2b(digest_size=len(UNKNOWN))
    for part in _content(x):
        found.update(part)
    return found.digest()


def _parts(text: str) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in text.split("\n") if "\t" in line)


def _shown(what: object) -> str:
    """One part of a call: equal texts mean equal contents."""
    if isinstance(what, Tensor):
        text = f"a tensor of {tuple(what.shape)} {what.dtype}"
    else:
        text = " ".join((what if isinstance(what, str) else repr(what)).split())
    if len(text) <= LONGEST and (what is None or isinstance(what, str | int | float | torch.dtype)):
        return text
    if isinstance(what, Mask | Layout):
        digest = _digest_of_rule(Unchanged(what) if isinstance(what, Mask) else what)
    else:
        digest = _digest(what)
    return f"{text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'} ({digest})"


def _digest(what: object) -> str:
    """Eight letters for all that a value holds: equal ones have the same."""
    found = hashlib.blake2b(digest_size=4)
    for part in _content(what):
        found.update(part)
    return found.hexdigest()


@lru_cache(maxsize=8)
def _digest_of_rule(rule: Unchanged | Layout) -> str:
    return _digest(rule.mask if isinstance(rule, Unchanged) else rule)


def _content(x: object) -> Iterator[bytes]:
    if isinstance(x, Tensor):
        yield f"{tuple(x.shape)} {x.dtype}".encode()
        yield x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif is_dataclass(x):
        yield type(x).__name__.encode()
        for field in fields(x):
            yield field.name.encode()
            yield from _content(getattr(x, field.name))
    elif isinstance(x, Mapping | list | tuple):
        yield f"{type(x).__name__} of {len(x)}".encode()
        for item in x.items() if isinstance(x, Mapping) else x:
            yield from _content(item)
    else:
        yield repr(x).encode()
