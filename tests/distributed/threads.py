"""Ranks as threads of one process: the same code as with a process group, for any number of
ranks."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from clearhead.distributed.transport import History, Mail, RankLost, Transport, Work


class Threads(Transport):
    def __init__(self, rank: int, world: int, boxes: dict) -> None:
        self.rank, self.world, self.boxes = rank, world, boxes
        self.history = History()

    def give_up(self, error: BaseException) -> None:
        pass  # the others wait until the timeout

    def store_reason(self, text: str) -> None:
        pass

    def start(self, outgoing: Mail, incoming: Mail) -> Work:
        for to, x in outgoing:
            assert x.is_contiguous()
            self.boxes[self.rank, to].put(x.clone())
        return Arriving(self, incoming)


class Arriving(Work):
    def __init__(self, transport: Threads, incoming: Mail) -> None:
        self.transport, self.incoming = transport, incoming

    def wait(self) -> None:
        for source, x in self.incoming:
            try:
                found = self.transport.boxes[source, self.transport.rank].get(timeout=20)
            except queue.Empty:
                raise RankLost(f"rank {source}", "answers", "start again") from None
            assert found.shape == x.shape and found.dtype == x.dtype
            x.copy_(found)


def on_ranks(world: int, do: Callable[[Transport], Any]) -> list[Any]:
    """Run `do` on each rank, and return the results; raise the first error."""
    boxes = {(a, b): queue.Queue() for a in range(world) for b in range(world)}
    found: list[Any] = [None] * world
    wrong: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = do(Threads(rank, world, boxes))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(box.empty() for box in boxes.values()) or wrong
    if wrong:
        raise wrong[0]
    return found
