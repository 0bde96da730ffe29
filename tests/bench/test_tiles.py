"""The comparison of tiles runs where no GPU is, by a false clock; its times are not tested."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.outside
ROOT = Path(__file__).parents[2]
COMPARE = """
import os; os.environ["TRITON_INTERPRET"] = "1"
import torch
from bench import gpu, tiles
from bench.cases import BF16, Case
from clearhead.core.masks import causal

in_use = {name: tiles.tiles_of(q)[q.case.D][0] for name, q in tiles.QUESTIONS.items()}
assert all(tile not in tiles.QUESTIONS[name].others for name, tile in in_use.items())
gpu.DEVICE = torch.device("cpu")
gpu.seconds_per_call = lambda run: (run(), 1.0)[1]
case = Case("", H=1, G=1, D=64, Tq=40, Tk=40, dtype=BF16, mask=causal)
question = tiles.Question("FORWARD", case, [(16, 32, 4, 2, True), (1, 2)])
print(*tiles.answer(question, 1), sep="\\n")
assert in_use == {name: tiles.tiles_of(q)[q.case.D][0] for name, q in tiles.QUESTIONS.items()}
"""


def test_tiles_are_compared_with_the_one_in_use():
    """A tile that fails has its error. The tables are the same afterwards."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE], cwd=ROOT, capture_output=True, text=True
    )
    failed, usual, other = done.stdout.splitlines() or done.stderr[-2000:].splitlines()
    assert failed.startswith("(1, 2) ") and "ValueError" in failed
    assert usual.startswith("(128, 64, 4, 3)") and usual.endswith(" 1.000 of the tile in use")
    assert other.startswith("(16, 32, 4, 2, True)") and "1.000" in other
