"""Find out whether Triton runs kernels on a CPU."""

import os


def interprets() -> bool:
    """Does Triton run kernels on a CPU? It reads the variable when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
