"""Limits and engines for each type of device.

The numbers for the CPU come from measurements, those for CUDA from reasons. Other devices, such as
MPS, have only engines that call torch.
"""

from typing import NamedTuple

import torch


class Policy(NamedTuple):
    """The engines and limits of a type of device.

    `engines` can compute on it. torch may get a mask written out as a matrix of up to `mask_bytes`,
    and its kernel that is not fused may store weights of up to `weights_bytes`. `reads_values` is
    true if code may read a tensor's values for a decision, which on other devices causes a wait.
    """

    engines: tuple[str, ...]
    mask_bytes: int
    weights_bytes: int
    reads_values: bool = False


# With a mask of more than 256 MB on a CPU, `tiled` takes 0.3 to 1.7 of torch's time.
CPU = Policy(("cpu", "sdpa", "tiled", "steps"), 2**28, 2**30, reads_values=True)
CUDA = Policy(("fused", "sdpa", "triton", "tiled", "steps"), 2**32, 2**26)
META = Policy(("cpu", "sdpa", "triton", "tiled", "steps"), 2**32, 2**30)  # for plans from shapes
OTHERS = Policy(("sdpa", "tiled", "steps"), 2**32, 2**30)
POLICIES = {"cpu": CPU, "cuda": CUDA, "meta": META}


def policy_of(device: torch.device) -> Policy:
    """Return the policy for a device."""
    return POLICIES.get(device.type, OTHERS)
