"""What a user calls: one problem, whose sequence is cut over the ranks of a group."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import BadValue
from ..masks import Grid, Mask, everything
from ..problem.biases import Alibi, Bias, TensorBias, bias as as_bias
from ..problem.check import DEFAULTS, Options, make_problem
from ..problem.dropout import draw_seed
from ..problem.problem import Inputs, Problem
from ..torch_state import has_values, in_forward_mode, in_transform, requires_grad
from .cut import routes
from .dtensor import of_dtensors
from .exchange import check_heads, exchanged_ring
from .handshake import UNKNOWN, agree, telling_others
from .layouts import Layout, layout_of
from .local import Finished
from .ring import Ring
from .transport import Group, GroupTransport, Transport, rank_and_world

TIMEOUT = 300.0  # seconds


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    layout: Layout | str | None = None,
    key_layout: Layout | str | None = None,
    heads: int = 1,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    timeout: float = TIMEOUT,
) -> Tensor:
    """`clearhead.attention` of a sequence that is cut over the ranks of a group.

    Every rank passes its shard of the queries, keys and values and gets the output of its own
    queries, exactly: every mask, on absolute positions. Keys and values travel while the rank works
    on those that are there; what the mask leaves empty is neither computed nor sent. The error does
    not grow with the number of ranks; the last bits of the output depend on it.

    >>> x = ch.distributed.shard(x, group, "head-tail")  # doctest: +SKIP
    >>> ch.distributed.attention(x, x, x, mask=ch.causal, layout="head-tail")  # doctest: +SKIP

    Args:
        q: queries of this rank, (B, H, q, D). Leading dimensions may be missing from q, k and v.
            They may be DTensors, whose sequence is sharded along one dimension of their mesh.
        k: keys of this rank, (B, G, k, D); H is a multiple of G.
        v: values of this rank, (B, G, k, Dv).
        group: a process group, or a DeviceMesh of one dimension; None means all ranks, and for
            DTensors the ranks along which they are sharded.
        layout: which positions each rank holds: "contiguous", "head-tail", or a `Layout`. None
            means one range after the other, as long as the shards are.
        key_layout: the layout of keys and values; None means that of the queries.
        heads: how many ranks exchange heads for sequence; `plan` says how many to take. 1: none do,
            and keys and values travel round a ring of all ranks. All of them: each rank answers
            some of the heads on the whole sequence, without a ring. Between: teams of so many ranks
            exchange, and the teams form a ring. It divides the number of ranks and G.
        mask: who may look at whom, of all positions: `causal`, `documents(ids)` with the ids of the
            whole sequence, and so on; None means every query at every key.
        bias: added to the scaled scores: `alibi()`, or the rows of this rank's queries for all
            keys, a tensor that broadcasts to (B, H, q, Tk); None adds nothing.
        scale, softcap, sinks: as in `clearhead.attention`, the same on all ranks.
        dropout: the probability that a weight is dropped.
        seed: makes dropout a function of (seed, b, h, q, k), the same for any number of ranks. None
            means that torch's generator draws one on rank 0.
        timeout: seconds that a rank waits for another.

    Returns:
        (B, H, q, Dv), in the dtype of q, the output of this rank's queries; of DTensors a DTensor,
        (B, H, Tq, Dv), placed like q.

        Gradients of q, k and v are those of the shards, exact as the output. Those of sinks and of
        a bias are this rank's share, from its own queries: add them up over the ranks, as those of
        every weight that all ranks hold.

    Raises:
        BadValue, BadType: what `clearhead.attention` refuses, shards that do not fit the layout; on
            every rank, where the ranks were called with different arguments or one refused its own.
        RankLost: a rank died, stalled or failed; also a `BadValue` and a `ConnectionError`.

    Source: Liu, Zaharia & Abbeel 2023, "Ring Attention with Blockwise Transformers"; the layout
    "head-tail" Brandon et al. 2023, "Striped Attention", and zhuzilin's ring-flash-attention; heads
    for sequence Jacobs et al. 2023, "DeepSpeed Ulysses".
    """
    (q, k, v), group, back = of_dtensors(q, k, v, group)
    transport = GroupTransport(group, timeout)
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    return back(attend(transport, Call(options, layout, key_layout, heads), q, k, v))


@dataclass(frozen=True, eq=False)
class Call:
    """The keywords of a call: those of `clearhead.attention`, and how the sequence is cut."""

    options: Options = DEFAULTS
    layout: Layout | str | None = None
    key_layout: Layout | str | None = None
    heads: int = 1


def attend(transport: Transport, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ring, inputs = agreed(transport, call, q, k, v)
    with transport.answering():
        return ring.problem.shape_back(output(ring, inputs, call.heads))


def output(ring: Ring, inputs: Inputs, heads: int = 1) -> Tensor:
    """The output of the queries here, (B, H, q, Dv), with a gradient."""
    if heads > 1:
        of_heads, exchanged, team = exchanged_ring(ring, inputs, heads)
        return team.to_sequence(output(of_heads, exchanged), ring.routes.queries)
    numbers = None if ring.bias is None else ring.bias.numbers
    return _Attend.apply(ring, *inputs, numbers, ring.problem.sinks)


def agreed(
    transport: Transport,
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    text: bytes = UNKNOWN,
    **more: object,
) -> tuple[Ring, Inputs]:
    """The call as this rank sees it, once it is checked here and certain that all ranks made the
    same one; `more` is compared too."""
    must_be_eager(q, k, v)
    with telling_others(transport):
        p, bias, inputs = _checked(call, transport.world, q, k, v)
    draws = p.dropout and p.seed is None
    drawn = int(draw_seed()) if draws else 0
    compared = {"call": "forward", **more, **_described(p, bias, call)}
    layer = f" in {more['layer']}" if more.get("layer") else ""
    name = f"call {transport.history.meetings}{layer}"
    shards = agree(transport, compared, p.Tq, p.Tk, drawn, text=text)
    queries = _laid_out("queries", call.layout, shards.queries)
    of_keys = call.layout if call.key_layout is None else call.key_layout
    keys = _laid_out("keys", of_keys, shards.keys)
    grid = Grid(queries.length, keys.length, p.B, p.H)
    mask = call.options.mask
    check_on_all_positions(p, mask, bias, grid)
    with transport.answering():
        found = routes(everything if mask is None else mask, grid, queries, keys, transport.rank)
    seed = shards.drawn if draws else p.seed
    return Ring(replace(p, seed=seed), bias, found, transport, name), inputs


def must_be_eager(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises `BadValue` where tensors have no values that could be sent; nor can it be told."""
    if not has_values(q, k, v) or in_transform() or in_forward_mode():
        raise BadValue(
            "Attention over ranks was called inside a transform of torch.func, a trace or a fake "
            "mode, or on tensors without values.",
            "the ranks send each other numbers while the call runs.",
            "call it eagerly; gradients come from torch.autograd.",
        )


def _checked(
    call: Call, world: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Problem, Bias | None, Inputs]:
    """The problem of the shards, without mask and bias, whose positions are not known yet."""
    problem, inputs = make_problem(q, k, v, call.options._replace(mask=None, bias=None))
    bias = call.options.bias
    bias = bias if bias is None or isinstance(bias, Bias) else as_bias(bias)
    check_heads(call.heads, world, problem, bias)
    if isinstance(bias, TensorBias) and bias.as_4d().shape[2] not in (1, problem.Tq):
        raise BadValue(
            f"The bias has {bias.as_4d().shape[2]} rows of queries, and this rank has "
            f"{problem.Tq} queries.",
            "a bias of numbers holds the rows of this rank's queries, for the keys of all ranks.",
            "cut it with shard(bias, group, layout), which takes the rows of this rank.",
        )
    learned = torch.is_grad_enabled() and bias is not None and requires_grad(bias.numbers)
    return replace(problem, grad=problem.grad or learned), bias, inputs


def _described(p: Problem, bias: Bias | None, call: Call) -> dict[str, object]:
    """What must be the same on all ranks, by names that a user knows."""
    return {
        "clearhead": _version(),
        "torch": torch.__version__,
        "dtype": p.dtype,
        "heads and sizes": f"B={p.B} H={p.H} G={p.G} D={p.D} Dv={p.Dv}",
        "mask": call.options.mask,
        "bias": _rows_left_out(bias) if isinstance(bias, TensorBias) else bias,
        "scale": p.scale,
        "softcap": p.softcap,
        "sinks": p.sinks,
        "dropout": p.dropout,
        "seed": p.seed,
        "layout": call.layout,
        "key_layout": call.key_layout,
        "heads": call.heads,
        "gradient": "wanted" if p.grad else "not wanted",
    }


def _rows_left_out(bias: TensorBias) -> str:
    """A bias of numbers as all ranks have it, each with the rows of its queries."""
    batch, heads, _, keys = bias.as_4d().shape
    return f"a tensor of {batch} x {heads} x queries x {keys}"


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Any
    ) -> Tensor:
        out, lse = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        agree(ring.transport.everyone, {"call": f"backward of {ring.name}"}, 0, 0)
        learn_bias = ctx.needs_input_grad[4]
        with ring.transport.answering():
            finished = Finished(lse, out, dout.to(out.dtype).contiguous())
            found = ring.backward(q, k, v, finished, learn_bias)
        dbias, dsinks = found.bias, found.sinks
        if dbias is not None and ring.bias is not None and ring.bias.numbers is not None:
            numbers = ring.bias.numbers
            dbias = dbias.sum_to_size(numbers.shape) if isinstance(ring.bias, Alibi) else dbias
            dbias = dbias.reshape(numbers.shape).to(numbers.dtype)
        if dsinks is not None and ring.problem.sinks is not None:
            dsinks = dsinks.to(ring.problem.sinks.dtype)
        wide = zip((found.q, found.k, found.v), (q, k, v), strict=True)
        return None, *(x.to(like.dtype) for x, like in wide), dbias, dsinks


def _laid_out(name: str, layout: Layout | str | None, sizes: list[int]) -> Layout:
    """The layout by name, or the ranges in a row for None. Raises `BadValue` where the shards have
    other sizes."""
    if layout is None:
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        return Layout([[range(a, b)] for a, b in pairwise(ends)])
    found = layout_of(layout, sum(sizes), len(sizes))
    wanted = [len(held) for held in found.held]
    if wanted != sizes:
        rank = next(r for r, (a, b) in enumerate(zip(wanted, sizes, strict=True)) if a != b)
        raise BadValue(
            f"Rank {rank} has {sizes[rank]} {name}, and {layout!r} of {sum(sizes)} on {len(sizes)} "
            f"ranks gives it {wanted[rank]}.",
            "the shards are those of the layout.",
            f"cut with shard(x, group, {layout!r}), or pass layout=None for shards that follow "
            "each other as they are.",
        )
    return found


def check_on_all_positions(p: Problem, mask: Mask | None, bias: Bias | None, grid: Grid) -> None:
    """Mask and ALiBi speak of all positions, a bias of numbers of the rows here."""
    q, k, v = (
        torch.empty(size, dtype=p.dtype, device="meta")
        for size in (
            (p.B, p.H, grid.Tq, p.D),
            (p.B, p.G, grid.Tk, p.D),
            (p.B, p.G, grid.Tk, p.Dv),
        )
    )
    make_problem(q, k, v, Options(mask=mask))
    if isinstance(bias, Alibi):
        bias.check(grid)
    elif bias is not None:
        bias.check(grid._replace(Tq=p.Tq))


def _version() -> str:
    from .. import __version__

    return __version__


def shard(
    x: Tensor, group: Group = None, layout: Layout | str = "contiguous", dim: int = -2
) -> Tensor:
    """This rank's part of a tensor that every rank holds whole. Nothing is sent, so a rank may call
    it alone.

    Args:
        x: positions along `dim`, for example (B, H, T, D), or with dim=1 token ids (B, T).
        group: as in `attention`.
        layout: which positions each rank holds.
        dim: the dimension of the positions.

    Returns:
        `x` at the positions of this rank, in rising order; a view where they are one range.

    Raises `BadValue` for a layout of another length or for another number of ranks.
    """
    rank, world = rank_and_world(group)
    return layout_of(layout, x.shape[dim], world).held[rank].cut(x, dim)


def unshard(
    x: Tensor,
    group: Group = None,
    layout: Layout | str = "contiguous",
    dim: int = -2,
    timeout: float = TIMEOUT,
) -> Tensor:
    """All positions in their order, on every rank: the inverse of `shard`.

    Args:
        x: this rank's positions along `dim`.
        group, layout, dim: as in `shard`.
        timeout: seconds that a rank waits for another.

    Returns:
        The tensor whole. Its gradient is added up over the ranks: where each of them computes the
        same loss from it, divide that by their number.

    Raises:
        BadValue: shards that do not fit the layout or each other.
        RankLost: a rank died, stalled or failed.
    """
    return gathered(GroupTransport(group, timeout), x, layout, dim)


def gathered(transport: Transport, x: Tensor, layout: Layout | str, dim: int) -> Tensor:
    dim %= x.dim()
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    what = {"call": "unshard", "dtype": x.dtype, "other sizes": str(rest)}
    what |= {"dim": dim, "layout": layout}
    sizes = agree(transport, what, x.shape[dim], 0).queries
    found = _laid_out("positions", layout, sizes)
    with transport.answering():
        return _Gather.apply(transport, x, found, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transport: Transport, x: Tensor, layout: Layout, dim: int) -> Tensor:
        ctx.transport, ctx.layout, ctx.dim = transport, layout, dim
        mine = x.contiguous()
        sizes = [(*x.shape[:dim], len(held), *x.shape[dim + 1 :]) for held in layout.held]
        shards = [x.new_empty(size) for size in sizes]
        shards[transport.rank] = mine
        others = [r for r in range(transport.world) if r != transport.rank]
        outgoing, incoming = [(r, mine) for r in others], [(r, shards[r]) for r in others]
        transport.batch_isend_irecv(outgoing, incoming).wait()
        return layout.join(shards, dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        here, world = ctx.transport.rank, ctx.transport.world
        agree(ctx.transport, {"call": "backward of unshard", "sizes": str(list(dx.shape))}, 0, 0)
        with ctx.transport.answering():
            parts = [part.contiguous() for part in ctx.layout.split(dx, ctx.dim)]
            found = [torch.empty_like(parts[here]) for _ in range(world)]
            ctx.transport.all_to_all(parts, found)
        total = torch.zeros_like(parts[here])
        for part in found:
            total += part
        return None, total, None, None
