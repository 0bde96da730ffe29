"""Compare the calls of all ranks before any work, and name the rank whose call differs.

Every rank sends one record to every other rank. It contains sizes that the others need, and a
digest of all that must be equal. If digests differ, the ranks exchange the full text. A rank with
an error sends a record of it, and does not wait for the records of the others.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import AttentionError, BadValue
from ..core.masks import Mask
from ..core.masks.mask import Unchanged
from ..core.stats.per_key import PerKey
from .layouts import Layout
from .transport import Transport, summary

HEAD = struct.Struct("=5q16s8s")  # the numbers of a record, and its two digests
REASON_BYTES = 424  # the length of a rank's error in a record
LONGEST = 80  # letters of one part of a call in an error
SENT = "clearhead_sent"  # an attribute of errors that the other ranks have, or have a record of
UNKNOWN = bytes(8)  # the digest of a text that is not known


class Kind(IntEnum):
    """The kind of a record."""

    CALL = 0
    END = 1  # the rank is at the end of a `sharded` block
    REFUSED = 2  # the rank raised an error before its call
    LEFT = 3  # the rank left a `sharded` block by an error


class Record(NamedTuple):
    """The message of one rank to all others."""

    kind: Kind
    queries: int
    keys: int
    drawn: int
    size: int  # bytes of the call as text
    digest: bytes  # of the call
    text: bytes  # a digest of the text that was cut, if it is known
    reason: str  # the rank's error

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
    """The numbers of queries and keys of each rank, and the seed that rank 0 drew."""

    queries: list[int]
    keys: list[int]
    drawn: int


def agree(
    transport: Transport, call: dict[str, object], Tq: int, Tk: int, drawn: int = 0,
    kind: Kind = Kind.CALL, text: bytes = UNKNOWN,
) -> Shards:  # fmt: skip
    """Compare `call` with the calls of the other ranks, and return the sizes of all shards.

    Raises `BadValue` on every rank if a call differs, or if one rank raised an error.
    """
    history = transport.history
    if history.ended_block:
        gave = f"The block of distributed.sharded has ended: {history.ended_block}"
        rule = "all ranks leave a block together."
        raise BadValue(gave, rule, "leave the block, and enter a new one.")
    call_text = written(call)
    digest = hashlib.blake2b(call_text, digest_size=16).digest()
    record = Record(kind, Tq, Tk, drawn, len(call_text), digest, text, "")
    mine = record.packed().to(transport.device)
    with transport.computing():
        records = [Record.read(x) for x in transport.all_gather(mine)]
        history.meetings += 1
        history.unread.clear()  # records come in the order in which they were sent
        absent = next((n for n, r in enumerate(records) if r.kind >= Kind.REFUSED), None)
        differ = absent is None and len({r.digest for r in records}) > 1
        texts = _texts(transport, call_text, [r.size for r in records]) if differ else []
    error = _error_of(absent, records[absent]) if absent is not None else None
    error = _differs(texts) if differ else error or _other_text([r.text for r in records])
    left = any(record.kind in (Kind.END, Kind.LEFT) for record in records)
    if error and left and history.blocks and kind is Kind.CALL:
        history.ended_block = summary(error)
    if error:
        vars(error)[SENT] = True
        raise error
    return Shards([r.queries for r in records], [r.keys for r in records], records[0].drawn)


def written(call: dict[str, object]) -> bytes:
    """Write all of a call that must be equal on all ranks, as text and digests."""
    return "\n".join(f"{name}\t{_description(what)}" for name, what in call.items()).encode()


def send_error(transport: Transport, kind: Kind, error: BaseException) -> None:
    """Send an error of this rank to the others, without waiting for their records.

    A new thread sends it: transforms of torch.func, traces and fake modes, which change tensors,
    are of one thread.
    """
    if transport.history.ended_block:
        return
    vars(error)[SENT] = True
    sender = Thread(target=_send_error, args=(transport, kind, error))
    sender.start()
    sender.join()


def _send_error(transport: Transport, kind: Kind, error: BaseException) -> None:
    reason = summary(error)
    with suppress(AttentionError):  # the rank's own error matters more than a lost rank
        transport.store_reason(reason)
        record = Record(kind, 0, 0, 0, 0, bytes(16), UNKNOWN, reason).packed().to(transport.device)
        work, _ = transport.start_all_gather(record)
        transport.history.meetings += 1
        transport.history.unread.append(work)


@contextmanager
def reporting_errors(transport: Transport) -> Iterator[None]:
    """Send an error inside the `with` block to the other ranks, which then do not wait for this
    one, and raise it."""
    try:
        yield
    except Exception as error:
        send_error(transport, Kind.REFUSED, error)
        raise


def _texts(transport: Transport, mine: bytes, sizes: list[int]) -> list[str]:
    """Gather the texts of all calls."""
    padded = torch.frombuffer(bytearray(mine.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    every = transport.all_gather(padded.to(transport.device))
    return [x.cpu().numpy().tobytes()[:size].decode() for x, size in zip(every, sizes, strict=True)]


def _error_of(rank: int, record: Record) -> BadValue:
    if record.kind is Kind.REFUSED:
        gave = f"Rank {rank} raised an error in its call: {record.reason}"
        rule = "all ranks of a group compute a call, or none does."
        return BadValue(gave, rule, "correct the call on that rank.")
    gave = f"Rank {rank} left its block of distributed.sharded: {record.reason}"
    rule = "all ranks of a group make the same calls in a block, and leave it together."
    hint = "correct the error on that rank; all ranks can enter the next block."
    return BadValue(gave, rule, hint)


def _differs(texts: list[str]) -> BadValue:
    most = Counter(texts).most_common(1)[0][1]
    usual = next(text for text in texts if texts.count(text) == most)
    other = next(r for r, text in enumerate(texts) if text != usual)
    theirs, ours = (_parts(text) for text in (texts[other], usual))
    name = next(n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n))
    like = texts.index(usual)
    pairs = ((theirs, other), (ours, like))
    calls = ", and ".join(f"{x.get(name, 'missing')} on rank {rank}" for x, rank in pairs)
    gave = f"The ranks made different calls: {name} is {calls}."
    rule = "all ranks of a group make the same call; only their shards differ."
    return BadValue(gave, rule, f"pass the same {name} on every rank.")


def _other_text(texts: list[bytes]) -> BadValue | None:
    """Return an error if two ranks cut different texts, else None."""
    known = {text: rank for rank, text in reversed([*enumerate(texts)]) if text != UNKNOWN}
    if len(known) < 2:
        return None
    first, second, *_ = sorted(known.values())
    gave = f"part.shard got another tensor on rank {second} than on rank {first}."
    hint = "check whether one rank skipped a step."
    return BadValue(gave, "every rank passes the same whole text.", hint)


def digest_of_text(x: Tensor) -> bytes:
    """Return a digest of a text: of all numbers if they are integers, else of the signs of some,
    because processors round last bits differently."""
    if x.is_floating_point() or x.is_complex():
        x = x[tuple(slice(None, None, n // 10 + 1) for n in x.shape)]
        x = (x.real if x.is_complex() else x) > 0
    return _digest(x, len(UNKNOWN))


def _parts(text: str) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in text.split("\n") if "\t" in line)


def _description(what: object) -> str:
    """Describe one part of a call, so that equal texts mean equal contents."""
    if what is None or isinstance(what, int | float | torch.dtype):
        return str(what)
    if isinstance(what, Tensor):
        text = f"a tensor of {tuple(what.shape)} {what.dtype}"
    else:
        text = " ".join((what if isinstance(what, str) else repr(what)).split())
    if len(text) <= LONGEST and isinstance(what, str):
        return text
    if isinstance(what, Mask | Layout):
        digest = _digest_of_rule(Unchanged(what) if isinstance(what, Mask) else what)
    else:
        digest = _digest(what)
    return f"{text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'} ({digest.hex()})"


def _digest(what: object, size: int = 4) -> bytes:
    """Return a digest of a value's contents, of this many bytes."""
    digest = hashlib.blake2b(digest_size=size)
    for part in _content(what):
        digest.update(part)
    return digest.digest()


@lru_cache(maxsize=8)
def _digest_of_rule(rule: Unchanged | Layout) -> bytes:
    return _digest(rule.mask if isinstance(rule, Unchanged) else rule)


def _content(x: object) -> Iterator[bytes]:
    if isinstance(x, Tensor):
        yield f"{tuple(x.shape)} {x.dtype}".encode()
        yield x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(x, PerKey):
        yield from _content(x.norm if x.numbers is None else x.numbers)
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
