"""Compute the shards of a survey in several processes of this machine.

Each process is the command ``clearhead survey work OUT``, as one would start it in a shell of any
machine that has the folder. A process that ends early loses the shard that it computed; another one
computes it.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from ..core.errors import BadType, BadValue
from ..core.formatting import quantity
from . import state
from .manifest import Manifest, read_manifest
from .merge import missing_shards
from .progress import token_progress
from .steps import Setup

POLL = 0.2  # seconds


def run_workers(setup: Setup, out: Path, workers: int, progress: bool | None) -> None:
    """Compute all shards in `workers` processes.

    Prints a line for each process that ends early. Raises `BadValue` if shards are missing at the
    end, with the last error of a process.
    """
    command = worker_command(setup, out)
    manifest = read_manifest(out)
    processes: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        for _ in range(workers):
            errors: IO[bytes] = tempfile.TemporaryFile()
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors)
            processes.append((child, errors))
        _wait([child for child, _ in processes], out, manifest, progress)
    finally:
        for child, _ in processes:
            child.terminate()
            child.wait()
    message = ""
    for number, (child, output) in enumerate(processes):
        if child.returncode:
            output.seek(0)
            message = output.read().decode(errors="replace").strip() or message
            code = child.returncode  # of a signal, it is negative
            ended = f"signal {-code}" if code < 0 else f"code {code}"
            print(f"worker {number} ended with {ended}", file=sys.stderr)
        output.close()
    if missing := missing_shards(out, manifest):
        raise BadValue(
            f"All workers ended, and the survey lacks {len(missing)} of "
            f"{quantity(len(manifest.shards), 'shard')}."
            + (f" The last error: {message}" if message else ""),
            "shards that are finished stay valid.",
            "run the same survey again, which computes the others.",
        )


def worker_command(setup: Setup, out: Path) -> list[str]:
    """Return the command of a worker.

    Raises `BadType` for a model in memory, and for metrics that have no name to import.
    """
    path = setup.path_for("Several workers were", "each worker is a process, which")
    if unnamed := [entry for entry in setup.entries if not isinstance(entry, str)]:
        raise BadType(
            f"Several workers were requested with the metric {unnamed[0]!r}.",
            "each worker is a process, which imports metrics by name.",
            'define it in a module, and pass "module:name".',
        )
    model = [] if path is None else ["--model", str(path)]
    return [sys.executable, "-m", "clearhead", "survey", "work", str(out), *model]


def _wait(
    children: list[subprocess.Popen[bytes]], out: Path, manifest: Manifest, progress: bool | None
) -> None:
    """Wait until all processes have ended, and show how many tokens are done."""
    entries = [manifest.shards[number] for number in missing_shards(out, manifest)]
    waiting = {entry.state: entry.tokens for entry in entries}
    total = sum(entry.tokens for entry in manifest.shards)
    before = total - sum(waiting.values())
    with token_progress(total, progress, before) as advance:
        while any([child.poll() is None for child in children]):
            for file in [name for name in waiting if (out / state.FOLDER / name).exists()]:
                advance(waiting.pop(file))
            time.sleep(POLL)
