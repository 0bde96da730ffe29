"""The included model on a text: its predictions, its attention, and what its heads look at.

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

from ..core.errors import BadValue, as_count, as_path
from ..core.files import atomic_io
from ..core.formatting import aligned, visible
from ..core.functional.ambient import capture_call
from ..core.functional.explain import explain_problem
from ..core.functional.trace import Trace
from ..models.follow.outputs import most_probable
from ..models.report import Report
from ..models.report.text_model import Remark
from ..nn.token_ids import run_with_known_ids
from .measured import WORDS_OF, MeasuredHead, with_measured_labels
from .model import Config, Decoder, live_model, untrained
from .vocabulary import Encoded, Vocabulary


class WordLink(NamedTuple):
    """A word, the word that gets its largest weight, and that weight."""

    query: str
    key: str
    weight: float

    def __str__(self) -> str:
        return f"{visible(self.query)} → {visible(self.key)} {self.weight:.0%}"


@dataclass(frozen=True)
class Reading:
    """The predictions of the model after each word of a text.

    `tokens` are the words as written, `unknown` is True for words outside the vocabulary, and
    `guesses` has the most probable next words of each position, with probabilities.
    """

    tokens: tuple[str, ...]
    unknown: tuple[bool, ...]
    guesses: tuple[tuple[tuple[str, float], ...], ...]

    def __str__(self) -> str:
        labels = Encoded(self.tokens, (), self.unknown).labels()
        words = ("  ".join(f"{visible(x)} {_percent(p)}" for x, p in some) for some in self.guesses)
        lines = aligned([(visible(x, 24), y) for x, y in zip(labels, words, strict=True)])
        if any(self.unknown):
            lines.append("(?) marks words that the model does not know; it reads them as unknown.")
        return "\n".join(lines)


@dataclass(eq=False, repr=False)
class Storyteller:
    """A decoder with its vocabulary.

    `provenance` has the seed, the command and the commit of its training. `table` is the result of
    `measure`; None if the model was not measured. `path` is the folder of its files; None for the
    included model.
    """

    is_small = True

    model: Decoder
    vocabulary: Vocabulary
    provenance: dict[str, Any]
    table: dict[str, Any] | None = None
    path: Path | None = None

    @property
    def name(self) -> str:
        """The name of its folder; "storyteller" for the included model."""
        return "storyteller" if self.path is None else self.path.resolve().name

    @property
    def heads(self) -> tuple[MeasuredHead, ...]:
        """The measured heads that are right for more than half of the held-out words."""
        return tuple(head for head in _heads(self.table) if head.rate > 0.5)

    @property
    def module(self) -> nn.Module:
        """The module that runs on a text: `model`, which is also the `predictor`."""
        return self.model

    predictor = module

    @property
    def depth(self) -> int:
        """The number of layers."""
        return self.model.config.layers

    @property
    def words(self) -> tuple[str, ...]:
        """The word of each id."""
        return self.vocabulary.words

    def tokens_and_inputs(self, text: str | Sequence[str]) -> tuple[list[str], dict[str, Tensor]]:
        """Return the words of a text, unknown ones marked, and the inputs of the model.

        Raises `BadValue` for a text without words.
        """
        encoded = self.encode(text)
        return encoded.labels(), {"input_ids": torch.tensor([encoded.ids])}

    def run(self, inputs: dict[str, Tensor], *, predict: bool = True) -> Tensor:
        """Return the logits of the next words, (1, T, words), for any `predict`."""
        with torch.no_grad():
            logits: Tensor = run_with_known_ids(self.model, inputs)
        return logits

    def annotate(self, report: Report) -> Report:
        """Return the report with labels of measured heads, positions of unknown words, the model
        for the page, and where to begin: at a pronoun and its antecedent, or a verb and its
        subject.

        The number of a measured head is its rate on held-out stories; the labels of other heads
        describe their weights on this text.
        """
        unknown = self.encode(report.text).unknown
        return replace(
            with_measured_labels(report, self.heads),
            unknown=tuple(i for i, is_unknown in enumerate(unknown) if is_unknown),
            model=live_model(self.model, self.words),
            begin=self._begin(report),
        )

    def _begin(self, report: Report) -> tuple[int, int, int] | None:
        """Return the layer, the head and the query of the clearest pronoun, or else verb."""
        for head in sorted(self.heads, key=lambda head: head.label):  # the antecedent first
            if not head.words:
                continue
            layer = report.layers[head.layer]
            weights = layer.top_weights[head.head, :, 0].tolist()
            named = [
                (weight, query)
                for query, weight in zip(layer.kept_queries, weights, strict=True)
                if query > 0 and report.tokens[query].lower() in head.words
            ]
            if named:
                return head.layer, head.head, max(named)[1]
        return None

    def remarks(self, text: str) -> list[Remark]:
        """Return the predictions after each word, and the words that measured heads look at."""
        remarks = [Remark(f"The storyteller's predictions after each word:\n\n{self.read(text)}")]
        # The antecedent of a pronoun comes first, because it shows most clearly what attention is.
        for head in sorted(self.heads, key=lambda head: head.label != "antecedent"):
            arrows = ", ".join(map(str, self.links(text, head))) or "no word of this text needs it"
            sentence = f"{head}; on this text, right or wrong:\n{arrows}"
            remarks.append(Remark(sentence, self.explain(text, head.layer), head.layer, head.head))
        return remarks

    def encode(self, text: str | Sequence[str]) -> Encoded:
        """Convert a text to ids. Raises `BadValue` for a text without words."""
        return self.vocabulary.encode(text)

    def read(self, text: str | Sequence[str], guesses: int = 3) -> Reading:
        """Predict the next word after each word of a text.

        Raises `BadValue` for a text without words, or longer than the context.

        >>> import clearhead.demo as st
        >>> st.load().read("Once upon a").guesses[-1][0][0]
        'time'
        """
        rule = "guesses is the number of next words per position, 1 or more."
        count = as_count("guesses", guesses, rule, "pass for example guesses=3.", least=1)
        encoded = self.encode(text)
        with torch.no_grad():
            logits = self.model(torch.tensor(encoded.ids))
        return Reading(encoded.tokens, encoded.unknown, most_probable(logits, self.words, count))

    def explain(self, text: str | Sequence[str], layer: int = 0) -> Trace:
        """Return the `Trace` of one layer on a text, with the q, k, v that the model computed.

        Raises `BadValue` for a layer that the model does not have, and any error of `read`.
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
        """Return the word that a measured head looks at, for each word of its relation.

        These are verbs for "subject", pronouns for "antecedent", and all words but the first for
        "previous word".

        >>> import clearhead.demo as st
        >>> teller = st.load()
        >>> [head] = [head for head in teller.heads if head.label == "subject"]
        >>> [link.key for link in teller.links("The cat near that queen slowly sat.", head)]
        ['cat']
        """
        trace = self.explain(text, head.layer)
        tokens, weights = trace.queries or (), trace["weights"][head.head]
        queries: Iterable[int] = range(1, len(tokens))  # no word precedes the first
        if head.words:
            queries = [i for i in queries if tokens[i].lower() in head.words]
        largest, keys = weights.max(-1)
        return [WordLink(tokens[i], tokens[int(keys[i])], float(largest[i])) for i in queries]

    def save(self, path: str | Path) -> Path:
        """Write weights, vocabulary and provenance to a file, and the table, if any, beside it."""
        about = {
            "config": self.model.config.as_dict(),
            "vocabulary": self.vocabulary.words,
            "made": self.provenance,
        }
        path = atomic_io.write(as_path("save", path), self.model.state_dict(), about)
        if self.table is not None:
            keep_table(path, self.table)
        return path


def _percent(probability: float) -> str:
    return "<1%" if probability < 0.005 else f"{probability:.0%}"


def load(path: str | Path | None = None) -> Storyteller:
    """Load the included storyteller, or one that `train` wrote.

    Raises `BadValue` for a file that is missing or not a storyteller.
    """
    if path is None:
        return _shipped()
    file = _file(as_path("load", path))
    return _load(file, file.parent)


@lru_cache(maxsize=1)
def _shipped() -> Storyteller:
    # The complete folder, so that the table is beside the weights even in a zipped package.
    with resources.as_file(resources.files(__package__) / "weights") as folder:
        return _load(folder / "storyteller.safetensors")


def is_storyteller(path: str | Path) -> bool:
    """Return whether `path` is a model that `train` wrote: a file, or a folder with one.

    A Hugging Face checkpoint has a config.json beside the weights instead.
    """
    path = _file(Path(path))
    if not path.is_file():
        return False
    try:
        with safe_open(str(path), framework="pt") as file:
            return "vocabulary" in (file.metadata() or {})
    except (OSError, SafetensorError):  # the file is damaged, so decide by the folder
        return path.name == "model.safetensors" and not (path.parent / "config.json").exists()


def keep_table(path: str | Path, table: dict[str, Any]) -> Path:
    """Write the result of `measure` beside the weights, where `load` reads it."""
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
        gave = f"The file {str(path)!r} is not a storyteller: {error}."
        rule = "a model file has the weights, the sizes and the vocabulary that `train` wrote."
        hint = "pass the model.safetensors that `train` wrote, or its folder."
        raise BadValue(gave, rule, hint) from error
    model.eval().requires_grad_(False)
    provenance, table = about.get("made", {}), _table(path.with_suffix(".json"))
    return Storyteller(model, vocabulary, provenance, table, folder)


def _table(path: Path) -> dict[str, Any] | None:
    """Read the table that `measure` wrote beside the weights; None if there is none."""
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        _heads(table)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        gave = f"The file {str(path)!r} beside the weights is not a table of heads: {error!r}."
        rule = "it is the result of `measure` for this model."
        raise BadValue(gave, rule, "remove it, or run clearhead measure again.") from error
    return table


def _heads(table: dict[str, Any] | None) -> tuple[MeasuredHead, ...]:
    """Return the heads of a table. Raises KeyError, TypeError or ValueError for another table."""
    rows = table["heads"] if table else ()
    heads = tuple(
        MeasuredHead(**{**row, "rate": float(row["rate"]), "words": tuple(row["words"])})
        for row in rows
    )
    if unknown := {head.label for head in heads} - set(WORDS_OF):
        raise KeyError(*unknown)
    return heads
