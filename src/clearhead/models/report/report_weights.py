"""`report_weights`: a `Report` of attention weights that another program computed.

The softmax of the logarithms of weights is these weights. So each layer becomes a problem of
attention with these logarithms as its bias, of which the report collects what it collects of a
model: statistics, and roles tested against chance.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...core.errors import AttentionError, BadType, BadValue
from ...core.functional.explain import ROUNDING, explain_weights, labels_of
from ...core.functional.trace import Trace
from ...core.masks import dense
from ...core.masks.text_positions import BY_COLUMN
from ...core.problem.biases import bias
from ...core.problem.check import Options, make_problem
from ...core.problem.problem import Inputs, Problem
from ..follow.cross_attention import CallSite, TextTracker
from .collect import Collector
from .findings import Layer
from .norms import Norms
from .result import Report

NO_VALUES = Norms(None, "Another program computed the weights, and their values are unknown.")
LEAST_LOG, LEAST_REST = -1e4, 1e-12  # exp(-1e4) is 0


def report_weights(
    layers: Sequence[Tensor] | Tensor,
    *,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    name: str = "a model",
) -> Report:
    """Report on the attention weights of one text that another program computed.

    It has what `report` finds in the weights: statistics, roles, maps. The traces of its layers
    have the step `weights` alone, because nothing else follows from weights. A cell counts as
    masked if its weight is 0 in every head of the layer.

    Args:
        layers: the weights of each layer, (1, H, Tq, Tk), where leading dimensions may be missing:
            the `attentions` of a model of transformers that was called with
            ``output_attentions=True``, tensors, or arrays that NumPy reads. A tensor is one layer.
        tokens: labels of the queries, and of the keys if `key_tokens` is None; None means numbers.
        key_tokens: labels of the keys in cross-attention, from one text into another.
        name: the name of the model in the report.

    Raises:
        BadValue, BadType: as `explain_weights`; no layers, or empty ones; a batch; Tq != Tk without
            `key_tokens`.
    """
    every: Sequence[Any] = layers if isinstance(layers, list | tuple) else [layers]
    missing = [number for number, weights in enumerate(every) if weights is None]
    if missing or not every:
        gave = f"report_weights got no weights of layer {missing[0] if missing else 0}."
        hint = 'load the model with attn_implementation="eager", and pass output_attentions=True.'
        raise BadType(gave, "it takes the attention weights of each layer.", hint)
    traces = [_trace(number, x, tokens, key_tokens) for number, x in enumerate(every)]
    collector = Collector(_Texts(tokens, key_tokens))
    for trace in traces:
        collector.add_layer(collector.begin(*_as_problem(trace["weights"]), norms=NO_VALUES))
    report = collector.report(name)
    return replace(report, layers=tuple(map(_of_weights, report.layers, traces)))


class _Texts(TextTracker):
    """The texts of the queries and of the keys, which are the same for all layers."""

    def __init__(self, tokens: Sequence[str] | None, key_tokens: Sequence[str] | None) -> None:
        super().__init__(tokens)
        self.key_tokens = key_tokens

    def call_site(self, problem: Problem) -> CallSite:
        queries = self._tokens("tokens", problem.Tq)
        _, keys = labels_of(problem.Tq, problem.Tk, queries, self.key_tokens)
        crosses = self.key_tokens is not None and keys != queries
        return CallSite("", crosses, queries, keys, BY_COLUMN)


def _trace(
    number: int, weights: Tensor, tokens: Sequence[str] | None, key_tokens: Sequence[str] | None
) -> Trace:
    """Return the trace of a layer, whose number is in the errors."""
    try:
        trace = explain_weights(weights, tokens=tokens, key_tokens=key_tokens)
    except AttentionError as error:
        raise type(error)(f"Layer {number}: {error.gave}", error.rule, error.hint) from None
    shape = trace.step("weights").shape
    if (trace.size("b") or 1) > 1:
        gave = f"Layer {number} has the shape {shape}, a batch of {shape[0]}."
        hint = "pass [weights[:1] for weights in layers]; if layers is one tensor, list(layers)."
        raise BadValue(gave, "a report describes one text.", hint)
    if 0 in shape or (shape[-1] != shape[-2] and key_tokens is None):
        rule = "a report has one token or more, and as many keys as queries, or key_tokens=."
        hint = "for keys of another text, pass their tokens as key_tokens=."
        raise BadValue(f"Layer {number} has the shape {shape}.", rule, hint)
    return trace


def _as_problem(weights: Tensor) -> tuple[Problem, Inputs]:
    """Return a problem of attention with these weights.

    What a row lacks to 1 is the weight of a sink.
    """
    exact = weights.cpu().double()
    exact = exact.reshape(1, -1, *exact.shape[-2:])
    _, H, Tq, Tk = exact.shape
    keep = (exact > 0).any(1, keepdim=True)
    rest = 1 - exact.sum(-1, keepdim=True)
    logits, sinks = exact.log().clamp(min=LEAST_LOG), None
    if bool(((rest > ROUNDING) & keep.any(-1, keepdim=True)).any()):
        logits, sinks = logits - rest.clamp(min=LEAST_REST).log(), exact.new_zeros(H)
    mask = None if bool(keep.all()) else dense(keep=keep)
    q, k = (exact.new_zeros(1, H, n, 1) for n in (Tq, Tk))
    return make_problem(q, k, k, Options(mask, bias(logits), sinks=sinks))


def _of_weights(layer: Layer, trace: Trace) -> Layer:
    """Return the layer with the trace of its weights in place of that of the problem."""
    heads = tuple(range(len(layer.heads)))
    return replace(layer, trace=trace, traced_heads=heads, problem=trace.about)
