"""Divide the cutting of texts among workers, by slices of the texts.

A slice has consecutive texts, enough for about `SHARDS` shards, so it does not depend on workers.
Each worker reads all texts, and cuts the slices that no other one claims. What it cuts is listed in
a file, so every worker puts together the same manifest, and no slice is cut twice.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

from ..core.files import atomic_io
from .claims import alone, claimed
from .corpus import FOLDER, Cutter
from .manifest import ShardEntry, digest_of
from .reader import Reader
from .texts import CHARACTERS, Text

SHARDS = 8  # of a slice, about


class Slice(NamedTuple):
    """Consecutive texts, of which the first has the number `first`."""

    first: int
    texts: list[Text]


class Cut(NamedTuple):
    """The shards of a slice, or of several.

    `texts` and `tokens` count those that were read. `skipped` has the names of texts without a
    token, with the reasons. `ended` is False if the limit of tokens was reached.
    """

    shards: list[ShardEntry]
    texts: int
    tokens: int
    skipped: list[list[str]]
    ended: bool = True


class Cuts:
    """Cuts the texts that `read` yields, up to `most` tokens, into shards in a folder."""

    def __init__(
        self, reader: Reader, settings: dict[str, Any], out: Path,
        read: Callable[[], Iterator[Text]], most: int | None,
    ) -> None:  # fmt: skip
        self.reader, self.out, self.read, self.most = reader, out, read, most
        self.sizes = settings["context"], settings["shard tokens"]
        Cutter(reader, *self.sizes)  # which checks the context
        self.known = Cut([], 0, 0, [])  # of the first slices
        self.waiting: deque[tuple[int, str]] = deque()  # number and name of the next ones

    def cut(self, once: bool) -> Cut:
        """Cut all slices that no other worker cuts, until all are cut.

        Texts that can be read `once` wait for each slice that another worker cuts.
        """
        for part in self._slices():
            name = self._name_of(part)
            self.waiting.append((part.first, name))
            with (alone if once else claimed)(self.out, name) as mine:
                if mine and self._cut_of(name) is None:
                    self._cut(part, name)
            self._collect()
            if self.known.tokens == self.most:
                break
        while self.waiting and self.known.tokens != self.most:
            first, name = self.waiting[0]
            with alone(self.out, name):
                if self._cut_of(name) is None:  # its worker is lost, or reached no limit
                    self._cut(next(x for x in self._slices() if x.first == first), name)
            self._collect()
        return self.known

    def _slices(self) -> Iterator[Slice]:
        first, part, filled = 0, list[Text](), 0
        for number, text in enumerate(self.read(), 1):
            part.append(text)
            filled += text.size
            if filled >= SHARDS * CHARACTERS * self.sizes[1]:
                yield Slice(first, part)
                first, part, filled = number, [], 0
        if part:
            yield Slice(first, part)

    def _name_of(self, part: Slice) -> str:
        """Return the name of a slice, with a digest of all on which its shards depend."""
        reader = self.reader
        settings = reader.tokenizer_digest, reader.around, self.sizes, part.first
        digest = hashlib.sha256(repr(settings).encode())
        for text in part.texts:
            digest.update(text.bytes)
        return f"cut-{part.first:09d}-{digest.hexdigest()[:16]}.json"

    @property
    def _left(self) -> int | None:
        """The most tokens that the slices after the known ones may have."""
        return None if self.most is None else self.most - self.known.tokens

    def _cut(self, part: Slice, name: str) -> None:
        cutter, shards, left = Cutter(self.reader, *self.sizes, part.first), [], self._left
        for shard in cutter.cut(iter(part.texts), left):
            shard.write(self.out)
            sizes = len(shard.ids), len(shard.lengths)
            shards.append(ShardEntry(shard.state_file, shard.file, *sizes, *shard.numbers_of(0)))
        skipped = list(map(list, cutter.skipped))
        cut = [shards, cutter.texts - part.first, cutter.tokens, skipped, cutter.tokens != left]
        atomic_io.write_json(self.out / FOLDER / name, [digest_of(cut), cut])

    def _cut_of(self, name: str) -> Cut | None:
        """Return what was cut from a slice, if its files exist and it has not too few tokens."""
        try:
            digest, cut = json.loads((self.out / FOLDER / name).read_text(encoding="utf-8"))
            if digest != digest_of(cut):
                return None
        except (OSError, ValueError, TypeError):
            return None
        known, left = Cut([ShardEntry(*entry) for entry in cut[0]], *cut[1:]), self._left
        fits = known.tokens == left or (known.ended and (left is None or known.tokens < left))
        exist = all((self.out / FOLDER / entry.corpus).exists() for entry in known.shards)
        return known if fits and exist else None

    def _collect(self) -> None:
        """Add the next slices that were cut to the known ones."""
        while self.waiting and self.known.tokens != self.most:
            cut = self._cut_of(self.waiting[0][1])
            if cut is None:
                return
            self.known = Cut(*map(add, self.known[:4], cut[:4]))
            self.waiting.popleft()
