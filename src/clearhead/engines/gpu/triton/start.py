"""Starting a kernel.

What Triton compiles depends on the types of the arguments, on which integers are 1, and on which
integers and addresses are multiples of 16. Its launcher finds that out anew at each start, in 40 to
60 us of Python, where a step of decoding may take the device 10. So what it compiled is remembered
here by the same.
"""

from typing import Any

import triton

# A product and a sum may round once: Triton 3.9 does so with a warning, 3.10 only where it is said.
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
    """Start so many programs of a kernel on the current device, whose index is given."""
    of = kernel.fn, device, warps, stages, *constants.items(), *kinds(args)
    compiled = _compiled.get(of)
    if compiled is not None:
        compiled[programs, 1, 1](
            *args, *[constants[name] for name in kernel.arg_names[len(args) :]]
        )
        return
    compiled = kernel[(programs,)](*args, **constants, num_warps=warps, num_stages=stages, **FUSED)
    if isinstance(compiled, triton.compiler.CompiledKernel):  # the interpreter compiles nothing
        _compiled[of] = compiled


def kinds(args: tuple[Any, ...]) -> tuple[object, ...]:
    """What of arguments decides how a kernel is compiled."""
    found: list[object] = []
    for x in args:
        if x is None:
            found.append(x)
        elif type(x) is int:
            found.append("one" if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31))
        elif type(x) is float:
            found.append(float)
        elif isinstance(x, tuple):
            found.append(kinds(x))
        else:
            found.append((x.dtype, x.data_ptr() % 16 == 0))
    return tuple(found)
