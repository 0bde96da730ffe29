"""The text of a command: typed, from a file, or from standard input."""

import codecs
import errno
import sys
from pathlib import Path


def read_text(words: list[str] | None) -> str:
    """The text as typed (with or without quotes), from the file of that name, or from standard
    input."""
    from clearhead.errors import BadValue

    given = " ".join(words) if words else None
    paths = [word for word in words or () if word == "-" or Path(word).suffix in (".txt", ".md")]
    if paths and len(words or ()) > 1:
        raise BadValue(
            f"The text is {given!r}.",
            "a text is some words, or one file, or - for standard input.",
            f"name {paths[0]!r} alone, or put words that look like a file in quotes, all together.",
        )
    if given == "-" or (given is None and not sys.stdin.isatty()):
        raw = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
        text = _decode(raw, "standard input")
    elif given is None:
        raise BadValue(
            "No text was given.",
            "clearhead explains a text.",
            "type it in quotes, name a text file, or pipe it in.",
        )
    else:
        text = _read_file(given)
    if not text.strip():
        raise BadValue(
            "The text is empty.",
            "attention needs at least one token.",
            "type some words in quotes, name a text file that has some, or pipe them in.",
        )
    return text.strip()


def _read_file(given: str) -> str:
    """The content of the file of that name, or what was given if it is not a path."""
    from clearhead.errors import BadValue

    path = Path(given)
    if len(given) > 1024 or "\0" in given or "\n" in given:
        return given
    looks_like_path = path.suffix in (".txt", ".md") or ("/" in given and path.parent.is_dir())
    try:
        if path.exists() and not path.is_dir():
            return _decode(path.read_bytes(), f"the file {given!r}")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return given
        raise BadValue(
            f"The file {given!r} cannot be read: {error.strerror}.",
            "a text is typed, piped in, or read from a file.",
            "check the path and its permissions.",
        ) from error
    if looks_like_path and not any(c.isspace() for c in given):
        what = "is a folder" if path.is_dir() else "is not there"
        raise BadValue(
            f"The file {given!r} {what}.",
            "a text without spaces that looks like a path is read as one.",
            "check the path; to explain these letters themselves, pipe them in.",
        )
    return given


def _decode(raw: bytes, source: str) -> str:
    from clearhead.errors import BadValue

    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        is_utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise BadValue(
            f"Byte {error.start} of {source} is not UTF-8.",
            "a text is UTF-8.",
            f"convert it, for example with iconv -f {'utf-16' if is_utf16 else 'latin1'} -t utf-8.",
        ) from error
