"""The compiled core, if it is there, and which instructions it uses."""

import os
import struct
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from ...errors import BadValue

try:
    import clearhead._kernels as core
except ModuleNotFoundError as error:  # a broken core is an error; a missing one is a fact
    if error.name != "clearhead._kernels":
        raise
    core = None  # type: ignore[assignment]  # a module or None; `why_not` says so


def must_be_of_this_version(differ: bool, what: str) -> None:
    """Raise `ImportError` if the compiled core and the Python code differ in something."""
    if differ:
        raise ImportError(
            "clearhead's compiled core is of another version than its Python code: they differ in "
            f"{what}. Both come from one installation. Install clearhead again: pip install "
            "--force-reinstall --no-deps clearhead, or pip install -e . in a checkout."
        )


def layout(name: str, *parts: str) -> tuple[struct.Struct, ...]:
    """How to pack a struct of the core whose members, in order, are those of all the parts."""
    if core is None:
        return (struct.Struct(""),) * len(parts)
    fields = core.fields().get(name, []) if hasattr(core, "fields") else []
    same = [field for field, _ in fields] == " ".join(parts).split()
    must_be_of_this_version(not same, f"the members of {name}")
    formats = dict(fields)
    return tuple(struct.Struct("=" + "".join(formats[x] for x in p.split())) for p in parts)


# The library with torch's threads: by name on Linux, by path elsewhere.
LIBRARIES = "libtorch_cpu.so", str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.dylib")
_pool: bool = core is not None and any(map(core.take_pool, LIBRARIES))

# torch's functions by which the core reads a tensor; without them no call is like an earlier one.
must_be_of_this_version(bool(core) and not hasattr(core, "take_tensors"), "how tensors are read")
if core is not None and hasattr(Tensor, "__dlpack_c_exchange_api__"):
    core.take_tensors(
        Tensor.__dlpack_c_exchange_api__, Tensor, Parameter, Tensor.is_neg, torch.is_grad_enabled
    )

# A copy of the core's, so that a tracer need not call the core.
_level: str = core.level() if core else ""


def level() -> str:
    """The instruction-set level in use; empty where CLEARHEAD_CPU names none of this machine's."""
    return _level


def status() -> str:
    """What the core is here: its instruction set and threads, or why there is none."""
    if core is None:
        return (
            "the C++ core is missing: clearhead was installed without a C++ compiler, or it did "
            "not build (pip install -v says); torch answers, several times slower"
        )
    if not _level:
        return level_error()
    what = {n: text for n, text, _ in core.levels()}[_level]
    threads = "" if _pool else "; on one thread, as torch's pool was not found in its library"
    return f"{_level} ({what}){threads}"


def amx_note() -> str:
    """What this processor has that torch uses and the core does not; empty if nothing.

    No processor with matrix tiles has been measured, so `auto` has no preference there.
    """
    if core is None or not core.has_amx():
        return ""
    return (
        "in bfloat16 torch has matrix tiles (AMX), which the core does not use: "
        "`clearhead bench prefill` shows which is faster, engine='sdpa' takes torch's"
    )


def use_level(name: str = "") -> str:
    """Force an instruction-set level by name, or the widest for an empty one; returns the old one.

    The environment variable CLEARHEAD_CPU does the same when clearhead is imported.
    """
    global _level
    before = _level
    if not core.choose_level(name):
        present = ", ".join(repr(n) for n, _, here in core.levels() if here)
        raise BadValue(
            f"The instruction-set level is {name!r}.",
            f"this machine and this build have {present}.",
            "pass one of these, or none for the widest.",
        )
    _level = core.level()
    return before


def level_error() -> str:
    present = ", ".join(n for n, _, here in core.levels() if here)
    return f"CLEARHEAD_CPU={os.environ.get('CLEARHEAD_CPU')} is none of this machine's: {present}"
