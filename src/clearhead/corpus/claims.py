"""Share work among processes that see one folder: files with a lease.

A worker claims a piece of work with a file that it creates, and touches while it computes. The
claim of a lost worker ends after `LEASE` seconds, or at once if it ran on this machine. In rare
races two workers compute one piece, which gives the same bytes twice: files are written in one
move.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ..core.files.atomic_io import temporary_for

FOLDER, LEASE, POLL = "claims", 60.0, 0.2  # seconds
Piece = TypeVar("Piece")


@contextmanager
def claimed(out: Path, name: str) -> Iterator[bool]:
    """Claim a piece of work in the `with` block; yield False if another worker has it."""
    path = out / FOLDER / name
    path.parent.mkdir(exist_ok=True)
    if not _take(path):
        yield False
        return
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(path, ended), daemon=True)
    renewing.start()
    try:
        yield True
    finally:
        ended.set()
        renewing.join()
        path.unlink(missing_ok=True)


@contextmanager
def alone(out: Path, name: str) -> Iterator[bool]:
    """Wait until no other worker has this piece of work, and claim it in the `with` block."""
    while True:
        with claimed(out, name) as mine:
            if mine:
                yield True
                return
        time.sleep(POLL)


def share(
    out: Path, pieces: Sequence[Piece], name: Callable[[Piece], str],
    is_complete: Callable[[Piece], bool],
) -> Iterator[Piece]:  # fmt: skip
    """Yield, and claim meanwhile, pieces of work that are not complete, until all are complete.

    A worker begins at a random piece. It waits for those of the others, and has the ones of workers
    that are lost.
    """
    first = secrets.randbelow(len(pieces) + 1)
    waiting = [*pieces[first:], *pieces[:first]]
    while waiting:
        busy = []
        for piece in waiting:
            if is_complete(piece):
                continue
            with claimed(out, name(piece)) as mine:
                if not mine:
                    busy.append(piece)
                elif not is_complete(piece):
                    yield piece
        if len(busy) == len(waiting):
            time.sleep(POLL)
        waiting = busy


def _take(path: Path) -> bool:
    with suppress(FileExistsError), path.open("x") as file:
        file.write(f"{socket.gethostname()} {os.getpid()}")
        return True
    try:
        if _is_alive(path):
            return False
        lost = temporary_for(path)
        os.rename(path, lost)  # of several workers, one succeeds
        lost.unlink()
    except FileNotFoundError:  # it has ended, or another worker was first
        return False
    return _take(path)


def _is_alive(path: Path) -> bool:
    host, _, process = path.read_text().partition(" ")
    if host == socket.gethostname() and process:
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
    now = path.with_name(".now")  # its time is that of the file system, as clocks differ
    now.touch()
    return now.stat().st_mtime - path.stat().st_mtime < LEASE


def _renew(path: Path, ended: threading.Event) -> None:
    while not ended.wait(LEASE / 6):
        with suppress(FileNotFoundError):
            os.utime(path)
