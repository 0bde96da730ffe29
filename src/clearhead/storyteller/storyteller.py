"""A trained model that reads a text: its guesses, its attention, and what its heads look for.

Letters: T tokens, H heads.
"""

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..api.explain import explain_problem
from ..api.hooks import capture_call
from ..errors import BadValue, whole_number
from ..results.trace import Trace
from ..views.escape import visible
from . import checkpoint
from .grammar import pronouns, verbs
from .model import Config, Decoder, untrained
from .vocabulary import Encoded, Vocabulary

OF = {"previous word": "words", "subject": "verbs", "antecedent": "pronouns"}


@dataclass(frozen=True)
class Head:
    """A head and what it was measured to do: the share of held-out words, verbs or pronouns for
    which its largest weight lies where `label` says."""

    label: str
    layer: int
    head: int
    rate: float

    def __str__(self) -> str:
        of = f"{self.rate:.1%} of held-out {OF[self.label]}"
        return f"layer {self.layer}, head {self.head} looks at the {self.label} ({of})"


class Link(NamedTuple):
    """A word, the word on which the largest weight lies, and that weight."""

    word: str
    at: str
    weight: float

    def __str__(self) -> str:
        return f"{visible(self.word)} → {visible(self.at)} {self.weight:.0%}"


@dataclass(frozen=True)
class Reading:
    """What the model made of a text, word by word.

    `tokens` are the words as written, `unknown` says which of them the model does not know, and
    `guesses` holds for each position the likeliest next words with their probabilities.
    """

    tokens: tuple[str, ...]
    unknown: tuple[bool, ...]
    guesses: tuple[tuple[tuple[str, float], ...], ...]

    def __str__(self) -> str:
        labels = [visible(x, 24) for x in Encoded(self.tokens, (), self.unknown).labels()]
        width = max(map(len, labels))
        lines = [
            f"{label:<{width}}  " + "  ".join(f"{visible(word)} {p:.0%}" for word, p in guesses)
            for label, guesses in zip(labels, self.guesses, strict=True)
        ]
        if any(self.unknown):
            lines.append("(?) marks words that the model does not know; it reads them as unknown.")
        return "\n".join(lines)


class Storyteller:
    """A decoder, its vocabulary, and how both were made.

    `made` says seed, command, commit and the like; `table` is what `measure` found, if it was.
    """

    def __init__(
        self,
        model: Decoder,
        vocabulary: Vocabulary,
        made: dict[str, Any],
        table: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.vocabulary, self.made, self.table = model, vocabulary, made, table

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads that do something more often than not, with their held-out rates."""
        return tuple(head for head in _heads(self.table) if head.rate > 0.5)

    @property
    def layers(self) -> int:
        return self.model.config.layers

    def encode(self, text: str | Sequence[str]) -> Encoded:
        """Raises `BadValue` for a text without words, or with more than the model can read."""
        encoded = self.vocabulary.encode(text)
        most = self.model.config.context
        if len(encoded.ids) > most:
            raise BadValue(
                f"The text has {len(encoded.ids)} tokens.",
                f"this model reads at most {most} tokens at a time.",
                "pass a shorter text, for example its last sentences.",
            )
        return encoded

    def read(self, text: str | Sequence[str], guesses: int = 3) -> Reading:
        """What the model expects after each word of a text.

        >>> import clearhead.storyteller as st
        >>> st.load().read("Once upon a").guesses[-1][0][0]
        'time'
        """
        count = whole_number(guesses)
        if count is None or count < 1:
            raise BadValue(
                f"guesses={guesses!r}.",
                "guesses is how many next words are given, 1 or more.",
                "pass for example guesses=3.",
            )
        encoded = self.encode(text)
        with torch.no_grad():
            likely = self.model(torch.tensor(encoded.ids)).softmax(-1)
        top = likely.topk(min(count, len(self.vocabulary)))
        words = self.vocabulary.words
        return Reading(
            encoded.tokens,
            encoded.unknown,
            tuple(
                tuple((words[i], p) for i, p in zip(ids, ps, strict=True))
                for ids, ps in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ),
        )

    def explain(self, text: str | Sequence[str], layer: int = 0) -> Trace:
        """The `Trace` of one layer on a text, with the very q, k, v that the model computed.

        Raises `BadValue` for a layer that the model does not have, and as `encode` does.
        """
        number = whole_number(layer)
        if number is None or not 0 <= number < self.layers:
            raise BadValue(
                f"layer {layer!r} was asked for.",
                f"this model has {self.layers} layers, numbered from 0.",
                f"pass a layer from 0 to {self.layers - 1}.",
            )
        encoded = self.encode(text)
        with torch.no_grad():
            asked, _ = capture_call(lambda: self.model(torch.tensor(encoded.ids)), number)
        assert asked is not None
        trace = explain_problem(*asked, tokens=encoded.labels())
        roles = "; ".join(f"head {h.head} {h.label}" for h in self.heads if h.layer == number)
        return replace(
            trace, about=f"storyteller, layer {number}{roles and f' ({roles})'}: {trace.about}"
        )

    def links(self, text: str | Sequence[str], head: Head) -> list[Link]:
        """Where a measured head looks from each verb, each pronoun, or each word but the first.

        >>> import clearhead.storyteller as st
        >>> teller = st.load()
        >>> [head] = [head for head in teller.heads if head.label == "subject"]
        >>> [link.at for link in teller.links("The cat near that queen slowly sat.", head)]
        ['cat']
        """
        trace = self.explain(text, head.layer)
        tokens, weights = trace.queries or (), trace["weights"][head.head]
        asks: Container[int] = range(1, len(tokens))  # the first word has none before it
        if head.label != "previous word":
            kind = verbs() if head.label == "subject" else pronouns()
            asks = [i for i, token in enumerate(tokens) if i and token.lower() in kind]
        most, where = weights.max(-1)
        return [
            Link(token, tokens[int(where[i])], float(most[i]))
            for i, token in enumerate(tokens)
            if i in asks
        ]

    def save(self, path: str | Path) -> Path:
        """Weights, vocabulary and how they were made in one file; the table, if any, beside it."""
        about = {
            "config": self.model.config.as_dict(),
            "vocabulary": self.vocabulary.words,
            "made": self.made,
        }
        path = checkpoint.write(Path(path), self.model.state_dict(), about)
        if self.table is not None:
            keep_table(path, self.table)
        return path


def load(path: str | Path | None = None) -> Storyteller:
    """The storyteller that comes with clearhead, or one that `train` wrote.

    Raises `BadValue` for a file that is not there, or is no such model.
    """
    if path is not None:
        return _load(Path(path))
    return _shipped()


@lru_cache(maxsize=1)
def _shipped() -> Storyteller:
    # The folder, so that the table is beside the weights even where the package is an archive.
    with resources.as_file(resources.files(__package__) / "weights") as folder:
        return _load(folder / "storyteller.safetensors")


def is_storyteller(path: str | Path) -> bool:
    """Whether there is a model that `train` wrote: a file, or a folder with its model.safetensors.

    A Hugging Face checkpoint is none: it keeps its sizes in config.json beside the weights.
    """
    path = _file(Path(path))
    if not path.is_file():
        return False
    try:
        with safe_open(str(path), framework="pt") as file:
            return "vocabulary" in (file.metadata() or {})
    except (OSError, SafetensorError):  # damaged: whose it was, its folder tells
        return path.name == "model.safetensors" and not (path.parent / "config.json").exists()


def keep_table(path: str | Path, table: dict[str, Any]) -> Path:
    """Write what was measured beside the weights, so that `load` labels the heads with it."""
    return checkpoint.write_json(_file(Path(path)).with_suffix(".json"), table)


def _file(path: Path) -> Path:
    return path / "model.safetensors" if path.is_dir() else path


def _load(path: Path) -> Storyteller:
    path = _file(path)
    tensors, about = checkpoint.read(path)
    try:
        model = untrained(Config(**about["config"]))
        model.load_state_dict(tensors)
        vocabulary = Vocabulary(tuple(about["vocabulary"]))
    except (KeyError, TypeError, RuntimeError) as error:
        raise BadValue(
            f"The file {str(path)!r} holds no storyteller: {error}.",
            "a model file has the weights, the sizes and the vocabulary that `train` wrote.",
            "pass the model.safetensors of a training, or its folder.",
        ) from error
    model.eval().requires_grad_(False)
    return Storyteller(model, vocabulary, about.get("made", {}), _table(path.with_suffix(".json")))


def _table(path: Path) -> dict[str, Any] | None:
    """What `measure` left beside the weights; None if it was not called."""
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        _heads(table)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadValue(
            f"The file {str(path)!r} beside the weights is no table of heads: {error!r}.",
            "it holds what `measure` found of this model.",
            "move it away, or measure again with clearhead measure.",
        ) from error
    return table


def _heads(table: dict[str, Any] | None) -> tuple[Head, ...]:
    """Every head of a table, with what it does. Raises KeyError or TypeError for another table."""
    found = table["heads"] if table else ()
    heads = tuple(Head(h["label"], h["layer"], h["head"], float(h["rate"])) for h in found)
    if unknown := {head.label for head in heads} - set(OF):
        raise KeyError(*unknown)
    return heads
