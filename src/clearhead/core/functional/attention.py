"""`attention`: check the arguments, choose an engine, compute."""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..engines import choice
from ..engines.choice import CORE, answer, choose, counts_with_output, kind_of, replay
from ..engines.cpu import direct
from ..errors import refuse_keywords
from ..masks import Mask
from ..problem.biases import Bias
from ..problem.check import Options, make_problem, must_have_values
from ..problem.problem import Inputs, Problem
from ..stats import Result, Statistics
from ..torch_state import is_autocast, no_autocast
from .ambient import ALONE, Ambient, EditedCall, FollowedCall, ambient, attend_over_ranks, visible


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
    """Compute scaled dot-product attention: ``softmax(scale * Q K^T + ...) V``.

    The order is scale, soft cap, bias, mask, softmax (in fp32 or wider), dropout, values.

    >>> import torch, clearhead as ch
    >>> q = torch.tensor([[0.0, 2.0 ** 0.5]]); k = torch.eye(2); v = torch.eye(2)
    >>> ch.attention(q, k, v)  # weights 1/(1+e) and e/(1+e)
    tensor([[0.2689, 0.7311]])

    Args:
        q: queries, (B, H, Tq, D). Leading dimensions may be missing from q, k and v alike. Under
            autocast, tensors of different dtypes are converted to the dtype of autocast.
        k: keys, (B, G, Tk, D); H is a multiple of G, and query head i reads KV head i // (H // G).
        v: values, (B, G, Tk, Dv).
        mask: which keys each query may look at, for example `causal`; None means all keys.
        bias: added to the scaled scores; a tensor that broadcasts to (B, H, Tq, Tk), or `alibi()`;
            None adds nothing.
        scale: multiplies Q K^T; None means 1/sqrt(D), and 1 is the unscaled attention.
        softcap: scores become softcap * tanh(scores / softcap); None means no cap. A cap of 2^100
            or more changes nothing and is ignored.
        sinks: one extra logit per query head, (H,), that takes weight and adds no value; None
            means no such logit.
        dropout: the probability that a weight is dropped; the others are scaled by 1 / (1 - p).
            None means 0.
        seed: makes dropout a function of (seed, b, h, q, k). It needs `dropout`, which may be 0 for
            evaluation. None means that torch's generator draws: up to 65536 weights (B H Tq Tk) one
            by one, as `nn.Dropout` does, and a seed for more weights if the C++ core computes them.
        engine: "auto", or the name of an engine, which then computes the call or raises.
        unknown: raises `BadType`, which names the keyword to use for a keyword of torch's function.

    Returns:
        (B, H, Tq, Dv), in the dtype of q. A fully masked query gets 0. Masked positions never
        affect the result, even if they contain NaN or infinity. An unmasked infinity propagates as
        in the formula; the engine `sdpa` with a mask (float64, GPU) returns NaN instead. The
        weighted sum of the values is divided last, so the output is infinite if the undivided sum
        exceeds the range of fp32.

        The C++ core (fp32, bf16 and fp16 on a CPU) returns the same bits for an example with any
        number of threads, alone or in a batch, forward and backward, on one instruction-set level.
        The numbers of heads and queries may change last bits. The last bits of other engines depend
        on all of these, as torch's do.

    Raises:
        BadValue, BadType: shapes, dtypes or values that do not fit; an engine that cannot compute
            the call.

    Source: Vaswani et al. 2017, "Attention Is All You Need"; heads that share keys Ainslie et al.
    2023, "GQA"; the soft cap Gemma Team 2024, "Gemma 2"; sinks Xiao et al. 2023, "Efficient
    Streaming Language Models with Attention Sinks", as a learned logit OpenAI 2025, "gpt-oss".
    """
    if unknown:
        refuse_keywords(attention, unknown)
    around = ambient()
    # 1. A plain call goes to the core after quick checks.
    if is_plain_call(bias, sinks, dropout, seed, engine, around):
        if (out := direct.output_of(q, k, v, mask, scale, softcap)) is not None:
            return out
    # 2. Inside `distributed.sharded` the ranks compute together.
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    if around.ranks is not None:
        return attend_over_ranks(q, k, v, options, engine, around)
    # 3. Any other call is checked, and computed by the chosen engine.
    problem, inputs = make_problem(q, k, v, options)
    return problem.shape_back(_output(problem, inputs, engine, around))


def is_plain_call(
    bias: object, sinks: object, dropout: object, seed: object, engine: str, around: Ambient
) -> bool:
    """Can `engines.direct` compute a call with these arguments?"""
    if not (around == ALONE and engine == "auto" and bias is sinks is seed is None):
        return False
    undropped = dropout is None or (type(dropout) is float and dropout == 0.0)
    return undropped and choice.ENGINES[0] is CORE


def _output(problem: Problem, inputs: Inputs, engine: str, around: Ambient) -> Tensor:
    """Compute the output, (B, H, Tq, Dv), by the first engine that can."""
    if inputs.q.is_meta:  # a shape without numbers
        choose(problem, engine)
        out = inputs.q.new_empty(*inputs.q.shape[:3], problem.Dv)
        for follower in around.followers:
            if follower.begin(problem, inputs):
                must_have_values(problem, "a statistic")
            follower.receive(FollowedCall(problem, inputs, out, inputs))
        return problem.with_zero_grad(out, *inputs) if problem.grad else out
    return compute(problem, inputs, engine, around).out


class Answer(NamedTuple):
    """The edited problem, its output (B, H, Tq, Dv), and its statistics by name."""

    problem: Problem
    out: Tensor
    stats: dict[str, Result]


def compute(
    problem: Problem, inputs: Inputs, engine: str, around: Ambient, statistics: Statistics = ()
) -> Answer:
    """Apply the editors of `around`, choose an engine, compute, and call the followers.

    The statistics of one follower are computed in the sweep of the output, if no other statistics
    are, and if they are those of the computed problem.
    """
    if torch._C._is_any_autocast_enabled() and is_autocast(problem.device):
        with no_autocast(problem.device):
            return compute(problem, inputs, engine, around, statistics)
    if not around.is_hooked and (kind := kind_of(problem, engine, statistics)) is not None:
        return Answer(problem, *replay(kind, problem, inputs, engine, statistics))
    edits: list[EditedCall] = []
    for editor in around.editors:
        edits.append(editor.edit(problem, inputs))
        problem, inputs = edits[-1].problem, edits[-1].inputs
    chosen = choose(problem, engine)
    computed = seen = problem, inputs
    if statistics or around.followers:
        seen = visible(edits, problem, inputs)
    if statistics:
        computed = seen
    requests = [follower.begin(*seen) for follower in around.followers]
    swept = None
    is_computed = seen[0] is problem and seen[1] is inputs
    if not statistics and is_computed and counts_with_output(chosen, problem):
        swept = next((number for number, request in enumerate(requests) if request), None)
    out, stats = answer(chosen, *computed, statistics if swept is None else requests[swept])
    for edit in edits:
        out = edit.output(out, problem, inputs, chosen.name)
    for number, follower in enumerate(around.followers):
        own = stats if number == swept else None
        follower.receive(FollowedCall(*seen, out, inputs, own))
    return Answer(problem, out, stats if swept is None else {})
