"""DTensors as arguments and results, and models sharded by FSDP2 along another mesh dimension."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import clearhead as ch
from clearhead.distributed import sharded
from tests.distributed.processes import on_processes
from tests.hf.test_models import build

T = 22


def tensors(length: int = T) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    sizes = ((2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 6))
    return [torch.randn(size, generator=draw).requires_grad_() for size in sizes]


def placed(rank: int) -> list[tuple]:
    """Return output and gradients of DTensors, and of the same full tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "sequence"))
    found = []
    for length in (T, 5, 1):
        for other in (Replicate(), Shard(0), Shard(1)):
            whole = tensors(length)
            mask = ch.causal & ch.window(before=7)
            one = ch.attention(*whole, mask=mask)
            true = one, *torch.autograd.grad(one.square().sum(), whole)
            parts = [
                distribute_tensor(x.detach(), mesh, [other, Shard(2)]).requires_grad_()
                for x in whole
            ]
            out = ch.distributed.attention(*parts, mask=mask)
            assert isinstance(out, DTensor) and out.placements == (other, Shard(2))
            learned = torch.autograd.grad(out.square().sum(), parts)
            found.append((true, [x.full_tensor().detach() for x in (out, *learned)]))
    return found


def test_dtensors_in_and_out(tmp_path):
    for found in on_processes(4, placed, tmp_path):
        assert len(found) == 9
        for true, got in found:
            for a, b in zip(got, true, strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-5)


def misplaced(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (x.detach() for x in tensors())

    def on(x: torch.Tensor, placement: object) -> DTensor:
        return distribute_tensor(x, mesh, [placement])

    errors = []
    for given in (
        (on(q, Shard(2)), k, v),
        (on(q, Shard(2)), on(k, Replicate()), on(v, Replicate())),
        tuple(on(x, Shard(3)) for x in (q, k, v)),
        tuple(on(x, Replicate()) for x in (q, k, v)),
    ):
        with pytest.raises(ch.AttentionError) as error:
            ch.distributed.attention(*given)
        errors.append(f"{type(error.value).__name__}: {error.value.gave}")
    with pytest.raises(ch.BadValue) as error:
        alone = [dist.new_group([n]) for n in range(2)][rank]
        ch.distributed.attention(*(on(x, Shard(2)) for x in (q, k, v)), group=alone)
    return [*errors, error.value.gave]


def test_placements_that_do_not_fit(tmp_path):
    for errors in on_processes(2, misplaced, tmp_path):
        assert errors[0] == "BadType: q, k and v are a DTensor, a Tensor, a Tensor."
        assert all(x.startswith("BadValue: The placements are q (") for x in errors[1:4])
        assert errors[4].startswith("group= is not the group along which")


def trained(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return gradients of a model on two texts, by one process and on a 2 x 2 mesh. There FSDP2
    shards the weights along one dimension, and the texts are cut along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    text = torch.randint(1, 97, (2, T + 1), generator=torch.Generator().manual_seed(3))
    ids, labels = text[:, :-1], text[:, 1:]
    found = {}
    for kind in ("llama", "mistral"):
        one = build(kind, "AutoModelForCausalLM")
        one.set_attn_implementation("clearhead")
        loss = F.cross_entropy(one(ids).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        model = build(kind, "AutoModelForCausalLM")
        model.set_attn_implementation("clearhead")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        row = mesh["data"].get_local_rank()
        with sharded(T, mesh["sequence"], layout="head-tail") as here:
            logits = model(
                here.shard(ids[row : row + 1]), position_ids=here.positions[None], use_cache=False
            ).logits
            mine = here.shard(labels[row : row + 1])
        part = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum") / T
        part.backward()  # FSDP2 averages over its ranks
        for (name, x), (_, y) in zip(model.named_parameters(), one.named_parameters(), strict=True):
            dist.all_reduce(x.grad.to_local(), group=mesh["sequence"].get_group())
            found[f"{kind} {name}"] = x.grad.full_tensor(), y.grad
    return found


def test_fully_shard_on_another_dimension_of_the_mesh(tmp_path):
    for found in on_processes(4, trained, tmp_path):
        assert len(found) > 20
        for name, (got, true) in found.items():
            error = float((got - true).abs().max() / true.abs().max())
            assert error < 2e-5, f"{name}: {error:.2g}"
