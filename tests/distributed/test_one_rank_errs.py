"""An error on one rank is one error on every rank, and the group remains usable."""

from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import clearhead as ch
from clearhead.distributed import attention, contiguous, decode, look, shard, unshard
from tests.distributed.processes import on_processes

WHOLE = torch.randn(1, 2, 13, 4, generator=torch.Generator().manual_seed(1))


def in_fake_mode(q: torch.Tensor) -> None:
    with FakeTensorMode():
        x = torch.empty(q.shape)
        attention(x, x, x)


def ring(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, timeout=60)


def team(q: torch.Tensor) -> torch.Tensor:
    x = q.repeat(1, 3, 1, 1)  # six heads for any team
    return attention(x, x, x, heads=torch.distributed.get_world_size(), timeout=60)


def gathered(q: torch.Tensor) -> torch.Tensor:
    return unshard(q, timeout=60)


def grad_of(call, q: torch.Tensor, order: str = "") -> None:
    out = call(q)
    seed = torch.ones_like(out)
    seed = seed.expand(5, *seed.shape) if order == "is_grads_batched" else seed
    torch.autograd.grad(out, q, seed, **({order: True} if order else {}))


CALLS = {
    "no tensor": lambda q: attention(None, q, q),
    "meta": lambda q: attention(*[q.to("meta")] * 3),
    "sizes": lambda q: attention(q[..., :3], q, q),
    "boolean mask": lambda q: attention(q, q, q, mask=torch.ones(13, 13) > 0),
    "bias rows": lambda q: attention(q, q, q, bias=torch.zeros(2, 12, 13)),
    "scale": lambda q: attention(q, q, q, scale="half"),
    "soft cap": lambda q: attention(q, q, q, softcap=-1.0),
    "sinks": lambda q: attention(q, q, q, sinks=torch.zeros(7)),
    "dropout": lambda q: attention(q, q, q, dropout=2.0),
    "heads": lambda q: attention(q, q, q, heads=7),
    "grad": lambda q: torch.func.grad(lambda x: attention(x, x, x).sum())(q),
    "vmap": lambda q: torch.vmap(lambda x: attention(x, x, x))(q[None]),
    "jvp": lambda q: torch.func.jvp(lambda x: attention(x, x, x), (q,), (q,)),
    "fake": in_fake_mode,
    "make_fx": lambda q: make_fx(lambda x: attention(x, x, x))(q.detach()),
    "stats in no list": lambda q: look(q, q, q, stats="lse"),
    "unknown statistic": lambda q: look(q, q, q, stats=["weight"]),
    "look at no tensor": lambda q: look(q, 3, q),
    "unshard no tensor": lambda q: unshard([1.0]),
    "unshard along no dimension": lambda q: unshard(q, dim=4),
    "unshard meta": lambda q: unshard(q.to("meta")),
    "decode without layout": lambda q: decode(q, q, q, keys="contiguous"),
    "decode with another layout": lambda q: decode(q, q, q, keys=contiguous(99, 7)),
    "decode with a bias": lambda q: decode(q, q, q, keys=contiguous(13, 2), bias=torch.zeros(1)),
}
LOCAL = {  # raised before a message is sent, which other ranks must not wait for
    "timeout": lambda q: attention(q, q, q, timeout="long"),
    "no time": lambda q: look(q, q, q, timeout=0),
    "group": lambda q: attention(q, q, q, group=3),
    "shard no tensor": lambda q: shard(3),
    "shard along no dimension": lambda q: shard(q, dim=-5),
}
ORDERS = "create_graph", "is_grads_batched"


def error_of(do, *given: object) -> str:
    try:
        do(*given)
    except ch.AttentionError as error:
        return error.gave
    return "nothing"


def is_usable(q: torch.Tensor) -> bool:
    found = unshard(attention(q, q, q, mask=ch.causal, timeout=60), timeout=60)
    return torch.allclose(found, ch.attention(WHOLE, WHOLE, WHOLE, mask=ch.causal), atol=1e-6)


def errors(rank: int, world: int) -> dict[str, tuple[str, bool]]:
    found, wrong = {}, rank == world - 1
    q = shard(WHOLE).requires_grad_()
    for name, call in CALLS.items():
        text = error_of(call if wrong else ring, q)
        found[name] = text, is_usable(q)
    for name, call in LOCAL.items():
        text = error_of(call, q) if wrong else ""
        found[name] = text, is_usable(q)
    for order, call in product(ORDERS, (ring, team, gathered)):
        text = error_of(grad_of, call, q, order if wrong else "")
        found[f"{order}, {call.__name__}"] = text, is_usable(q)
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_error_on_one_rank_is_one_on_every_rank(world, tmp_path):
    *others, wrong = on_processes(world, errors, tmp_path, world)
    for name, (text, usable) in wrong.items():
        assert usable and text != "nothing", name
        for found in others:
            there, there_usable = found[name]
            reported = f"Rank {world - 1} raised an error in its call: {text}"
            one = there == text or (there and reported.startswith(there))
            assert there_usable and (name in LOCAL or one), f"{name}: {text}; {there}"
    for order in ORDERS:
        assert wrong[f"{order}, ring"][0] == (
            f"A gradient over ranks was requested with {order}=True."
        )
