"""Ranks as processes, over gloo."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

KINDS = "llama", "mistral", "gemma2", "gpt_oss", "gpt2"  # the models of the tests
IMPORTED = [
    "pytest",
    "clearhead",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
]
IMPORTED += [f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS]


def on_processes(
    world: int, do: Callable[..., Any], folder: Path, *given: Any, seconds: float = 90
) -> list[Any]:
    """Run `do(rank, *given)` on each rank in a separate process, which imports `do` by its name.
    Return the results of all ranks; None for one that was killed. Each has some seconds."""
    folder.mkdir(exist_ok=True)
    # Forked from a server that has imported the modules and started no thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ranks = [
        context.Process(target=_run, args=(rank, world, do, str(folder), given))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds)
    late = [process for process in ranks if process.exitcode is None]
    for process in late:
        process.kill()
    assert not late, "a rank hung"
    found = [folder / f"{rank}.pt" for rank in range(world)]
    for rank in range(world):
        if (wrong := folder / f"{rank}.txt").exists():
            raise AssertionError(f"rank {rank}: {wrong.read_text()}")
    return [torch.load(f, weights_only=False) if f.exists() else None for f in found]


def _run(rank: int, world: int, do: Callable[..., Any], folder: str, given: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    try:
        torch.save(do(rank, *given), f"{folder}/{rank}.pt")
    except BaseException:
        Path(f"{folder}/{rank}.txt").write_text(traceback.format_exc())
    sys.stdout.flush()
    os._exit(0)  # without destroying the group, which may have lost a rank
