"""Combine the attention of several layers: `rollout`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.errors import BadValue, as_index, as_number, must_be_of
from ...core.masks.text_positions import Positions
from ...core.torch_state import own_dtypes
from .recording import Call, Recording, rows_in_columns


@own_dtypes()
def rollout(
    recording: Recording, rows: Sequence[int] | None = None, *, residual: float = 0.5
) -> Tensor:
    """Compute how much each input token contributes to each token after the last layer.

    The result is (B, n, T), for n queries and the T columns of the batch.

    ``R = A_L ... A_2 A_1`` with ``A_l = residual I + (1 - residual) mean over heads of W_l``: in
    every layer a token keeps the fraction `residual` of itself (the residual connection) and takes
    the rest from the tokens that its heads look at. The weight of a sink logit adds nothing to a
    token, so the token keeps that fraction of itself too, and also if it may look at no key:
    ``A_l = residual I + (1 - residual) (W + diag(1 - sum over keys of W))``, with W the mean over
    heads. So the rows of R sum to 1. Only weights count: values, projections and feed-forward
    layers are ignored.

    >>> with ch.watch(model, exact_rows=range(T)) as recording:  # doctest: +SKIP
    ...     model(x)
    >>> ch.rollout(recording, rows=[-1])  # contributions to the last token  # doctest: +SKIP

    Each of the n rows is multiplied by one layer after another, so no product of two matrices is
    formed: memory is n T numbers beside the recording.

    Args:
        recording: a recording of self-attention layers by ``watch(model, exact_rows=range(T))``.
            The last layer needs only the queries in `rows`. If a layer ran several times, its last
            call is used.
        rows: the queries to return, counted as in `watch`; None means all that were recorded in the
            last layer. The result is 0 for a text that has no such row.
        residual: the fraction of itself that a token keeps in each layer, from 0 to 1. The source
            uses 0.5, which is a choice: the model adds two vectors of different lengths.

    Raises:
        BadType, BadValue: an object that is not a recording, rows that were not recorded, layers of
            different sizes, layers recorded for some heads, a fraction outside 0 to 1.

    Source: Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers".
    """
    layers, requested = _layers(recording, rows, residual)
    B, _, T = layers[0].shape
    mixed = (requested.unsqueeze(-1) == torch.arange(T)).to(layers[0]).expand(B, -1, -1)
    for weights in reversed(layers):
        remaining = (1 - weights.sum(-1)).clamp(min=0)  # what heads take from no key
        taken = mixed @ weights + mixed * remaining.unsqueeze(1)
        mixed = residual * mixed + (1 - residual) * taken
    return mixed


def _layers(
    recording: Recording, rows: Sequence[int] | None, residual: object
) -> tuple[list[Tensor], Tensor]:
    """Return the weights of each layer (`_weights`) in order, and the columns of the requested
    rows, (B|1, n); -1 if a text has no such row."""
    rule = "rollout combines weights that watch recorded."
    hint = "pass the recording of `with watch(model, exact_rows=range(T)) as recording`."
    must_be_of(Recording, "rollout", recording, rule, hint)
    rule = "it is the fraction of itself that a token keeps in a layer."
    hint = "pass a number from 0 to 1, such as 0.5."
    as_number("rollout got residual", residual, rule, hint, lambda fraction: 0 <= fraction <= 1)
    calls = list({call.layer: call for call in recording}.values())
    if not calls:
        rule = "rollout combines weights that watch recorded in memory."
        hint = "run the model inside watch(model, exact_rows=range(T)), without to=."
        raise BadValue("rollout got a recording without calls.", rule, hint)
    layers = [_weights(call) for call in calls]
    T, last = layers[0].shape[-1], calls[-1]
    named = last.queries or () if rows is None else _checked(rows, last.at, T)
    requested = last.at.rows(named, T)
    needed = (requested.unsqueeze(-1) == torch.arange(T)).any(1)
    for call, weights in zip(reversed(calls), reversed(layers), strict=True):
        size, missing = weights.shape[-1], needed
        if size == T:
            recorded = call.at.rows(call.queries or (), T).unsqueeze(-1) == torch.arange(T)
            missing = needed & ~recorded.any(1)
        if size != T or bool(missing.any()):
            absent = int(missing.any(0).sum())
            gave = f"Layer {call.layer} has {size} keys, and {absent} required queries are missing."
            rule = f"rollout needs self-attention of {T} tokens, all rows but in the last layer."
            hint = "record watch(model, exact_rows=range(T)), with layers= to leave out others."
            raise BadValue(gave, rule, hint)
        needed = call.at.is_real(T)[:, 0]
    return layers, requested


def _weights(call: Call) -> Tensor:
    """Return the mean over the heads of a layer, (B, T, T); 0 in rows that were not recorded."""
    call.must_have_all_heads("rollout takes the mean over all heads of a layer.")
    if call.queries is None:
        rule = "rollout needs the exact weights of every layer."
        hint = "record watch(model, exact_rows=range(T))."
        raise BadValue(f"Layer {call.layer} was recorded without rows.", rule, hint)
    rows = call.statistics["exact_rows"]
    assert isinstance(rows, Tensor)
    T = rows.shape[-1]
    return rows_in_columns(rows.mean(1), call.at.rows(call.queries, T), T)


def _checked(rows: Sequence[int], at: Positions, T: int) -> tuple[int, ...]:
    count = int(at.is_real(T).sum(-1).max())
    for row in rows:
        as_index("Row", row, count)
    return tuple(map(int, rows))
