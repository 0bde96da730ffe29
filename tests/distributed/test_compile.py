"""torch.compile inside `sharded`: the graph breaks at attention, and numbers do not change."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import clearhead as ch
from clearhead.distributed import shard, sharded
from tests.distributed.processes import on_processes
from tests.distributed.test_refusals import T, block, error_of, layer, text
from tests.hf.test_models import build

Run = Callable[[torch.nn.Module, Tensor], Tensor]


def plainly(model: torch.nn.Module, x: Tensor) -> Tensor:
    return model(x)


def patched(model: torch.nn.Module, x: Tensor) -> Tensor:
    with ch.compat.patched():
        return model(x, x, x, need_weights=False)[0]


def errors(model: torch.nn.Module, run: Run = plainly, times: int = 2, **options) -> list[float]:
    """Return the errors of outputs and gradients of a compiled model, in blocks and between them,
    against those of the same model without ranks."""

    def gradients() -> Tensor:
        learned = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return learned

    x, found = text(), []
    one = run(model, x)
    one.square().sum().backward()
    expected = gradients()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", **options)
    for _ in range(times):
        found.append(run(compiled, x) - one)  # with a graph that blocks must not use
        with block() as here:
            out = run(compiled, here.shard(x, -2))
            found.append(here.unshard(out.detach()) - one)
        out.square().sum().backward()
        learned = gradients()
        dist.all_reduce(learned)
        found.append((learned - expected) / expected.abs().max())
    return [float(x.detach().abs().max()) for x in found]


class Windows(torch.nn.Module):
    """Two calls with other keywords, and code after the first that depends on its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)[:, None]
        y = ch.attention(y, y, y, mask=ch.causal & ch.window(before=5), softcap=3.0)
        y = self.b(y).sin()
        return ch.attention(y, y, y, bias=ch.alibi())[:, 0]


def of_module(rank: int, name: str) -> list[float]:
    torch.manual_seed(0)
    if name == "attention":
        return errors(layer(), times=1)
    if name == "two calls":
        return errors(Windows())
    if name == "transformer":
        rotary = ch.nn.RotaryPositions(8)
        return errors(ch.nn.TransformerBlock(32, 4, kv_heads=2, rotary=rotary), dynamic=True)
    return errors(torch.nn.MultiheadAttention(32, 4, batch_first=True), patched)


SLOW = "two calls", "transformer", "of torch"


@pytest.mark.parametrize(
    "name", ["attention", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
)
def test_a_module_computes_what_it_computes_uncompiled(name, tmp_path):
    for found in on_processes(2, of_module, tmp_path, name, seconds=250):
        assert len(found) == (6 if name in SLOW else 3) and max(found) < 1e-5, found


def compiled_backward(rank: int) -> float:
    """Return the error of gradients by compiled autograd, which traces backward passes too."""
    model, x = layer(), text()
    expected = torch.autograd.grad(model(x).square().sum(), model.parameters())
    with torch._dynamo.config.patch(compiled_autograd=True):
        with block() as here:
            loss = model(here.shard(x, -2)).square().sum()
        torch.compile(lambda: loss.backward(), backend="aot_eager")()
    off = []
    for p, whole in zip(model.parameters(), expected, strict=True):
        dist.all_reduce(p.grad)
        off.append(float((p.grad - whole).abs().max() / whole.abs().max()))
    return max(off)


@pytest.mark.slow
def test_compiled_autograd_does_not_trace_messages(tmp_path):
    for found in on_processes(2, compiled_backward, tmp_path, seconds=250):
        assert found < 1e-5


def refusals(rank: int) -> list[str]:
    """Return the errors of graphs that may not break, and of a model without positions."""

    def error_in_block(run: Callable[[object], object]) -> str:
        def do() -> None:
            with block() as here:
                run(here)

        torch._dynamo.reset()
        return error_of(do)

    x = text()
    whole = torch.compile(layer(), backend="eager", fullgraph=True)
    found = [error_in_block(lambda here: whole(here.shard(x, -2)))]
    found.append(error_in_block(lambda here: (whole if rank else layer())(here.shard(x, -2))))
    ids = torch.randint(1, 97, (1, T), generator=torch.Generator().manual_seed(3))
    for options in ({"fullgraph": True}, {}):
        model = build("llama", "AutoModelForCausalLM")
        model.set_attn_implementation("clearhead")
        for part in model.model.layers:
            part.compile(backend="eager", **options)
        found.append(error_in_block(lambda here, model=model: model(here.shard(ids))))
    dist.barrier()  # the first rank to end closes connections that the other may still use
    return found


def test_a_graph_that_may_not_break_is_one_error(tmp_path):
    here, there = on_processes(2, refusals, tmp_path)
    refusal = (
        "Attention over ranks or with a mask from outside the graph was called in torch.compile"
    )
    assert all(x.startswith(refusal) for x in (here[0], there[0], there[1], here[2], there[2]))
    assert here[1].startswith(f"Rank 1 left its block of distributed.sharded: {refusal}")
    assert here[3] == there[3] == "The model got no position_ids inside distributed.sharded."


def compiled_calls(rank: int) -> dict[str, object]:
    x = torch.randn(1, 2, T, 8, generator=torch.Generator().manual_seed(1))
    calls: dict[str, Callable[..., torch.Tensor]] = {
        "attention": lambda y: ch.distributed.attention(y, y, y, mask=ch.causal),
        "look": lambda y: ch.distributed.look(y, y, y, stats=["received"]).received,
        "decode": lambda y: ch.distributed.decode(
            y[:, :, :3] * 0, y, y, keys=ch.distributed.contiguous(T, 2)
        ),
        "shard": lambda y: ch.distributed.shard(y),
        "unshard": lambda y: ch.distributed.unshard(y),
    }
    found: dict[str, object] = {}
    for name, call in calls.items():

        def around(y: torch.Tensor, call=call) -> torch.Tensor:
            return call(y * 2).cos()

        y = x if name == "shard" else shard(x)
        y = y.clone().requires_grad_(name not in ("look", "decode"))
        torch._dynamo.reset()
        expected, got = around(y), torch.compile(around, backend="aot_eager")(y)
        off = [float((got - expected).detach().abs().max())]
        if y.requires_grad:
            grads = [torch.autograd.grad(out.sum(), y)[0] for out in (expected, got)]
            off.append(float((grads[0] - grads[1]).abs().max()))
        torch._dynamo.reset()
        full = torch.compile(around, backend="aot_eager", fullgraph=True)
        found[name] = max(off), error_of(lambda full=full, y=y: full(y))
    dist.barrier()
    return found


def test_a_compiled_call_breaks_the_graph_or_says_that_it_would(tmp_path):
    for found in on_processes(2, compiled_calls, tmp_path):
        assert len(found) == 5
        for name, (off, error) in found.items():
            assert off < 1e-5, name
            assert error.startswith("Attention over ranks or with a mask from outside")


def losses(
    rank: int, steps: int, dtype: torch.dtype, backend: str | None, rows: int = 2
) -> tuple[list[float], int]:
    """Train a small Llama in `dtype` with FSDP2 and activation checkpoints around its layers, which
    are compiled (None: not), and return the loss of each step, and the number of graphs. A step has
    two texts, and computes as many of them at a time as `rows` says."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build("llama", "AutoModelForCausalLM").train()
    model.set_attn_implementation("clearhead")
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    for number, part in enumerate(model.model.layers):
        if backend is not None:
            part.compile(backend=backend)
        model.model.layers[number] = fully_shard(checkpoint_wrapper(part), mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw, found = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        ids = torch.randint(1, 97, (2, 64), generator=draw)
        for t in range(2, 64):  # each token follows from the two before it
            ids[:, t] = (ids[:, t - 1] + ids[:, t - 2]) % 7 + 1
        found.append(0.0)
        for some in ids.split(rows):
            with sharded(64, layout="head-tail", timeout=60) as here:
                loss = model(**here.inputs(some, labels=some), use_cache=False).loss
                loss = loss * len(some) / len(ids)
                (loss * dist.get_world_size()).backward()  # FSDP2 averages over its ranks
                found[-1] += float(here.total(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def mean_difference(a: list[float], b: list[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_training_has_the_losses_of_one_rank_up_to_the_order_of_sums(tmp_path):
    def train(world: int, *arguments: object) -> list[tuple[list[float], int]]:
        folder = tmp_path / f"{world}{len(arguments)}"
        return on_processes(world, losses, folder, 100, torch.bfloat16, *arguments, seconds=250)

    ((one, compiled),) = train(1, "aot_eager")
    ((rows, uncompiled),) = train(1, None, 1)
    (two, on_each), same = train(2, "aot_eager")
    assert same == (two, on_each) and compiled == on_each > 0 == uncompiled
    assert one[0] > 4 and one[-1] < 2
    # Two ranks differ from one as one differs from itself, if it computes the texts one by one.
    assert 0 < mean_difference(two, one) < 2 * mean_difference(rows, one) < 0.01
