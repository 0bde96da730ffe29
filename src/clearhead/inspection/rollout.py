"""Attention over several layers: rollout, how much of each input token reaches a token."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BadType, BadValue, as_index, as_number, kind_of
from ..masks.text_positions import Positions
from .recording import Call, Recording


def rollout(
    recording: Recording, rows: Sequence[int] | None = None, *, residual: float = 0.5
) -> Tensor:
    """The share of each input token in each token after the last layer, (B, n, T), where T are
    the columns of the batch.

    ``R = A_L ... A_2 A_1`` with ``A_l = residual I + (1 - residual) mean over heads of W_l``: in
    every layer a token keeps a share of itself (the residual connection) and takes the rest from
    where its heads look. The rows of R sum to 1. It follows weights alone: values, projections and
    feed-forward layers are not in it.

    >>> with ch.watch(model, exact_rows=range(T)) as seen:  # whole matrices  # doctest: +SKIP
    ...     model(x)
    >>> ch.rollout(seen, rows=[-1])  # what the last token is made of  # doctest: +SKIP

    For n queries a row of T numbers is carried down through the layers, so no product of two
    matrices is formed: beyond the recording it takes n T numbers.

    Args:
        recording: what ``watch(model, exact_rows=range(T))`` recorded of self-attention layers. The
            last layer needs only the queries in `rows`. Where a layer ran several times, the last
            call counts.
        rows: the queries asked for, counted as in `watch`; None means all that the last layer
            recorded. Of a text that has no such row the result is 0.
        residual: the share that a token keeps in each layer, from 0 to 1. Half, as in the source,
            is a choice: the model itself adds the two, with lengths of their own.

    Raises:
        BadType, BadValue: what is no recording, rows that were not recorded, layers of other sizes,
            a share outside 0 to 1.

    Source: Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers".
    """
    layers, requested = _layers(recording, rows, residual)
    T = layers[0].weights.shape[-1]
    share = (requested.unsqueeze(-1) == torch.arange(T)).to(layers[0].weights)
    share = share.expand(len(layers[0].weights), -1, -1)
    for layer in reversed(layers):
        share = residual * share + (1 - residual) * (share[..., layer.queries] @ layer.weights)
    return share


class _Layer(NamedTuple):
    queries: list[int]
    weights: Tensor  # (B, queries, T), the mean over heads


def _layers(
    recording: object, rows: Sequence[int] | None, residual: object
) -> tuple[list[_Layer], Tensor]:
    """The layers of a recording from the first to the last, and the queries asked for, by their
    columns, (B|1, n); -1 where a text has no such row."""
    if not isinstance(recording, Recording):
        raise BadType(
            f"rollout got {kind_of(recording)}.",
            "rollout follows weights that watch recorded.",
            "pass what `with watch(model, exact_rows=range(T)) as recording` gives.",
        )
    as_number(
        "rollout got residual",
        residual,
        "it is the share of itself that a token keeps in a layer.",
        "pass a number from 0 to 1, such as 0.5.",
        lambda share: 0 <= share <= 1,
    )
    calls = list({call.layer: call for call in recording}.values())
    if not calls:
        raise BadValue(
            "rollout got a recording without calls.",
            "rollout follows weights that watch recorded in memory.",
            "run the model inside of watch(model, exact_rows=range(T)), without to=.",
        )
    layers = [_layer(call) for call in calls]
    T, last = layers[0].weights.shape[-1], calls[-1]
    if rows is None:
        requested = last.at.rows(last.queries or (), T)
    else:
        requested = last.at.rows(_checked(rows, last.at, T), T)
    needed = (requested.unsqueeze(-1) == torch.arange(T)).any(1)
    for call, layer in zip(reversed(calls), reversed(layers), strict=True):
        size, missing = layer.weights.shape[-1], needed
        if size == T:
            recorded = call.at.rows(call.queries or (), T).unsqueeze(-1) == torch.arange(T)
            missing = needed & ~recorded.any(1)
        if size != T or bool(missing.any()):
            raise BadValue(
                f"Layer {call.layer} was recorded for {size} keys and {len(call.queries or ())} "
                f"queries; {int(missing.any(0).sum())} queries that are needed are missing.",
                f"rollout follows self-attention over the same {T} tokens in every layer, all rows "
                "of every layer but the last.",
                "record watch(model, exact_rows=range(T)), with layers= where a model has others.",
            )
        needed = call.at.is_real(T)[:, 0]
    return layers, requested


def _layer(call: Call) -> _Layer:
    """A layer with its rows at their columns. On padding, where a text has no row, it is 0."""
    weights = _mean_over_heads(call)
    queries = call.queries or ()
    if not call.at.padded:
        return _Layer(list(queries), weights)
    B, n, T = weights.shape
    at = call.at.rows(queries, T).to(weights.device) % (T + 1)  # those of no text come last
    every = weights.new_zeros(B, T + 1, T)
    every.scatter_(1, at.unsqueeze(-1).expand(B, n, T), weights)
    return _Layer(list(range(T)), every[:, :T])


def _mean_over_heads(call: Call) -> Tensor:
    """The recorded rows, (B, n, T)."""
    if call.queries is None:
        raise BadValue(
            f"Layer {call.layer} was recorded without rows.",
            "rollout follows the exact weights of every layer.",
            "record watch(model, exact_rows=range(T)).",
        )
    rows = call.statistics["exact_rows"]
    assert isinstance(rows, Tensor)
    return rows.mean(1)


def _checked(rows: Sequence[int], at: Positions, T: int) -> tuple[int, ...]:
    count = int(at.is_real(T).sum(-1).max())
    rule = f"there are {count} tokens, numbered from 0; -1 is the last."
    hint = f"ask for rows from 0 to {count - 1}."
    for row in rows:
        as_index("Row", row, count, rule, hint)
    return tuple(map(int, rows))
