"""`attention`: check the arguments, choose an engine, compute."""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..engines import CORE, answer, choose
from ..engines.cpu import repeated_calls
from ..engines.engine import Engine
from ..errors import refuse_keywords
from ..masks import Mask
from ..problem.biases import Bias
from ..problem.check import Options, make_problem
from ..problem.problem import Inputs, Problem
from ..stats import Partial, Statistic
from ..torch_state import no_autocast
from .ambient import ALONE, Ambient, EditedCall, ambient, visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    engine: str = "auto",
    **unknown: NoReturn,
) -> Tensor:
    """Scaled dot-product attention: ``softmax(scale * Q K^T + ...) V``.

    The order is scale, soft cap, bias, mask, softmax (in fp32 or wider), dropout, values.

    >>> import torch, clearhead as ch
    >>> q = torch.tensor([[0.0, 2.0 ** 0.5]]); k = torch.eye(2); v = torch.eye(2)
    >>> ch.attention(q, k, v)  # weights 1/(1+e) and e/(1+e)
    tensor([[0.2689, 0.7311]])

    Args:
        q: queries, (B, H, Tq, D). Leading dimensions may be missing from q, k and v alike. Under
            autocast, three of one dtype keep it, and mixed ones are narrowed.
        k: keys, (B, G, Tk, D); H is a multiple of G, and query head i reads key head i // (H // G).
        v: values, (B, G, Tk, Dv).
        mask: who may look at whom, for example `causal`; None means everyone at everything.
        bias: added to the scaled scores; a tensor that broadcasts to (B, H, Tq, Tk), or `alibi()`;
            None adds nothing.
        scale: multiplies Q K^T; None means 1/sqrt(D), and 1 is the unscaled attention.
        softcap: scores become softcap * tanh(scores / softcap); None means no cap, and so does one
            of 2^100 or more, which would change nothing.
        sinks: one extra logit per query head, (H,), that takes weight and gives no value; None
            means no such logit.
        dropout: the probability that a weight is dropped; the others are scaled by 1 / (1 - p).
            None means 0.
        seed: makes dropout a function of (seed, b, h, q, k); it needs `dropout`, which may be 0, as
            outside of training. None means torch's generator decides:
            it draws up to 65536 weights (B H Tq Tk) one by one, as `nn.Dropout` would, and for more
            it draws a seed where the C++ core answers.
        engine: "auto", or an engine by name, which then answers or raises, and never falls back.
        unknown: no other keyword is taken; one of torch's function is refused with its name here.

    Returns:
        (B, H, Tq, Dv), in the dtype of q. A query that may see nothing gets 0. Sums over keys are
        divided by the sum of the weights at the end, so values whose sum leaves the range of fp32
        (1e38 over four keys) give infinity. What stands behind
        the mask changes nothing, NaN and infinity too; a row that sees an infinity is what the
        formula gives, but on `sdpa` under a mask (float64, GPU) it is NaN.

        From the C++ core (fp32, bf16, fp16 on a CPU), on one instruction-set level, an example has
        the same bits for any number of threads, and alone or in a batch, forward and backward.
        Other numbers of heads or queries may change last bits. The other engines are made of
        torch's products, whose last bits follow all of these.

    Raises:
        BadValue, BadType: shapes, dtypes or values that do not fit, an engine that cannot answer.

    Source: Vaswani et al. 2017, "Attention Is All You Need"; heads that share keys Ainslie et al.
    2023, "GQA"; the soft cap Gemma Team 2024, "Gemma 2"; sinks Xiao et al. 2023, "Efficient
    Streaming Language Models with Attention Sinks", as a learned logit OpenAI 2025, "gpt-oss".
    """
    if unknown:
        refuse_keywords(attention, unknown)
    # 1. A call like an earlier one goes to the core at once.
    around, signature = ambient(), None
    plain = bias is sinks is seed is None
    undropped = dropout is None or (type(dropout) is float and dropout == 0.0)
    if plain and undropped and engine == "auto" and around == ALONE:
        signature = repeated_calls.signature(q, k, v, mask, scale, softcap)
        if signature is not None and (out := repeated_calls.replay(signature, q, k, v)) is not None:
            return out
    # 2. Inside `distributed.sharded` the ranks answer together.
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    if around.ranks is not None:
        return around.ranks.attention(q, k, v, options, engine, around)
    # 3. Any other is checked, answered by the engine that is chosen, and remembered if it can be.
    problem, inputs = make_problem(q, k, v, options)
    if signature is None:
        return problem.shape_back(_output(problem, inputs, engine, around))
    chosen = choose(problem, engine)
    if chosen is CORE:
        out = repeated_calls.run_and_remember(signature, Inputs(q, k, v), mask, problem, inputs)
        if out is not None:
            return out
    return problem.shape_back(_output(problem, inputs, chosen, around))


def _output(problem: Problem, inputs: Inputs, engine: str | Engine, around: Ambient) -> Tensor:
    """The output, (B, H, Tq, Dv), by the first engine that can."""
    if inputs.q.is_meta:  # only shapes: nothing to compute
        _chosen(problem, engine)
        out = inputs.q.new_empty(*inputs.q.shape[:3], problem.Dv)
        return problem.with_zero_grad(out, *inputs) if problem.grad else out
    return answered(problem, inputs, engine, around).out


def _chosen(problem: Problem, engine: str | Engine) -> Engine:
    return engine if isinstance(engine, Engine) else choose(problem, engine)


class Answered(NamedTuple):
    """A call that was answered: the problem that was computed, with the active edits, the output,
    (B, H, Tq, Dv), and the statistics, None if none were requested."""

    problem: Problem
    out: Tensor
    stats: Partial | None


def answered(
    problem: Problem,
    inputs: Inputs,
    engine: str | Engine,
    around: Ambient,
    statistics: tuple[Statistic, ...] = (),
) -> Answered:
    """Choose an engine, compute with it under the edits of `around`, then call its listeners."""
    edits: list[EditedCall] = []
    for editor in around.editors:
        edits.append(editor.edit(problem, inputs))
        problem, inputs = edits[-1].problem, edits[-1].inputs
    chosen = _chosen(problem, engine)
    computed = seen = problem, inputs
    if statistics or around.listeners:
        seen = visible(edits, problem, inputs)
    if statistics:
        computed = seen
    if torch._C._is_any_autocast_enabled():  # a context manager takes as long as a small call
        with no_autocast(problem.device):
            out, stats = answer(chosen, *computed, statistics)
    else:
        out, stats = answer(chosen, *computed, statistics)
    assert out is not None
    for edit in edits:
        out = edit.output(out, problem, inputs, chosen.name)
    for on_call in around.listeners:
        on_call(*seen, out)
    return Answered(problem, out, stats)
