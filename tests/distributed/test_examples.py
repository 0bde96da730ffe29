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
        ("train_long_text.py", ("--tokens=257", "--steps=3")),
        ("look_at_long_text.py", ("--tokens=311",)),
    ],
)
def test_two_processes_print_what_one_prints(script, options):
    one, two = (printed(world, script, *options) for world in (1, 2))
    assert one == two and len(one) >= 3
