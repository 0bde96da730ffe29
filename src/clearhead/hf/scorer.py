"""The press of KVPress that `press` returns."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from kvpress import ScorerPress
from torch import Tensor, nn

from ..core.errors import BadValue
from ..core.functional.ambient import ambient, capture_call, statistics_of, without_followers
from ..core.stats import Statistic
from .register import NAME


@dataclass(kw_only=True)
class Scorer(ScorerPress):
    """A press that scores keys by a statistic; `press` describes it."""

    statistic: Statistic
    window: int
    kernel: int

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Return the scores of the keys of a prompt, (B, G, T)."""
        (G, T), prompt = keys.shape[1:3], kwargs["hidden_states"]
        if hidden_states is not prompt or not self.window < T == prompt.shape[1]:
            gave = f"press got {T} keys of {prompt.shape[1]} tokens, and window={self.window}."
            rule = "it scores the keys of a complete prompt, which is longer than the window."
            raise BadValue(gave, rule, "use it without presses that divide a prompt.")
        scores = self._by_query_head(module, kwargs)[..., : T - self.window]
        scores = F.avg_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)
        scores = scores.unflatten(1, (G, -1)).mean(2)
        return F.pad(scores, (0, self.window), value=float(scores.max()) + 1)

    @torch.no_grad()
    def _by_query_head(self, module: nn.Module, kwargs: dict[str, Any]) -> Tensor:
        config, mask = cast(Any, module.config), kwargs.get("attention_mask")
        before = config._attn_implementation
        if before not in (NAME, "sdpa") or (type(mask) is Tensor and mask.dtype != torch.bool):
            of = getattr(mask, "dtype", None)
            gave = f"press got a {before!r} attention, with a mask of {of}."
            rule = f'it reads the masks of "{NAME}" and "sdpa", in which True means "may look".'
            raise BadValue(gave, rule, f'call model.set_attn_implementation("{NAME}").')
        if ambient().editors or ambient().ranks is not None:
            rule = "the press computes the attention of a layer again."
            hint = "run the model without edits, on one machine."
            raise BadValue("A press ran inside intervene or sharded.", rule, hint)
        # `forward` itself, because hooks, such as that of KVPress, would run a second time.
        run = partial(module.forward, **{**kwargs, "past_key_values": None})
        config._attn_implementation = NAME
        try:
            with without_followers():
                call, count = capture_call(run, 0)
        finally:
            config._attn_implementation = before
        if call is None or count > 1:
            gave = f"A {type(module).__name__} made {count} attention calls."
            raise BadValue(gave, "a press scores one call of a layer.", "use another model.")
        return cast(Tensor, statistics_of(*call, [self.statistic])[self.statistic.name])
