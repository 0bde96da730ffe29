"""Start a kernel.

What Triton compiles depends on the types of the arguments, on which integers are 1, and on which
integers and addresses are multiples of 16. Triton's launcher determines this at each start, in 40
to 60 us of Python; a step of decoding may take the device 10 us. So compiled kernels are cached
here by the same properties.
"""

from functools import partial
from typing import Any

import triton

from ..replay import start_recorded

# A product and a sum may be rounded once. Triton 3.9 does so with a warning, 3.10 only with this
# option.
FUSED = {"enable_fp_fusion": True}

_compiled: dict[tuple[object, ...], Any] = {}


def start(
    kernel: Any,
    programs: int,
    device: int,
    *args: Any,
    warps: int = 4,
    stages: int = 3,
    **constants: Any,
) -> None:
    """Start `programs` programs of a kernel on the current device, whose index is `device`."""
    of = kernel.fn, device, warps, stages, *constants.items(), *specialization(args)
    compiled = _compiled.get(of)
    if compiled is not None:
        values = (constants[name] for name in kernel.arg_names[len(args) :])
        start_recorded(compiled[programs, 1, 1], (*args, *values), True)
        return
    options = {"num_warps": warps, "num_stages": stages, **FUSED}
    compiled = start_recorded(partial(kernel[(programs,)], **constants, **options), args, False)
    if isinstance(compiled, triton.compiler.CompiledKernel):  # the interpreter compiles nothing
        _compiled[of] = compiled


def specialization(args: tuple[Any, ...]) -> tuple[object, ...]:
    """Return the properties of arguments that determine how a kernel is compiled."""
    properties: list[object] = []
    for x in args:
        if x is None:
            properties.append(x)
        elif type(x) is int:
            properties.append("one" if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31))
        elif type(x) is float:
            properties.append(float)
        elif isinstance(x, tuple):
            properties.append(specialization(x))
        else:
            properties.append((x.dtype, x.data_ptr() % 16 == 0))
    return tuple(properties)
