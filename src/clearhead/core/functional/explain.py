"""`explain`: compute attention step by step, and return every matrix in a `Trace`.

`explain_weights` returns a `Trace` of weights that another program computed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ..engines import reference
from ..engines.choice import CORE, choose
from ..errors import BadType, BadValue, is_iterable, kind_of, must_be_strided, refuse_keywords
from ..masks import Mask
from ..problem.biases import Bias
from ..problem.check import Options, make_problem, must_have_values
from ..problem.dropout import draw_seed
from ..problem.problem import Inputs, Problem
from ..torch_state import has_values, no_autocast
from .ambient import must_not_be_sharded
from .trace import Step, Trace


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    engine: str = "auto",
    **unknown: NoReturn,
) -> Trace:
    """Compute attention step by step, and return a `Trace` with every intermediate matrix.

    The steps are `query`, `key`, `value`, `scores`, `scaled`, `capped`, `biased`, `masked`,
    `weights` (the softmax), `dropped` and `output` (the context vectors). A step that the call does
    not need is left out.

    Args:
        tokens: labels of the queries, and of the keys if Tq = Tk and `key_tokens` is None;
            None means numbers.
        key_tokens: labels of the keys.
        engine: the name of an engine that computes `output`; the reference computes all other
            steps.

    All other arguments are those of `attention`. Three dimensions are (H, T, D), so pass a batch of
    one head as x.unsqueeze(1).

    Raises:
        BadValue, BadType: as `attention`; labels that are not a list with one string for each
            position; matrices that do not fit in memory; meta tensors; dropout without a seed with
            another engine, because each engine draws for itself.
    """
    if unknown:
        refuse_keywords(explain, unknown)
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    must_not_be_sharded("explain")
    problem, inputs = make_problem(q, k, v, options)
    return explain_problem(problem, inputs, tokens, key_tokens, engine)


def explain_problem(
    problem: Problem, inputs: Inputs, tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None, engine: str = "auto",
) -> Trace:  # fmt: skip
    """Explain a problem that is already checked, such as one that a listener received."""
    must_have_values(problem, "explain")
    named = None if engine in ("auto", "steps") else choose(problem, engine)
    if named is not None and problem.dropout and problem.seed is None:
        gave = f"explain got dropout={problem.dropout} without a seed, and engine={engine!r}."
        rule = "without a seed each engine draws anew, so output and weights would not match."
        raise BadValue(gave, rule, "pass a seed=, or leave engine= out.")
    if reasons := reference.too_large(problem):
        rule = "explain holds every matrix it shows."
        hint = "explain fewer tokens, heads or batches, or hold few rows: matrix(q, k).rows([...])."
        raise BadValue(f"explain got {problem.describe()}: it {reasons[0]}.", rule, hint)
    queries, keys = labels_of(problem.Tq, problem.Tk, tokens, key_tokens)
    if engine == "auto" and problem.dropout and problem.seed is None and not CORE.why_not(problem):
        problem = replace(problem, seed=int(draw_seed()))  # as the core does
    steps: list[Step] = []
    with no_autocast(problem.device):
        for step in reference.steps(problem, inputs):
            if step.name == "output" and named is not None:
                step = replace(step, tensor=named.compute(problem, inputs))
            if step.name == "weights":
                step = replace(step, why=step.why + _note_on_sums(problem, step.tensor))
            steps.append(_without_added_dims(step, problem.input_dims))
    answered = "" if named is None else f", answered by {named.name}"
    settings = {
        "mask": repr(problem.mask),
        "scale": problem.scale,
        "softcap": problem.softcap,
        "bias": None if problem.bias is None else repr(problem.bias),
        "dropout": problem.dropout,
        "seed": problem.seed,
    }
    return Trace(tuple(steps), queries, keys, problem.describe() + answered, settings)


def _note_on_sums(problem: Problem, weights: Tensor) -> str:
    """Return a note on rows of these weights that do not sum to 1, or ""."""
    note = "" if problem.sinks is None else " What is missing went to the sink."
    if problem.masked and bool((weights == 0).all(-1).any()):
        note += " A query that may see nothing gives 0."
    return note


def wrong_count(name: str, count: int, size: int) -> BadValue:
    """Return the error for `count` labels of `size` positions."""
    gave = f"{name} has {count} entries for {size} positions."
    return BadValue(gave, "every position has one token as label.", f"pass {size} tokens, or none.")


def labels_of(
    Tq: int, Tk: int, tokens: Sequence[str] | None, key_tokens: Sequence[str] | None
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return the labels of queries and keys, after the checks of `explain`."""
    if key_tokens is None and tokens is not None and Tq == Tk:
        key_tokens = tokens
    return _labels("tokens", tokens, Tq), _labels("key_tokens", key_tokens, Tk)


def _labels(name: str, tokens: Sequence[str] | None, size: int) -> tuple[str, ...] | None:
    if tokens is None:
        return None
    is_text = isinstance(tokens, str)
    is_list = hasattr(tokens, "__len__") and is_iterable(tokens) and not is_text
    if not is_list:
        rule = "tokens are a list of strings, one for each position."
        hint = f"split it first, for example {name}=text.split()."
        raise BadType(f"{name} is {'one string, ' * is_text}{tokens!r}.", rule, hint)
    if len(tokens) != size:
        raise wrong_count(name, len(tokens), size)
    return tuple(map(label, tokens))


def label(token: object) -> str:
    """Convert a token to a string; a `Token` is returned as it is."""
    if isinstance(token, str):
        return token
    return str(token.item() if isinstance(token, Tensor) and token.dim() == 0 else token)


def _without_added_dims(step: Step, rank: int) -> Step:
    """Remove the leading dimensions that the caller's tensors did not have."""
    drop = 4 - rank
    if not drop:  # keep the tensor from which the output was computed, for its gradient
        return step
    tensor = step.tensor.reshape(step.tensor.shape[drop:])
    return replace(step, axes=" ".join(step.axes.split()[drop:]), tensor=tensor)


ROUNDING = 2.0**-7  # the error of a sum of weights that were rounded to bfloat16
WHY = "Another program computed these weights. Their scores and values are unknown."


def explain_weights(
    weights: Tensor, *, tokens: Sequence[str] | None = None, key_tokens: Sequence[str] | None = None
) -> Trace:
    """Return a `Trace` of attention weights that another program computed, for the views.

    Its only step is `weights`. Queries, keys, values and scores do not follow from the weights, so
    views that need them refuse the trace. `report_weights` accepts the layers of a model.

    Args:
        weights: the softmax, (B, H, Tq, Tk); leading dimensions may be missing. A tensor, or an
            array that NumPy reads.
        tokens: labels of the queries, and of the keys if Tq = Tk and `key_tokens` is None; None
            means numbers.
        key_tokens: labels of the keys.

    A row may sum to less than 1, as with sinks, or to 0 for a fully masked query; `Step.why` has
    the smallest sum.

    Raises:
        BadValue, BadType: anything else than numbers in two to four dimensions; a negative number,
            NaN, or a row that sums to more than 1; labels that do not fit.
    """
    tensor = _as_tensor(weights)
    if not 2 <= tensor.dim() <= 4:
        rule = "the weights of a layer are (Tq, Tk), (H, Tq, Tk) or (B, H, Tq, Tk)."
        hint = "for several layers, pass report_weights a list with the weights of each."
        raise BadValue(f"The weights have the shape {tuple(tensor.shape)}.", rule, hint)
    sums = _checked_sums(tensor)
    Tq, Tk = tensor.shape[-2:]
    queries, keys = labels_of(Tq, Tk, tokens, key_tokens)
    letters, names = "bhqk"[-tensor.dim() :], ("B", "H", "Tq", "Tk")[-tensor.dim() :]
    sizes = " ".join(f"{name}={n}" for name, n in zip(names, tensor.shape, strict=True))
    about = f"{sizes}, weights that another program computed"
    step = Step("weights", "", WHY + sums, " ".join(letters), tensor)
    return Trace((step,), queries, keys, about, {})


def _as_tensor(weights: object) -> Tensor:
    """Return the weights as a tensor. Raises `BadType` for anything but an array of numbers."""
    if weights is None or isinstance(weights, list | tuple):
        rule = "the weights of a layer are a tensor, or an array that NumPy reads."
        hint = "pass the element of one layer, or all layers to report_weights."
        if weights is None:
            hint = 'transformers returns None unless the model has attn_implementation="eager".'
        raise BadType(f"The weights are {kind_of(weights)}.", rule, hint)
    try:
        tensor = weights if isinstance(weights, Tensor) else torch.from_numpy(np.array(weights))
    except TypeError:  # a dtype that torch does not have
        tensor = None
    if tensor is None or not tensor.is_floating_point() or not has_values(tensor):
        kind = " ".join(str(getattr(weights, name, "")) for name in ("dtype", "device")).strip()
        gave = f"The weights are {kind_of(weights)}{f' of {kind}' if kind else ''}."
        rule = "the weights of a layer are floating-point numbers, with their values."
        raise BadType(gave, rule, "pass the output of the softmax.")
    must_be_strided("weights", tensor)
    return tensor.detach()


def _checked_sums(weights: Tensor) -> str:
    """Return a note on rows that sum to less than 1, or "". Raises `BadValue` for anything but
    weights."""
    if not weights.numel():
        return ""
    least, largest = (float(x) for x in weights.aminmax())
    if not (least >= 0 and largest < float("inf")):  # NaN compares as False
        rule = "weights are the output of a softmax: finite, and 0 or more."
        hint = "pass weights, not scores; if masked queries have NaN, pass weights.nan_to_num(0)."
        raise BadValue(f"The weights are between {least:g} and {largest:g}.", rule, hint)
    sums = weights.sum(-1, dtype=torch.float64)
    if float(sums.max()) > 1 + ROUNDING:
        rule = "the weights of a query on all keys sum to at most 1."
        hint = "queries are rows and keys are columns; if there was dropout, use model.eval()."
        raise BadValue(f"A row of the weights sums to {float(sums.max()):.4g}.", rule, hint)
    rest = sums[(sums > 0) & (sums < 1 - ROUNDING)]
    if not rest.numel():
        return ""
    less = f" Some rows sum to less than 1, one to {float(rest.min()):.2f}: "
    return f"{less}the rest is not on these keys, as with a sink."
