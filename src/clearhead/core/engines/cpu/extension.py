"""Load the compiled core, if it is installed, and choose its instruction set."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ...errors import BadValue

try:
    import clearhead._kernels as core
except ModuleNotFoundError as error:  # a missing core is allowed; a broken one is an error
    if error.name != "clearhead._kernels":
        raise
    core = None  # type: ignore[assignment]  # a module or None


def must_be_of_this_version(differ: bool, what: str) -> None:
    """Raise `ImportError` if the compiled core and the Python code `differ` in `what`."""
    if differ:
        again = "reinstall clearhead in its checkout: pip install --force-reinstall --no-deps ."
        raise ImportError(f"the core and Python code are of different versions ({what}); {again}")


def must_have_fields(arguments: type[NamedTuple]) -> None:
    """Raise `ImportError` if the core reads other members of this named tuple."""
    fields, table = " ".join(arguments._fields), core.fields() if core else {}
    name = arguments.__name__
    must_be_of_this_version(bool(core) and table.get(name) != fields, f"the members of {name}")


must_be_of_this_version(bool(core) and "Computed" not in core.fields(), "the tensors of results")

# The library with torch's threads: by name on Linux, by path elsewhere.
LIBRARIES = "libtorch_cpu.so", str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.dylib")
_pool: bool = core is not None and any(map(core.take_pool, LIBRARIES))

# torch's types and functions by which the core reads and makes tensors.
_reads: bool = core is not None and core.take_tensors(
    Tensor, Parameter, Tensor.is_neg, torch.is_grad_enabled, Tensor.new_empty
)
if core is not None and not _reads:
    installed = f"torch {torch.__version__} has no DLPack exchange API of version 1"
    raise ImportError(f"{installed}, by which the core reads tensors. Install torch 2.10 or later.")

# A copy, so that code under a tracer does not call the core.
_level: str = core.level() if core else ""


def level() -> str:
    """Return the instruction-set level in use; empty if CLEARHEAD_CPU names an unavailable one."""
    return _level


def status() -> str:
    """Describe the core's instruction set and threads, or why the core is missing."""
    if core is None:
        why = "installed without a C++ compiler, or its build failed (see pip install -v)"
        return f"the C++ core is missing: {why}; torch computes instead, several times slower"
    if not _level:
        return level_error()
    instructions = {name: text for name, text, _ in core.levels()}[_level]
    threads = "" if _pool else "; on one thread, because torch's library has no thread pool"
    return f"{_level} ({instructions}){threads}"


def amx_note() -> str:
    """Return a note if this processor has matrix tiles (AMX), which only torch uses; else "".

    No processor with matrix tiles has been measured, so `auto` ignores them.
    """
    if core is None or not core.has_amx():
        return ""
    advice = "compare them by `clearhead bench prefill`, and pass engine='sdpa' to use torch"
    return f"for bfloat16 torch uses matrix tiles (AMX), which the core does not; {advice}"


def use_level(name: str = "") -> str:
    """Set the instruction-set level by name, or the widest if the name is empty; return the old
    one.

    The environment variable CLEARHEAD_CPU sets it when clearhead is imported.
    """
    global _level
    before = _level
    if not core.choose_level(name):
        names = ", ".join(repr(name) for name, _, available in core.levels() if available)
        rule = f"this machine and this build support {names}."
        hint = "pass one of these, or none for the widest."
        raise BadValue(f"The instruction-set level is {name!r}.", rule, hint)
    _level = core.level()
    return before


def level_error() -> str:
    """Return why the level that CLEARHEAD_CPU names cannot be used."""
    names = ", ".join(name for name, _, available in core.levels() if available)
    level = os.environ.get("CLEARHEAD_CPU")
    return f"CLEARHEAD_CPU={level} is not one of this machine's levels: {names}"
