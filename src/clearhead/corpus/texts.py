"""Read texts: strings, files, folders, and files of many texts (.jsonl, .parquet).

A text that cannot be read is left out, and its name and the reason are reported.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..core.errors import BadType, BadValue, is_iterable, kind_of, why_failed
from .connection import connect, pattern_of

COLUMN = "text"  # of .jsonl and .parquet
CHARACTERS = 4  # of a token, about


class Text(NamedTuple):
    """A text and its name. `content` is None for a text that cannot be read, with the `reason`.

    A text of tokens alone has only its `ids`. A picture has those of its grid, its `file`, and the
    `digest` of the contents of this file.
    """

    name: str
    content: str | None
    reason: str = ""
    ids: Sequence[int] = ()
    file: Path | None = None
    digest: str = ""

    @property
    def bytes(self) -> bytes:
        """What a digest has of it."""
        content = self[:4] if self.file is None else (self.name, self.digest)
        return json.dumps(content).encode()

    @property
    def size(self) -> int:
        """Its number of characters, also if it has only tokens: `CHARACTERS` of each."""
        return len(self.ids) * CHARACTERS if self.content is None else len(self.content)


Sources: TypeAlias = str | Path | Iterable[str | Path]


def read_texts(
    sources: Sources, read_file: Callable[[Path, str], Iterator[Text]] | None = None
) -> Iterator[Text]:
    """Read texts, one after the other; `read_file` yields those of a file, which has a name.

    A string is a text, and a `Path` a file or a folder. A folder has a text in each of its files,
    also in folders below, in the order of their names; names that begin with a dot are left out. A
    line of a .jsonl file, and a row of a .parquet file, is a text in its field "text".

    Raises `BadType` for anything else, and `BadValue` for a path that does not exist, and for a
    string that is the name of a file.
    """
    read_file = read_file or _texts_of
    several = sources if is_iterable(sources) and not isinstance(sources, str) else [sources]
    for number, source in enumerate(several):
        if not isinstance(source, (str, Path)):
            rule = "texts are strings, files and folders."
            hint = 'pass for example ["A text.", Path("book.txt"), Path("folder")].'
            raise BadType(f"survey got {kind_of(source)} among its texts.", rule, hint)
        path = source if isinstance(source, Path) else None
        if path is None:
            _must_not_name_a_file(str(source))
            yield _text(f"text {number}", str(source))
        elif not path.exists():
            rule = "a path among the texts is a file or a folder."
            hint = "check the path, or pass the text itself as a string."
            raise BadValue(f"{str(path)!r} does not exist.", rule, hint)
        elif path.is_dir():
            for file in sorted(path.rglob("*"), key=lambda x: x.relative_to(path).parts):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.is_file() and not hidden:
                    yield from read_file(file, _name_of(file.relative_to(path.parent)))
        else:
            yield from read_file(path, _name_of(Path(path.name)))


def sizes_of(texts: object) -> int:
    """Return the characters of strings and the bytes of files; 0 for what can be read once."""
    if isinstance(texts, str):
        return len(texts)
    if isinstance(texts, Path):
        files = texts.rglob("*") if texts.is_dir() else [texts]
        return sum(file.stat().st_size for file in files if file.is_file())
    if not is_iterable(texts) or iter(texts) is texts:
        return 0
    return sum(map(sizes_of, texts))


def _name_of(path: Path) -> str:
    """Return the name of a text; bytes of the path that are not UTF-8 are written as \\xff."""
    return os.fsencode(path.as_posix()).decode(errors="backslashreplace")


def _text(name: str, content: str) -> Text:
    """Return a text. One with a lone surrogate, which is not a character, cannot be read."""
    try:
        content.encode()
    except UnicodeEncodeError as error:
        return Text(name, None, f"character {error.start} is half of a surrogate pair")
    return Text(name, content)


def _must_not_name_a_file(text: str) -> None:
    """Raise `BadValue` for a string such as "book.txt" if this file exists."""
    try:
        named = len(text) < 256 and bool(Path(text).suffix or "/" in text) and Path(text).exists()
    except (OSError, ValueError):  # with a null character
        return
    if named:
        rule = "a string is a text; a file is passed as a pathlib.Path."
        hint = f"pass Path({text!r})."
        raise BadValue(f"The text {text!r} is the name of a file.", rule, hint)


def _texts_of(file: Path, name: str) -> Iterator[Text]:
    try:
        if file.suffix == ".parquet":
            yield from _rows(file, name)
        elif file.suffix == ".jsonl":
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _line(line, f"{name}:{number}")
        else:
            yield Text(name, file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Text(name, None, f"byte {error.start} is not UTF-8")
    except OSError as error:
        yield Text(name, None, f"it cannot be read: {why_failed(error)}")


def _line(line: bytes, name: str) -> Text:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return Text(name, None, "the line is not JSON in UTF-8")
    content = value.get(COLUMN) if isinstance(value, dict) else value
    if not isinstance(content, str):
        return Text(name, None, f"the line has no string in its field {COLUMN!r}")
    return _text(name, content)


def _rows(file: Path, name: str) -> Iterator[Text]:
    connection, number = connect(), 0
    import duckdb

    try:
        rows = connection.execute(
            f'select "{COLUMN}" from read_parquet(?, file_row_number = true, '
            "hive_partitioning = false) order by file_row_number",
            [pattern_of(file)],
        )
        while batch := rows.fetchmany(1000):
            for (content,) in batch:
                if isinstance(content, str):
                    yield Text(f"{name}:{number}", content)
                else:
                    yield Text(f"{name}:{number}", None, f"the row has no string in {COLUMN!r}")
                number += 1
    except BadValue as error:
        yield Text(name, None, f"{error.gave} {error.rule}")
    except duckdb.Error as error:
        why = " ".join(str(error).split())[:200]
        yield Text(name, None, f"it has no column {COLUMN!r} that can be read: {why}")
    finally:
        connection.close()
