"""How bytes get from rank to rank, and what happens when one of them does not answer."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Its functions have the default group as a default value. Imported after init_process_group, as
# optimizers do, it keeps the group past destroy_process_group, and gloo's threads past Python.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import BadType, BadValue, kind_of

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"
Mail: TypeAlias = Sequence[tuple[int, Tensor]]  # (rank, a contiguous tensor)


class RankLost(BadValue, ConnectionError):
    """A rank died, stalled, or failed, and the others cannot go on without it."""


_calls: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()


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
    calls = 0  # how many calls were made before, so that ranks notice when one left one out
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
        others = [rank for rank in range(self.world) if rank != self.rank]
        found = [
            mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.world)
        ]
        self.start([(r, mine) for r in others], [(r, found[r]) for r in others]).wait()
        return found


class GroupTransport(Transport):
    """Over a process group of torch.distributed: gloo on CPUs, NCCL on GPUs.

    Making one counts a call, so every rank of the group makes it, or none does.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = process_group(group)
        self.rank, self.world = rank_and_world(self.group)
        self.timeout = timeout
        self.calls = _calls[self.group] = _calls.get(self.group, 0) + 1
        if dist.get_backend(self.group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def start(self, outgoing: Mail, incoming: Mail) -> Work:
        def of(what: Any, mail: Mail) -> list[dist.P2POp]:
            return [
                dist.P2POp(what, x.view(-1).view(torch.uint8), group=self.group, group_peer=rank)
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
        return _GroupWork(self, list(zip(works, each, strict=True)))

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
        _GroupWork(self, [(work, ranks)]).wait()
        for x, part in zip(incoming, into.split(got), strict=True):
            flat(x).copy_(part)

    def lost(self, ranks: list[int], error: Exception) -> RankLost:
        names = ", ".join(map(str, sorted(set(ranks))))
        said = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]  # without gloo's file and advice
        return RankLost(
            f"Rank {self.rank} of {self.world} waited for rank {names}: {said}.",
            f"every rank of the group takes part in every call, forward and backward, within "
            f"{self.timeout:g} s.",
            "look at what that rank printed last; if it is only slow, pass timeout=. The process "
            "group cannot be used any more: start the ranks again.",
        )


class _GroupWork(Work):
    def __init__(self, transport: GroupTransport, works: list[tuple[dist.Work, list[int]]]) -> None:
        self.transport, self.works = transport, works

    def wait(self) -> None:
        limit = timedelta(seconds=self.transport.timeout)
        for work, ranks in self.works:
            try:
                work.wait(limit)
            except RuntimeError as error:
                raise self.transport.lost(ranks, error) from error


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
