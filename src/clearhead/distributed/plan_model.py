"""Estimate what the attention of a model costs on the ranks of a group, without computing it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from ..core.errors import AttentionError, BadValue
from ..core.functional.ambient import FollowedCall, listening
from ..nn.token_ids import as_batch
from .layouts import Layout
from .plan import Plan, plan

SUMS = "pairs", "flops", "sent", "received", "exchanged", "sent_back"


def plan_model(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    *,
    world: int,
    layout: Layout | str = "contiguous",
    heads: int = 1,
) -> Plan:
    """Estimate what each of `world` ranks computes, sends and stores in the attention of a model.

    The model reads the whole text on the meta device, which has shapes and no numbers, so that a
    text of any length fits. Each attention call is planned with its own mask.

    >>> import torch, clearhead as ch
    >>> block = ch.nn.TransformerBlock(64, 4)
    >>> text = torch.empty(1, 32768, 64, device="meta")
    >>> ch.distributed.plan_model(block, text, world=4, layout="head-tail").balance
    1.0

    Args:
        model: a model whose attention goes through clearhead, on any device. It does not change.
        inputs: the ids of the whole text, (B, T), or the inputs of the model by name; their numbers
            are not read. With ``use_cache=False`` a model of transformers would read them.
        world, layout: as in `plan`.
        heads: as in `sharded`.

    Returns:
        A `Plan` with the sums over all calls; `memory` is that of the largest call.

    Raises `BadValue` for a model without attention calls, or one that does not run on the meta
    device; and the errors of `plan`.
    """
    plans: list[tuple[object, Plan]] = []

    def on_call(call: FollowedCall) -> None:
        p = call.problem
        key = p.mask, p.grid, p.G, p.D, p.Dv, p.dtype
        own = next((known for other, known in plans if other == key), None)
        own = own or plan(*call.inputs[:3], world=world, layout=layout, heads=heads, mask=p.mask)
        plans.append((key, own))

    meta = {name: x.to("meta") for name, x in (*model.named_parameters(), *model.named_buffers())}
    passed = tree_map_only(Tensor, lambda x: x.to("meta"), as_batch(inputs))
    args, named = ((), dict(passed)) if isinstance(passed, Mapping) else ((passed,), {})
    try:
        with torch.no_grad(), listening(on_call):
            functional_call(model, meta, args, named)
    except AttentionError:
        raise
    except Exception as error:  # a model may raise anything where it reads a number
        gave = f"{type(model).__name__} raised {type(error).__name__} on the meta device: {error}"
        rule = "a plan has shapes and no numbers, so the model may not read any."
        hint = "pass ids alone: a model of transformers reads a mask, and ids without its cache."
        raise BadValue(gave, rule, hint) from error
    if not plans:
        rule = "the calls that go through clearhead are planned."
        hint = 'load it with attn_implementation="clearhead", or see clearhead.hf.supports.'
        raise BadValue(f"{type(model).__name__} made no attention call.", rule, hint)
    own = [known for _, known in plans]
    counts = Counter(x.problem for x in own)
    what = "; ".join(f"{count} x {text}" for text, count in counts.items())
    numbers: dict[str, Any] = {name: _by_rank(sum, name, own) for name in SUMS}
    numbers["memory"] = _by_rank(max, "memory", own)
    return replace(own[0], problem=f"{type(model).__name__}: {what}", **numbers)


def _by_rank(of: Callable[[Iterable[int]], int], name: str, plans: Sequence[Plan]) -> list[int]:
    """Combine a number of several plans, rank by rank."""
    return [of(x) for x in zip(*(getattr(own, name) for own in plans), strict=True)]
