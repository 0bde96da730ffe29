"""Read the text of a command: typed, from a file, or from standard input."""

import codecs
import errno
import sys
from pathlib import Path


def read_text(words: list[str] | None) -> str:
    """Return the text: the words as typed, the content of a file, or standard input."""
    from clearhead.core.errors import BadValue

    typed = " ".join(words) if words else None
    paths = [word for word in words or () if word == "-" or Path(word).suffix in (".txt", ".md")]
    if paths and len(words or ()) > 1:
        rule = "a text is some words, or one file, or - for standard input."
        hint = f"pass only {paths[0]!r}, or put the complete text in quotes."
        raise BadValue(f"The text is {typed!r}.", rule, hint)
    if typed == "-" or (typed is None and not sys.stdin.isatty()):
        raw = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
        text = _decode(raw, "standard input")
    elif typed is None:
        rule = "this command needs a text."
        hint = "type it in quotes, name a text file, or pipe it in."
        raise BadValue("No text was passed.", rule, hint)
    else:
        text = _read_file(typed)
    if not text.strip():
        rule = "attention needs at least one token."
        hint = "type some words in quotes, name a text file with words, or pipe them in."
        raise BadValue("The text is empty.", rule, hint)
    return text.strip()


def _read_file(typed: str) -> str:
    """Return the content of the file `typed`, or `typed` itself if it is not a path."""
    from clearhead.core.errors import BadValue
    from clearhead.hf.image_checkpoint import SUFFIXES
    from clearhead.hf.sound_checkpoint import SOUNDS

    path = Path(typed)
    if len(typed) > 1024 or "\0" in typed or "\n" in typed:
        return typed
    is_named = path.suffix.lower() in (".txt", ".md", *SUFFIXES, *SOUNDS)
    looks_like_path = is_named or ("/" in typed and path.parent.is_dir())
    try:
        is_folder = path.is_dir()
        if path.exists() and not is_folder:
            return _decode(path.read_bytes(), f"the file {typed!r}")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return typed
        gave = f"The file {typed!r} cannot be read: {error.strerror}."
        rule = "a text is typed, piped in, or read from a file."
        raise BadValue(gave, rule, "check the path and its permissions.") from error
    if typed and (is_folder or looks_like_path) and not any(c.isspace() for c in typed):
        what = "is a folder" if is_folder else "does not exist"
        rule = "a text without spaces that looks like a path is the name of a file."
        hint = "check the path; to use these characters as the text, pipe them in."
        raise BadValue(f"The file {typed!r} {what}.", rule, hint)
    return typed


def _decode(raw: bytes, source: str) -> str:
    from clearhead.core.errors import BadValue

    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        codec = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
        hint = f"convert it, for example with iconv -f {codec} -t utf-8."
        gave = f"Byte {error.start} of {source} is not UTF-8."
        raise BadValue(gave, "a text is UTF-8.", hint) from error
