"""Compare what a repeated call gives the driver with what Triton's launcher gives it:

    python start_without_device.py LIBCUDA

LIBCUDA is driver.c, compiled, which stores the parameters of a kernel and starts nothing. Triton
must find it as libcuda.
"""

import ctypes
import sys
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from clearhead.core.engines.gpu.replay import PLAIN_CALLS, Records
from clearhead.core.engines.gpu.triton.start import start

LIBCUDA = ctypes.CDLL(sys.argv[1])
STREAM, PROGRAMS, WARPS = 77, 6, 8


class Pair(NamedTuple):
    at: object
    step: int
    none: object


@triton.jit(do_not_specialize=["n"])
def kernel(x, pair, none, scale, n, one, tile, A: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, (tl.load(pair.at + at) + tile.load([0])) * scale + n + one + pair.step)


def stored() -> tuple[bytes, list[int]]:
    """Return what the driver got, and forget it."""
    parameters = (ctypes.c_uint8 * sum(SIZES)).in_dll(LIBCUDA, "parameters")
    launch = (ctypes.c_uint64 * 5).in_dll(LIBCUDA, "launch")
    got = bytes(parameters), list(launch)
    ctypes.memset(parameters, 0, sum(SIZES))
    ctypes.memset(launch, 0, 40)
    return got


def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    pair, tile = Pair(y, 48, None), TensorDescriptor(y, [16], [1], [16])
    start(kernel, PROGRAMS, 0, x, pair, None, 2.5, 33, 1, tile, N=16, A=True, warps=WARPS)
    return x


# What the kernel takes: x, y, the step, the scale, n, which is not compiled in (1 is), and the
# descriptor, whose first bytes are the address in driver.c, with its size and stride.
SIZES = [8, 8, 4, 4, 4, 128, 4, 8]
driver.set_active(
    SimpleNamespace(
        launcher_cls=CudaLauncher,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: STREAM,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
)
driver.active.utils = CudaUtils()
records, x, y = Records(), torch.zeros(16), torch.zeros(16)
records.call(call, (x, y))  # compiles
(ctypes.c_int * len(SIZES)).in_dll(LIBCUDA, "sizes")[:] = SIZES
seen = []
for _ in range(PLAIN_CALLS + 1):
    records.call(call, (x, y))
    seen.append(stored())
plain, repeated = seen[0], seen[-1]
assert any(map(callable, records._by_kind.values()))
numbers = torch.tensor([48, 33], dtype=torch.int32).numpy().tobytes()
assert numbers[:4] in plain[0] and numbers[4:] in plain[0]
assert plain[1] == [PROGRAMS, 32 * WARPS, plain[1][2], STREAM, 5]
assert repeated == plain, (plain, repeated)
assert plain[0].count(y.data_ptr().to_bytes(8, "little")) == 2
other = torch.zeros(16)
records.call(call, (x, other))
assert stored()[0] == plain[0].replace(
    y.data_ptr().to_bytes(8, "little"), other.data_ptr().to_bytes(8, "little")
)
print(triton.__version__, "right")
