"""What is trained on: batches that depend on their number only.

A batch is made anew from (seed, number), so a training that was killed goes on with the very
batches it would have seen, and nothing but the step has to be remembered. Letters: B batch,
T tokens. Targets are the next words; -100 marks those that do not count.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BadValue, why_failed
from .grammar import Split, Story, lexicon, story
from .vocabulary import END, Vocabulary

SKIP = -100  # cross_entropy leaves these targets out
BLANKED = 0.01  # this share of the words a model reads in training is unknown to it


class Batch(NamedTuple):
    """What is read, (B, T), and the next words, (B, T)."""

    ids: Tensor
    targets: Tensor


class Source(ABC):
    """Where batches come from, and the words they are made of."""

    vocabulary: Vocabulary
    name: str
    mark: str  # the same for the same words only, so that no training goes on with others

    @abstractmethod
    def batch(self, number: int, size: int) -> Batch:
        """Training batch `number`."""

    @abstractmethod
    def held_out(self, size: int) -> Batch:
        """One batch that is never trained on."""


class Stories(Source):
    """Stories of the grammar: number i of `seed` is read once, in batch i // size."""

    name = mark = "stories"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.vocabulary = Vocabulary.of(lexicon())

    def batch(self, number: int, size: int) -> Batch:
        told = tell(self.seed, size, "train", start=number * size)
        return blank(pad(told, self.vocabulary), Random(f"blank {self.seed} {number}"))

    def held_out(self, size: int) -> Batch:
        return pad(tell(self.seed, size, "held-out"), self.vocabulary)


class TextFile(Source):
    """A text: random passages of its first nine tenths, `context` words long each; the rest is held
    out. Raises `BadValue` for a file that cannot be read, or with fewer than 100 words."""

    def __init__(self, path: str | Path, seed: int, context: int) -> None:
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise BadValue(
                f"The file {str(path)!r} cannot be read: {why_failed(error)}.",
                "a model is trained on a file of UTF-8 text.",
                "check the path, or convert the file to UTF-8.",
            ) from error
        self.name, self.seed = Path(path).name, seed
        self.mark = f"{self.name}, sha256 {sha256(text.encode()).hexdigest()[:16]}"
        self.vocabulary = Vocabulary.of_text(text)
        ids = torch.tensor(self.vocabulary.encode(text).ids if text.strip() else [])
        if len(ids) < 100:
            raise BadValue(
                f"The file {str(path)!r} has {len(ids)} words.",
                "a text to train on has at least 100.",
                "pass a longer text, or leave it out to train on stories.",
            )
        cut = len(ids) * 9 // 10
        self.learned, self.kept = ids[:cut], ids[cut:]
        self.context = min(context, len(self.kept) - 1)

    def batch(self, number: int, size: int) -> Batch:
        return self._passages(self.learned, Random(f"{self.seed} {number}"), size)

    def held_out(self, size: int) -> Batch:
        return self._passages(self.kept, Random(f"{self.seed} held-out"), size)

    def _passages(self, ids: Tensor, random: Random, size: int) -> Batch:
        starts = [random.randrange(len(ids) - self.context) for _ in range(size)]
        rows = torch.stack([ids[i : i + self.context + 1] for i in starts])
        targets = rows[:, 1:].clone()
        targets[targets == 0] = SKIP  # nobody is taught to guess an unknown word
        return Batch(rows[:, :-1], targets)


def tell(seed: int, count: int, split: Split, start: int = 0) -> list[Story]:
    """Stories `start` to `start + count` of a seed and split."""
    return [story(seed, number, split) for number in range(start, start + count)]


def pad(stories: Sequence[Story], vocabulary: Vocabulary) -> Batch:
    """Stories side by side, as long as the longest. After the last word comes <end>; what stands
    behind it is never looked at by what stands before, and does not count."""
    end = vocabulary.number[END]
    T = max(len(story.words) for story in stories)
    ids, targets = torch.full((len(stories), T), end), torch.full((len(stories), T), SKIP)
    for row, told in enumerate(stories):
        words = torch.tensor([*vocabulary.encode(told.words).ids, end])
        ids[row, : len(words) - 1], targets[row, : len(words) - 1] = words[:-1], words[1:]
    return Batch(ids, targets)


def blank(batch: Batch, random: Random) -> Batch:
    """The batch with a few words made unknown, so that a model learns to read on past one."""
    ids = batch.ids.clone()
    for row in ids:
        for place in range(len(row)):
            if random.random() < BLANKED:
                row[place] = 0
    return batch._replace(ids=ids)
