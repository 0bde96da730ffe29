"""A trained model that reads a text: its predictions, its attention, and what its heads look at.

Letters: T tokens, H heads.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import BadValue, as_count
from ..formatting import visible
from ..functional.ambient import capture_call
from ..functional.explain import explain_problem
from ..inspection.metrics import most_probable
from ..inspection.report import Report
from ..inspection.text_model import Remark
from ..nn.token_ids import run_with_known_ids
from ..trace import Trace
from . import atomic_io
from .cast import pronouns, verbs
from .live_model import live_model
from .measured import WORDS_OF, MeasuredHead, with_measured_labels
from .model import Config, Decoder, untrained
from .vocabulary import Encoded, Vocabulary


class WordLink(NamedTuple):
    """A word, the word on which its largest weight lies, and that weight."""

    query: str
    key: str
    weight: float

    def __str__(self) -> str:
        return f"{visible(self.query)} → {visible(self.key)} {self.weight:.0%}"


@dataclass(frozen=True)
class Reading:
    """What the model expects after each word of a text.

    `tokens` are the words as written, `unknown` says which of them the model does not know, and
    `guesses` holds for each position the most probable next words with their probabilities.
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

    `made` has the seed, the command, the commit and so on; `table` is the result of `measure`, None
    if the model was not measured. `path` is the folder of its files, None if it came with the
    package.
    """

    is_small = True

    def __init__(
        self,
        model: Decoder,
        vocabulary: Vocabulary,
        made: dict[str, Any],
        table: dict[str, Any] | None = None,
        path: Path | None = None,
    ) -> None:
        self.model, self.vocabulary, self.made, self.table = model, vocabulary, made, table
        self.path = path

    @property
    def name(self) -> str:
        """The name of its folder."""
        return "storyteller" if self.path is None else self.path.resolve().name

    @property
    def heads(self) -> tuple[MeasuredHead, ...]:
        """The measured heads that are right for more than half of the held-out words."""
        return tuple(head for head in _heads(self.table) if head.rate > 0.5)

    @property
    def module(self) -> nn.Module:
        """What runs on a text: `model`, which is also what predicts the next word."""
        return self.model

    predictor = module

    @property
    def depth(self) -> int:
        """How many layers there are."""
        return self.model.config.layers

    @property
    def words(self) -> tuple[str, ...]:
        """The word of each id."""
        return self.vocabulary.words

    def tokens_and_inputs(self, text: str | Sequence[str]) -> tuple[list[str], dict[str, Tensor]]:
        """The words of a text, unknown ones marked, and the inputs of the model for it. Raises
        `BadValue` for a text without words."""
        encoded = self.encode(text)
        return encoded.labels(), {"input_ids": torch.tensor([encoded.ids])}

    def run(self, inputs: dict[str, Tensor], *, predict: bool = True) -> Tensor:
        """The logits of the next words, (1, T, words), with `predict` or without."""
        with torch.no_grad():
            logits: Tensor = run_with_known_ids(self.model, inputs)
        return logits

    def annotate(self, report: Report) -> Report:
        """The report with the labels of measured heads, the positions of unknown words, and the
        model for the page. The numbers of a measured head's label are rates on held-out stories;
        the other heads are labelled by where their weight lies on this text."""
        unknown = self.encode(report.text).unknown
        return replace(
            with_measured_labels(report, self.heads),
            unknown=tuple(i for i, is_unknown in enumerate(unknown) if is_unknown),
            model=live_model(self.model, self.words),
        )

    def remarks(self, text: str) -> list[Remark]:
        """What the model expects after each word, and where measured heads look."""
        found = [
            Remark(f"After each word, what the storyteller expects next:\n\n{self.read(text)}")
        ]
        # That it finds whom a pronoun means shows most plainly what attention is.
        for head in sorted(self.heads, key=lambda head: head.label != "antecedent"):
            links = ", ".join(map(str, self.links(text, head))) or "no word of this text needs it"
            sentence = f"{head}; here, right or wrong:\n{links}"
            found.append(Remark(sentence, self.explain(text, head.layer), head.layer, head.head))
        return found

    def encode(self, text: str | Sequence[str]) -> Encoded:
        """The text as numbers. Raises `BadValue` for a text without words."""
        return self.vocabulary.encode(text)

    def read(self, text: str | Sequence[str], guesses: int = 3) -> Reading:
        """What the model expects after each word of a text.

        Raises `BadValue` for a text without words, or with more than the model can read.
        >>> import clearhead.demo as st
        >>> st.load().read("Once upon a").guesses[-1][0][0]
        'time'
        """
        rule = "guesses is how many next words are given, 1 or more."
        count = as_count("guesses", guesses, rule, "pass for example guesses=3.", least=1)
        encoded = self.encode(text)
        with torch.no_grad():
            logits = self.model(torch.tensor(encoded.ids))
        return Reading(encoded.tokens, encoded.unknown, most_probable(logits, self.words, count))

    def explain(self, text: str | Sequence[str], layer: int = 0) -> Trace:
        """The `Trace` of one layer on a text, with the q, k, v that the model computed.

        Raises `BadValue` for a layer that the model does not have, and as `read` does.
        """
        last = self.depth - 1
        rule = f"this model has {self.depth} layers, numbered from 0."
        number = as_count("layer", layer, rule, f"pass a layer from 0 to {last}.", most=last)
        encoded = self.encode(text)
        with torch.no_grad():
            call, _ = capture_call(lambda: self.model(torch.tensor(encoded.ids)), number)
        assert call is not None
        trace = explain_problem(*call, tokens=encoded.labels())
        labels = "; ".join(f"head {h.head} {h.label}" for h in self.heads if h.layer == number)
        return replace(
            trace, about=f"storyteller, layer {number}{labels and f' ({labels})'}: {trace.about}"
        )

    def links(self, text: str | Sequence[str], head: MeasuredHead) -> list[WordLink]:
        """Where a measured head looks from each verb, each pronoun, or each word but the first.

        >>> import clearhead.demo as st
        >>> teller = st.load()
        >>> [head] = [head for head in teller.heads if head.label == "subject"]
        >>> [link.key for link in teller.links("The cat near that queen slowly sat.", head)]
        ['cat']
        """
        trace = self.explain(text, head.layer)
        tokens, weights = trace.queries or (), trace["weights"][head.head]
        queries: Iterable[int] = range(1, len(tokens))  # the first word has none before it
        if head.label != "previous word":
            kind = verbs() if head.label == "subject" else pronouns()
            queries = [i for i in queries if tokens[i].lower() in kind]
        largest, keys = weights.max(-1)
        return [WordLink(tokens[i], tokens[int(keys[i])], float(largest[i])) for i in queries]

    def save(self, path: str | Path) -> Path:
        """Write weights, vocabulary and how they were made to one file; the table, if any, to
        another beside it."""
        about = {
            "config": self.model.config.as_dict(),
            "vocabulary": self.vocabulary.words,
            "made": self.made,
        }
        path = atomic_io.write(Path(path), self.model.state_dict(), about)
        if self.table is not None:
            keep_table(path, self.table)
        return path


def load(path: str | Path | None = None) -> Storyteller:
    """The storyteller that comes with clearhead, or one that `train` wrote.

    Raises `BadValue` for a file that is missing, or is no such model.
    """
    if path is None:
        return _shipped()
    file = _file(Path(path))
    return _load(file, file.parent)


@lru_cache(maxsize=1)
def _shipped() -> Storyteller:
    # The whole folder, so that the table is beside the weights even if the package is a zip file.
    with resources.as_file(resources.files(__package__) / "weights") as folder:
        return _load(folder / "storyteller.safetensors")


def is_storyteller(path: str | Path) -> bool:
    """Whether `path` is a model that `train` wrote: a file, or a folder with its model.safetensors.

    A Hugging Face checkpoint has a config.json beside the weights instead.
    """
    path = _file(Path(path))
    if not path.is_file():
        return False
    try:
        with safe_open(str(path), framework="pt") as file:
            return "vocabulary" in (file.metadata() or {})
    except (OSError, SafetensorError):  # a damaged file: tell by the folder
        return path.name == "model.safetensors" and not (path.parent / "config.json").exists()


def keep_table(path: str | Path, table: dict[str, Any]) -> Path:
    """Write the result of `measure` beside the weights, from where `load` reads it."""
    return atomic_io.write_json(_file(Path(path)).with_suffix(".json"), table)


def _file(path: Path) -> Path:
    return path / "model.safetensors" if path.is_dir() else path


def _load(path: Path, folder: Path | None = None) -> Storyteller:
    tensors, about = atomic_io.read(path)
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
    made, table = about.get("made", {}), _table(path.with_suffix(".json"))
    return Storyteller(model, vocabulary, made, table, folder)


def _table(path: Path) -> dict[str, Any] | None:
    """The table that `measure` wrote beside the weights; None if there is none."""
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        _heads(table)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadValue(
            f"The file {str(path)!r} beside the weights is no table of heads: {error!r}.",
            "it holds the result of `measure` for this model.",
            "move it away, or measure again with clearhead measure.",
        ) from error
    return table


def _heads(table: dict[str, Any] | None) -> tuple[MeasuredHead, ...]:
    """The heads of a table. Raises KeyError, TypeError or ValueError for another kind of table."""
    rows = table["heads"] if table else ()
    heads = tuple(MeasuredHead(**{**row, "rate": float(row["rate"])}) for row in rows)
    if unknown := {head.label for head in heads} - set(WORDS_OF):
        raise KeyError(*unknown)
    return heads
