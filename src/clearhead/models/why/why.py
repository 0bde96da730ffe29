"""`why`: split the score of a query and a key into what wrote them.

Letters: C components, Tq queries, Tk keys, D head dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import BadValue, as_index
from ...core.functional.ambient import without_followers
from ...core.torch_state import own_dtypes
from ...nn.token_ids import as_batch
from ..follow.layers import must_be_runnable
from ..follow.refused_models import weights_must_be_whole
from ..inspect.edits import Edit, ablate, patch, path
from ..inspect.edits.path import without_paths
from ..weights.attention_weights import rotary_of_call
from .result import Check, Why
from .score_paths import Component, record_scores
from .split import Split

AGAINST = ("others", "weights", "nothing")
_AGAINST = f"a contrast is against {', '.join(map(repr, AGAINST))}, or {{}}."


def why(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    *,
    layer: int,
    head: int,
    query: int | None = None,
    key: int | None = None,
    over: str | None = None,
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
        over: "rows" splits the mean contrast over all queries that look at the key and at what it
            is compared with, without a query. Memory grows with Tq + Tk, not with their product.
        against: u. "others" is uniform over the other visible keys (in a row, over all), "weights"
            the weights of the query, a number one other key, and "nothing" is u = 0, the score.
        tokens: the tokens of the text, which the printed sentence names.
        check: also measure what the weight becomes without the largest parts, by path edits
            (`edits.path`). It runs the model eight times, up to the layer or to its end.

    With a soft cap, parts sum to what enters the cap. Raises `BadValue` if parts miss a score by
    more than 1e-4 of their absolute sum (8 roundings in 16-bit types). Raises it for an operation
    between the stream and the scores that is not known to be linear, and for a key that the query
    may not look at. Raises it also for a cache, several texts, padding, random numbers, and a
    compiled, sharded or offloaded model.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Kamath et al.
    2025, "Tracing Attention Computation Through Feature Interactions"; path edits Wang et al. 2022.
    """
    one_query = query is not None
    if over not in (None, "rows") or one_query == (over == "rows") or (check and not one_query):
        rule = 'it splits one query, whose weight a check measures, or with over="rows" their mean.'
        hint = 'pass a query, or over="rows" without a check.'
        raise BadValue(f"why got {query=}, {over=} and {check=}.", rule, hint)
    reasons = Reasons(model, inputs, layer)
    (layer,) = reasons.runs
    return reasons.why(layer, head, query, key, against, tokens, check)


class Reasons:
    """One run of a model, with which `why` splits any score of a layer; of all layers for None."""

    @torch.inference_mode(False)  # it needs gradients inside torch.no_grad(), too
    @torch.enable_grad()
    def __init__(
        self, model: nn.Module, inputs: Tensor | Mapping[str, Any], layer: int | None = None
    ) -> None:
        must_be_runnable("why", model, "why runs a model.", ", then inputs")
        weights_must_be_whole("why", model)
        self.model, self.inputs = model, as_batch(inputs)
        self.runs = {run.layer: run for run in record_scores(model, self.inputs, layer)}

    @torch.inference_mode(False)
    @torch.enable_grad()
    def why(
        self,
        layer: int,
        head: int,
        query: int | None,
        key: int | None = None,
        against: str | int = "others",
        tokens: Sequence[str] | None = None,
        check: bool = False,
    ) -> Why:
        """Split a score of this run; the arguments and errors are those of the function."""
        run = self.runs[layer]
        run.must_be_linear()
        p = run.problem
        h = as_index("Head", head, p.H)
        if query is not None:
            query = as_index("Query", query, p.Tq)
        if key is not None:
            key = as_index("Key", key, p.Tk)
        if not isinstance(against, str):
            rule = _AGAINST.format(f"a key from 0 to {p.Tk - 1}")
            against = as_index("A contrast with key", against, p.Tk, rule, "pass a position.")
        elif against not in AGAINST or (key is None and against == "weights"):
            rule = (
                _AGAINST.format("a key") + ' Without a key, "weights" are compared with themselves.'
            )
            raise BadValue(f"why got {against=} and {key=}.", rule, 'pass against="others".')
        if tokens is not None and len(tokens) != p.Tk:
            gave = f"why got {len(tokens)} tokens for {p.Tk} keys."
            hint = "pass the tokens of the text that the keys are from, or leave tokens out."
            raise BadValue(gave, "tokens names the keys of the call, in order.", hint)
        names = None if tokens is None else tuple(map(str, tokens))
        with own_dtypes():
            remarks: tuple[str, ...] = ()
            try:
                run.rotary = rotary_of_call(self.model, run.attention, run.inside)
            except BadValue as error:
                remarks = (f"{error.gave} So there are no four terms.",)
            split = Split(run, h, query, key, against)
            split.split()
            best = split.components[int(split.keys.argmax())]
            sources = None
            if best.layer is not None and best.head is not None:
                sources = split.sources("key", best.layer)[best.head].float()
            weights, terms = split.weights, None if remarks else split.terms()
            result = Why(
                layer, h, query, key, against, split.count, names,
                split.visible.nonzero().flatten(), split.score,
                float(weights[weights.argmax() if key is None else key]), float(split.total),
                tuple(split.components), split.keys.float(), split.queries.float(),
                split.by_key.float(), sources, weights.float(), p.softcap, terms,
                None if remarks else split.frequencies(), remarks, _split=split,
            )  # fmt: skip
            if check:
                result = replace(result, checks=check_parts(self.model, self.inputs, result, split))
        return result


_CHECKED = 3  # parts of each side
_LEAST = 0.01  # smaller differences of weights are neither a sign nor an order


def check_parts(
    model: nn.Module, inputs: Tensor | Mapping[str, Any], why: Why, split: Split
) -> tuple[Check, ...]:
    """Measure the weight without each of the largest heads and MLPs, in the keys and the query."""
    scale, (q,) = split.run.problem.scale, split.q
    raw = split.rows.raw[0]

    def weight(raw: Tensor) -> float:
        weights = split.rows.weights_of(raw[None], split.run.problem)[0]
        return float(weights[why.weights.argmax() if why.key is None else why.key])

    checks: list[Check] = []
    for of in ("key", "query"):
        every = why.largest(of, len(why.components))
        largest = [x for x in every if x[0].kind in ("head", "mlp")][:_CHECKED]
        if not largest:
            continue
        receiver = why.layer, split.g if of == "key" else why.head
        edits = [path(_sender(component), receiver, of) for component, _ in largest]
        with torch.no_grad(), without_followers():
            patches = without_paths(edits, model, inputs)
        lacks = split.by_key if of == "key" else scale * split.factors("query") @ split.k.T
        changes: list[tuple[float, float]] = []  # by the part and by the edit
        for (component, _), edit in zip(largest, patches, strict=True):
            assert isinstance(edit, patch)
            call = edit.recording[-1]
            edited_q, k = q, split.k
            if of == "key" and call.key is not None:
                k = call.key[0, split.g].double()
            elif call.query is not None:
                edited_q = call.query[0, split.h, why.query].double()
            frozen = weight(raw - lacks[why.components.index(component)])
            changes.append((frozen - why.weight, weight(scale * (k @ edited_q)) - why.weight))
        for x, change, agrees in zip(largest, changes, agreements(changes), strict=True):
            frozen, edited = (why.weight + by for by in change)
            checks.append(Check(x[0], of, x[1], why.weight, frozen, edited, agrees))
    return tuple(checks)


def agreements(changes: Sequence[tuple[float, float]]) -> list[bool]:
    """Return whether two measures of a change agree on its sign and its order among all."""
    others = [(0.0, 0.0), *changes]
    return [
        all((a - x) * (b - y) > 0 or min(abs(a - x), abs(b - y)) < _LEAST for x, y in others)
        for a, b in changes
    ]


def _sender(component: Component) -> Edit | str:
    if component.layer is None or component.head is None:
        return component.module
    return ablate(layers=[component.layer], heads=[component.head])
