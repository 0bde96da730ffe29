"""The scripts in examples/ print the same for one process and for two."""

import io
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.processes import on_processes
from tests.fresh_process import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


def by_torchrun(world: int, script: str, *options: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += [f"--nproc-per-node={world}", str(EXAMPLES / script), *options]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, options",
    [
        ("train_long_text.py", ("--tokens=257", "--steps=3")),
        ("look_at_long_text.py", ("--tokens=311",)),
    ],
)
def test_two_processes_print_what_one_prints(script, options):
    one, two = (by_torchrun(world, script, *options) for world in (1, 2))
    assert one == two and len(one) >= 3


def look_over_ranks(rank: int) -> list[str]:
    """Return the output of the script in an existing group, as with torchrun."""
    script = str(EXAMPLES / "look_at_long_text.py")
    sys.argv = [script, "--tokens=311"]
    dist.init_process_group = lambda backend: None
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue().splitlines()


def test_two_ranks_print_what_one_prints(tmp_path):
    (one,), (two, other) = (on_processes(n, look_over_ranks, tmp_path / str(n)) for n in (1, 2))
    assert one == two and len(one) >= 3 and not other


def test_no_thread_of_the_group_outlives_it():
    # Such a thread may free a tensor after Python has ended; the process then aborts.
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
    done = run_program(script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout and "gloo" not in done.stdout
