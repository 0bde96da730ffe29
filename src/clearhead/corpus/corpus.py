"""Cut texts into contexts, and contexts into shards: fixed lists that no worker can change.

A text is tokenized once, and cut into pieces. Each piece is a context, with the tokens that the
tokenizer adds around a text, such as BOS. Nothing is dropped: the last piece of a text is as long
as it is. A context never mixes texts. A shard has contexts in their order, until it has
`shard_tokens` tokens, or those of a slice of the texts (`cuts`); so texts that are added later
change only the last shard.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import BadValue
from ..core.files import atomic_io
from ..models.roles import role_keys
from .metric import Batch
from .reader import Reader
from .texts import Text

FOLDER, AT_ONCE = "corpus", 64  # texts


@dataclass(frozen=True, eq=False)
class Shard:
    """The contexts of a shard.

    Attributes:
        ids: the token ids of all contexts, one after the other.
        lengths: the number of tokens of each context.
        texts: the number of the text of each context in the corpus.
        contexts: the number of each context in its text.
        names: the name of each text that begins in this shard, by its number.
        spelling: the text of each token id in this shard.
        pixels: the picture of each context, (contexts, channels, height, width); None for texts.
    """

    ids: Tensor
    lengths: Tensor
    texts: Tensor
    contexts: Tensor
    names: dict[int, str]
    spelling: dict[int, str]
    pixels: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The contexts, by the names of these attributes."""
        names = "ids", "lengths", "texts", "contexts", "pixels"
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    @property
    def digest(self) -> str:
        """A digest of the contexts."""
        digest = hashlib.sha256()
        for part in self.tensors.values():
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def _ends(self) -> list[int]:
        return list(self.lengths.cumsum(0).tolist())

    @cached_property
    def _is_separator(self) -> Tensor:
        """Whether each token id is punctuation or the end of a line."""
        is_separator = torch.zeros(max(self.spelling) + 1, dtype=torch.bool)
        is_separator[[i for i, token in self.spelling.items() if role_keys.is_separator(token)]] = 1
        return is_separator

    def numbers_of(self, index: int) -> tuple[int, int]:
        """Return the numbers of the text and context of a context; they rise in a corpus."""
        return int(self.texts[index]), int(self.contexts[index])

    @property
    def _prefix(self) -> str:
        text, context = self.numbers_of(0)
        return f"{text:09d}-{context:06d}"

    @property
    def state_file(self) -> str:
        """The name of the file of its state, by the digest of its contexts."""
        return f"{self._prefix}-{self.digest}.safetensors"

    @property
    def file(self) -> str:
        """The name of the file of its contexts, by the digest of all that it has."""
        texts = json.dumps([self.names, self.spelling], sort_keys=True)
        digest = hashlib.sha256(f"{self.digest} {texts}".encode()).hexdigest()[:16]
        return f"{self._prefix}-{digest}.safetensors"

    def context(self, index: int) -> Tensor:
        """Return the ids of a context, (T,)."""
        end = self._ends[index]
        return self.ids[end - int(self.lengths[index]) : end].long()

    def batches(self, most: int) -> Iterator[Batch]:
        """Yield the contexts in batches of equal length, the longest first.

        A batch has at most `most` tokens, or one context.
        """
        by_length: dict[int, list[int]] = {}
        for index, length in enumerate(self.lengths.tolist()):
            by_length.setdefault(length, []).append(index)
        for length in sorted(by_length, reverse=True):
            indices, size = by_length[length], max(1, most // length)
            for first in range(0, len(indices), size):
                yield self.batch(indices[first : first + size])

    def batch(self, indices: list[int]) -> Batch:
        """Return contexts of equal length as a batch."""
        ids = torch.stack([self.context(index) for index in indices])
        texts, contexts = self.texts[indices].tolist(), self.contexts[indices].tolist()
        pixels = None if self.pixels is None else self.pixels[indices]
        return Batch(ids, texts, contexts, self.spelling, self._is_separator[ids], pixels)

    def write(self, out: Path) -> Path:
        """Write the shard, if the folder does not have it, or only a damaged one."""
        path = out / FOLDER / self.file
        with suppress(BadValue):
            read_shard(path)
            return path
        about = {"names": self.names, "spelling": self.spelling}
        return atomic_io.write(path, self.tensors, {"shard": about})


def damaged(path: Path, why: str) -> BadValue:
    """Return the error for a file whose contents are not those that were written."""
    rule = "a file of a survey has the contents that were written, which its digest shows."
    hint = "delete the file, and run the same survey again, which writes it."
    return BadValue(f"{str(path)!r} is damaged: {why}.", rule, hint)


def read_shard(path: Path) -> Shard:
    """Read the contexts of a shard.

    Raises `BadValue` for a missing file, and for one whose contents do not have the digest in its
    name.
    """
    tensors, about = atomic_io.read(path)
    try:
        texts = (about["shard"][name] for name in ("names", "spelling"))
        names, spelling = ({int(i): text for i, text in part.items()} for part in texts)
        shard = Shard(**tensors, names=names, spelling=spelling)
        if shard.file == path.name:
            return shard
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise damaged(path, f"it is not that of a shard ({error})") from error
    raise damaged(path, "its contents do not have the digest in its name")


class Cutter:
    """Cuts texts into shards, of which the first has the number `first`.

    `skipped` has the texts without a token, with the reason.
    """

    def __init__(self, reader: Reader, context: int, shard_tokens: int, first: int = 0) -> None:
        self.reader, self.shard_tokens, self.texts, self.tokens = reader, shard_tokens, first, 0
        self.before, self.after = reader.around
        self.size = context - len(self.before) - len(self.after)
        if self.size < 1:
            added = len(self.before) + len(self.after)
            rule = f"a context has a token of a text besides the {added} that the tokenizer adds."
            raise BadValue(f"context={context!r}.", rule, "pass a larger context.")
        self.skipped: list[tuple[str, str]] = []
        self._contexts: list[tuple[list[int], int, int]] = []
        self._pixels: list[Tensor] = []
        self._names: dict[int, str] = {}
        self._filled = 0

    def cut(self, texts: Iterator[Text], most: int | None = None) -> Iterator[Shard]:
        """Yield the shards of the texts.

        With `most`, the contexts end after this number of tokens of texts.
        """
        for text, ids in self._encoded(texts):
            if most is not None:
                ids = ids[: most - self.tokens]
            if ids:
                self._names[self.texts] = text.name
            else:
                self.skipped.append((text.name, text.reason or "it has no token"))
            if text.file is not None and self.reader.pictures is not None:
                self._pixels.append(self.reader.pictures.pixels(text.file))
            for number, start in enumerate(range(0, len(ids), self.size)):
                piece = ids[start : start + self.size]
                context = [*self.before, *piece, *self.after]
                self._contexts.append((context, self.texts, number))
                self._filled += len(context)
                self.tokens += len(piece)
                if self._filled >= self.shard_tokens:
                    yield self._shard()
            self.texts += 1
            if self.tokens == most:
                break
        if self._contexts:
            yield self._shard()

    def _encoded(self, texts: Iterator[Text]) -> Iterator[tuple[Text, Sequence[int]]]:
        """Yield texts with their tokens; a tokenizer may divide some texts between its threads."""
        while several := list(islice(texts, AT_ONCE)):
            contents = [text.content for text in several if text.content is not None]
            ids = iter(self.reader.encode(contents))
            yield from ((x, x.ids if x.content is None else next(ids)) for x in several)

    def _shard(self) -> Shard:
        contexts, texts, numbers = zip(*self._contexts, strict=True)
        ids = [i for context in contexts for i in context]
        lengths = [*map(len, contexts)]
        parts = {"ids": ids, "lengths": lengths, "texts": texts, "contexts": numbers}
        tensors = {name: torch.tensor(part, dtype=torch.int32) for name, part in parts.items()}
        spelling = {i: str(self.reader.words[i]) for i in sorted({*ids})}
        pixels = torch.cat(self._pixels) if self._pixels else None
        shard = Shard(**tensors, names=self._names, spelling=spelling, pixels=pixels)
        self._contexts, self._names, self._pixels, self._filled = [], {}, [], 0
        return shard
