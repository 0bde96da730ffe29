"""Alarms of a training: rules over the numbers of heads, each with a sentence."""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ...core.formatting import quantity

LARGEST_LOGIT = 100.0  # above it, MuonClip clips
_GROWTH, _GROWN = 4.0, 20.0
_COLLAPSED, SINK, DEAD = 0.1, 0.9, 1e-3
_EARLIER, _LEAST = 20, 3  # earlier logged steps whose median counts, and how many there must be

METRIC_OF = dict(logit="max", nan="max", entropy="entropy_fraction", sink="first", dead="output")

# Numbers of a layer's heads, by metric.
Layers = Mapping[int, Mapping[str, list[float]]]


class Alarm(NamedTuple):
    """What an alarm reports. `head` is None for a rule over all heads of a layer."""

    step: int
    rule: str
    layer: int
    head: int | None
    value: float
    sentence: str


class Alarms:
    """Checks the rules at each logged step. An alarm that lasts is raised once.

    The earlier median is that of up to 20 logged steps before, of which there must be 3. A resumed
    run knows none, so it begins with the limits alone.

    - ``"logit"``: the largest logit of a head exceeds 100; or it exceeds 20 and 4 times its earlier
      median.
    - ``"nan"``: the largest logit of some head of a layer is NaN.
    - ``"entropy"``: the mean of entropy_fraction over a layer's heads is below 0.1, and below half
      of its earlier median.
    - ``"sink"``: the mean weight on the first token over a layer's heads exceeds 0.9, and twice its
      earlier median.
    - ``"dead"``: the output of a head is below a thousandth of that of its layer.

    Source: the limit of 100 is that of Kimi Team 2025, "Kimi K2"; entropy collapse is described by
    Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy Collapse".
    """

    def __init__(self) -> None:
        self._earlier: dict[tuple[str, int, int | None], deque[float]] = defaultdict(
            lambda: deque(maxlen=_EARLIER)
        )
        self._lasting: set[tuple[str, int, int | None]] = set()

    def check(self, step: int, layers: Layers) -> list[Alarm]:
        """Return the alarms that begin at this step."""
        raised = []
        for layer, numbers in layers.items():
            for alarm, applies in self._rules(step, layer, numbers):
                key = alarm.rule, layer, alarm.head
                if applies and key not in self._lasting:
                    raised.append(alarm)
                (self._lasting.add if applies else self._lasting.discard)(key)
                if math.isfinite(alarm.value):
                    self._earlier[key].append(alarm.value)
        return raised

    def _rules(
        self, step: int, layer: int, numbers: Mapping[str, list[float]]
    ) -> Iterator[tuple[Alarm, bool]]:
        for head, value in enumerate(numbers.get("max", ())):
            before = self._median("logit", layer, head)
            grown = before is not None and value > max(_GROWN, _GROWTH * before)
            growth = f"; before, it was {before:.3g}" if before is not None else ""
            sentence = f"the largest logit of L{layer}H{head} is {value:.4g}{growth}"
            alarm = Alarm(step, "logit", layer, head, value, sentence)
            yield alarm, value > LARGEST_LOGIT or grown
        broken = sum(map(math.isnan, numbers.get("max", ())))
        sentence = f"the largest logit of {quantity(broken, 'head')} of layer {layer} is NaN"
        yield Alarm(step, "nan", layer, None, broken, sentence), broken > 0
        for head, value in enumerate(numbers.get("output", ())):
            sentence = f"L{layer}H{head} writes {value:.2g} of what a head of its layer writes"
            yield Alarm(step, "dead", layer, head, value, sentence), value < DEAD
        if fractions := numbers.get("entropy_fraction"):
            value, before = statistics.fmean(fractions), self._median("entropy", layer, None)
            sentence = (
                f"the entropy of layer {layer} fell to {value:.3f} of that of uniform weights"
            )
            applies = value < _COLLAPSED and before is not None and value < before / 2
            yield Alarm(step, "entropy", layer, None, value, sentence), applies
        if firsts := numbers.get("first"):
            value, before = statistics.fmean(firsts), self._median("sink", layer, None)
            sentence = f"layer {layer} attends to the first token with {value:.2f} of its weight"
            applies = value > SINK and before is not None and value > 2 * before
            yield Alarm(step, "sink", layer, None, value, sentence), applies

    def _median(self, rule: str, layer: int, head: int | None) -> float | None:
        values = self._earlier[rule, layer, head]
        return statistics.median(values) if len(values) >= _LEAST else None
