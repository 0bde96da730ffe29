"""Predict the next word by counts: of each word, and of each word after another."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.demo.vocabulary import Vocabulary

from .data import SKIP, pad
from .grammar import Story


class Counted(ABC):
    """Predicts the next word from counts over training stories; V words."""

    def __init__(self, stories: Sequence[Story], vocabulary: Vocabulary) -> None:
        V = len(vocabulary)
        self.vocabulary = vocabulary
        self.pairs = torch.zeros(V, V)
        word, following = self._pairs(stories)
        self.pairs.index_put_((word, following), torch.ones(len(word)), accumulate=True)
        counts = self.pairs.sum(0)
        self.unigram = (counts + 1) / (counts.sum() + V)  # + 1, so that no probability is 0

    def scores(self, stories: Sequence[Story]) -> tuple[float, float]:
        """Compute nats per word, and the fraction of words predicted correctly."""
        probabilities = self.probabilities()
        word, following = self._pairs(stories)
        loss = -float(probabilities[word, following].log().sum())
        correct = int((probabilities.argmax(-1)[word] == following).sum())
        return loss / len(word), correct / len(word)

    @abstractmethod
    def probabilities(self) -> Tensor:
        """Return the probability of each next word after each word, (V, V)."""

    def _pairs(self, stories: Sequence[Story]) -> tuple[Tensor, Tensor]:
        """Return all words, and the word after each."""
        ids, targets = pad(stories, self.vocabulary)
        return ids[targets != SKIP], targets[targets != SKIP]


class Unigram(Counted):
    """Predicts each word with its frequency."""

    def probabilities(self) -> Tensor:
        return self.unigram.expand(len(self.unigram), -1)


class Bigram(Counted):
    """Predicts by the words that followed in training, plus the unigram as one count."""

    def probabilities(self) -> Tensor:
        return (self.pairs + self.unigram) / (self.pairs.sum(-1, keepdim=True) + 1)
