"""What counting alone can guess: the commonest words, and the commonest after each word."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .data import SKIP, pad
from .grammar import Story
from .vocabulary import Vocabulary


class Counted(ABC):
    """Guesses the next word from counts over training stories; V words."""

    def __init__(self, stories: Sequence[Story], vocabulary: Vocabulary) -> None:
        V = len(vocabulary)
        self.vocabulary = vocabulary
        self.pairs = torch.zeros(V, V)
        for now, then in self._pairs(stories):
            self.pairs.index_put_((now, then), torch.ones(len(now)), accumulate=True)
        seen = self.pairs.sum(0)
        self.alone = (seen + 1) / (seen.sum() + V)  # a word that never came still may

    def guess(self, stories: Sequence[Story]) -> tuple[float, float]:
        """Nats per word, and the share of words guessed right."""
        chances = self.chances()
        loss, correct, count = 0.0, 0, 0
        for now, then in self._pairs(stories):
            loss -= float(chances[now, then].log().sum())
            correct += int((chances.argmax(-1)[now] == then).sum())
            count += len(now)
        return loss / count, correct / count

    @abstractmethod
    def chances(self) -> Tensor:
        """(V, V): the probability of each next word after each word."""

    def _pairs(self, stories: Sequence[Story]) -> list[tuple[Tensor, Tensor]]:
        ids, targets = pad(stories, self.vocabulary)
        return [(ids[targets != SKIP], targets[targets != SKIP])]


class Unigram(Counted):
    """The same guess everywhere: how common each word is."""

    def chances(self) -> Tensor:
        return self.alone.expand(len(self.alone), -1)


class Bigram(Counted):
    """What came after this word in training, mixed with one word's worth of the unigram."""

    def chances(self) -> Tensor:
        return (self.pairs + self.alone) / (self.pairs.sum(-1, keepdim=True) + 1)
