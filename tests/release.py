"""Check that a release is consistent: python tests/release.py v1.2.3

The version has one source, `__version__` in `src/clearhead/__init__.py`. The tag, the citation and
a dated heading of the changelog must repeat it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _first(pattern: str, file: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def version() -> str:
    return _first(r'^__version__ = "(.+)"$', "src/clearhead/__init__.py")


def disagreements(tag: str | None = None) -> list[str]:
    """What repeats another version than the package's. Without a tag the changelog may be open."""
    number = version()
    heading = _first(r"^## (.+)$", "CHANGELOG.md")
    stated = {
        "CITATION.cff": _first(r"^version: (.+)$", "CITATION.cff"),
        "CHANGELOG.md": heading.split()[0],
        "the tag": number if tag is None else tag.removeprefix("v"),
    }
    wrong = [f"{place} says {said}, and __version__ is {number}" for place, said in stated.items()
             if said != number]  # fmt: skip
    if tag is not None and not re.fullmatch(r"\S+ \(\d{4}-\d{2}-\d{2}\)", heading):
        wrong.append(f"the changelog's first heading has no date: {heading}")
    return wrong


if __name__ == "__main__":
    sys.exit("\n".join(disagreements(*sys.argv[1:2])) or None)
