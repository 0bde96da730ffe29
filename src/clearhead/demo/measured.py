"""What heads were measured to do, on held-out stories."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..inspection.report import Report
from ..inspection.report.findings import Head

# By relation: the words of which it holds.
WORDS_OF = {"previous word": "words", "subject": "verbs", "antecedent": "pronouns"}


@dataclass(frozen=True)
class MeasuredHead:
    """One relation and the head that was selected for it. Each rate is the share of words, verbs or
    pronouns for which the largest weight lies where `label` says."""

    label: str
    layer: int
    head: int
    of: int  # how many held-out words the rates are of
    found: float  # its rate on the training stories that it was selected on
    rate: float  # its rate on held-out stories
    random: float  # that of the best head of a model with random weights
    distance: float  # that of always looking one fixed distance back, the best one
    chance: float

    def __str__(self) -> str:
        of = f"{self.rate:.1%} of held-out {WORDS_OF[self.label]}"
        return f"layer {self.layer}, head {self.head} looks at the {self.label} ({of})"

    @property
    def evidence(self) -> str:
        """Against what the relation was measured."""
        return (
            f"Measured on {self.of:,} {WORDS_OF[self.label]} of held-out stories; an untrained "
            f"model's best head reaches {self.random:.0%}, the best fixed distance "
            f"{self.distance:.0%}."
        )


def with_measured_labels(report: Report, heads: Sequence[MeasuredHead]) -> Report:
    """The report, in which heads that were measured are labelled by what they do, and their number
    is the share of held-out words for which they do it."""

    def labelled(head: Head) -> Head:
        own = [x for x in heads if (x.layer, x.head) == (head.layer, head.head)]
        if not own:
            return head
        return replace(
            head,
            label=" and ".join(x.label for x in own),
            number=min(x.rate for x in own),
            measured=True,
            evidence=" ".join(x.evidence for x in own),
            withheld="",
        )

    layers = (replace(x, heads=tuple(map(labelled, x.heads))) for x in report.layers)
    return replace(report, layers=tuple(layers))
