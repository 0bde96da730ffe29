"""What a cache of 8 or 4 bits does to each head, the set `caches`, and which heads need 8.

Each layer has exact inputs, and `clearhead.divergence` compares its attention with attention on the
rounded keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.errors import BadValue, as_number, as_path
from ..core.files import atomic_io
from ..core.functional.divergence import Divergence, compare
from ..core.problem.blocks import BYTES, in_blocks
from ..core.problem.problem import Inputs, Problem
from ..models.inspect.edits import Edit, cache
from ..models.inspect.edits.cache import BITS
from ..models.inspect.intervene import intervene
from .metric import Bins, LayerCall, Metric, WithoutBaseline, needed_by
from .reader import Reader

if TYPE_CHECKING:
    from . import Survey

FINE, COARSE = "q8_0", "q4_0"
Compared = Callable[[Problem, Inputs, str], Divergence]


def _compared(problem: Problem, inputs: Inputs, format: str) -> Divergence:
    """Compare a call with the same call on keys and values in blocks of a format."""
    q, k, v = inputs
    p, read = problem.without_dropout, (in_blocks(x, format).dequantize() for x in (k, v))
    return compare(p, inputs, p, Inputs(q, *read))


class Damage(WithoutBaseline):
    """The divergence of the weights, or the error of the output."""

    source = "clearhead.divergence; the formats of ggml"
    bins = Bins(1e-9, 10.0, log=True, bounds=(0.0, None))

    def __init__(self, compared: Compared, format: str, measure: str, formula: str) -> None:
        self.compared, self.format, self.measure = compared, format, measure
        self.name = f"{measure}_{format}"
        self.formula = f"{formula}, w' and z' with keys and values in {format}"

    def values(self, call: LayerCall) -> Tensor:
        assert call.problem is not None and call.inputs is not None
        divergence = self.compared(call.problem, call.inputs, self.format)
        return divergence.kl if self.measure == "kl" else divergence.error


def caches(reader: Reader, context: int) -> list[Metric]:
    """Return the divergence and the error of each format.

    Raises `BadValue` for heads whose vectors are not entire blocks: before the survey begins, the
    model runs on one token.
    """
    edits = [cache(keys=COARSE, values=COARSE)]
    with needed_by("caches", "heads that ggml stores"), intervene(reader.module, edits):
        reader.run(torch.tensor([[len(reader.words) // 2]]))
    formulas = {"kl": "KL(w || w') in nats", "error": "|z - z'| / |z|"}
    compared = lru_cache(maxsize=len(BYTES))(_compared)  # which both measures read
    return [Damage(compared, x, *formula) for x in BYTES for formula in formulas.items()]


@dataclass(frozen=True)
class BitBudgets:
    """The format in which a cache stores each KV head.

    `formats` has those of a layer's KV heads, by layer, and `damage` the mean over queries of
    KL(w || w') in nats, summed over all query heads.
    """

    formats: dict[int, tuple[str, ...]]
    damage: float

    @property
    def bits(self) -> float:
        """The mean bits of a number."""
        return fmean(BITS[x] for layer in self.formats.values() for x in layer)

    def edits(self) -> list[Edit]:
        """Return the edits that round keys and values so, for `intervene`."""
        return [
            cache(keys=format, values=format, layers=[layer], heads=heads)
            for layer, formats in self.formats.items()
            for format in BYTES
            if (heads := [head for head, own in enumerate(formats) if own == format])
        ]

    def save(self, path: str | Path) -> Path:
        """Write JSON: the mean bits, and a list of formats for each layer."""
        about = {"bits": self.bits, "damage": self.damage, "layers": self.formats}
        return atomic_io.write_json(as_path("save", path), about)


def bit_budgets(survey: "Survey", bits: float) -> BitBudgets:
    """Divide a mean of `bits` a number among the KV heads, from 4.5 (q4_0) to 8.5 (q8_0).

    The KV heads whose query heads lose most by 4 bits, summed, get 8. Raises `BadValue` for a
    survey without the metrics `caches`, and for another number of bits.
    """
    rule = f"bits is a mean from {BITS[COARSE]} to {BITS[FINE]}."
    bits = as_number(
        "bits", bits, rule, "pass for example 6.5.", lambda x: BITS[COARSE] <= x <= BITS[FINE]
    )
    rows = survey.query(
        "select layer, key_head, sum(mean) filter (metric = ?), sum(mean) filter (metric = ?) "
        "from heads group by layer, key_head order by layer, key_head",
        [f"kl_{COARSE}", f"kl_{FINE}"],
    ).rows
    if not rows or rows[0][2] is None:
        gave = "The survey has no damage of caches."
        hint = 'survey texts with metrics="caches".'
        raise BadValue(gave, "bits are divided by the metrics of 'caches'.", hint)
    worst = sorted(rows, key=lambda row: row[3] - row[2])
    share = (bits - BITS[COARSE]) / (BITS[FINE] - BITS[COARSE])
    fine = {row[:2] for row in worst[: int(share * len(rows))]}
    formats = {
        layer: tuple(FINE if row[:2] in fine else COARSE for row in of_layer)
        for layer, of_layer in groupby(rows, itemgetter(0))
    }
    return BitBudgets(formats, sum(row[3] if row[:2] in fine else row[2] for row in rows))
