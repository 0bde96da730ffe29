"""Write a public-domain book and source code, in turn, as a corpus for a survey.

python -m examples.book_and_code out/kjv-and-stdlib.jsonl
clearhead survey out/kjv-and-stdlib.jsonl --model DIR --tokens 1000000 --out out/smollm2

The book is the King James Bible, a text for each chapter, from the Debian packages bible-kjv and
bible-kjv-text; `--packages` is a folder into which `dpkg -x` unpacked them. The code is Python's
standard library, a text for each file without its tests. Both are in an order drawn at random, and
the kind with fewer characters so far is next.
"""

import argparse
import json
import random
import re
import subprocess
import sysconfig
from pathlib import Path

MOST = 2_600_000  # characters of each kind
LARGEST_FILE = 100_000  # characters


def chapters(packages: Path) -> list[str]:
    """Return the chapters of the book, a line for each verse."""
    command = [packages / "usr/bin/bible", "-f", "-p", packages / "usr/lib", "gen1:1-rev22:21"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    verses: dict[str, list[str]] = {}
    for line in lines:
        chapter, verse = re.fullmatch(r"(\w+):\d+ (.*)", line).groups()
        verses.setdefault(chapter, []).append(verse)
    return ["\n".join(of) + "\n" for of in verses.values()]


def files() -> list[str]:
    """Return the files of the standard library, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests"}
    paths = sorted(path for path in library.rglob("*.py") if left_out.isdisjoint(path.parts))
    random.Random(0).shuffle(paths)
    texts = [path.read_bytes().decode("utf-8", errors="ignore") for path in paths]
    return [text for text in texts if text.strip() and len(text) < LARGEST_FILE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, default=Path("/"))
    arguments = parser.parse_args()
    book = chapters(arguments.packages)
    random.Random(0).shuffle(book)
    kinds, sizes = [iter(book), iter(files())], [0, 0]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as out:
        while min(sizes) < MOST:
            kind = sizes.index(min(sizes))
            text = next(kinds[kind])
            sizes[kind] += len(text)
            out.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
