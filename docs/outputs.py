"""Write what the Python of a page prints into the blocks of text that follow it.

    python -m docs.outputs docs/how-to/intervene.md

A block of Python shows its output if a block of text, which may be empty, comes directly after it;
what depends on the machine is not shown. The blocks of a page run in order, in one namespace and an
empty folder. `tests/test_docs.py` runs them too, and compares the outputs.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

BLOCK = re.compile(r"^```python\n(.*?)^```$(\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def run(page: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each block of Python of a page with what it prints; run in an empty folder."""
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in BLOCK.finditer(page.read_text("utf-8")):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block[1], str(page), "exec"), names)
        lines = [line.rstrip() for line in printed.getvalue().rstrip().split("\n")]
        yield block, "\n".join(lines) + "\n" if lines != [""] else ""


def write(page: Path) -> None:
    """Replace the outputs of a page."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        outputs = [printed for _, printed in run(page)]
        os.chdir(before)
    following = iter(outputs)

    def with_output(block: re.Match[str]) -> str:
        printed = next(following)
        return f"```python\n{block[1]}```" + (f"\n\n```text\n{printed}```" if block[2] else "")

    page.write_text(BLOCK.sub(with_output, page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name).resolve())
