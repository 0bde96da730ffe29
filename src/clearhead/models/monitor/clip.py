"""QK-clip: scale the queries and keys of heads whose logits have grown too large."""

import math
from typing import NamedTuple

import torch
from torch import nn

from ...core.errors import BadValue, as_number
from ..follow.layers import must_be_module
from .alarms import LARGEST_LOGIT
from .monitor import MONITORS


class Clipped(NamedTuple):
    """A head that was clipped: its largest logit, and the factor of its logits."""

    layer: int
    head: int
    module: str
    largest: float
    factor: float


@torch.no_grad()
def qk_clip(model: nn.Module, limit: float = LARGEST_LOGIT) -> list[Clipped]:
    """Scale W_Q and W_K of the heads whose largest logit in the last step exceeded `limit`.

    >>> with ch.monitor(model, every=1, stats=["max"]) as monitor:  # doctest: +SKIP
    ...     for batch in data:
    ...         ...
    ...         monitor.step()
    ...         ch.qk_clip(model, limit=100)

    The logits of such a head get the factor ``limit / largest``. Its rows of W_Q and of W_K, and of
    their biases, get the root of that. Where several query heads share a key head, W_K stays as it
    is, and W_Q gets the whole factor. In latent attention the features of W_Q that meet the shared
    rotary key get the whole factor, and the other features of W_Q and W_K its root. Rows that FSDP2
    divides over ranks are scaled on each rank.

    The state of the optimizer stays as it is. An optimizer that has its own copy of the weights, as
    master weights in fp32, writes the unclipped ones again: load the clipped ones into its copy.
    The clip acts after the step, so the next step may exceed the limit again, and is clipped then.
    A module that is several layers gets the smallest of their factors.

    Args:
        model: the model that was passed to `monitor`, after ``monitor.step()``.
        limit: the largest logit that stays as it is.

    Returns:
        the heads that were clipped.

    Raises:
        BadValue, BadType: the last step was not logged with ``max``; or a head exceeds the limit
            whose logits are not proportional to known rows of W_Q and W_K: after QK-norm, with a
            soft cap or a bias, or in an unknown module. Then nothing is changed.

    Source: Kimi Team 2025, "Kimi K2: Open Agentic Intelligence", MuonClip.
    """
    must_be_module("qk_clip", model, "qk_clip scales the weights of a model.")
    rule = "limit is a positive logit."
    limit = as_number("limit", limit, rule, "pass limit=100.", lambda x: 0 < x < math.inf)
    monitor = MONITORS.get(id(model))
    if monitor is None or not monitor.largest:
        gave = f"qk_clip does not know the largest logits of the {type(model).__name__}."
        rule = "they are those of the step that monitor logged last, and each step is clipped once."
        hint = 'use monitor(model, every=1, stats=["max"]), and qk_clip(model) after its step().'
        raise BadValue(gave, rule, hint)
    clipped = [
        Clipped(layer, head, monitor.layers[layer].name, value, limit / value)
        for layer, values in monitor.largest.items()
        for head, value in enumerate(values)
        if value > limit
    ]
    for head in clipped:
        if obstacle := monitor.layers[head.layer].obstacle:
            name = f"L{head.layer}H{head.head}"
            gave = f"{name} has a logit of {head.largest:.4g}, and cannot be clipped: {obstacle}."
            rule = "the logits of a head must be proportional to its rows of W_Q and W_K."
            hint = "leave out the layer by layers=; QK-norm and a soft cap bound logits themselves."
            raise BadValue(gave, rule, hint)
    for module in dict.fromkeys(head.module for head in clipped):
        own = [head for head in clipped if head.module == module]
        _, rows, H, _ = monitor.layers[own[0].layer]
        assert rows is not None
        factors = torch.ones(H, dtype=torch.float64)
        for head in own:  # a module may be several layers
            factors[head.head] = min(float(factors[head.head]), head.factor)
        size = rows.query.outputs.shape[1]
        of_query = factors[:, None].repeat(1, size)
        if H == len(rows.key.outputs):
            of_query[:, : size - rows.shared] = factors.sqrt()[:, None]
            rows.key.scale(factors.sqrt())
        rows.query.scale(of_query)
    monitor.largest = {}
    return clipped
