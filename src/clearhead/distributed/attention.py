"""Attention of a sequence that is cut over the ranks of a group: the functions that users call."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..core.errors import BadValue, as_index, must_be_of
from ..core.functional.eager import eagerly
from ..core.masks import Grid, Mask, everything
from ..core.problem.biases import Alibi, Bias, TensorBias, bias as as_bias
from ..core.problem.check import DEFAULTS, Options, make_problem
from ..core.problem.dropout import draw_seed
from ..core.problem.problem import Inputs, Problem
from ..core.torch_state import has_values, in_forward_mode, in_transform, requires_grad
from .cut import routes
from .dtensor import local_parts
from .exchange import check_heads, exchanged_ring, must_be_first_order
from .handshake import UNKNOWN, agree, reporting_errors
from .layouts import Layout, layout_of
from .local import QueryOutputs
from .ring import Ring
from .transport import Group, GroupTransport, Transport, rank_and_world

TIMEOUT = 300.0  # seconds


@eagerly
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
    """Compute `clearhead.attention` of a sequence that is cut over the ranks of a group.

    Every rank passes its shard of the queries, keys and values, and gets the exact output of its
    own queries. A mask is over absolute positions. Communication overlaps with computation. Blocks
    that the mask leaves empty are neither computed nor sent. The error does not grow with the
    number of ranks, but the last bits of the output depend on it.

    >>> x = ch.distributed.shard(x, group, "head-tail")  # doctest: +SKIP
    >>> ch.distributed.attention(x, x, x, mask=ch.causal, layout="head-tail")  # doctest: +SKIP

    Args:
        q: queries of this rank, (B, H, q, D). Leading dimensions may be missing from q, k and v.
            They may be DTensors whose sequence is sharded along one dimension of their mesh.
        k: keys of this rank, (B, G, k, D); H is a multiple of G.
        v: values of this rank, (B, G, k, Dv).
        group: a process group, or a DeviceMesh of one dimension; None means all ranks, and for
            DTensors the ranks along which they are sharded.
        layout: which positions each rank holds: "contiguous", "head-tail", or a `Layout`. None
            means consecutive ranges, with the lengths of the shards.
        key_layout: the layout of keys and values; None means that of the queries.
        heads: the number of ranks in a team; `plan` recommends one. The ranks of a team exchange
            heads for sequence by all-to-all, and the teams form a ring. With 1, all ranks form a
            ring, around which keys and values are sent. With the number of ranks, each rank
            computes some heads of the whole sequence, without a ring. It divides the number of
            ranks and G.
        mask: which queries may look at which keys, over all positions: `causal`, `documents(ids)`
            with the ids of the whole sequence, and so on; None means all.
        bias: added to the scaled scores: `alibi()`, or the rows of this rank's queries for all
            keys, a tensor that broadcasts to (B, H, q, Tk); None means no bias.
        scale, softcap, sinks: as in `clearhead.attention`, the same on all ranks.
        dropout: the probability that a weight is dropped.
        seed: makes dropout a function of (seed, b, h, q, k), the same for any number of ranks. None
            means that torch's generator draws one on rank 0.
        timeout: seconds that a rank waits for another.

    Returns:
        The output of this rank's queries, (B, H, q, Dv), in the dtype of q. For DTensors it is a
        DTensor, (B, H, Tq, Dv), placed like q.

        Gradients of q, k and v are those of the shards, and exact; they have none themselves
        (``create_graph=True`` is refused). Gradients of sinks and of a bias
        come only from this rank's queries: sum them over the ranks, like those of all replicated
        parameters.

    Raises:
        BadValue, BadType: if `clearhead.attention` raises it, or if shards do not fit the layout;
            on every rank if the arguments differ, or if one rank raises it.
        RankLost: if a rank died, stalled or failed; it is a `BadValue` and a `ConnectionError`.

    Source: Liu, Zaharia & Abbeel 2023, "Ring Attention with Blockwise Transformers"; the layout
    "head-tail" Brandon et al. 2023, "Striped Attention", and zhuzilin's ring-flash-attention; heads
    for sequence Jacobs et al. 2023, "DeepSpeed Ulysses".
    """
    (q, k, v), group, to_dtensor = local_parts(q, k, v, group)
    transport = GroupTransport(group, timeout)
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    return to_dtensor(attend(transport, Call(options, layout, key_layout, heads), q, k, v))


@dataclass(frozen=True, eq=False)
class Call:
    """The keywords of a call: those of `clearhead.attention`, and the layouts."""

    options: Options = DEFAULTS
    layout: Layout | str | None = None
    key_layout: Layout | str | None = None
    heads: int = 1


def attend(transport: Transport, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `attention` over any transport, in the caller's shape."""
    ring, inputs = agreed_ring(transport, call, q, k, v)
    with transport.computing():
        return ring.problem.shape_back(output(ring, inputs, call.heads))


def output(ring: Ring, inputs: Inputs, heads: int = 1) -> Tensor:
    """Compute the output of this rank's queries, (B, H, q, Dv), with a gradient."""
    if heads > 1:
        of_heads, exchanged, team = exchanged_ring(ring, inputs, heads)
        return team.to_sequence(output(of_heads, exchanged), ring.routes.queries)
    numbers = None if ring.bias is None else ring.bias.numbers
    return _Attend.apply(ring, *inputs, numbers, ring.problem.sinks)


def agreed_ring(
    transport: Transport, call: Call, q: Tensor, k: Tensor, v: Tensor, text: bytes = UNKNOWN,
    **more: object,
) -> tuple[Ring, Inputs]:  # fmt: skip
    """Check the call, compare it with those of the other ranks, and return this rank's part of it.
    `more` is compared too."""
    with reporting_errors(transport):
        must_be_eager(q, k, v)
        p, bias, inputs = _checked(call, transport.world, q, k, v)
    draws = p.dropout and p.seed is None
    drawn = int(draw_seed()) if draws else 0
    compared = {
        "call": "forward",
        **more,
        **described(p, call.options.mask, bias),
        "dropout": p.dropout,
        "seed": p.seed,
        "layout": call.layout,
        "key_layout": call.key_layout,
        "heads": call.heads,
        "gradient": "wanted" if p.grad else "not wanted",
    }
    layer = f" in {more['layer']}" if more.get("layer") else ""
    name = f"call {transport.history.meetings}{layer}"
    shards = agree(transport, compared, p.Tq, p.Tk, drawn, text=text)
    queries = _checked_layout("queries", call.layout, shards.queries)
    of_keys = call.layout if call.key_layout is None else call.key_layout
    keys = _checked_layout("keys", of_keys, shards.keys)
    grid = Grid(queries.length, keys.length, p.B, p.H)
    mask = call.options.mask
    check_on_all_positions(p, mask, bias, grid)
    with transport.computing():
        of_rank = routes(everything if mask is None else mask, grid, queries, keys, transport.rank)
    seed = shards.drawn if draws else p.seed
    return Ring(replace(p, seed=seed), bias, of_rank, transport, name), inputs


def must_be_eager(*tensors: object, verb: str = "Attention over ranks") -> None:
    """Raise `BadValue` if tensors have no values that can be sent."""
    values = has_values(*(x for x in tensors if isinstance(x, Tensor)))
    if not values or in_transform() or in_forward_mode():
        gave = f"{verb} was called inside torch.func or a trace, or on tensors without values."
        hint = "call it eagerly, and use torch.autograd for gradients."
        raise BadValue(gave, "the ranks exchange numbers during the call.", hint)


def _checked(
    call: Call, world: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Problem, Bias | None, Inputs]:
    """Check the problem of this rank's shards. Mask and bias are checked later, since the positions
    are not known yet."""
    problem, inputs = make_problem(q, k, v, call.options._replace(mask=None, bias=None))
    bias = call.options.bias
    bias = bias if bias is None or isinstance(bias, Bias) else as_bias(bias)
    check_heads(call.heads, world, problem, bias)
    if isinstance(bias, TensorBias) and bias.as_4d().shape[2] not in (1, problem.Tq):
        gave = f"The bias has {bias.as_4d().shape[2]} rows of queries, this rank {problem.Tq}."
        rule = "a bias tensor holds the rows of this rank's queries, for the keys of all ranks."
        hint = "cut it with shard(bias, group, layout), which selects the rows of this rank."
        raise BadValue(gave, rule, hint)
    bias_grad = torch.is_grad_enabled() and bias is not None and requires_grad(bias.numbers)
    return replace(problem, grad=problem.grad or bias_grad), bias, inputs


def described(p: Problem, mask: Mask | None, bias: object) -> dict[str, object]:
    """Return what must be equal on all ranks, by names that a user knows."""
    from .. import __version__

    of_bias = bias
    if isinstance(bias, TensorBias):  # the number of its rows differs between ranks
        batch, heads, _, keys = bias.as_4d().shape
        of_bias = f"a tensor of {batch} x {heads} x queries x {keys}"
    return {
        "clearhead": __version__,
        "torch": torch.__version__,
        "dtype": p.dtype,
        "heads and sizes": f"B={p.B} H={p.H} G={p.G} D={p.D} Dv={p.Dv}",
        "mask": mask,
        "bias": of_bias,
        "scale": p.scale,
        "softcap": p.softcap,
        "sinks": p.sinks,
    }


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
    @eagerly
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        must_be_first_order(ring.transport.everyone)
        q, k, v, out, lse = ctx.saved_tensors
        agree(ring.transport.everyone, {"call": f"backward of {ring.name}"}, 0, 0)
        bias_grad = ctx.needs_input_grad[4]
        with ring.transport.computing():
            outputs = QueryOutputs(lse, out, dout.to(out.dtype).contiguous())
            grads = ring.backward(q, k, v, outputs, bias_grad)
        dbias, dsinks = grads.bias, grads.sinks
        if dbias is not None and ring.bias is not None and ring.bias.numbers is not None:
            numbers = ring.bias.numbers
            dbias = dbias.sum_to_size(numbers.shape) if isinstance(ring.bias, Alibi) else dbias
            dbias = dbias.reshape(numbers.shape).to(numbers.dtype)
        if dsinks is not None and ring.problem.sinks is not None:
            dsinks = dsinks.to(ring.problem.sinks.dtype)
        wide = zip((grads.q, grads.k, grads.v), (q, k, v), strict=True)
        return None, *(x.to(like.dtype) for x, like in wide), dbias, dsinks


def _checked_layout(name: str, layout: Layout | str | None, sizes: list[int]) -> Layout:
    """Return the layout by name, or consecutive ranges for None. Raises `BadValue` if the shards
    have other sizes."""
    if layout is None:
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        return Layout([[range(a, b)] for a, b in pairwise(ends)])
    chosen = layout_of(layout, sum(sizes), len(sizes))
    wanted = [len(positions) for positions in chosen.positions]
    if wanted != sizes:
        rank = next(r for r, (a, b) in enumerate(zip(wanted, sizes, strict=True)) if a != b)
        gave = f"Rank {rank} has {sizes[rank]} of {sum(sizes)} {name}, and not {wanted[rank]}."
        rule = f"the shards have the sizes of the layout {layout!r} on {len(sizes)} ranks."
        hint = f"cut with shard(x, group, {layout!r}), or pass layout=None for consecutive shards."
        raise BadValue(gave, rule, hint)
    return chosen


def check_on_all_positions(p: Problem, mask: Mask | None, bias: Bias | None, grid: Grid) -> None:
    """Check the mask and ALiBi on all positions, and a bias tensor on this rank's rows."""
    q, k, v = (
        torch.empty(size, dtype=p.dtype, device="meta")
        for size in ((p.B, p.H, grid.Tq, p.D), (p.B, p.G, grid.Tk, p.D), (p.B, p.G, grid.Tk, p.Dv))
    )
    make_problem(q, k, v, Options(mask=mask))
    if isinstance(bias, Alibi):
        bias.check(grid)
    elif bias is not None:
        bias.check(grid._replace(Tq=p.Tq))


@eagerly
def shard(
    x: Tensor, group: Group = None, layout: Layout | str = "contiguous", dim: int = -2
) -> Tensor:
    """Return this rank's part of a tensor that every rank holds completely. Nothing is sent.

    Args:
        x: a tensor with positions along `dim`, for example (B, H, T, D), or with dim=1 token ids
            (B, T).
        group: as in `attention`.
        layout: which positions each rank holds.
        dim: the dimension of the positions.

    Returns:
        `x` at the positions of this rank, in increasing order, contiguous in memory.

    Raises `BadValue` for a layout of another length or of another number of ranks.
    """
    rank, world = rank_and_world(group)
    dim = dim_of("shard", x, dim)
    return layout_of(layout, x.shape[dim], world).part(x, rank, dim)


@eagerly
def unshard(
    x: Tensor,
    group: Group = None,
    layout: Layout | str = "contiguous",
    dim: int = -2,
    timeout: float = TIMEOUT,
) -> Tensor:
    """Gather all positions in order on every rank: the inverse of `shard`.

    Args:
        x: a tensor with this rank's positions along `dim`.
        group, layout, dim: as in `shard`.
        timeout: seconds that a rank waits for another.

    Returns:
        The complete tensor. Its gradient is summed over the ranks: if every rank computes the same
        loss from it, divide that loss by the number of ranks.

    Raises:
        BadValue: if shards do not fit the layout or each other.
        RankLost: if a rank died, stalled or failed.
    """
    return gathered(GroupTransport(group, timeout), x, layout, dim)


def gathered(transport: Transport, x: Tensor, layout: Layout | str, dim: int) -> Tensor:
    """Compute `unshard` over any transport."""
    with reporting_errors(transport):
        dim = dim_of("unshard", x, dim)
        must_be_eager(x, verb="unshard")
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    what = {"call": "unshard", "dtype": x.dtype, "other sizes": str(rest)}
    what |= {"dim": dim, "layout": layout}
    sizes = agree(transport, what, x.shape[dim], 0).queries
    checked = _checked_layout("positions", layout, sizes)
    with transport.computing():
        return _Gather.apply(transport, x, checked, dim)


def dim_of(verb: str, x: Tensor, dim: object) -> int:
    """Return a dimension of a tensor, counted from 0, or raise `BadType` or `BadValue`."""
    rule = "the positions are those of a dimension of a tensor."
    must_be_of(Tensor, verb, x, rule, "convert it first: torch.as_tensor(x).")
    rule = f"a tensor of shape {tuple(x.shape)} has dimensions up to {x.dim() - 1}."
    return as_index(f"{verb} along dim", dim, x.dim(), rule, "pass dim=1 for token ids (B, T).")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transport: Transport, x: Tensor, layout: Layout, dim: int) -> Tensor:
        ctx.transport, ctx.layout, ctx.dim = transport, layout, dim
        mine = x.contiguous()
        sizes = [(*x.shape[:dim], len(at), *x.shape[dim + 1 :]) for at in layout.positions]
        shards = [x.new_empty(size) for size in sizes]
        shards[transport.rank] = mine
        others = [r for r in range(transport.world) if r != transport.rank]
        outgoing, incoming = [(r, mine) for r in others], [(r, shards[r]) for r in others]
        transport.batch_isend_irecv(outgoing, incoming).wait()
        return layout.join(shards, dim)

    @staticmethod
    @eagerly
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        rank, world = ctx.transport.rank, ctx.transport.world
        must_be_first_order(ctx.transport)
        agree(ctx.transport, {"call": "backward of unshard", "sizes": str(list(dx.shape))}, 0, 0)
        with ctx.transport.computing():
            parts = ctx.layout.split(dx, ctx.dim)
            incoming = [torch.empty_like(parts[rank]) for _ in range(world)]
            ctx.transport.all_to_all(parts, incoming)
        total = torch.zeros_like(parts[rank])
        for part in incoming:
            total += part
        return None, total, None, None
