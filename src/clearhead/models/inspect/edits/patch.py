"""The edit that replaces queries, keys, values or outputs by those of another run."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....core.errors import BadValue, must_be_among
from ....core.problem.problem import Inputs, Problem
from ....core.torch_state import records_grad
from ..recording import Call
from .edit import Edited, EditSite, replaced
from .recorded import (
    RECORDED,
    FromRecording,
    call_for,
    check_columns,
    heads_in,
    other_sizes,
    recorded_part,
    texts_in,
)

_IN_INPUTS = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True, eq=False, repr=False)
class patch(FromRecording):
    """Replace the queries, keys, values or outputs of heads by those of another run.

    ``watch(model, outputs=True)`` records outputs, and ``watch(model, inputs=True)`` the others.

    ========  ==========================================================================
    `of`      replaces, for each selected head and position
    ========  ==========================================================================
    "output"  o[b, h, q], the weighted sum of the values, before the output projection
    "query"   q[b, h, q], as attention receives it, after rotation and norm
    "key"     k[b, g, k], likewise, for KV head g
    "value"   v[b, g, k], for KV head g
    ========  ==========================================================================

    For keys and values, `heads` are KV heads, each of which is read by H // G query heads, and
    `positions` are those of keys, in a cache too. Each call is patched as it reads them; a cache
    keeps its own.

    If a layer was recorded several times, as in generation, call n of the block reads call n of the
    recording; if it was recorded once, every call reads that one. Text b reads row b of the
    recording, in any order of `batch`; if one text was recorded, every text reads it. The recorded
    call has the size of the call that is patched. Keys and values at named `positions` may come
    from a call of another length, for example from the prompt of a generation.

    Args:
        recording: what `watch` returned for the other run.
        of: "output", "query", "key" or "value".
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: query heads, or KV heads for keys and values; -1 is the last, None means all.
        positions: positions of queries or keys in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    Raises `BadValue` for a recording without the layer, its heads, texts or what `of` names, with
    fewer calls, of other sizes, or of texts with different padding.

    Source: Vig et al. 2020, "Investigating Gender Bias in Language Models Using Causal Mediation
    Analysis"; Meng et al. 2022, "Locating and Editing Factual Associations in GPT".
    """

    stage = 2

    of: str = "output"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = 'of is "query", "key", "value" or "output".'
        hint = 'pass for example of="value", and record with watch(model, inputs=True).'
        must_be_among(RECORDED, "patch got of", self.of, rule, hint)

    def arguments(self) -> list[str]:
        return [*super().arguments(), *([] if self.of == "output" else [f"of={self.of!r}"])]

    @property
    def of_keys(self) -> bool:
        return self.of in ("key", "value")

    def edit_inputs(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        if self.of == "output":
            return problem, inputs
        name = _IN_INPUTS[self.of]
        inputs = inputs._replace(**{name: self._patched(getattr(inputs, name), problem, site)})
        if not problem.grad and records_grad(*inputs):
            problem = replace(problem, grad=True)  # of the recorded run
        return problem, inputs

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, site: EditSite) -> Tensor:
        return self._patched(out, problem, site) if self.of == "output" else out

    def _patched(self, x: Tensor, problem: Problem, site: EditSite) -> Tensor:
        """Return x, (B, heads, T, d), with the recorded vectors where the edit selects them."""
        call = call_for(self, self.recording, site)
        recorded = recorded_part(self, call, self.of)
        one_length = not self.of_keys or self.positions is None
        if recorded.shape[2:] != x.shape[2:] and (one_length or recorded.shape[3] != x.shape[3]):
            letters = {"query": "Tq, D", "key": "Tk, D", "value": "Tk, Dv", "output": "Tq, Dv"}
            raise other_sizes(self, letters[self.of], recorded.shape[2:], x.shape[2:])
        value = texts_in(self, call, problem, recorded)
        value = value[:, heads_in(self, call, problem, recorded)]
        check_columns(self, call, problem, site)
        self._must_be_recorded(call, recorded, problem, site)
        count = min(recorded.shape[2], x.shape[2])
        return replaced(self, x, value[:, :, :count], problem, site, torch.arange(count)[None])

    def _must_be_recorded(
        self, call: Call, recorded: Tensor, problem: Problem, site: EditSite
    ) -> None:
        """Raise `BadValue` if the edit selects a token where a recorded text has none."""
        size = problem.Tk if self.of_keys else problem.Tq
        was, now = (
            at.is_real_key(size) if self.of_keys else at.is_real(size) for at in (call.at, site.at)
        )
        was = was & (torch.arange(size) < recorded.shape[2])
        now = now & self.where(problem, site).cpu()
        texts = torch.tensor(self.batch_of(problem))
        now, was = (x[texts if len(x) > 1 else [0]].any(1) for x in (now, was))
        if bool((missing := now & ~was).any()):
            what = "keys" if self.of_keys else "queries"
            what += f" {missing.any(0).nonzero().flatten().tolist()}"
            gave = f"{self!r} selects {what}, where a recorded text has padding or ends."
            rule = f"the {self.of} of a token is replaced by the {self.of} of a token."
            raise BadValue(gave, rule, "select positions of both, or record texts of one length.")
