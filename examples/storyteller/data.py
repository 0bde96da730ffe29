"""Make training batches, which depend only on the seed and their number.

So a training that is started again continues with the same batches, without the state of the data
in its checkpoint. Letters: B batch, T tokens. Targets are the next words; -100 marks targets that
do not count.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.core.errors import BadValue, why_failed
from clearhead.demo.vocabulary import END, Vocabulary

from .grammar import Split, Story, lexicon, story

SKIP = -100  # cross_entropy ignores these targets
UNKNOWN_FRACTION = 0.01  # of the words in a training batch, which are replaced by <unknown>


class Batch(NamedTuple):
    """The words, (B, T), and the next word of each, (B, T)."""

    ids: Tensor
    targets: Tensor


class Source(ABC):
    """A source of batches, and the vocabulary of its words."""

    vocabulary: Vocabulary
    name: str
    identity: str  # depends on the words, so that training is not continued on other data

    @abstractmethod
    def batch(self, number: int, size: int) -> Batch:
        """Return training batch `number`."""

    @abstractmethod
    def held_out(self, size: int) -> Batch:
        """Return one batch that is never used for training."""


class Stories(Source):
    """Stories of the grammar: story i of `seed` is used once, in batch i // size."""

    name = identity = "stories"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.vocabulary = Vocabulary.of(lexicon())

    def batch(self, number: int, size: int) -> Batch:
        batch = pad(stories(self.seed, size, "train", start=number * size), self.vocabulary)
        return with_unknown_words(batch, Random(f"blank {self.seed} {number}"))

    def held_out(self, size: int) -> Batch:
        return pad(stories(self.seed, size, "held-out"), self.vocabulary)


class TextFile(Source):
    """Random passages of `context` words from the first nine tenths of a file.

    The rest of the file is held out.

    Raises `BadValue` for a file that cannot be read, or that has fewer than 100 words.
    """

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
        self.identity = f"{self.name}, sha256 {sha256(text.encode()).hexdigest()[:16]}"
        self.vocabulary = Vocabulary.of_text(text)
        ids = torch.tensor(self.vocabulary.encode(text).ids if text.strip() else [])
        if len(ids) < 100:
            raise BadValue(
                f"The file {str(path)!r} has {len(ids)} words.",
                "a text for training has at least 100.",
                "pass a longer text, or leave it out to train on stories.",
            )
        cut = len(ids) * 9 // 10
        self.training_ids, self.held_out_ids = ids[:cut], ids[cut:]
        self.context = min(context, len(self.held_out_ids) - 1)

    def batch(self, number: int, size: int) -> Batch:
        return self._passages(self.training_ids, Random(f"{self.seed} {number}"), size)

    def held_out(self, size: int) -> Batch:
        return self._passages(self.held_out_ids, Random(f"{self.seed} held-out"), size)

    def _passages(self, ids: Tensor, random: Random, size: int) -> Batch:
        starts = [random.randrange(len(ids) - self.context) for _ in range(size)]
        rows = torch.stack([ids[i : i + self.context + 1] for i in starts])
        targets = rows[:, 1:].clone()
        targets[targets == 0] = SKIP  # an unknown word is never a target
        return Batch(rows[:, :-1], targets)


def stories(seed: int, count: int, split: Split, start: int = 0) -> list[Story]:
    """Return stories `start` to `start + count` of a seed and split."""
    return [story(seed, number, split) for number in range(start, start + count)]


def pad(stories: Sequence[Story], vocabulary: Vocabulary) -> Batch:
    """Make one batch of stories, padded to the longest with <end> after the last word.

    The padding has no effect because of the causal mask, and is not a target.
    """
    end = vocabulary.number[END]
    T = max(len(story.words) for story in stories)
    ids, targets = torch.full((len(stories), T), end), torch.full((len(stories), T), SKIP)
    for row, one in enumerate(stories):
        words = torch.tensor([*vocabulary.encode(one.words).ids, end])
        ids[row, : len(words) - 1], targets[row, : len(words) - 1] = words[:-1], words[1:]
    return Batch(ids, targets)


def with_unknown_words(batch: Batch, random: Random) -> Batch:
    """Replace a few words by <unknown>, so that a model learns to read texts with such words."""
    ids = batch.ids.clone()
    for row in ids:
        for i in range(len(row)):
            if random.random() < UNKNOWN_FRACTION:
                row[i] = 0
    return batch._replace(ids=ids)
