"""`why`: split the score of a query and a key into what wrote them.

Letters: C components, Tq queries, Tk keys, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import BadValue, as_index
from ...core.functional.sharding import must_not_be_sharded
from ...core.torch_state import own_dtypes
from ..follow.divided_weights import weights_must_be_whole
from ..follow.layers import must_be_module, refuse_compiled
from ..weights.attention_weights import rotary_of_call
from ..weights.rotations import Rotary
from .check import check_parts
from .result import Why
from .score_paths import record_scores
from .split_row import ScoreRow, SplitRow, score_row

AGAINST = ("others", "weights", "nothing")


@torch.inference_mode(False)  # it needs gradients inside torch.no_grad(), too
@torch.enable_grad()
def why(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    *,
    layer: int,
    head: int,
    query: int,
    key: int | None = None,
    against: str | int = "others",
    tokens: Sequence[str] | None = None,
    check: bool = False,
) -> Why:
    """Split the score of a query and a key into parts of embeddings, heads, MLPs and biases.

    >>> reasons = ch.why(model, ids, layer=18, head=6, query=-1, key=5)  # doctest: +SKIP
    >>> reasons.key_parts  # what in the key each component wrote, (C,)  # doctest: +SKIP

    The stream at a position is a sum of what components wrote. With the divisors of the norms of
    this run, queries and keys are too: ``q_i = sum_c q_i^c`` and ``k_j = sum_c k_j^c``, after W_Q,
    W_K, biases, norms and rotation. So the score is ``s_ij = scale sum_cc' q_i^c . k_j^c'``, plus a
    position bias. A softmax sees only differences of scores, so the numbers are the contrast
    ``s_ij - sum_j' u_j' s_ij'``, which equals ``log A_ij - sum_j' u_j' log A_ij'``:

    - ``key_parts[c]`` is scale q_i . (k_j^c - sum_j' u_j' k_j'^c),
    - ``query_parts[c]`` is scale q_i^c . (k_j - sum_j' u_j' k_j').

    Both sum to the contrast. They are not effects: without a component, norms and later components
    would change too, and weights are not linear. `check` shows this beside them.

    Args:
        model: a model whose stream is a sum, as for `logit_attribution`, and without dropout.
        inputs: the ids of one text, (T,) or (1, T); or the inputs of the model by name, a dict.
        layer, head: the attention call, numbered as in `watch`, and the query head.
        query, key: positions in the call. ``key=None`` summarises the row: s_ij is replaced by its
            mean under the weights, sum_j A_ij s_ij.
        against: u. "others" is uniform over the other visible keys, "weights" the weights of the
            query, a number one other key, and "nothing" is u = 0, the score itself.
        tokens: the tokens of the text, which the printed sentence names.
        check: also measure what the weight becomes without the largest parts, by path edits
            (`edits.path`). It runs the model eight times, up to the layer or to its end.

    With a soft cap, parts sum to what enters the cap. Raises `BadValue` if parts miss a score by
    more than 1e-4 of their absolute sum (8 roundings in 16-bit types). Raises it for an operation
    between the stream and the scores that is not known to be linear, and for a key that the query
    may not look at. Raises it also for a cache, several texts, random numbers, and a compiled,
    sharded or offloaded model.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Kamath et al.
    2025, "Tracing Attention Computation Through Feature Interactions"; path edits Wang et al. 2022.
    """
    must_be_module("why", model, "why runs a model.", ", then inputs")
    must_not_be_sharded("why")
    refuse_compiled(model)
    weights_must_be_whole("why", model)
    if isinstance(inputs, Tensor) and inputs.dim() == 1:
        inputs = inputs[None]
    run = record_scores(model, inputs, layer)
    p = run.problem
    layer = run.paths.layer
    i, h = (
        as_index(what, x, size, f"it is a number from 0 to {size - 1}.", "pass one of these.")
        for what, x, size in (("Query", query, p.Tq), ("Head", head, p.H))
    )
    if key is not None:
        key = as_index("Key", key, p.Tk, f"keys are 0 to {p.Tk - 1}.", "pass one of these.")
    if tokens is not None and len(tokens) != p.Tk:
        raise BadValue(
            f"why got {len(tokens)} tokens for {p.Tk} keys.",
            "tokens names the keys of the call, in order.",
            "pass the tokens of the text that the keys are from, or leave tokens out.",
        )
    names = None if tokens is None else tuple(map(str, tokens))
    with own_dtypes():
        row = score_row(run, i, h)
        contrast = _contrast(row, i, key, against)
        split = SplitRow(run, row, i, h, contrast)
        rotary: Rotary | None = None
        remarks: tuple[str, ...] = ()
        try:
            rotary = rotary_of_call(model, run.paths.attention, run.paths.inside)
            terms, frequencies = split.terms(rotary), split.frequencies(rotary)
        except BadValue as error:
            terms, frequencies, remarks = None, None, (f"{error.gave} So there are no four terms.",)
        best = split.components[int(split.keys.argmax())]
        sources = None
        if best.layer is not None and best.head is not None:
            sources = split.sources("key", best.layer)[best.head].float()
        result = Why(
            layer, h, i, key, against, names, row.visible.nonzero().flatten(),
            float(row.scores[key] if key is not None else row.weights @ row.scores),
            float(row.weights[key if key is not None else row.weights.argmax()]),
            float(split.total), tuple(split.components), split.keys.float(), split.queries.float(),
            split.by_key.float(), sources, row.weights.float(), p.softcap, terms, frequencies,
            remarks, _split=split,
        )  # fmt: skip
        if check:
            result = replace(result, checks=check_parts(model, inputs, result, split))
    return result


def _contrast(row: ScoreRow, i: int, key: int | None, against: str | int) -> Tensor:
    """Return e - u, (Tk,): the key or the weights, minus what they are compared with."""
    seen = int(row.visible.sum())
    if key is not None and not bool(row.visible[key]):
        keys = row.visible.nonzero().flatten().tolist()
        some = f"{', '.join(map(str, keys[:8]))}{', ...' if seen > 8 else ''}"
        raise BadValue(
            f"Query {i} may not look at key {key}.",
            f"it looks at {seen} keys: {some}.",
            "pass one of these.",
        )
    total = row.weights.sum()
    of = row.weights / total if key is None else torch.zeros_like(row.raw)
    if key is not None:
        of[key] = 1.0
    if isinstance(against, str) and against == "nothing":
        return of
    others = row.visible.clone()
    if key is not None:
        others[key] = False
    rule = f"a contrast is against {', '.join(map(repr, AGAINST))}, or a visible key."
    if isinstance(against, str) and against not in AGAINST:
        raise BadValue(f"against={against!r} was passed.", rule, 'pass against="others".')
    if not isinstance(against, str):
        size = len(row.raw)
        other = as_index("A contrast with key", against, size, rule, "pass a position.")
        if not bool(others[other]):
            raise BadValue(
                f"against={against!r} was passed for query {i}.", rule, "pass another key."
            )
        others = torch.zeros_like(others)
        others[other] = True
    if not bool(others.any()) or (key is None and against == "weights"):
        raise BadValue(
            f"Query {i} looks at {seen} keys, and against={against!r}.",
            "a contrast needs something else to compare with.",
            'pass against="nothing" for the score itself.',
        )
    if against == "weights":
        return of - row.weights / total
    return of - others.double() / others.sum()
