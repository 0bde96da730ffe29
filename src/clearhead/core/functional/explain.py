"""`explain`: compute attention step by step, and return every matrix in a `Trace`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from torch import Tensor

from ..engines import CORE, choose, reference
from ..errors import BadType, BadValue, is_iterable, refuse_keywords
from ..masks import Mask
from ..problem.biases import Bias
from ..problem.check import Options, make_problem, must_have_values
from ..problem.dropout import draw_seed
from ..problem.problem import Inputs, Problem
from ..torch_state import no_autocast
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
    problem: Problem,
    inputs: Inputs,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    engine: str = "auto",
) -> Trace:
    """Explain a problem that is already checked, such as one that a listener received."""
    must_have_values(problem, "explain")
    named = None if engine in ("auto", "steps") else choose(problem, engine)
    if named is not None and problem.dropout and problem.seed is None:
        raise BadValue(
            f"explain got dropout={problem.dropout} without a seed, and engine={engine!r}.",
            "without a seed each engine draws for itself, so the output would not match the shown "
            "weights.",
            "pass a seed=, or leave engine= out.",
        )
    if reasons := reference.too_large(problem):
        raise BadValue(
            f"explain got {problem.describe()}: it {reasons[0]}.",
            "explain holds every matrix it shows.",
            "explain fewer tokens, heads or batches, or use matrix(q, k).rows([...]), which holds "
            "only the requested rows.",
        )
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
    return BadValue(
        f"{name} has {count} entries for {size} positions.",
        "every position has one token as its label.",
        f"pass {size} tokens, or none.",
    )


def labels_of(
    Tq: int, Tk: int, tokens: Sequence[str] | None, key_tokens: Sequence[str] | None
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return the labels of queries and keys, after the checks of `explain`."""
    if key_tokens is None and tokens is not None and Tq == Tk:
        key_tokens = tokens
    for name, labels, size in (("tokens", tokens, Tq), ("key_tokens", key_tokens, Tk)):
        if isinstance(labels, str) or not (
            labels is None or (hasattr(labels, "__len__") and is_iterable(labels))
        ):
            raise BadType(
                f"{name} is {'one string, ' * isinstance(labels, str)}{labels!r}.",
                "tokens are a list of strings, one for each position.",
                f"split it first, for example {name}=text.split().",
            )
        if labels is not None and len(labels) != size:
            raise wrong_count(name, len(labels), size)
    return (
        None if tokens is None else tuple(map(label, tokens)),
        None if key_tokens is None else tuple(map(label, key_tokens)),
    )


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
