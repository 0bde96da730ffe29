"""What the engines do on each type of device.

The row of the CPU follows from measurements. That of CUDA follows from reasons, because the GPU
engines have not run on a GPU yet. Other devices, such as MPS, have only engines that call torch.
"""

from typing import NamedTuple

import torch


class Policy(NamedTuple):
    """What is done on a type of device.

    `engines` compute there. torch may get a mask written out as a matrix of `mask_bytes`, and its
    kernel that is not fused may store weights of `weights_bytes`. `reads_values` says whether code
    may read a tensor's values to make a decision, which elsewhere waits for the device.
    """

    engines: tuple[str, ...]
    mask_bytes: int
    weights_bytes: int
    reads_values: bool = False


# With a mask of more than 256 MB on a CPU, `tiled` takes 0.3 to 1.7 of torch's time.
CPU = Policy(("cpu", "sdpa", "tiled", "steps"), 2**28, 2**30, reads_values=True)
CUDA = Policy(("sdpa", "triton", "flex", "tiled", "steps"), 2**32, 2**26)
META = Policy(("cpu", "sdpa", "triton", "tiled", "steps"), 2**32, 2**30)  # shapes alone, planned
OTHERS = Policy(("sdpa", "tiled", "steps"), 2**32, 2**30)
POLICIES = {"cpu": CPU, "cuda": CUDA, "meta": META}


def policy_of(device: torch.device) -> Policy:
    return POLICIES.get(device.type, OTHERS)
