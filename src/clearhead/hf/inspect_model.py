"""Read from the code of a transformers model whether it uses the attention interface.

A module uses it if the code of its class reads transformers' table `ALL_ATTENTION_FUNCTIONS`. So
the classes of a model's modules show this before it runs.
"""

import functools
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from ..core.errors import BadValue
from .architectures import READ_MASKS

TABLE = "ALL_ATTENTION_FUNCTIONS"
# A module that computes its attention itself calls one of these, or a function named softmax.
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}


def calls_interface(kind: type[nn.Module]) -> bool:
    """Return whether a module of this class uses transformers' attention interface."""
    return TABLE in names_of(kind)


def computes_attention(kind: type[nn.Module]) -> bool:
    """Return whether a module of this class computes attention itself.

    Its name must have "Attention" in it, because a router also has a softmax.
    """
    if "Attention" not in kind.__name__ or calls_interface(kind):
        return False
    return any("softmax" in name.lower() or name in _ATTENTION for name in names_of(kind))


def misreads_masks(configuration: str) -> bool:
    """Return whether the models whose configuration is in this module misread a boolean mask.

    False for models outside transformers, which are assumed to read it correctly.
    """
    return _misreads_masks(configuration)


# `torch.compiler.assume_constant_result`, without importing the compiler.
misreads_masks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function's own


@functools.lru_cache
def _misreads_masks(configuration: str) -> bool:
    package, _, name = configuration.rpartition(".configuration_")
    if not package.startswith("transformers.models."):
        return False
    try:
        modeling = importlib.import_module(f"{package}.modeling_{name}")
    except ImportError:
        return False
    classes: list[Any] = [x for x in vars(modeling).values() if isinstance(x, type)]
    modules = [x for x in classes if issubclass(x, nn.Module) and x.__module__ == modeling.__name__]
    own = any(map(computes_attention, modules)) and not any(map(calls_interface, modules))
    return own or package in READ_MASKS


def not_answered(model: str) -> BadValue:
    gave = f"{model} computes its attention itself, or needs an additive mask."
    rule = "a model uses transformers' attention interface with boolean masks (see hf.supports)."
    hint = "load it with attn_implementation='eager', or 'sdpa' inside clearhead.compat.patched()."
    return BadValue(gave, rule, hint)


def asks_for_mask(kind: type[nn.Module]) -> bool:
    """Return whether a module of this class lets transformers create the mask."""
    return any(name.startswith("create_") and "mask" in name for name in names_of(kind))


def functions_of(kind: type[nn.Module]) -> list[FunctionType]:
    """Return the methods of a class and its bases, and functions of their files that they call."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    # `PreTrainedModel` reads the table only to check names.
    bases = [base for base in own if base.__module__ != "transformers.modeling_utils"]
    methods: dict[str, list[FunctionType]] = {}  # by name, with those that they call by super
    for base in bases:
        for name, member in vars(base).items():
            method = inspect.unwrap(member) if callable(member) else None
            above = methods.setdefault(name, [])
            if isinstance(method, FunctionType) and (not above or "super" in names_in(above[-1])):
                above.append(method)
    pending = [method for above in methods.values() for method in above]
    functions: dict[FunctionType, None] = {}
    while pending:
        function = pending.pop()
        if function in functions:
            continue
        functions[function] = None
        helpers = [function.__globals__.get(name) for name in names_in(function)]
        pending += [
            inspect.unwrap(x)
            for x in helpers
            if isinstance(x, FunctionType) and x.__module__ == function.__module__
        ]
    return list(functions)


def names_in(function: FunctionType) -> set[str]:
    """Return the names of globals and attributes that a function uses."""
    return {name for part in _with_inner(function.__code__) for name in part.co_names}


def names_of(kind: type[nn.Module]) -> set[str]:
    """Return the names that the functions of a module class use."""
    return _cached_names(kind)  # type: ignore[arg-type]  # a class has a hash


@functools.lru_cache
def _cached_names(kind: type[nn.Module]) -> set[str]:
    return {name for function in functions_of(kind) for name in names_in(function)}


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _with_inner(inner)
