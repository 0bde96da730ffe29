"""Edits of the outputs of heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....core.errors import BadValue
from ....core.problem.problem import Inputs, Problem
from ..recording import Recording
from .edit import Edit, EditSite, finite_number, replaced
from .recorded import calls_of, check_recording, heads_in, recorded_part


@dataclass(frozen=True, eq=False, repr=False)
class ablate(Edit):
    """Replace the output of the heads by zeros, by a mean, or by a tensor.

    ``by="mean"`` replaces it by the mean of each head over the queries and texts of a reference
    set: all calls of the layer in ``over``, recorded by ``watch(model, outputs=True)``. Fully
    masked queries do not count, nor does padding that the calls carried.

    Args:
        by: "zero", "mean", or a tensor that broadcasts to (B, n, Tq, Dv), with the n heads of
            `heads` and the B texts of `batch` in their order.
        over: the recording of the reference set, for a mean only.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of query heads; -1 is the last, None means all.
        positions: positions of queries in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    Raises `BadValue` for any other `by`, a mean without `over`, and a recording without the layer,
    its heads or outputs.

    Source: Michel, Levy & Neubig 2019, "Are Sixteen Heads Really Better than One?"; the mean Wang
    et al. 2022, "Interpretability in the Wild".
    """

    stage = 2

    by: str | Tensor = "zero"
    over: Recording | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.by, Tensor) and self.by not in ("zero", "mean"):
            hint = 'pass by="zero", or a tensor that broadcasts to (B, heads, Tq, Dv).'
            raise BadValue(f"ablate got by={self.by!r}.", 'by is "zero", "mean" or a tensor.', hint)
        if (self.by == "mean" if isinstance(self.by, str) else False) != (self.over is not None):
            rule = "a mean needs a reference set, over=, and nothing else takes one."
            hint = 'pass by="mean" and over=, a recording of watch(model, outputs=True).'
            raise BadValue(f"ablate got by={_printed(self.by)} and over={self.over!r}.", rule, hint)
        if self.over is not None:
            check_recording(self, "over", self.over)

    def arguments(self) -> list[str]:
        over = [] if self.over is None else [f"over=<{len(self.over)} calls>"]
        zero = isinstance(self.by, str) and self.by == "zero"
        return [] if zero else [f"by={_printed(self.by)}", *over]

    def reads(self, site: EditSite) -> tuple[int, ...]:
        return () if self.over is None else (site.layer,)

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, site: EditSite) -> Tensor:
        if isinstance(self.by, Tensor):
            return replaced(self, out, self.by, problem, site)
        if self.over is not None:
            return replaced(self, out, self._mean(problem, site), problem, site)
        return out.masked_fill(self.where(problem, site).unsqueeze(-1), 0.0)

    def _mean(self, problem: Problem, site: EditSite) -> Tensor:
        """Return the mean of each head over the reference set, (n, 1, Dv)."""
        total, count = torch.zeros(()), torch.zeros(())
        for call in calls_of(self, self.over, site):
            output = recorded_part(self, call, "output")
            counts = torch.ones_like(output[..., :1], dtype=torch.bool)
            if call.fully_masked is not None:
                counts = counts & ~call.fully_masked.unsqueeze(-1)
            counts = counts & call.at.is_real(output.shape[2]).unsqueeze(-1).to(output.device)
            picked = heads_in(self, call, problem, output)
            total = total + (output * counts)[:, picked].sum((0, 2), dtype=torch.float64)
            count = count + counts[:, picked].sum((0, 2))
        return (total / count.clamp(min=1)).unsqueeze(1)


zero_ablate = ablate  # whose replacement is zeros unless it gets another


def mean_ablate(
    over: Recording,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    batch: range | None = None,
) -> ablate:
    """Replace the output of the heads by their mean: ``ablate(by="mean", over=over)``.

    Each head has one mean vector, over all positions of all texts in the recording. Padding and
    fully masked queries do not count. Raises the errors of `ablate`.

    Args:
        over: the recording of ``watch(model, outputs=True)``.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of query heads; -1 is the last, None means all.
        positions: positions of queries in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.
    """
    return ablate(
        by="mean", over=over, layers=layers, heads=heads, positions=positions, batch=batch
    )


@dataclass(frozen=True, eq=False, repr=False)
class scale(Edit):
    """Multiply the output of the heads by `factor`: o becomes factor * o. 0 is `ablate()`.

    Args:
        factor: a finite number.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of query heads; -1 is the last, None means all.
        positions: positions of queries in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    Raises `BadValue` for a factor that is not finite, `BadType` for one that is not a number.
    """

    stage = 2

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", finite_number("scale", "factor", self.factor))

    def arguments(self) -> list[str]:
        return [f"{self.factor:g}"]

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, site: EditSite) -> Tensor:
        return (out * self.factors(self.factor, problem, site).unsqueeze(-1)).to(out.dtype)


def _printed(by: str | Tensor) -> str:
    return f"<{'x'.join(map(str, by.shape))} numbers>" if isinstance(by, Tensor) else repr(by)
