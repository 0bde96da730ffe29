"""The metrics of pictures, the set `grid`: where on its grid of patches a head looks.

The queries of a mean are patches. Distances are in patches, from r[q], c[q], the row and column of
a query, to those of a key.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.masks import Mask, dense
from ..core.stats import Statistic, exact_rows
from ..models.follow.picture import Picture
from .basic import Entropy, Evenness, Largest, Support
from .metric import Batch, Bins, LayerCall, Mass, Metric
from .reader import Reader


class Cells(Mass):
    """The mass of the keys of each query that `cells` has, (T, T)."""

    def __init__(self, name: str, formula: str, cells: Tensor) -> None:
        self.name, self.formula, self.mask = name, formula, dense(keep=cells)

    def group(self, batch: Batch) -> Mask:
        return self.mask


class Distance(Metric):
    """The mean distance of the patches at which a patch looks.

    It is 0 for a query with all its weight on tokens that are not patches.
    """

    name = "distance"
    formula = "Σ w d / Σ w over patches, d = √((r[q] - r[k])² + (c[q] - c[k])²)"
    source = "Dosovitskiy et al. 2021, arXiv 2010.11929: attention distance, here in patches"

    def __init__(self, picture: Picture) -> None:
        places = picture.places.double()
        self.patches = picture.patches
        self.is_patch = (places >= 0).all(-1)
        self.away = (places.unsqueeze(1) - places[self.patches]).norm(dim=-1)
        self.bins = Bins(0.0, max(float(self.away[self.is_patch].max()), 1.0))
        self.rows = exact_rows(list(range(len(places))))

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        return [self.rows]

    def values(self, call: LayerCall) -> Tensor:
        weights: Tensor = call["exact_rows"][..., self.patches]
        total = weights.sum(-1)
        sums = torch.einsum("bhqk,qk->bhq", weights, self.away.to(weights.dtype))
        return sums / total.masked_fill(total == 0, 1.0)

    def counts(self, uniform: LayerCall) -> Tensor:
        return super().counts(uniform) & self.is_patch


def grid(reader: Reader, context: int) -> list[Metric]:
    """Return the metrics of a reader of pictures with `context` tokens."""
    assert reader.pictures is not None
    picture = reader.pictures.grid
    is_patch = (picture.places >= 0).all(-1)
    away = (picture.places - picture.places.unsqueeze(1)).abs()
    sums, most = away.sum(-1), away.amax(-1)
    cells = {
        "self": ("w on the query itself", sums == 0),
        "neighbours": ("Σ w over the four patches beside the query", sums == 1),
        "within_1": ("Σ w over |r[q] - r[k]| ≤ 1 and |c[q] - c[k]| ≤ 1", most <= 1),
        "within_2": ("Σ w over |r[q] - r[k]| ≤ 2 and |c[q] - c[k]| ≤ 2", most <= 2),
        "row": ("Σ w over r[k] = r[q]", away[..., 0] == 0),
        "column": ("Σ w over c[k] = c[q]", away[..., 1] == 0),
    }
    cells = {name: (formula, keep & is_patch) for name, (formula, keep) in cells.items()}
    for token in dict.fromkeys(picture.before):
        keys = torch.tensor([token == x for x in picture.tokens])
        cells[f"on_{str(token).strip('[]').lower()}"] = f"Σ w over {token}", keys.expand_as(sums)
    of_cells = [Cells(n, formula, x & is_patch[:, None]) for n, (formula, x) in cells.items()]
    concentrated = [Entropy(context), Evenness(), Support(context), Largest()]
    return [*of_cells, Distance(picture), *concentrated]
