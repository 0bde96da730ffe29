"""Label heads by measurements on held-out stories."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..models.report import Report
from ..models.report.findings import Head

# The words for which a relation is measured.
WORDS_OF = {"previous word": "words", "subject": "verbs", "antecedent": "pronouns"}


@dataclass(frozen=True)
class MeasuredHead:
    """A relation and the head that was selected for it.

    A rate is the fraction of words, verbs or pronouns whose largest weight is on the word that
    `label` names. `words` are these verbs or pronouns, and () for all words but the first.
    """

    label: str
    layer: int
    head: int
    of: int  # the number of held-out words
    found: float  # the rate on the training stories used to select the head
    rate: float  # the rate on held-out stories
    random: float  # the rate of the best head of a model with random weights
    distance: float  # the rate of the best fixed distance
    chance: float
    words: tuple[str, ...]

    def __str__(self) -> str:
        of = f"{self.rate:.1%} of held-out {WORDS_OF[self.label]}"
        return f"L{self.layer}H{self.head} looks at the {self.label} ({of})"

    @property
    def evidence(self) -> str:
        """The size of the measurement, and its baselines."""
        return (
            f"Measured on {self.of:,} {WORDS_OF[self.label]} of held-out stories; an untrained "
            f"model's best head reaches {100 * self.random:.0f} %, the best fixed "
            f"distance {100 * self.distance:.0f} %."
        )


def with_measured_labels(report: Report, heads: Sequence[MeasuredHead]) -> Report:
    """Return the report with the labels of measured heads.

    Their number is the fraction of held-out words for which they are right.
    """

    def labelled(head: Head) -> Head:
        own = [x for x in heads if (x.layer, x.head) == (head.layer, head.head)]
        if not own:
            return head
        return replace(
            head,
            labels=tuple(x.label for x in own),
            number=min(x.rate for x in own),
            measured=True,
            evidence=" ".join(x.evidence for x in own),
            withheld="",
        )

    return report.map_heads(labelled)
