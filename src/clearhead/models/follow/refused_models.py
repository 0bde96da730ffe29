"""Refuse models whose runs differ without an edit, and weights that cannot be read here.

Models may draw random numbers; weights may be divided over ranks, by tensor parallelism or FSDP, or
be offloaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...core.errors import BadValue


@contextmanager
def no_random_numbers(model: nn.Module) -> Iterator[None]:
    """Raise `BadValue` if the body draws random numbers, on the CPU or the model's GPUs.

    Batch normalisation in training mode, which changes in each run, is refused at the start.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            why = f"in training mode {name} normalises by the batch, and stores its statistics"
            raise _not_repeatable(model, why)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    before = _states(devices)
    yield
    if any(not torch.equal(a, b) for a, b in zip(before, _states(devices), strict=True)):
        raise _not_repeatable(model, "it draws random numbers while it runs, as dropout does")


def _states(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _not_repeatable(model: nn.Module, why: str) -> BadValue:
    rule = "only what is equal in every run of a model can be compared or split."
    hint = "call model.eval(); if it still draws random numbers, pass them as an input."
    return BadValue(f"Two runs of the {type(model).__name__} differ: {why}.", rule, hint)


def heads_must_be_whole(name: str, module: nn.Module) -> None:
    """Raise `BadValue` if tensor parallelism divides the heads of a module that calls attention.

    Its matrices are then divided while it runs. Those that FSDP divides are whole while it runs.
    """
    if _is_divided(module):
        gave = f"The heads of {name or 'the model'} are divided over ranks by tensor parallelism."
        rule = "heads are numbered in the whole layer, and this rank computes only some of them."
        hint = "do not use tensor parallelism; distributed.sharded divides a long text."
        raise BadValue(gave, rule, hint)


def weights_must_be_whole(call: str, model: nn.Module) -> None:
    """Raise `BadValue` if weights of a model that does not run are divided over ranks or offloaded.

    Offloaded ones are on the meta device, without numbers, except while their module runs.
    """
    meta = next((name for name, x in model.named_parameters() if x.is_meta), None)
    if meta is not None:
        gave = f"{call} got a {type(model).__name__} whose weight {meta} is on the meta device."
        rule = "it reads weights without a run, and offloaded ones are loaded only in a run."
        hint = "load the model on one device without offloading; watch and effects accept it so."
        raise BadValue(gave, rule, hint)
    if _is_divided(model):
        gave = f"{call} got a {type(model).__name__} whose weights are divided over ranks."
        raise BadValue(gave, "it reads the complete weights.", "load the model on one rank.")


def _is_divided(module: nn.Module) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    for parameter in module.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)  # of a DTensor, which imports slowly
        placements = getattr(parameter, "placements", ())
        is_matrix = parameter.dim() > 1
        if is_matrix and any(x.is_shard() and mesh.size(i) > 1 for i, x in enumerate(placements)):
            return True
    return False
