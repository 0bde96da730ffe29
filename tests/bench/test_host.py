"""The measurement of the host runs where no GPU is; its times are not tested."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.outside
ROOT = Path(__file__).parents[2]
MEASURE = """
import os; os.environ["TRITON_INTERPRET"] = "1"
from bench.host import measure_host
from clearhead.core.engines.gpu.triton import start
before = start._compiled
print(sum(us > 0 for us in measure_host(1, 2).values()), start._compiled is before)
"""


def test_ten_calls_are_measured_and_nothing_starts():
    """The cache of compiled kernels is the same afterwards."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "10 True\n", done.stderr[-2000:]
