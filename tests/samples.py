"""Draw texts at random, to restate each in other words: python tests/samples.py [SEED]

Twenty docstrings, ten errors and ten paragraphs. Rewrite a text that a reader restates wrongly.
"""

import ast
import random
import sys
from collections.abc import Iterator
from itertools import takewhile

from words import ROOT, files, markdown


def docstrings() -> Iterator[tuple[str, int, str]]:
    for path in sorted(ROOT.glob("src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield path.relative_to(ROOT).as_posix(), node.lineno, f"{node.name}\n{text}"


def errors() -> Iterator[tuple[str, int, str]]:
    """The parts of raised errors, as source where a part is computed."""
    for path in sorted(ROOT.glob("src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and ast.unparse(node.exc.func) in ("BadValue", "BadType", "Missing")
            ):
                text = "\n".join(ast.unparse(argument) for argument in node.exc.args)
                yield path.relative_to(ROOT).as_posix(), node.lineno, text


def paragraphs() -> Iterator[tuple[str, int, str]]:
    """Paragraphs of README, documentation and lessons, of at least twenty words, as written."""
    for path in files():
        if path.suffix == ".md":
            source = path.read_text()
            lines = source.split("\n")
            for line, text, prose in markdown(source):
                if prose and len(text.split()) >= 20:
                    block = "\n".join(takewhile(str.strip, lines[line - 1 :]))
                    yield path.relative_to(ROOT).as_posix(), line, block


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10**6)
    draw = random.Random(seed)
    print(f"seed {seed}")
    for texts, count in ((docstrings(), 20), (errors(), 10), (paragraphs(), 10)):
        for file, line, text in draw.sample(list(texts), count):
            print(f"\n{file}:{line}\n{text}")
