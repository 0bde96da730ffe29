"""Send messages between ranks, and handle ranks that fail."""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Imported here because its functions have the default group as a default value. If an optimizer
# imports it after init_process_group, the group outlives destroy_process_group, and gloo's threads
# outlive Python.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core.errors import AttentionError, BadType, BadValue, as_number, kind_of
from ..core.torch_state import ends_recomputation
from .interrupt import ended_by_ctrl_c

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"
Mail: TypeAlias = Sequence[tuple[int, Tensor]]  # (rank, a contiguous tensor)
LARGEST_TAG = 2**31 - 1
REASON_KEY = "clearhead: why rank {} failed"


class RankLost(BadValue, ConnectionError):
    """A rank died, stalled or failed, and the others cannot continue without it."""


@dataclass
class History:
    """The state of a group on this rank."""

    meetings: int = 0  # comparisons of calls so far; equal on all ranks
    unread: list["Work"] = field(default_factory=list)  # comparisons whose records are not read
    lost: str = ""  # why the group can no longer be used
    blocks: int = 0  # open blocks of `sharded`
    thread: int = 0  # the one that computes with other ranks now
    ended_block: str = ""  # why the open block has ended on another rank


_histories: "WeakKeyDictionary[dist.ProcessGroup, History]" = WeakKeyDictionary()


class Work(ABC):
    """Messages that are being sent and received."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all have arrived. Raises `RankLost` if one does not arrive in time."""


class Transport(ABC):
    """Messages between the ranks of a group, with the names of torch.distributed. Messages between
    two ranks are received in the order in which they are sent."""

    rank: int
    world: int
    device = torch.device("cpu")  # of the messages
    history: History
    sent = 0  # bytes sent so far

    def batch_isend_irecv(self, outgoing: Mail, incoming: Mail) -> Work:
        """Start to send and receive. The tensors must not change before `wait` returns. Empty
        tensors are not sent, so both ranks must know that they are empty."""
        outgoing = [(rank, x) for rank, x in outgoing if x.numel()]
        incoming = [(rank, x) for rank, x in incoming if x.numel()]
        self.sent += sum(x.nbytes for _, x in outgoing)
        return self.start(outgoing, incoming)

    @abstractmethod
    def start(self, outgoing: Mail, incoming: Mail) -> Work:
        """Start to send and receive tensors that are not empty."""

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send every rank its tensor of `outgoing`, and receive one of `incoming` from every rank.
        Tensors may be empty; all are contiguous and of one dtype."""
        incoming[self.rank].copy_(outgoing[self.rank])
        self.sent += sum(x.nbytes for rank, x in enumerate(outgoing) if rank != self.rank)
        self.all_to_all_others(outgoing, incoming)

    def all_to_all_others(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Exchange the tensors of other ranks; this rank's own tensor has been copied."""
        out, into = (
            [(rank, x) for rank, x in enumerate(mail) if rank != self.rank and x.numel()]
            for mail in (outgoing, incoming)
        )
        self.start(out, into).wait()

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Gather `mine` of every rank; shape and dtype are the same on all ranks."""
        work, gathered = self.start_all_gather(mine)
        work.wait()
        return gathered

    def start_all_gather(self, mine: Tensor) -> tuple[Work, list[Tensor]]:
        """Start `all_gather`. The tensors are valid after the work's `wait`."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        gathered = [
            mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.world)
        ]
        work = self.start([(r, mine) for r in others], [(r, gathered[r]) for r in others])
        return work, gathered

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Close the group if the `with` block raises an error, because the other ranks wait for its
        messages. Raises `BadValue` if another thread is in such a block."""
        other, self.history.thread = self.history.thread, threading.get_ident()
        try:
            if other not in (0, threading.get_ident()):
                gave = "Two threads called attention over the ranks of one group at the same time."
                rule = "the ranks exchange messages in the order of the calls."
                raise BadValue(gave, rule, "let one thread wait for the other.")
            yield
        except RankLost:
            raise
        except BaseException as error:
            if not ends_recomputation(error):  # torch raises it on every rank, after the messages
                self.give_up(error)
            raise
        finally:
            self.history.thread = other

    @property
    def everyone(self) -> "Transport":
        """The transport of the whole group, whose ranks compare their calls."""
        return self

    @abstractmethod
    def give_up(self, error: BaseException) -> None:
        """Close the group: end the waits of the other ranks, and refuse later calls."""

    @abstractmethod
    def store_reason(self, text: str) -> None:
        """Store why this rank failed, for the errors of the other ranks."""


class GroupTransport(Transport):
    """A process group of torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = process_group(group)
        self.rank, self.world = rank_and_world(self.group)
        rule = "a rank waits for another for a number of seconds."
        hint, most = "pass for example timeout=300.", threading.TIMEOUT_MAX
        self.timeout = as_number("timeout", timeout, rule, hint, lambda x: 0 < x <= most)
        self.history = history_of(self.group)
        if self.history.lost:
            gave = f"The process group was closed: {self.history.lost}"
            rule = "after a rank is lost or fails in a call, the group cannot compute another."
            raise RankLost(gave, rule, "start the ranks again.")
        if dist.get_backend(self.group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def start(self, outgoing: Mail, incoming: Mail) -> Work:
        # gloo aborts the process if a message has an unexpected size. With its size as a tag, such
        # a message is not matched.
        ops = [
            dist.P2POp(
                what, x.view(-1).view(torch.uint8), None, self.group, x.nbytes % LARGEST_TAG, rank
            )
            for what, mail in ((dist.isend, outgoing), (dist.irecv, incoming))
            for rank, x in mail
        ]
        ranks = [rank for rank, _ in (*outgoing, *incoming)]
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self.lost(ranks, error) from error
        # NCCL returns one handle for all messages.
        one_each = len(works) == len(ranks)
        ranks_of = [[rank] for rank in ranks] if one_each else [ranks] * len(works)
        return _GroupWork(self, list(zip(works, ranks_of, strict=True)), (outgoing, incoming))

    def all_to_all_others(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        def flat(x: Tensor) -> Tensor:
            return x.view(-1).view(torch.uint8)

        out = torch.cat([flat(x) for x in outgoing])
        into = torch.empty(sum(x.nbytes for x in incoming), dtype=torch.uint8, device=out.device)
        got, gone = ([x.nbytes for x in mail] for mail in (incoming, outgoing))
        ranks = [rank for rank in range(self.world) if rank != self.rank]
        try:
            work = dist.all_to_all_single(into, out, got, gone, self.group, async_op=True)
        except RuntimeError as error:
            raise self.lost(ranks, error) from error
        _GroupWork(self, [(work, ranks)], (out, into)).wait()
        for x, part in zip(incoming, into.split(got), strict=True):
            flat(x).copy_(part)

    def lost(self, ranks: list[int], error: Exception) -> RankLost:
        """Close the group, and return the error for a failed wait for these ranks."""
        names = ", ".join(map(str, sorted(set(ranks))))
        message = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]  # without file and advice
        reason = next((text for text in map(self._stored_reason, ranks) if text), message)
        gave = f"Rank {self.rank} of {self.world} waited for rank {names}: {reason}."
        rule = f"every rank takes part in every call, forward and backward, in {self.timeout:g} s."
        hint = "read that rank's output, and start again; for a slow rank, pass timeout=."
        lost = RankLost(gave, rule, hint)
        self.give_up(lost)
        return lost

    def give_up(self, error: BaseException) -> None:
        if self.history.lost:
            return
        reason = summary(error)
        self.history.lost = f"rank {self.rank} failed in a call with {reason}"
        self.store_reason(reason)
        self.close()

    def store_reason(self, text: str) -> None:
        with suppress(Exception):
            value = f"{self.history.meetings} {text}"
            self.group.get_group_store().set(REASON_KEY.format(self.rank), value)

    def _stored_reason(self, rank: int) -> str:
        """Return the reason that a lost rank stored in this call; "" if there is none."""
        with suppress(Exception):
            store, key = self.group.get_group_store(), REASON_KEY.format(rank)
            if store.check([key]):
                meetings, text = store.get(key).decode().split(" ", 1)
                if int(meetings) == self.history.meetings:
                    return f"it failed with {text.rstrip('.')}"
        return ""

    def close(self) -> None:
        """End every wait in the group, on all ranks."""
        with suppress(RuntimeError):
            if dist.get_backend(self.group) != "gloo":
                self.group.abort()
            elif self.world > 1:  # a wait that times out makes gloo close its connections
                wait = dist.irecv(
                    torch.empty(1, dtype=torch.uint8),
                    group=self.group,
                    group_src=(self.rank + 1) % self.world,
                    tag=LARGEST_TAG,
                )
                assert wait is not None
                wait.wait(timedelta(milliseconds=1))


class _GroupWork(Work):
    def __init__(
        self, transport: GroupTransport, works: list[tuple[dist.Work, list[int]]], used: object
    ) -> None:
        self.transport, self.works = transport, works
        self.used = used  # tensors that must live until the messages have arrived

    def wait(self) -> None:
        limit = timedelta(seconds=self.transport.timeout)
        with ended_by_ctrl_c(partial(self.transport.give_up, KeyboardInterrupt())):
            for work, ranks in self.works:
                try:
                    work.wait(limit)
                except RuntimeError as error:
                    raise self.transport.lost(ranks, error) from error


def summary(error: BaseException) -> str:
    """Return an error's message in one line."""
    text = error.gave if isinstance(error, AttentionError) else repr(error)
    return " ".join(text.split())


def history_of(group: Group) -> History:
    return _histories.setdefault(process_group(group), History())


def rank_and_world(group: Group) -> tuple[int, int]:
    """Return this rank's number in the group and the number of ranks, without any message."""
    group = process_group(group)
    return dist.get_rank(group), dist.get_world_size(group)


def process_group(group: Group) -> dist.ProcessGroup:
    """Return the process group: the default one for None, or that of a mesh of one dimension.

    Raises `BadValue` if torch.distributed is not initialized, or if a mesh has several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        rule = "the ranks communicate by torch.distributed."
        hint = 'start with torchrun, and call torch.distributed.init_process_group("gloo").'
        raise BadValue("torch.distributed is not initialized.", rule, hint)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            gave = f"group is a mesh of {group.ndim} dimensions, {group.mesh_dim_names}."
            rule = "a sequence is cut along one dimension of a mesh."
            raise BadValue(gave, rule, 'pass that dimension, for example mesh["sequence"].')
        return group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        rule = "a group is a process group of this rank, a DeviceMesh of one dimension, or None."
        hint = "pass the result of torch.distributed.new_group or init_device_mesh."
        raise BadType(f"group is {kind_of(group)}.", rule, hint)
    return group
