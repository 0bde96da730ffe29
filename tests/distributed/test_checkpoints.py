"""Activation checkpoints in a block: recomputed in any thread and after it, gradients are exact."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy as Policy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import clearhead as ch
from clearhead.core.functional.ambient import token_positions
from clearhead.distributed import shard, sharded
from clearhead.distributed.checkpoints import open_checkpoints
from clearhead.distributed.transport import history_of
from tests.distributed.processes import on_processes
from tests.distributed.test_refusals import error_of, in_a_thread
from tests.hf.test_models import build

T = 24
Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
WHEN = "inside", "after", "thread inside", "thread after"


class Toy(torch.nn.Module):
    """Two layers, with positions that are added outside of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(8, 32)
        self.layers = torch.nn.ModuleList(
            ch.nn.TransformerBlock(32, 4, kv_heads=2, rotary=ch.nn.RotaryPositions(8))
            for _ in range(2)
        )
        self.double()

    def embedded(self, x: Tensor) -> Tensor:
        """Add positions, which have no attention and depend on the ranks."""
        x = self.embed(x).sin()
        at = token_positions(0, x.shape[-2], torch.long, x.device).to(x)
        return (x * torch.sin(at)[:, None]).tanh()

    def run(self, x: Tensor, outer: Run, inner: Run) -> Tensor:
        def layers(x: Tensor) -> Tensor:
            x = inner(self.layers[0], x)
            return inner(self.layers[1], inner(lambda y: y.sin().tanh(), x))

        return outer(layers, outer(self.embedded, x))

    def gradients(self) -> Tensor:
        found = torch.cat([p.grad.flatten() for p in self.parameters()])
        self.zero_grad()
        return found


class Own(torch.autograd.Function):
    """A checkpoint as other libraries write it."""

    @staticmethod
    def forward(ctx, layers, x: Tensor) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layers(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layers(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad


def plain(layers: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layers(x)


def stored(ctx: object, operator: object, *passed: object, **keywords: object) -> Policy:
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    return Policy.MUST_SAVE if operator in products else Policy.PREFER_RECOMPUTE


def on_module(layers: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Checkpoint by hooks of a module, without a call of `checkpoint` on the stack."""
    from torch.distributed._composable import checkpoint as of_module

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layers(x)

    module = Module()
    of_module(module)
    return module(x)


def offloaded(layers: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def on_cpu(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return layers(x)

    return checkpoint(on_cpu, x, use_reentrant=False)


CHECKPOINTS: dict[str, Run] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "other": partial(checkpoint, use_reentrant=False),
    "to the end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, stored),
    ),
    "own function": Own.apply,
    "module": on_module,
    "offloaded": offloaded,
}


def in_turn(run: Callable[[object], Tensor], when: str, layout: str = "head-tail") -> None:
    """Run forward in a block, and backward when a test wants it."""
    with sharded(T, layout=layout, timeout=20) as here:
        loss = run(here)
        if when == "inside":
            loss.backward()
        elif when == "thread inside":
            in_a_thread(loss.backward)
    if when == "after":
        loss.backward()
    elif when == "thread after":
        in_a_thread(loss.backward)


def errors_of_gradients(rank: int, cases: list[tuple[str, str, str]]) -> list[float]:
    model, x, w = Toy(), torch.randn(2, T, 8).double(), torch.randn(2, T, 32).double()
    dist.broadcast(x, 0), dist.broadcast(w, 0)
    (model.run(x, plain, plain) * w).sum().backward()
    one, found = model.gradients(), []
    for outer, inner, when in cases:

        def loss(here, outer=outer, inner=inner) -> Tensor:
            mine = here.shard(x, -2).requires_grad_()
            out = model.run(mine, CHECKPOINTS[outer], CHECKPOINTS.get(inner, plain))
            return (out * here.shard(w, -2)).sum()

        in_turn(loss, when)
        got = model.gradients()
        dist.all_reduce(got)
        found.append(float((got - one).abs().max() / one.abs().max()))
    return found


EVERY = list(product(CHECKPOINTS, ["plain", *CHECKPOINTS], WHEN))
SOME = [
    *product(CHECKPOINTS, ["plain"], ["after"]),
    *product(["reentrant", "other"], ["plain", "reentrant", "other"], WHEN[:1] + WHEN[2:]),
]


@pytest.mark.parametrize(
    "world, cases",
    [(2, SOME), pytest.param(3, EVERY, marks=pytest.mark.slow)],
    ids=lambda x: str(x) if isinstance(x, int) else f"{len(x)} cases",
)
def test_gradients_are_those_without_checkpoints(world, cases, tmp_path):
    seconds = 60 + len(cases)
    for found in on_processes(world, errors_of_gradients, tmp_path, cases, seconds=seconds):
        assert len(found) == len(cases) and max(found) < 1e-13


def steps_of_training(rank: int, dtype: torch.dtype) -> dict[tuple[bool, str], float]:
    """Return the largest error of a gradient of a Llama, by the kind of its checkpoints."""
    model = build("llama", "AutoModelForCausalLM").to(dtype).train()
    model.set_attn_implementation("clearhead")
    text = torch.randint(1, 97, (2, T + 1), generator=torch.Generator().manual_seed(3))
    ids, labels = text[:, :-1], text[:, 1:]

    def loss(here, rows: slice = slice(None)) -> Tensor:
        positions = here.positions[None]
        out = model(here.shard(ids[rows]), position_ids=positions, use_cache=False).logits
        labels_here = here.shard(labels[rows]).flatten()
        return F.cross_entropy(out.flatten(0, 1), labels_here, reduction="sum")

    def micro_batches() -> None:
        losses = []
        for row in range(2):
            with sharded(T, layout="head-tail", timeout=20) as here:
                losses.append(loss(here, slice(row, row + 1)))
        sum(losses).backward()

    def block_in_block() -> None:
        with sharded(T, timeout=20) as outer:
            first = loss(outer, slice(1))
            with sharded(T, layout="head-tail", timeout=20) as here:
                second = loss(here, slice(1, 2))
        (first + second).backward()

    def gradients() -> dict[str, Tensor]:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    out = model(ids, use_cache=False).logits.flatten(0, 1)
    F.cross_entropy(out, labels.flatten(), reduction="sum").backward()
    one, found = gradients(), {}
    model.enable_input_require_grads()
    ways = {when: partial(in_turn, loss, when) for when in WHEN}
    ways |= {"micro-batches": micro_batches, "block in block": block_in_block}
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for name, run in ways.items():
            before = history_of(None).meetings
            run()
            # Forward, recomputed, backward, and the ends of blocks.
            blocks = 1 if name in WHEN else 2
            layers = model.config.num_hidden_layers
            assert history_of(None).meetings - before == blocks * (3 * layers + 1)
            got = gradients()
            assert set(got) == set(one)
            off = []
            for parameter, gradient in got.items():
                dist.all_reduce(gradient)
                expected = one[parameter]
                off.append(float((gradient - expected).abs().max() / expected.abs().max()))
            found[reentrant, name] = max(off)
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "world, dtype, limit",
    [
        (2, torch.float32, 1e-5),
        *(pytest.param(n, torch.float64, 1e-13, marks=pytest.mark.slow) for n in (2, 3)),
    ],
)
def test_gradient_checkpoints_of_transformers(world, dtype, limit, tmp_path):
    for found in on_processes(world, steps_of_training, tmp_path, dtype):
        assert len(found) == 12 and max(found.values()) < limit, found


def wrapped(rank: int) -> dict[tuple[str, bool | None, str], float]:
    """Return the largest error of a gradient of a Llama that is wrapped for training."""
    from torch.distributed._composable import checkpoint as of_module
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    text = torch.randint(1, 97, (2, T + 1), generator=torch.Generator().manual_seed(3))
    ids, labels = text[:, :-1], text[:, 1:]

    def fresh(reentrant: bool | None) -> torch.nn.Module:
        model = build("llama", "AutoModelForCausalLM").double().train()
        model.set_attn_implementation("clearhead")
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        return model

    def sharded_weights(model: torch.nn.Module, by_hooks: bool) -> torch.nn.Module:
        for layer in model.model.layers:
            if by_hooks:
                of_module(layer)
            fully_shard(layer)
        return fully_shard(model)

    model = fresh(None)
    out = model(ids, use_cache=False).logits.flatten(0, 1)
    F.cross_entropy(out, labels.flatten(), reduction="sum").backward()
    one = {n: p.grad for n, p in model.named_parameters()}
    found = {}
    for wrapper, reentrant, when in product(("ddp", "fsdp"), (True, False, None), WHEN[::3]):
        model = fresh(reentrant)
        if wrapper == "ddp":
            run = DistributedDataParallel(model)
        else:
            run = sharded_weights(model, by_hooks=reentrant is None)

        def loss(here, run=run) -> Tensor:
            out = run(here.shard(ids), position_ids=here.positions[None], use_cache=False)
            mine = here.shard(labels).flatten()
            return F.cross_entropy(out.logits.flatten(0, 1), mine, reduction="sum")

        in_turn(loss, when)
        off = []
        for name, p in model.named_parameters():
            full = p.grad.full_tensor() if wrapper == "fsdp" else p.grad
            full = full * dist.get_world_size()  # they average
            off.append(float((full - one[name]).abs().max() / one[name].abs().max()))
        found[wrapper, reentrant, when] = max(off)
    return found


@pytest.mark.slow
def test_checkpoints_in_models_that_are_wrapped_for_training(tmp_path):
    for found in on_processes(2, wrapped, tmp_path):
        assert len(found) == 12 and max(found.values()) < 1e-13, found


def failing(rank: int, cases: list[tuple[str, str, str]]) -> list[list[str]]:
    """Return the errors of a step in which a layer of rank 1 fails while it is recomputed, and of
    two steps after it."""
    model, x = Toy(), torch.randn(2, T, 8, generator=torch.Generator().manual_seed(1)).double()
    fails = ""

    def perhaps(at: str, x: Tensor) -> Tensor:
        if at == fails and rank == 1 and torch._C._current_graph_task_id() != -1:
            raise MemoryError("no room")
        return x

    def step(kind: str, when: str) -> str:
        def first(x: Tensor) -> Tensor:
            return perhaps("first", model.embedded(x)).tanh()

        def second(x: Tensor) -> Tensor:
            return perhaps("behind", model.layers[0](perhaps("before", x))).sin().tanh()

        def loss(here) -> Tensor:
            run, mine = CHECKPOINTS[kind], here.shard(x, -2).requires_grad_()
            return run(second, run(first, mine)).sum()

        try:
            return error_of(lambda: in_turn(loss, when))
        except MemoryError:
            return "its own"

    found = []
    for kind, when, fails in cases:
        errors = [step(kind, when)]
        fails = ""
        found.append([*errors, step(kind, when), step(kind, when)])
    return found


FAILING = list(product(["reentrant", "other", "own function"], WHEN, ["before", "behind", "first"]))


def test_a_layer_that_fails_while_it_is_recomputed_is_one_error_on_every_rank(tmp_path):
    here, there = on_processes(2, failing, tmp_path, FAILING)
    for case, other, own in zip(FAILING, here, there, strict=True):
        _, when, at = case
        assert own[0] == "its own", case
        assert other[2] == own[2] == "nothing", case
        if at == "first" and "after" in when:  # the other rank had done all its calls
            assert other[0] == "nothing" and other[1].startswith("Rank 1 raised an error"), case
            assert own[1].startswith("Rank 0 left its block of distributed.sharded: Rank 1"), case
        else:
            left = "raised an error in its call" if "after" in when else "left its block of distri"
            assert other[0].startswith(f"Rank 1 {left}") and "no room" in other[0], case
            assert other[1] == own[1] == "nothing", case


def other_uses(rank: int) -> dict[str, object]:
    x, w = (
        torch.randn(1, T, 32, generator=torch.Generator().manual_seed(seed)).double()
        for seed in (1, 2)
    )
    model = ch.nn.MultiHeadAttention(32, 4, kv_heads=2, causal=True).double()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    (model(x) * w).sum().backward()
    one, found = Toy.gradients(model), {}

    def compare(name: str) -> None:
        got = Toy.gradients(model)
        dist.all_reduce(got)
        found[name] = float((got - one).abs().max() / one.abs().max())

    for reentrant in (True, False):
        run = partial(checkpoint, use_reentrant=reentrant)

        def whole(y: Tensor) -> Tensor:
            before = model(y).sum() * 0  # not of the block
            with sharded(T, layout="head-tail", timeout=20) as here:
                out = model(here.shard(y, -2)) * here.shard(w, -2)
            return out.sum() + before + (model(y) * 0).sum()

        run(whole, x.clone().requires_grad_()).backward()
        compare(f"around a block, {reentrant}")

        def nested(here, run=run) -> Tensor:
            def with_a_block(y: Tensor) -> Tensor:
                with sharded(T, timeout=20) as within:
                    inner = (model(within.shard(x, -2)) * within.shard(w, -2)).sum() * 0.5
                return inner + (model(y) * here.shard(w, -2)).sum() * 0.5

            return run(with_a_block, here.shard(x, -2).requires_grad_())

        in_turn(nested, "after")
        compare(f"around a block in a block, {reentrant}")

    y, v = (shard(t.unflatten(-1, (4, 8)).transpose(1, 2)) for t in (x, w))
    y.requires_grad_()
    (expected,) = torch.autograd.grad((ch.distributed.attention(y, y, y) * v).sum(), y)
    with sharded(T, timeout=20):
        # Nothing of the checkpoint is saved after attention, which ends its recomputation.
        out = checkpoint(lambda y: ch.attention(y, y, y), y, use_reentrant=False)
    for retain in (True, False):
        (got,) = torch.autograd.grad((out * v).sum(), y, retain_graph=retain)
        found[f"ends with attention, {retain}"] = float((got - expected).abs().max())

    mapped = lambda y: torch.func.vmap(lambda z: model(z))(y[None])[0]  # noqa: E731
    found["vmap"] = error_of(lambda: in_turn(lambda here: nothing(mapped, here.shard(x, -2)), ""))
    return found


def nothing(layers: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(layers, x.requires_grad_(), use_reentrant=False).sum()


def test_blocks_in_checkpoints_and_calls_at_their_end(tmp_path):
    for found in on_processes(2, other_uses, tmp_path):
        assert found.pop("vmap").startswith("Attention over ranks was called inside torch.func")
        assert len(found) == 6 and max(found.values()) < 1e-13, found


def test_open_checkpoints_are_found_and_an_unknown_form_is_refused():
    opened: list[object] = []

    def inner(x: Tensor) -> Tensor:
        opened.extend(open_checkpoints())
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x, use_reentrant=False)

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(outer, x, use_reentrant=False)
    assert len(opened) == 2 and open_checkpoints() == []
    out.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())

    pack = lambda x: x  # noqa: E731
    pack.__module__, pack.__qualname__ = "torch.utils.checkpoint", "new_hook"
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        assert error_of(open_checkpoints).startswith("torch.utils.checkpoint ran inside")
