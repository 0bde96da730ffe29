"""Refuse models that draw random numbers, because their runs differ without an edit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
            raise _not_repeatable(
                model, f"in training mode {name} normalises by the batch, and stores its statistics"
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
        f"Two runs of the {type(model).__name__} differ: {why}.",
        "only what is equal in every run of a model can be compared or split.",
        "call model.eval(); if it still draws random numbers, pass them as an input.",
    )
