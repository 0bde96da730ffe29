"""What the heads look at: found on training stories, reported on held-out ones.

A head "looks at" the word on which its largest weight lies. For each of three relations the best
head is chosen on training stories; what is reported is how often it is right on held-out stories,
beside a model with random weights (whose best head is chosen likewise), the best fixed distance,
and chance: picking one of the visible words blindly.

Letters: L layers, H heads, N pairs of words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.watch import Call, watch
from ..errors import BadValue
from ..stats import Top, topk
from .baselines import Bigram, Unigram
from .data import SKIP, pad, tell
from .grammar import Story, lexicon
from .model import Decoder, untrained
from .storyteller import OF, Storyteller
from .vocabulary import Vocabulary

# What a relation says: for each word that looks, the word it should look at.
RELATIONS: dict[str, Callable[[Story], dict[int, int]]] = {
    "previous word": lambda story: {i: i - 1 for i in range(1, len(story.words))},
    "subject": lambda story: story.subjects,
    "antecedent": lambda story: story.antecedents,
}
AT_ONCE = 100  # stories; bounds the memory


@dataclass(frozen=True)
class Row:
    """One relation: the head that was found, and its rates."""

    label: str
    layer: int
    head: int
    of: int  # how many held-out words were asked about
    found: float  # its rate on the training stories it was found on
    rate: float  # its rate on held-out stories
    random: float  # the best head of a model with random weights, likewise
    distance: float  # always looking one fixed distance back, the best of them
    chance: float


@dataclass(frozen=True)
class Guesses:
    """How well the next word is guessed: nats per word, and the share guessed right."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Table:
    """What `measure` found; prints itself."""

    searched: int
    reported: int
    heads: tuple[Row, ...]
    guesses: dict[str, Guesses]

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Table":
        """The table again, from what `as_dict` made of it."""
        return cls(
            stored["searched"],
            stored["reported"],
            tuple(Row(**row) for row in stored["heads"]),
            {name: Guesses(**guesses) for name, guesses in stored["guesses"].items()},
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "heads": [asdict(row) for row in self.heads]}

    def __str__(self) -> str:
        lines = [
            f"Found on {self.searched} training stories, reported on {self.reported} held-out "
            "stories.",
            "",
            f"{'looks at':<15}{'layer':>6}{'head':>6}{'held out':>10}{'random':>9}"
            f"{'distance':>10}{'chance':>8}   of",
        ]
        for r in self.heads:
            lines.append(
                f"{r.label:<15}{r.layer:>6}{r.head:>6}{r.rate:>10.1%}{r.random:>9.1%}"
                f"{r.distance:>10.1%}{r.chance:>8.1%}   {r.of} {OF[r.label]}"
            )
        lines += ["", f"{'next word':<15}{'loss':>8}{'right':>8}"]
        for name, g in self.guesses.items():
            lines.append(f"{name:<15}{g.loss:>8.3f}{g.accuracy:>8.1%}")
        return "\n".join(lines)


def measure(teller: Storyteller, *, search: int = 200, report: int = 500, seed: int = 1) -> Table:
    """The table of a storyteller: heads found on `search` training stories, rates and next-word
    guesses on `report` held-out stories of `seed`.

    Raises `BadValue` for a model that was not trained on stories, and for no stories.
    """
    if strange := set(lexicon()) - set(teller.vocabulary.words):
        raise BadValue(
            f"The model does not know {len(strange)} words of the stories, for example "
            f"{min(strange)!r}.",
            "heads are measured on the stories of the grammar, for which the truth is known.",
            "measure a model that was trained on stories.",
        )
    if search < 1 or report < 1:
        raise BadValue(
            f"search={search} and report={report} stories were asked for.",
            "heads are found on at least one story and reported on at least one.",
            "pass larger numbers.",
        )
    known, fresh = tell(seed, search, "train"), tell(seed, report, "held-out")
    blank = untrained(teller.model.config, teller.made.get("seed", 0)).eval()
    rows = heads(teller.model, teller.vocabulary, known, fresh)
    blind = heads(blank, teller.vocabulary, known, fresh)
    counts = tell(seed, 2000, "train")
    guesses = {
        "model": guess(teller.model, teller.vocabulary, fresh),
        "random model": guess(blank, teller.vocabulary, fresh),
        "bigram": Guesses(*Bigram(counts, teller.vocabulary).guess(fresh)),
        "unigram": Guesses(*Unigram(counts, teller.vocabulary).guess(fresh)),
    }
    return Table(
        search,
        report,
        tuple(
            Row(
                **head,
                random=other["rate"],
                distance=best_distance(known, fresh, RELATIONS[head["label"]]),
                chance=chance(fresh, RELATIONS[head["label"]]),
            )
            for head, other in zip(rows, blind, strict=True)
        ),
        guesses,
    )


def heads(
    model: Decoder, vocabulary: Vocabulary, known: Sequence[Story], fresh: Sequence[Story]
) -> list[dict[str, Any]]:
    """The best head of each relation on `known` stories, and its rate there and on `fresh` ones."""
    learned, held = right(model, vocabulary, known), right(model, vocabulary, fresh)
    found = []
    for label in RELATIONS:
        rates, _ = learned[label]
        best = int(rates.flatten().argmax())
        layer, head = divmod(best, rates.shape[1])
        asked = held[label][1]
        found.append(
            {
                "label": label,
                "layer": layer,
                "head": head,
                "of": asked,
                "found": float(rates[layer, head]),
                "rate": float(held[label][0][layer, head]),
            }
        )
    return found


def right(
    model: Decoder, vocabulary: Vocabulary, stories: Sequence[Story]
) -> dict[str, tuple[Tensor, int]]:
    """For each relation, how often each head is right, (L, H), and of how many words."""
    hits = {label: torch.zeros(()) for label in RELATIONS}
    asked = dict.fromkeys(RELATIONS, 0)
    for start in range(0, len(stories), AT_ONCE):
        some = stories[start : start + AT_ONCE]
        with torch.no_grad(), watch(model, stats=[topk(1)]) as seen:
            model(pad(some, vocabulary).ids)
        looked = torch.stack([_largest(call) for call in seen])  # (L, B, H, T)
        for label, truth in RELATIONS.items():
            where = [(b, i, j) for b, story in enumerate(some) for i, j in truth(story).items()]
            b, i, j = torch.tensor(where).T
            hits[label] = hits[label] + (looked[:, b, :, i] == j[:, None, None]).sum(0)
            asked[label] += len(where)
    return {label: (hits[label] / asked[label], asked[label]) for label in RELATIONS}


def _largest(call: Call) -> Tensor:
    """Where the largest weight of each query lies, (B, H, T)."""
    top = call.found["topk"]
    assert isinstance(top, Top)
    return top.keys[..., 0]


def guess(model: Decoder, vocabulary: Vocabulary, stories: Sequence[Story]) -> Guesses:
    """Loss and accuracy of the next word, the end of a story included."""
    loss, correct, count = 0.0, 0, 0
    for start in range(0, len(stories), AT_ONCE):
        ids, targets = pad(stories[start : start + AT_ONCE], vocabulary)
        with torch.no_grad():
            logits = model(ids)
        loss += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=SKIP,
                                      reduction="sum"))  # fmt: skip
        correct += int((logits.argmax(-1) == targets).sum())
        count += int((targets != SKIP).sum())
    return Guesses(loss / count, correct / count)


def best_distance(
    known: Sequence[Story], fresh: Sequence[Story], truth: Callable[[Story], dict[int, int]]
) -> float:
    """The rate of always looking the same distance back, the one that is best on `known`."""
    learned = [i - j for story in known for i, j in truth(story).items()]
    best = max(set(learned), key=learned.count)
    held = [i - j for story in fresh for i, j in truth(story).items()]
    return held.count(best) / len(held)


def chance(stories: Sequence[Story], truth: Callable[[Story], dict[int, int]]) -> float:
    """The rate of picking one of the visible words blindly: word i sees i + 1 of them."""
    rates = [1 / (i + 1) for story in stories for i in truth(story)]
    return sum(rates) / len(rates)
