"""How bytes get from rank to rank, and what happens when one of them does not answer."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Its functions have the default group as a default value. Imported after init_process_group, as
# optimizers do, it keeps the group past destroy_process_group, and gloo's threads past Python.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import AttentionError, BadType, BadValue, kind_of
from ..torch_state import ends_recomputation
from .interrupt import ended_by_ctrl_c

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"
Mail: TypeAlias = Sequence[tuple[int, Tensor]]  # (rank, a contiguous tensor)
LARGEST_TAG = 2**31 - 1
WORDS = "clearhead: last words of rank {}"


class RankLost(BadValue, ConnectionError):
    """A rank died, stalled, or failed, and the others cannot go on without it."""


@dataclass
class History:
    """What this rank has done in a group."""

    meetings: int = 0  # in which the ranks compared calls, the same number on all of them
    unread: list["Work"] = field(default_factory=list)  # meetings whose records are not waited for
    lost: str = ""  # why the group cannot be used any more
    blocks: int = 0  # of `sharded` that are open here
    ended_block: str = ""  # why the open block has ended on another rank


_histories: "WeakKeyDictionary[dist.ProcessGroup, History]" = WeakKeyDictionary()


class Work(ABC):
    """Messages on their way."""

    @abstractmethod
    def wait(self) -> None:
        """Until all have arrived. Raises `RankLost` if one does not, in time."""


class Transport(ABC):
    """Messages between the ranks of a group, in the words of torch.distributed. Every rank sends in
    the same order, so that the n-th message from one to another is the n-th that the other expects.
    """

    rank: int
    world: int
    device = torch.device("cpu")  # where messages lie
    history: History
    sent = 0  # bytes, counted

    def batch_isend_irecv(self, outgoing: Mail, incoming: Mail) -> Work:
        """Begin to send and to receive; the tensors must stay as they are until `wait` is over.
        What is empty is not sent, so both sides must know that it is."""
        outgoing = [(rank, x) for rank, x in outgoing if x.numel()]
        incoming = [(rank, x) for rank, x in incoming if x.numel()]
        self.sent += sum(x.nbytes for _, x in outgoing)
        return self.start(outgoing, incoming)

    @abstractmethod
    def start(self, outgoing: Mail, incoming: Mail) -> Work:
        """The same, of what is not empty."""

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """To every rank its tensor of `outgoing`, and from every rank its one of `incoming`, which
        may be empty. All are contiguous and of one dtype."""
        incoming[self.rank].copy_(outgoing[self.rank])
        self.sent += sum(x.nbytes for rank, x in enumerate(outgoing) if rank != self.rank)
        self.all_to_all_others(outgoing, incoming)

    def all_to_all_others(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """The same between different ranks: what stays here has been copied."""
        out, into = (
            [(rank, x) for rank, x in enumerate(mail) if rank != self.rank and x.numel()]
            for mail in (outgoing, incoming)
        )
        self.start(out, into).wait()

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """`mine` of every rank, of one shape and dtype on all of them."""
        work, found = self.start_all_gather(mine)
        work.wait()
        return found

    def start_all_gather(self, mine: Tensor) -> tuple[Work, list[Tensor]]:
        """The same, which has arrived once the work was waited for."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        found = [
            mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.world)
        ]
        return self.start([(r, mine) for r in others], [(r, found[r]) for r in others]), found

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The `with` block computes a call whose messages other ranks wait for. After an error they
        would wait in vain, so the group is given up, and they are told."""
        try:
            yield
        except RankLost:
            raise
        except BaseException as error:
            if not ends_recomputation(error):  # which comes after the messages, on every rank
                self.give_up(error)
            raise

    @property
    def everyone(self) -> "Transport":
        """The ranks of the whole group, which compare their calls."""
        return self

    @abstractmethod
    def give_up(self, error: BaseException) -> None:
        """End the waits of the other ranks, and all calls to come."""

    @abstractmethod
    def leave_word(self, text: str) -> None:
        """Note for ranks that lose this one why it went away."""


class GroupTransport(Transport):
    """Over a process group of torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = process_group(group)
        self.rank, self.world = rank_and_world(self.group)
        self.timeout = timeout
        self.history = history_of(self.group)
        if self.history.lost:
            raise RankLost(
                f"The process group was given up: {self.history.lost}",
                "ranks that were lost, or failed in the middle of a call, cannot answer together.",
                "start the ranks again.",
            )
        if dist.get_backend(self.group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def start(self, outgoing: Mail, incoming: Mail) -> Work:
        def of(what: Any, mail: Mail) -> list[dist.P2POp]:
            # gloo ends the process if a message has another size than is expected; with its size
            # as its tag it is not taken for the one that is.
            return [
                dist.P2POp(
                    what,
                    x.view(-1).view(torch.uint8),
                    group=self.group,
                    tag=x.nbytes % LARGEST_TAG,
                    group_peer=rank,
                )
                for rank, x in mail
            ]

        ops = of(dist.isend, outgoing) + of(dist.irecv, incoming)
        ranks = [rank for rank, _ in (*outgoing, *incoming)]
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self.lost(ranks, error) from error
        # NCCL gives one handle for all of them.
        each = [[rank] for rank in ranks] if len(works) == len(ranks) else [ranks] * len(works)
        return _GroupWork(self, list(zip(works, each, strict=True)), (outgoing, incoming))

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
        """The error where a wait for these ranks ended without an answer."""
        names = ", ".join(map(str, sorted(set(ranks))))
        said = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]  # without gloo's file and advice
        last = next((words for words in map(self._last_words, ranks) if words), said)
        found = RankLost(
            f"Rank {self.rank} of {self.world} waited for rank {names}: {last}.",
            f"every rank of the group takes part in every call, forward and backward, within "
            f"{self.timeout:g} s.",
            "look at what that rank printed last; if it is only slow, pass timeout=. The process "
            "group cannot be used any more: start the ranks again.",
        )
        self.give_up(found)
        return found

    def give_up(self, error: BaseException) -> None:
        if self.history.lost:
            return
        what = summary(error)
        self.history.lost = f"rank {self.rank} failed in a call with {what}"
        self.leave_word(what)
        self.close()

    def leave_word(self, text: str) -> None:
        with suppress(Exception):
            words = f"{self.history.meetings} {text}"
            self.group.get_group_store().set(WORDS.format(self.rank), words)

    def _last_words(self, rank: int) -> str:
        """What a rank that is lost noted in this call."""
        with suppress(Exception):
            store, key = self.group.get_group_store(), WORDS.format(rank)
            if store.check([key]):
                meetings, text = store.get(key).decode().split(" ", 1)
                if int(meetings) == self.history.meetings:
                    return f"it failed with {text.rstrip('.')}"
        return ""

    def close(self) -> None:
        """End every wait in the group, here and on the other ranks."""
        with suppress(RuntimeError):
            if dist.get_backend(self.group) != "gloo":
                self.group.abort()
            elif self.world > 1:  # a wait that is too short makes gloo close its connections
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
        self.used = used  # tensors that are kept until the messages have arrived

    def wait(self) -> None:
        limit = timedelta(seconds=self.transport.timeout)
        with ended_by_ctrl_c(partial(self.transport.give_up, KeyboardInterrupt())):
            for work, ranks in self.works:
                try:
                    work.wait(limit)
                except RuntimeError as error:
                    raise self.transport.lost(ranks, error) from error


def summary(error: BaseException) -> str:
    """What an error says, in one line."""
    text = error.gave if isinstance(error, AttentionError) else repr(error)
    return " ".join(text.split())


def history_of(group: Group) -> History:
    return _histories.setdefault(process_group(group), History())


def rank_and_world(group: Group) -> tuple[int, int]:
    """This rank's number in the group, and how many ranks it has. Nothing is sent or counted."""
    group = process_group(group)
    return dist.get_rank(group), dist.get_world_size(group)


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group that is meant: the default one for None, that of a mesh of one dimension.

    Raises `BadValue` where torch.distributed was not set up, or a mesh has several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise BadValue(
            "There is no process group.",
            "the ranks find each other through torch.distributed.",
            'start the script with torchrun, and call torch.distributed.init_process_group("gloo") '
            "in it first.",
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise BadValue(
                f"group is a mesh of {group.ndim} dimensions, {group.mesh_dim_names}.",
                "a sequence is cut along one dimension of a mesh.",
                'pass that dimension, for example mesh["sequence"].',
            )
        return group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise BadType(
            f"group is {kind_of(group)}.",
            "a group is a process group of torch.distributed that this rank is in, a DeviceMesh of "
            "one dimension, or None for all ranks.",
            "pass what torch.distributed.new_group or init_device_mesh gave.",
        )
    return group
