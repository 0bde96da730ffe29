"""A report on a storyteller: its heads are called what they were measured to do."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..results.report import Head
from ..storyteller import Head as Role, Storyteller
from .report import Report
from .run import report


def report_teller(teller: Storyteller, text: str, *, progress: bool | None = None) -> Report:
    """What every head of a storyteller does with a text; words it does not know are marked.

    A head that was measured is labelled with its relation, and its number is the share of held-out
    words for which its largest weight lay there. The other heads are labelled by where their weight
    lies on this text. Raises `BadValue` for a text without words, or too long for the model.
    """
    encoded = teller.encode(text)
    found = report(
        teller.model,
        torch.tensor([encoded.ids]),
        tokens=encoded.labels(),
        name="storyteller",
        progress=progress,
    )
    measured: dict[tuple[int, int], list[Role]] = {}
    for role in teller.heads:
        measured.setdefault((role.layer, role.head), []).append(role)
    layers = tuple(
        replace(
            layer,
            heads=tuple(
                _named(head, measured.get((head.layer, head.head), [])) for head in layer.heads
            ),
        )
        for layer in found.layers
    )
    return replace(found, layers=layers)


def _named(head: Head, roles: Sequence[Role]) -> Head:
    if not roles:
        return head
    label = " and ".join(role.label for role in roles)
    return replace(head, label=label, number=min(role.rate for role in roles), measured=True)
