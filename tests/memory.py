"""The memory that a call takes, on Linux.

`resource.getrusage` does not tell it: its peak may be that of the process that started this one,
or of an earlier test, and then no call seems to take any.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

RESTART = Path("/proc/self/clear_refs")
needs_peak = pytest.mark.skipif(
    not os.access(RESTART, os.W_OK), reason="this system does not tell the peak of a process anew"
)


def grown(call: Callable[[], object]) -> float:
    """Run the call, and return how far the memory of this process rose meanwhile, in MB.

    Memory that an earlier call has left free is not counted: use a fresh process where that
    matters, after a small call that loads what is loaded once.
    """
    RESTART.write_text("5")  # the peak so far is forgotten
    before = megabytes("VmRSS")
    call()
    return megabytes("VmHWM") - before


def megabytes(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1024
