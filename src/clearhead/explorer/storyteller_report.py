"""A report on a storyteller: its heads are labelled by what they were measured to do."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..demo import MeasuredHead, Storyteller
from ..demo.storyteller import WORDS_OF
from ..engines.reference import WHY
from ..inspection.report.findings import Head
from ..inspection.report.live_model import LiveModel
from ..inspection.report.printed import Report
from ..inspection.report.run import GUESSES, report_and_output
from ..nn import RelativePositions

MOST_WEIGHTS = 700_000  # of a model that a page holds: 1.9 MB


def report_teller(
    teller: Storyteller,
    text: str,
    *,
    name: str = "storyteller",
    effects: bool = False,
    progress: bool | None = None,
) -> Report:
    """What every head of a storyteller does with a text; words it does not know are marked.

    A measured head is labelled with its relation, and its number is the share of held-out words
    for which its largest weight lay there. The other heads are labelled by where their weight lies
    on this text. With `effects` each head also says what the loss does without it; of one word
    `effects_withheld` says why not. Raises `BadValue` for a text without words, or too long for the
    model.
    """
    encoded = teller.encode(text)
    found, logits = report_and_output(
        teller.model,
        torch.tensor([encoded.ids]),
        tokens=encoded.labels(),
        name=name,
        effects=effects,
        progress=progress,
    )
    measured: dict[tuple[int, int], list[MeasuredHead]] = {}
    for head in teller.heads:
        measured.setdefault((head.layer, head.head), []).append(head)
    layers = tuple(
        replace(
            layer,
            heads=tuple(_labelled(x, measured.get((x.layer, x.head), [])) for x in layer.heads),
        )
        for layer in found.layers
    )
    return replace(
        found,
        layers=layers,
        text=text,
        unknown=tuple(i for i, unknown in enumerate(encoded.unknown) if unknown),
        guesses=teller.most_probable(logits[0], GUESSES),
        model=_live(teller),
    )


def _live(teller: Storyteller) -> LiveModel | None:
    """The model for the page; None for a large one, or one of which a part was taken away."""
    config = teller.model.config
    weights = teller.model.state_dict()
    usual = config.positions and config.causal and config.scaled
    if not usual or sum(x.numel() for x in weights.values()) > MOST_WEIGHTS:
        return None
    relative = next(x for x in teller.model.modules() if isinstance(x, RelativePositions))
    return LiveModel(
        teller.vocabulary.words,
        config.heads,
        config.context,
        relative.near,
        relative.longest,
        WHY,
        weights,
    )


def _labelled(head: Head, measured: Sequence[MeasuredHead]) -> Head:
    if not measured:
        return head
    label = " and ".join(x.label for x in measured)
    evidence = " ".join(map(_evidence, measured))
    number = min(x.rate for x in measured)
    return replace(head, label=label, number=number, measured=True, evidence=evidence, withheld="")


def _evidence(head: MeasuredHead) -> str:
    """Against what a relation was measured."""
    return (
        f"Measured on {head.of:,} {WORDS_OF[head.label]} of held-out stories; an untrained model's "
        f"best head reaches {head.random:.0%}, the best fixed distance {head.distance:.0%}."
    )
