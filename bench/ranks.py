"""Compare several processes of one thread with one process of as many threads, in turns.

    python bench/ranks.py --processes 2 --tokens 32768 --rounds 5

It prints the median time of one call for both, the speed of the processes as a fraction of that of
the one process, and the bytes that a rank receives by the plan. Everything runs on this machine,
over gloo. More processes than cores only show the cost of the exchange.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import clearhead as ch
from clearhead import distributed


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--processes", type=int, default=2)
    ask.add_argument("--tokens", type=int, default=32768)
    ask.add_argument("--heads", type=int, default=8)
    ask.add_argument("--kv-heads", type=int, default=8)
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--mask", default="causal")
    asked = ask.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (asked, folder), nprocs=asked.processes)


def rank(number: int, asked: argparse.Namespace, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = asked.processes
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=number, world_size=world)
    mask = ch.masks.parse(asked.mask)
    layout = distributed.head_tail(asked.tokens, world)
    draw = torch.Generator().manual_seed(0)
    sizes = [
        (1, heads, asked.tokens, 64) for heads in (asked.heads, asked.kv_heads, asked.kv_heads)
    ]
    whole = [torch.randn(size, generator=draw) for size in sizes]
    mine = [distributed.shard(x, layout=layout) for x in whole]
    shapes = [x.to("meta") for x in whole]
    plan = distributed.plan(*shapes, world=world, layout=layout, mask=mask, heads=1)
    engine = ch.plan(*whole, mask=mask).engine

    def alone() -> float:
        """Run one process with as many threads, while the other ranks wait."""
        if number == 0:
            torch.set_num_threads(world)
            took = timed(lambda: ch.attention(*whole, mask=mask))
            torch.set_num_threads(1)
            (Path(folder) / "done").touch()
        while not (Path(folder) / "done").exists():
            time.sleep(0.05)
        dist.barrier()
        if number == 0:
            (Path(folder) / "done").unlink()
        dist.barrier()
        return took if number == 0 else 0.0

    def together() -> float:
        return timed(lambda: distributed.attention(*mine, mask=mask, layout=layout))

    torch.set_num_threads(1)
    alone(), together()
    pairs = [(alone(), together()) for _ in range(asked.rounds)]
    if number == 0:
        one, many = (statistics.median(times) for times in zip(*pairs, strict=True))
        share = statistics.median(a / b for a, b in pairs)
        heads = f"{asked.heads} heads on {asked.kv_heads}"
        print(f"{asked.tokens} tokens, {heads}, {asked.mask}, by {engine}")
        print(f"one process, {world} threads     {one:8.3f} s")
        print(f"{world} processes, one thread    {many:8.3f} s, {share:.1%} of its speed")
        print(f"a rank receives           {max(plan.received) / 1e6:8.1f} MB by the plan")
    dist.destroy_process_group()


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
