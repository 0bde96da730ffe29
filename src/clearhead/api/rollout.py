"""Attention rollout: how much of each input token reaches a token after several layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import BadType, BadValue, as_index, kind_of
from .recording import Call, Recording


def rollout(
    recording: Recording, rows: Sequence[int] | None = None, *, residual: float = 0.5
) -> Tensor:
    """The share of each input token in each token after the last layer, (B, n, T).

    ``R = A_L ... A_2 A_1`` with ``A_l = residual I + (1 - residual) mean over heads of W_l``: in
    every layer a token keeps a share of itself (the residual connection) and takes the rest from
    where its heads look. The rows of R sum to 1. It follows weights alone: values, projections and
    feed-forward layers are not in it.

    >>> with ch.watch(model, rows=range(T)) as seen:  # whole matrices  # doctest: +SKIP
    ...     model(x)
    >>> ch.rollout(seen, rows=[-1])  # what the last token is made of  # doctest: +SKIP

    For n queries a row of T numbers is carried down through the layers, so no product of two
    matrices is formed: beyond the recording it takes n T numbers.

    Args:
        recording: what ``watch(model, rows=range(T))`` recorded of self-attention layers; of the
            last one the `rows` asked for are enough. Where a layer ran several times, the last
            counts.
        rows: the queries asked for; None means all that the last layer recorded.
        residual: the share that a token keeps in each layer, from 0 to 1. Half, as in the source,
            is a choice: the model itself adds the two, with lengths of their own.

    Raises:
        BadType, BadValue: what is no recording, rows that were not recorded, layers of other sizes,
            a share outside 0 to 1.

    Source: Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers".
    """
    if not isinstance(recording, Recording):
        raise BadType(
            f"rollout got {kind_of(recording)}.",
            "rollout follows weights that watch recorded.",
            "pass what `with watch(model, rows=range(T)) as recording` gives.",
        )
    if isinstance(residual, bool) or not 0 <= residual <= 1:
        raise BadValue(
            f"rollout got residual={residual!r}.",
            "it is the share of itself that a token keeps in a layer.",
            "pass a number from 0 to 1, such as 0.5.",
        )
    layers = list({call.layer: call for call in recording}.values())
    matrices = [_mean_over_heads(call) for call in layers]
    if not layers:
        raise BadValue(
            "rollout got a recording without calls.",
            "rollout follows weights that watch recorded in memory.",
            "run the model inside of watch(model, rows=range(T)), without to=.",
        )
    T = matrices[0].shape[-1]
    requested = list(layers[-1].queries or ()) if rows is None else _checked(rows, T)
    share = torch.eye(T, dtype=matrices[0].dtype, device=matrices[0].device)[requested]
    share = share.expand(len(matrices[0]), -1, -1)
    needed = set(requested)
    for call, weights in zip(reversed(layers), reversed(matrices), strict=True):
        queries = list(call.queries or ())
        missing = sorted(needed - set(queries))
        if weights.shape[-1] != T or missing:
            raise BadValue(
                f"Layer {call.layer} was recorded for {weights.shape[-1]} keys and "
                f"{len(queries)} queries; {len(missing)} queries that are needed are missing.",
                f"rollout follows self-attention over the same {T} tokens in every layer, all rows "
                "of every layer but the last.",
                "record watch(model, rows=range(T)), with layers= where a model has others.",
            )
        share = residual * share + (1 - residual) * (share[..., queries] @ weights)
        needed = set(range(T))
    return share


def _mean_over_heads(call: Call) -> Tensor:
    """The recorded rows, (B, n, T)."""
    if call.queries is None:
        raise BadValue(
            f"Layer {call.layer} was recorded without rows.",
            "rollout follows the exact weights of every layer.",
            "record watch(model, rows=range(T)).",
        )
    rows = call.found["rows"]
    assert isinstance(rows, Tensor)
    return rows.mean(1)


def _checked(rows: Sequence[int], T: int) -> list[int]:
    rule = f"there are {T} tokens, numbered from 0; -1 is the last."
    return [as_index("Row", row, T, rule, f"ask for rows from 0 to {T - 1}.") for row in rows]
