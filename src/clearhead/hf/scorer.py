"""The press of KVPress that `press` returns."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from kvpress import ScorerPress
from torch import Tensor, nn

from ..core.errors import BadValue
from ..core.functional.ambient import (
    ambient,
    capture_call,
    must_not_be_sharded,
    statistics_of,
    without_followers,
)
from ..core.stats import Statistic
from .register import NAME


@dataclass(kw_only=True)
class Scorer(ScorerPress):
    """A press that scores keys by a statistic; `press` describes it."""

    statistic: Statistic
    window: int
    kernel: int

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Return the scores of the keys of a prompt, (B, G, T)."""
        G, T = keys.shape[1:3]
        if hidden_states is not kwargs["hidden_states"] or T != hidden_states.shape[1]:
            gave = f"press got {T} keys of a prompt of {kwargs['hidden_states'].shape[1]} tokens."
            rule = "a score is a sum over the queries of a complete prompt."
            raise BadValue(gave, rule, "use it without presses that divide a prompt.")
        if T <= self.window:
            gave = f"press got a prompt of {T} tokens, and window={self.window}."
            raise BadValue(gave, "keys before the window are scored.", "pass a smaller window.")
        scores = self._by_query_head(module, kwargs)[..., : T - self.window]
        scores = F.avg_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)
        scores = scores.unflatten(1, (G, -1)).mean(2)
        return F.pad(scores, (0, self.window), value=float(scores.max()) + 1)

    @torch.no_grad()
    def _by_query_head(self, module: nn.Module, kwargs: dict[str, Any]) -> Tensor:
        must_not_be_sharded("press")
        if ambient().editors:
            rule = "the press computes the attention of a layer again, and edits name layers."
            raise BadValue("A press ran inside intervene.", rule, "run the model without edits.")
        # `forward` itself, because hooks, such as that of KVPress, would run a second time.
        run = partial(module.forward, **{**kwargs, "past_key_values": None})
        with _computed_by_clearhead(module, kwargs.get("attention_mask")), without_followers():
            call, count = capture_call(run, 0)
        if call is None or count > 1:
            gave = f"A {type(module).__name__} made {count} attention calls."
            raise BadValue(gave, "a press scores one call of a layer.", "use another model.")
        scores = statistics_of(*call, [self.statistic])[self.statistic.name]
        return cast(Tensor, scores)


@contextmanager
def _computed_by_clearhead(module: nn.Module, mask: object) -> Iterator[None]:
    config: Any = module.config
    before = config._attn_implementation
    if before not in (NAME, "sdpa") or (type(mask) is Tensor and mask.dtype != torch.bool):
        kind = f" and a mask of {mask.dtype}" if isinstance(mask, Tensor) else ""
        gave = f"press got a model with attn_implementation={before!r}{kind}."
        rule = f'it reads the masks of "{NAME}" and "sdpa": True means "may look".'
        raise BadValue(gave, rule, f'call model.set_attn_implementation("{NAME}").')
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
