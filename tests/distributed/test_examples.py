"""The scripts in examples/ print the same for one process and for two."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(world: int, script: str, *options: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += [f"--nproc-per-node={world}", str(EXAMPLES / script), *options]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "script, options",
    [
        pytest.param("train_long_text.py", ("--tokens=257", "--steps=3"), marks=pytest.mark.slow),
        ("look_at_long_text.py", ("--tokens=311",)),
    ],
)
def test_two_processes_print_what_one_prints(script, options):
    one, two = (printed(world, script, *options) for world in (1, 2))
    assert one == two and len(one) >= 3


def test_no_thread_of_the_group_outlives_it():
    # One that does may let go of a tensor when Python is gone: the process then aborts.
    script = """
import os, torch, torch.distributed as dist, clearhead
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.ones(3, requires_grad=True)
steps = torch.optim.AdamW([weight])
dist.all_reduce(weight.detach())
dist.destroy_process_group()
for thread in os.listdir("/proc/self/task"):
    print(open(f"/proc/self/task/{thread}/comm").read().strip())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout and "gloo" not in done.stdout
