"""Ranks as processes, over gloo: the same numbers, and errors when a rank is lost."""

import os
import re
import signal
import threading
import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import clearhead as ch
from clearhead.distributed import RankLost, local, shard, unshard
from tests.core.engines.test_engines import forward_and_back, wanting
from tests.distributed.processes import on_processes
from tests.problems import PROBLEMS

HEADS = 1, 2  # ranks in a team, which exchange heads for sequence
CASES = ["grouped", "window", "documents", "scattered", "sinks", "soft cap", "alibi", "large"]


def answers(rank: int, layouts: tuple[str, ...]) -> dict:
    """Return full outputs and gradients of some problems, from the shards of all ranks."""
    found = {}
    for name, heads in product(CASES, HEADS):
        for layout in layouts:
            case = wanting(PROBLEMS[name](torch.float32, 0), torch.float32)
            if heads == 2 and case.k.shape[1] % 2:
                continue
            q, k, v = (shard(x, None, layout) for x in case.tensors)
            out = ch.distributed.attention(q, k, v, layout=layout, heads=heads, **case.keywords)
            whole = unshard(out, None, layout)
            seed = torch.ones_like(whole).cumsum(2) / dist.get_world_size()
            learned = torch.autograd.grad(whole, case.wanted, seed)
            for x in learned:
                dist.all_reduce(x)
            found[name, layout, heads] = whole.detach(), *learned
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sequence",))
    x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(1))
    y = shard(x, mesh["sequence"])
    found["mesh"] = (unshard(ch.distributed.attention(y, y, y, group=mesh), mesh),)
    found["drawn"] = ch.distributed.attention(y, y, y, dropout=0.5).isfinite().all()
    return found


@pytest.mark.parametrize("world, layouts", [(2, ("contiguous", "head-tail")), (4, ("head-tail",))])
def test_processes_compute_what_one_computes(world, layouts, tmp_path):
    for found in on_processes(world, answers, tmp_path, layouts):
        for name in CASES:
            case = wanting(PROBLEMS[name](torch.float64, 0), torch.float64)
            seed = torch.ones(*case.q.shape[:3], case.v.shape[3]).cumsum(2)
            true = forward_and_back(
                lambda *x, **kw: ch.attention(*x, engine="steps", **kw), case, seed
            )
            for which in product([name], layouts, HEADS[: 2 - case.k.shape[1] % 2]):
                for a, b in zip(found[which], true, strict=True):
                    error, size = float((a - b).detach().abs().max()), float(b.detach().abs().max())
                    assert error <= 2e-6 * size + 1e-5, f"{which}: {error}"
        x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(found["mesh"][0], ch.attention(x, x, x))


# ------------------------------------------------------------------- ranks that differ, or are lost


def shards() -> tuple[torch.Tensor, ...]:
    x = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(1))
    return tuple(shard(x).requires_grad_() for _ in range(3))


def error_of(do, *given, **keywords) -> str:
    try:
        do(*given, **keywords)
    except ch.AttentionError as error:
        return f"{type(error).__name__}: {error.gave}"
    return "nothing"


def different_calls(rank: int) -> list[str]:
    q, k, v = shards()
    ids = torch.arange(64) // 32
    other = ids + (torch.arange(64) == 5) * (rank == 1)
    ask = ch.distributed.attention
    return [
        error_of(ask, q, k, v, mask=ch.causal if rank == 0 else ch.window(before=7)),
        error_of(ask, q, k, v, mask=ch.documents(other)),
        error_of(ask, q, k, v, dropout=0.5, seed=rank),
        error_of(ask, *(x.to([torch.float32, torch.bfloat16][rank]) for x in (q, k, v))),
        error_of(ask, q, k, v, layout=["contiguous", "head-tail"][rank]),
        error_of(ask, *(x.detach() if rank else x for x in (q, k, v))),
        error_of(ask, q, k[:, :, : 32 - rank], v),
        error_of(ask, *(x[:, :, rank:] for x in (q, k, v)), layout="head-tail"),
        error_of(ask, q, k, v, mask=ch.documents([0, 1])),
        error_of(ask, q, k, v, mask=ch.causal),
        error_of(unshard, q[..., : 8 - rank]),
        error_of(unshard, q),
    ]


def test_ranks_that_make_different_calls_are_named(tmp_path):
    differ = "BadValue: The ranks made different calls: "
    here, there = on_processes(2, different_calls, tmp_path)
    plain = [re.sub(r" \((?:[0-9a-f]{8})\)", "", text) for text in here]
    assert (
        plain[0] == f"{differ}mask is window(before=7, after=None) on rank 1, and causal on rank 0."
    )
    assert plain[1].startswith(f"{differ}mask is documents([0, 0, 0, 0, 0, 1, 0,")
    assert plain[2] == f"{differ}seed is 1 on rank 1, and 0 on rank 0."
    assert plain[3] == f"{differ}dtype is torch.bfloat16 on rank 1, and torch.float32 on rank 0."
    assert plain[4] == f"{differ}layout is head-tail on rank 1, and contiguous on rank 0."
    assert plain[5] == f"{differ}gradient is not wanted on rank 1, and wanted on rank 0."
    assert plain[6].startswith(
        "BadValue: Rank 1 raised an error in its call: Keys have (G, Tk) = (2, 31)"
    )
    assert there[6].startswith("BadValue: Keys have (G, Tk) = (2, 31) and values (2, 32)")
    assert plain[7].startswith("BadValue: Rank 0 has 32 of 63 queries, and not 31.")
    assert plain[8].startswith("BadValue: documents has ids for 2 queries and 2 keys; the call has")
    assert plain[9] == plain[11] == "nothing"  # the group works after each of them
    assert plain[10] == f"{differ}other sizes is [1, 2, 7] on rank 1, and [1, 2, 8] on rank 0."
    assert [*here[:6], *here[7:]] == [*there[:6], *there[7:]]


def alone(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(1))
    y = shard(x)
    if rank == 1:  # functions that send nothing, on one rank only
        shard(x)
    return unshard(ch.distributed.attention(y, y, y, timeout=20)), ch.attention(x, x, x)


def test_a_rank_may_cut_alone(tmp_path):
    for found, expected in on_processes(2, alone, tmp_path):
        torch.testing.assert_close(found, expected)


def lost(rank: int, how: str) -> tuple[str, float]:
    """Return the error and time on rank 0 when rank 1 dies or stalls."""
    q, k, v = shards()
    ask = ch.distributed.attention
    ask(q, k, v, mask=ch.causal, timeout=20.0)  # the ranks have compared a call
    when, what = how.split()

    def fail(*given, **keywords):
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise":
            raise MemoryError("no room")
        time.sleep(3)
        raise MemoryError("too late")

    if rank == 1 and when == "forward":
        local.attend = fail
    if rank == 1 and when == "backward":
        local.gradients = fail
    begun = time.monotonic()
    try:
        out = ask(q, k, v, timeout=1.0)
        out.sum().backward()
        return "nothing", time.monotonic() - begun
    except (RankLost, MemoryError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun


@pytest.mark.parametrize(
    "how", ["forward kill", "backward kill", "forward sleep", "backward sleep", "forward raise"]
)
def test_a_lost_rank_is_an_error_in_time(how, tmp_path):
    found, _ = on_processes(2, lost, tmp_path, how)
    text, seconds = found
    assert text.startswith("RankLost: Rank 0 of 2 waited for rank 1: ")
    assert seconds < 3


def interrupted(rank: int) -> tuple[str, float]:
    # A shell starts its background jobs with Ctrl-C ignored, and processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    q, k, v = shards()
    ch.distributed.attention(q, k, v, timeout=60)
    begun = time.monotonic()
    try:
        if rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(1.5)
        ch.distributed.attention(q, k, v, timeout=60)
    except KeyboardInterrupt:
        taken = time.monotonic() - begun
        return f"KeyboardInterrupt, then {error_of(ch.distributed.attention, q, k, v)}", taken
    except RankLost as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


def test_ctrl_c_ends_a_wait(tmp_path):
    (here, seconds), (there, _) = on_processes(2, interrupted, tmp_path)
    assert here.startswith("KeyboardInterrupt, then RankLost: The process group was closed")
    assert seconds < 1.3
    assert "waited for rank 0: it failed with KeyboardInterrupt()" in there
