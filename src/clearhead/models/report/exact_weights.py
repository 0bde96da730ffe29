"""Compute exact weights of a part of one head, for a text too long for a full matrix: `tile`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ...core.errors import BadValue, as_count, must_be_of
from ...core.errors.limits import MOST_TILE_CELLS
from ...core.functional.ambient import FollowedCall, capture_call, listening
from ...core.functional.matrix import Matrix
from ...core.functional.trace import Step, Trace
from ...core.problem.problem import Inputs, Problem
from ..follow.cross_attention import CallSite, TextTracker
from ..follow.layers import module_hooks
from .run import prepare
from .text_model import TextModel


def tile(
    model: "str | Path | TextModel | nn.Module",
    text: "str | Path | Tensor | Mapping[str, Tensor]",
    layer: int,
    head: int,
    queries: slice | range,
    keys: slice | range,
    *,
    tokens: Sequence[str] | None = None,
    decoder_tokens: Sequence[str] | None = None,
) -> Trace:
    """Run a model once, and return the exact weights of some queries of one head on some keys.

    A report pools the map of a long text; this function returns a part of it, cell by cell. The
    rows are normalised over all their keys, tile by tile, so no Tq x Tk matrix is formed.

    Args:
        model, text, tokens, decoder_tokens: as in `report`.
        layer: the number of the layer, as in the report.
        head: the number of the query head.
        queries, keys: consecutive positions.

    Returns:
        A `Trace` of one step, ``"weights"``, (1, 1, q, k), with the tokens of both sides. Every
        view can draw it.

    Raises:
        BadValue, BadType: any error of `report`; a layer, a head, queries or keys that do not
            exist; more than 2^20 cells.
    """
    layer, head = _number("layer", layer), _number("head", head)
    run = prepare(model, text)
    texts = TextTracker(run.tokens if tokens is None else tokens, decoder_tokens)
    sites: list[CallSite] = []

    def on_call(call: FollowedCall) -> None:
        sites.append(texts.call_site(call.problem))

    with torch.no_grad():
        with module_hooks(run.module, texts.stack.enter, texts.stack.leave), listening(on_call):
            call, count = capture_call(run.start, layer)
        if call is None:
            raise _absent("layer", layer, count)
        texts.check_tokens()
        return _exact_weights(*call, sites[layer], head, queries, keys, layer)


def _number(what: str, value: int) -> int:
    rule = f"{what} is its number in the report, from 0."
    return as_count(f"tile got {what}", value, rule, "pass a whole number.")


def _exact_weights(
    problem: Problem, inputs: Inputs, site: CallSite, head: int, queries: slice | range,
    keys: slice | range, layer: int,
) -> Trace:  # fmt: skip
    if not 0 <= head < problem.H:
        raise _absent("head", head, problem.H)
    q, k = _positions(queries, problem.Tq, "queries"), _positions(keys, problem.Tk, "keys")
    if len(q) * len(k) > MOST_TILE_CELLS:
        rule = f"a tile is shown cell by cell, so it has at most {MOST_TILE_CELLS:,}."
        hint = "pass fewer queries or keys; for larger maps use report, which pools them."
        raise BadValue(f"The tile has {len(q):,} x {len(k):,} cells.", rule, hint)
    block = Matrix(problem, inputs).block(slice(q.start, q.stop), slice(k.start, k.stop))
    weights = block.reshape(problem.B, problem.H, len(q), len(k))[:1, head : head + 1]
    step = Step(
        "weights",
        "exp(x − lse)",
        "The weight of each key in the output of a query; lse, the logarithm of the sum of "
        "exponentials, is over all keys of the text.",
        "b h q k",
        weights.clone(),
    )
    rows, columns = (
        None if tokens is None else tuple(tokens[i] for i in positions)
        for positions, tokens in ((q, site.query_tokens), (k, site.key_tokens))
    )
    about = (
        f"L{layer}H{head}, {_described(q, 'query', 'queries')} of {problem.Tq:,}, "
        f"{_described(k, 'key', 'keys')} of {problem.Tk:,}"
    )
    return Trace((step,), rows, columns, about, first={"h": head, "q": q.start, "k": k.start})


def _described(run: range, one: str, many: str) -> str:
    return f"{one} {run[0]}" if len(run) == 1 else f"{many} {run[0]} to {run[-1]}"


def _positions(part: slice | range, size: int, name: str) -> range:
    rule = f"{name} are consecutive positions, a slice or a range."
    must_be_of((slice, range), f"tile with {name}=", part, rule, f"pass slice(0, {min(size, 64)}).")
    step = 1 if part.step is None else part.step
    start = 0 if part.start is None else part.start
    stop = size if part.stop is None else part.stop
    if step != 1 or not 0 <= start < stop <= size:
        wanted = f"{name} {start} to {stop - 1}" if start < stop else f"no {name}"
        rule = f"{name} are one or more consecutive positions from 0 to {size - 1:,}."
        hint = f"pass for example {name} 0 to {min(size, 64) - 1}."
        raise BadValue(f"tile got {wanted}.", rule, hint)
    return range(start, stop)


def _absent(what: str, number: int, count: int) -> BadValue:
    rule = f"{what}s are numbered from 0, and there are {count}."
    hint = f"pass a number below {count}." if count else "pass a model that calls clearhead."
    return BadValue(f"tile got {what} {number}.", rule, hint)
