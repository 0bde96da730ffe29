"""Does a model draw random numbers, so that two runs differ without an edit?"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import BadValue


@contextmanager
def no_random_numbers(model: nn.Module) -> Iterator[None]:
    """Raises `BadValue` if the body draws random numbers, on the CPU or on the model's GPUs, and
    before it for batch normalisation in training mode, which a run changes."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise _not_repeatable(
                model, f"in training mode {name} normalises by the batch, and keeps its statistics"
            )
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    before = _states(devices)
    yield
    if any(not torch.equal(a, b) for a, b in zip(before, _states(devices), strict=True)):
        raise _not_repeatable(model, "it draws random numbers while it runs, as dropout does")


def _states(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _not_repeatable(model: nn.Module, why: str) -> BadValue:
    return BadValue(
        f"The {type(model).__name__} does not compute the same twice: {why}.",
        "an effect is the difference of two runs that differ in an edit and in nothing else.",
        "call model.eval(); if it draws in that mode, too, pass what it draws as an input.",
    )
