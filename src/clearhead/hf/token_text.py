"""Convert tokens to the text as it was written, for any spelling of the vocabulary.

Vocabularies spell a space, a byte and the middle of a word differently. Byte-level ones use letters
for bytes ("ĠMary", "âĢĻ"), SentencePiece uses "▁" and "<0xE2>", WordPiece uses "##". The first two
keep the complete text, so that the joined texts of tokens are the text. The others normalise it,
and the written text is read from the offsets of their tokens.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..core.formatting import Token
from ..core.torch_state import loadable

loadable(Token)
UNKNOWN = "(?)"  # after a word that is not in the vocabulary
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_letters() -> dict[str, int]:
    """Return GPT-2's letters for bytes.

    A printable byte is its character in Latin-1; the others are the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [*map(chr, printable), *(chr(256 + n) for n in range(len(others)))]
    return dict(zip(letters, printable + others, strict=True))


def texts_of(pieces: Sequence[bytes]) -> list[str]:
    """Return the text of each piece of UTF-8.

    A character that is split over pieces belongs to the piece with its last byte. Its bytes in
    earlier pieces, and bytes that are not UTF-8, are written as numbers.

    >>> texts_of([b"a", b"\\xe4\\xbd", b"\\xa0b", b"\\xff"])
    ['a', '⟨E4 BD⟩', '你b', '⟨FF⟩']
    """
    owners = [number for number, piece in enumerate(pieces) for _ in piece]
    data = b"".join(pieces)
    parts: list[list[str | bytes]] = [[] for _ in pieces]
    at = 0
    for char in data.decode("utf-8", errors="surrogateescape"):
        broken = 0xDC80 <= ord(char) <= 0xDCFF
        size = 1 if broken else len(char.encode())
        last = owners[at + size - 1]
        for i in range(at, at + size):
            if broken or owners[i] != last:
                parts[owners[i]].append(data[i : i + 1])
        if not broken:
            parts[last].append(char)
        at += size
    return list(map(_written, parts))


def _written(parts: list[Any]) -> str:
    """Join parts of a text; neighbouring bytes are written as numbers."""
    text = ""
    for kind, run in groupby(parts, type):
        joined = kind().join(run)
        text += joined if kind is str else f"⟨{joined.hex(' ').upper()}⟩"
    return text


class TokenTexts:
    """Converts tokens of a transformers tokenizer to `Token`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = repr(getattr(backend, "decoder", None))
        self._letters = byte_letters() if "ByteLevel" in decoder else {}
        self._keeps_all = bool(self._letters) or "ByteFallback" in decoder
        self._continues = getattr(getattr(backend, "decoder", None), "prefix", "") or ""
        self._spelled_out = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}

    def tokens(
        self, text: str | None, ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None
    ) -> list[Token]:
        """Return the tokens of a text; None if only its ids are known.

        `offsets` are the positions of their first characters and their ends in the text; None for
        slow tokenizers.
        """
        raw = self.tokenizer.convert_ids_to_tokens(list(ids))
        texts = texts_of([self._bytes(i, token) for i, token in zip(ids, raw, strict=True)])
        special = {*self.tokenizer.all_special_ids}
        if text is not None and self._keeps_all:
            self._strip_added_space(text, ids, texts, special)
        elif text is not None and offsets is not None:
            special.discard(self.tokenizer.unk_token_id)
            texts = self._sliced(text, ids, raw, texts, offsets)
        tokens: list[Token] = []
        before = " "  # the last character of the text so far
        for number, token in enumerate(texts):
            apart = ids[number] in special or before.isspace() or token[:1].isspace()
            tokens.append(Token(token, str(raw[number]), int(ids[number]), not apart))
            before = " " if ids[number] in special else token[-1:] or before
        return tokens

    def unknown(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """Return the positions of tokens that are the unknown token."""
        unknown = self.tokenizer.unk_token_id
        known = ((i, token) for i, token in enumerate(tokens) if isinstance(token, Token))
        return tuple(i for i, token in known if token.id == unknown and token != token.raw)

    def alone(self, id: int) -> Token:
        """Return the token of an id, without its text."""
        raw = str(self.tokenizer.convert_ids_to_tokens(id))
        return Token(texts_of([self._bytes(id, raw)])[0], raw, id)

    def _bytes(self, id: int, raw: str | None) -> bytes:
        """Return the bytes that a token adds to a text, from its spelling in the vocabulary."""
        raw = str(raw)
        if id in self._spelled_out:
            return raw.encode()
        if self._letters:
            known = all(char in self._letters for char in raw)
            return bytes(self._letters[char] for char in raw) if known else raw.encode()
        if byte := _BYTE.fullmatch(raw):
            return bytes.fromhex(byte[1])
        if self._continues:
            inside = raw.startswith(self._continues)
            return (raw.removeprefix(self._continues) if inside else f" {raw}").encode()
        return raw.replace("▁", " ").encode()

    def _strip_added_space(
        self, text: str, ids: Sequence[int], texts: list[str], special: set[int]
    ) -> None:
        """Remove the space that a tokenizer adds before the first word of a text."""
        own = [number for number, i in enumerate(ids) if i not in special]
        if own and not text.startswith(" ") and texts[own[0]].startswith(" "):
            texts[own[0]] = texts[own[0]][1:] or " "  # a separate space token stays visible

    def _sliced(
        self, text: str, ids: Sequence[int], raw: Sequence[str], texts: Sequence[str],
        offsets: Sequence[tuple[int, int]],
    ) -> list[str]:  # fmt: skip
        """Return the written text of each token, from its offsets.

        It includes marks after the token that were normalised away, and a space before it. Several
        tokens of one character, such as a normalised fraction, are spelled as in the vocabulary.
        """
        written = list(texts)
        spans = [(n, *span) for n, span in enumerate(offsets) if span[0] < span[1]]
        spans = [span for span in spans if raw[span[0]] != "▁"]  # its offsets are a letter's
        starts = [start for _, start, _ in spans[1:]] + [len(text)]
        end = 0
        for (number, start, stop), following in zip(spans, starts, strict=True):
            body = text[start:stop].strip()
            if start >= end and body:
                marks = re.match(r"\S*", text[stop:following])
                body += marks[0] if marks else ""
                unknown = ids[number] == self.tokenizer.unk_token_id and body != raw[number]
                written[number] = body + UNKNOWN * unknown
                if end and (text[start].isspace() or text[start - 1].isspace()):
                    written[number] = " " + written[number]
            end = max(end, stop)
        return written


class Vocabulary(Sequence[Token]):
    """The token of each id, converted when it is read."""

    def __init__(self, texts: TokenTexts) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts.tokenizer)

    def __getitem__(self, id: Any) -> Any:
        return self.texts.alone(range(len(self))[id])
