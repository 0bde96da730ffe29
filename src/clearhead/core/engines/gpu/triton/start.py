"""Start a kernel.

What Triton compiles depends on the types of the arguments, on which integers are 1, and on which
integers and addresses are multiples of 16. Triton's launcher determines this at each start, in 40
to 60 us of Python; a step of decoding may take the device 10 us. So compiled kernels are cached
here by the same properties. A repeated call starts them by the function in C that Triton's launcher
calls (`in_c`), in 0.8 us without the start itself; the launcher takes 3.6 (bench/LOG.md).
"""

import copy
from functools import partial
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ..recorder import STREAM, Compiled, start_recorded

# A product and a sum may be rounded once. Triton 3.9 does so with a warning, 3.10 only with this
# option.
FUSED = {"enable_fp_fusion": True}

_compiled: dict[tuple[object, ...], Any] = {}


def start(
    kernel: Any, programs: int, device: int, *args: Any, warps: int = 4, stages: int = 3,
    **constants: Any,
) -> None:  # fmt: skip
    """Start `programs` programs of a kernel on the current device, whose index is `device`."""
    of = kernel.fn, device, warps, stages, *constants.items(), *specialization(args)
    compiled = _compiled.get(of)
    if compiled is not None:
        values = (*args, *(constants[name] for name in kernel.arg_names[len(args) :]))
        again = partial(in_c, compiled, programs, device, values)
        start_recorded(compiled[programs, 1, 1], values, again)
        return
    options = {"num_warps": warps, "num_stages": stages, **FUSED}
    compiled = start_recorded(partial(kernel[(programs,)], **constants, **options), args, None)
    if isinstance(compiled, triton.compiler.CompiledKernel):  # the interpreter compiles nothing
        _compiled[of] = compiled


def in_c(compiled: Any, programs: int, device: int, args: tuple[Any, ...]) -> Compiled:
    """Return the call by which Triton's launcher starts a compiled kernel.

    A copy of the launcher is called, whose own function only stores its arguments. Their order
    differs by version and device. If the kernel needs memory for each start, the launcher itself is
    called.
    """
    launcher, stream = compiled.run, partial(current_stream, device)
    of_kernel = STREAM, compiled.function, compiled.packed_metadata
    arguments = programs, 1, 1, *of_kernel, None, None, None, *args  # without hooks
    scratch = (getattr(launcher, f"{x}_scratch_size", 0) for x in ("global", "profile"))
    if any(scratch) or not hasattr(launcher, "launch"):
        return Compiled(launcher, arguments, stream)
    stored: list[tuple[Any, ...]] = []
    shadow = copy.copy(launcher)
    shadow.launch = lambda *arguments: stored.append(arguments)
    shadow(*arguments)
    return Compiled(launcher.launch, stored[0], stream)


def current_stream(device: int) -> int | None:
    """Return the current stream, or None if hooks see each start, as those of Proton."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return None
    stream: int = driver.active.get_current_stream(device)
    return stream


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
        elif isinstance(x, TensorDescriptor):
            properties.append((x.base.dtype, *x.block_shape))
        else:
            properties.append((x.dtype, x.data_ptr() % 16 == 0))
    return tuple(properties)
