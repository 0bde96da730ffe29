"""Measure what the heads look at: select on training stories, report on held-out stories.

A head looks at the word with its largest weight. For each of three relations, the best head is
selected on training stories. The report has the rate at which it is right on held-out stories, and
three baselines: the best head of a model with random weights, selected in the same way; the best
fixed distance; and a random choice among the visible words.

Letters: L layers, H heads, N pairs of words.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.core.errors import BadValue, as_count
from clearhead.core.stats import TopWeights, topk
from clearhead.demo.measured import WORDS_OF, MeasuredHead
from clearhead.demo.model import Decoder, untrained
from clearhead.demo.storyteller import Storyteller
from clearhead.demo.vocabulary import Vocabulary
from clearhead.models.inspect.watch import Call, watch
from clearhead.models.progress import progress_bar

from .baselines import Bigram, Unigram
from .cast import pronouns, verbs
from .data import SKIP, pad, stories
from .grammar import Story, lexicon

Relation = Callable[[Story], dict[int, int]]  # from a word to the word that it should look at
RELATIONS: dict[str, Relation] = {
    "previous word": lambda story: {i: i - 1 for i in range(1, len(story.words))},
    "subject": lambda story: story.subjects,
    "antecedent": lambda story: story.antecedents,
}
WORDS = {  # whose relation is measured; () for all words but the first
    "previous word": (),
    "subject": tuple(sorted(verbs())),
    "antecedent": tuple(sorted(pronouns())),
}
BATCH = 100  # stories, which limits the memory


@dataclass(frozen=True)
class Scores:
    """The prediction of the next word: nats per word, and the fraction predicted correctly."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Table:
    """The results of `measure`, which print as a table, with scores of model and baselines."""

    searched: int
    reported: int
    heads: tuple[MeasuredHead, ...]
    guesses: dict[str, Scores]

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Table":
        """Return the table from its `as_dict`."""
        return cls(
            stored["searched"],
            stored["reported"],
            tuple(MeasuredHead(**{**x, "words": tuple(x["words"])}) for x in stored["heads"]),
            {name: Scores(**scores) for name, scores in stored["guesses"].items()},
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "heads": [asdict(head) for head in self.heads]}

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
                f"{r.distance:>10.1%}{r.chance:>8.1%}   {r.of} {WORDS_OF[r.label]}"
            )
        lines += ["", f"{'next word':<15}{'loss':>8}{'right':>8}"]
        for name, g in self.guesses.items():
            lines.append(f"{name:<15}{g.loss:>8.3f}{g.accuracy:>8.1%}")
        return "\n".join(lines)


def measure(
    teller: Storyteller,
    *,
    search: int = 200,
    report: int = 500,
    seed: int = 1,
    progress: bool | None = None,
) -> Table:
    """Measure the heads and the next-word scores of a storyteller.

    Heads are selected on `search` training stories, and reported on `report` held-out stories of
    `seed`. `progress` shows a bar on stderr; None means only in a terminal.

    Raises `BadValue` for a model that was not trained on stories, and for no stories.
    """
    if strange := set(lexicon()) - set(teller.vocabulary.words):
        raise BadValue(
            f"The model does not know {len(strange)} words of the stories, for example "
            f"{min(strange)!r}.",
            "heads are measured on the stories of the grammar, whose subjects and antecedents are "
            "known.",
            "measure a model that was trained on stories.",
        )
    rule = "heads are selected on at least one story, and reported on at least one."
    for name, count in (("search", search), ("report", report)):
        as_count(f"measure got {name}", count, rule, "pass a larger number.", least=1)
    searched, held_out = stories(seed, search, "train"), stories(seed, report, "held-out")
    random_model = untrained(teller.model.config, teller.provenance.get("seed", 0)).eval()
    models = {"model": teller.model, "random model": random_model}
    runs = len(models) * (math.ceil(search / BATCH) + 2 * math.ceil(report / BATCH))
    with progress_bar("measuring, batch by batch", runs, progress) as advance, ExitStack() as hooks:
        for model in models.values():
            hooks.enter_context(model.register_forward_hook(lambda *_: advance()))
        heads, random_heads = (
            best_heads(model, teller.vocabulary, searched, held_out) for model in models.values()
        )
        scores = {
            name: next_word_scores(model, teller.vocabulary, held_out)
            for name, model in models.items()
        }
    counted = stories(seed, 2000, "train")
    guesses = {
        **scores,
        "bigram": Scores(*Bigram(counted, teller.vocabulary).scores(held_out)),
        "unigram": Scores(*Unigram(counted, teller.vocabulary).scores(held_out)),
    }
    return Table(
        search,
        report,
        tuple(
            MeasuredHead(
                **head,
                random=random_head["rate"],
                distance=best_distance(searched, held_out, RELATIONS[head["label"]]),
                chance=chance(held_out, RELATIONS[head["label"]]),
                words=WORDS[head["label"]],
            )
            for head, random_head in zip(heads, random_heads, strict=True)
        ),
        guesses,
    )


def best_heads(
    model: Decoder, vocabulary: Vocabulary, searched: Sequence[Story], held_out: Sequence[Story]
) -> list[dict[str, Any]]:
    """Find the best head of each relation on the `searched` stories, with its rate on both sets."""
    search_rates = hit_rates(model, vocabulary, searched)
    held_out_rates = hit_rates(model, vocabulary, held_out)
    heads = []
    for label, (rates, _) in search_rates.items():
        layer, head = divmod(int(rates.flatten().argmax()), rates.shape[1])
        reported, count = held_out_rates[label]
        heads.append(
            {
                "label": label,
                "layer": layer,
                "head": head,
                "of": count,
                "found": float(rates[layer, head]),
                "rate": float(reported[layer, head]),
            }
        )
    return heads


def hit_rates(
    model: Decoder, vocabulary: Vocabulary, stories: Sequence[Story]
) -> dict[str, tuple[Tensor, int]]:
    """Compute the rate of each head for each relation, (L, H), and the number of words."""
    hits = {label: torch.zeros(()) for label in RELATIONS}
    count = dict.fromkeys(RELATIONS, 0)
    for start in range(0, len(stories), BATCH):
        batch = stories[start : start + BATCH]
        with torch.no_grad(), watch(model, stats=[topk(1)]) as recording:
            model(pad(batch, vocabulary).ids)
        top_keys = torch.stack([_top_key(call) for call in recording])  # (L, B, H, T)
        for label, relation in RELATIONS.items():
            pairs = [(b, i, j) for b, story in enumerate(batch) for i, j in relation(story).items()]
            b, i, j = torch.tensor(pairs).T
            hits[label] = hits[label] + (top_keys[:, b, :, i] == j[:, None, None]).sum(0)
            count[label] += len(pairs)
    return {label: (hits[label] / count[label], count[label]) for label in RELATIONS}


def _top_key(call: Call) -> Tensor:
    """Return the key of the largest weight of each query, (B, H, T)."""
    top = call.statistics["topk"]
    assert isinstance(top, TopWeights)
    return top.keys[..., 0]


def next_word_scores(model: Decoder, vocabulary: Vocabulary, stories: Sequence[Story]) -> Scores:
    """Compute loss and accuracy of the next word, including the end of a story."""
    loss, correct, count = 0.0, 0, 0
    for start in range(0, len(stories), BATCH):
        ids, targets = pad(stories[start : start + BATCH], vocabulary)
        with torch.no_grad():
            logits = model(ids)
        loss += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=SKIP,
                                      reduction="sum"))  # fmt: skip
        correct += int((logits.argmax(-1) == targets).sum())
        count += int((targets != SKIP).sum())
    return Scores(loss / count, correct / count)


def best_distance(
    searched: Sequence[Story], held_out: Sequence[Story], relation: Relation
) -> float:
    """Compute the rate of always looking back by the most frequent distance in `searched`."""
    distances = [i - j for story in searched for i, j in relation(story).items()]
    best = max(set(distances), key=distances.count)
    reported = [i - j for story in held_out for i, j in relation(story).items()]
    return reported.count(best) / len(reported)


def chance(stories: Sequence[Story], relation: Relation) -> float:
    """Compute the rate of a random choice among visible words; word i sees i + 1 words."""
    rates = [1 / (i + 1) for story in stories for i in relation(story)]
    return sum(rates) / len(rates)
