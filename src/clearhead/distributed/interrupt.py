"""Handle Ctrl-C while torch.distributed waits in C++, where Python runs no signal handlers."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache


@contextmanager
def ended_by_ctrl_c(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` in another thread if Ctrl-C is pressed inside the `with` block. `end` ends the
    wait, and Python then raises KeyboardInterrupt. A user's own signal handler is not changed."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    listener = _listener()
    before = signal.set_wakeup_fd(listener.sender.fileno(), warn_on_full_buffer=False)
    listener.end = end
    try:
        yield
    finally:
        with listener.ending:  # a thread in C++ at Python's exit would kill the process
            listener.end = None
        signal.set_wakeup_fd(before)


class _Listener:
    """A thread that reads the numbers of signals, which Python writes to a socket immediately."""

    def __init__(self) -> None:
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.end: Callable[[], None] | None = None
        self.ending = threading.Lock()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        while number := self.receiver.recv(1):
            with self.ending:
                if number[0] == signal.SIGINT and self.end is not None:
                    self.end()


def _listener() -> _Listener:
    """Return the listener of this process; a new one after a fork, which threads do not survive."""
    if not (listener := _only_listener()).thread.is_alive():
        _only_listener.cache_clear()
        listener = _only_listener()
    return listener


_only_listener = lru_cache(maxsize=1)(_Listener)
