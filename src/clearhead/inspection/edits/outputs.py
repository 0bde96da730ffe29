"""Edits of what heads give: other outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import BadValue
from ...problem.problem import Inputs, Problem
from ..recording import Recording
from .edit import Edit, Here, finite_number, replaced
from .recorded import (
    FromRecording,
    call_for,
    calls_of,
    check_columns,
    check_recording,
    heads_in,
    other_sizes,
    output_of,
    texts_in,
)


@dataclass(frozen=True, eq=False, repr=False)
class ablate(Edit):
    """The output of the heads is replaced: by zeros; by the ``"mean"`` of each head over the texts
    and queries of a reference set, that is of every call of the layer in ``over``, recorded by
    ``watch(model, outputs=True)``; or by a tensor that broadcasts to (B, n, Tq, Dv), where n are
    the heads named, in their order (all H where none are), and B the texts that `batch` names.

    Queries that may see nothing do not count for the mean, nor padding, where the calls carried it.
    Raises `BadValue` for another word, a
    mean without `over`, and a recording without the layer, its heads or outputs.

    Source: Michel, Levy & Neubig 2019, "Are Sixteen Heads Really Better than One?"; the mean Wang
    et al. 2022, "Interpretability in the Wild".
    """

    stage = 2

    by: str | Tensor = "zero"
    over: Recording | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.by, Tensor) and self.by not in ("zero", "mean"):
            raise BadValue(
                f"ablate got by={self.by!r}.",
                'an output is replaced by "zero", by "mean" or by a tensor.',
                'pass by="zero", or a tensor that broadcasts to (B, heads, Tq, Dv).',
            )
        if (self.by == "mean" if isinstance(self.by, str) else False) != (self.over is not None):
            raise BadValue(
                f"ablate got by={_word(self.by)} and over={self.over!r}.",
                "a mean is taken over a reference set, and nothing else is.",
                'pass by="mean" and over=, what watch(model, outputs=True) recorded.',
            )
        if self.over is not None:
            check_recording(self, "over", self.over)

    def arguments(self) -> list[str]:
        over = [] if self.over is None else [f"over=<{len(self.over)} calls>"]
        zero = isinstance(self.by, str) and self.by == "zero"
        return [] if zero else [f"by={_word(self.by)}", *over]

    def reads(self, here: Here) -> tuple[int, ...]:
        return () if self.over is None else (here.layer,)

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, here: Here) -> Tensor:
        if isinstance(self.by, Tensor):
            return replaced(self, out, self.by, problem, here)
        if self.over is not None:
            return replaced(self, out, self._mean(problem, here), problem, here)
        where = self.where(problem, here)
        return torch.zeros_like(out) if where is None else out.masked_fill(where.unsqueeze(-1), 0.0)

    def _mean(self, problem: Problem, here: Here) -> Tensor:
        """The mean of each head over the reference set, (n, 1, Dv)."""
        total, count = torch.zeros(()), torch.zeros(())
        for call in calls_of(self, self.over, here):
            output = output_of(self, call)
            sees = torch.ones_like(output[..., :1], dtype=torch.bool)
            sees = sees if call.blind is None else sees & ~call.blind.unsqueeze(-1)
            sees = sees & call.at.is_real(output.shape[2]).unsqueeze(-1).to(output.device)
            picked = heads_in(self, call, problem, output)
            total = total + (output * sees)[:, picked].sum((0, 2), dtype=torch.float64)
            count = count + sees[:, picked].sum((0, 2))
        return (total / count.clamp(min=1)).unsqueeze(1)


@dataclass(frozen=True, eq=False, repr=False)
class scale(Edit):
    """The output of the heads is multiplied by `factor`: o becomes factor * o, and 0 is `ablate()`.

    Raises `BadValue` for a factor that is not finite, `BadType` for one that is no number.
    """

    stage = 2

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", finite_number("scale", "factor", self.factor))

    def arguments(self) -> list[str]:
        return [f"{self.factor:g}"]

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, here: Here) -> Tensor:
        scaled = out * self.factors(self.factor, problem, here).unsqueeze(-1)
        return scaled.to(out.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class patch(FromRecording):
    """The output of the heads is that of another run, which ``watch(model, outputs=True)``
    recorded: o[b, h, q] = recorded[b, h, q], for the same layer, heads and queries.

    Of a layer that was recorded several times, as in generating, call n of the block takes call n
    of the recording; one that was recorded once serves every call. Row b of the recording serves
    text b, in whatever order `batch` names them; a recording of one text serves every text.

    Raises `BadValue` for a recording without the layer, its heads, texts or outputs, with fewer
    calls, of other sizes, or of texts that are padded otherwise.

    Source: Vig et al. 2020, "Investigating Gender Bias in Language Models Using Causal Mediation
    Analysis"; Meng et al. 2022, "Locating and Editing Factual Associations in GPT".
    """

    stage = 2

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, here: Here) -> Tensor:
        call = call_for(self, self.recording, here)
        given = output_of(self, call)
        if given.shape[2:] != out.shape[2:]:
            raise other_sizes(self, "Tq, Dv", given.shape[2:], out.shape[2:])
        value = texts_in(self, call, problem, given)[:, heads_in(self, call, problem, given)]
        check_columns(self, call, problem, here)
        where = self.where(problem, here)
        named = here.at.is_real(problem.Tq) & (True if where is None else where.cpu())
        texts = torch.tensor(self.batch_of(problem))
        named, recorded = (
            x[texts if len(x) > 1 else [0]].any(1) for x in (named, call.at.is_real(problem.Tq))
        )
        if bool((padding := named & ~recorded).any()):
            raise BadValue(
                f"{self!r} is about queries {padding.any(0).nonzero().flatten().tolist()}, where "
                "a text is padded in the recording.",
                "an output of another run is that of a token.",
                "name rows that both runs have, or record texts of as many tokens.",
            )
        return replaced(self, out, value, problem, here)


def _word(by: str | Tensor) -> str:
    return f"<{'x'.join(map(str, by.shape))} numbers>" if isinstance(by, Tensor) else repr(by)
