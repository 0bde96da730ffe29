"""Does a transformers model hand its attention to the interface that `register` answers?

A module does if the code of its class reads transformers' table `ALL_ATTENTION_FUNCTIONS`. So the
classes that a model is made of tell before it runs.
"""

import functools
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from ..errors import BadValue

TABLE = "ALL_ATTENTION_FUNCTIONS"
# What a module calls that computes its attention itself; or a function with softmax in its name.
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
# They call the interface and also read their mask elsewhere, as numbers.
_READ_MASKS = {"transformers.models.nllb_moe", "transformers.models.deepseek_v4"}


def calls_interface(kind: type[nn.Module]) -> bool:
    """Does a module of this class hand its attention to transformers' interface?"""
    return TABLE in _names(kind)


def computes_attention(kind: type[nn.Module]) -> bool:
    """Does it compute attention itself? It is named so and has a softmax; a router has one too."""
    if "Attention" not in kind.__name__ or calls_interface(kind):
        return False
    return any("softmax" in name.lower() or name in _ATTENTION for name in _names(kind))


def misreads_masks(configuration: str) -> bool:
    """Would the models whose configuration is in this module misread a boolean mask? Those that are
    not part of transformers are taken to read it right."""
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
    kinds = [x for x in classes if issubclass(x, nn.Module) and x.__module__ == modeling.__name__]
    own = any(map(computes_attention, kinds)) and not any(map(calls_interface, kinds))
    return own or package in _READ_MASKS


def not_answered(model: str) -> BadValue:
    return BadValue(
        f"{model} computes its attention itself, or needs a mask of numbers.",
        "clearhead answers models that hand their attention to transformers' interface, and gives "
        "them boolean masks; clearhead.hf.supports(model or configuration) tells beforehand.",
        "load this one with attn_implementation='eager' (or, where it has 'sdpa', run that inside "
        "of clearhead.compat.patched()), or take a BERT, GPT-2, Llama, Mistral, Qwen or Gemma.",
    )


def asks_for_mask(kind: type[nn.Module]) -> bool:
    """Does a module of this class have transformers make the mask?"""
    return any(name.startswith("create_") and "mask" in name for name in _names(kind))


def functions_of(kind: type[nn.Module]) -> list[FunctionType]:
    """The methods of a class and of its bases, and the functions of their files that these call."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    # `PreTrainedModel` reads the table only to check names.
    bases = [base for base in own if base.__module__ != "transformers.modeling_utils"]
    methods: dict[str, list[FunctionType]] = {}  # each with those of bases that it calls by super
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
    """The names of globals and attributes that a function uses."""
    return {name for part in _with_inner(function.__code__) for name in part.co_names}


def _names(kind: type[nn.Module]) -> set[str]:
    """The names that the functions of a class of modules use."""
    return _cached_names(kind)  # type: ignore[arg-type]  # a class has a hash


@functools.lru_cache
def _cached_names(kind: type[nn.Module]) -> set[str]:
    return {name for function in functions_of(kind) for name in names_in(function)}


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _with_inner(inner)
