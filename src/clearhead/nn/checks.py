"""Check the arguments that several layers have; `attention` checks the others."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BadType, BadValue, as_count, as_number, kind_of
from ..core.torch_state import is_autocast


def check_size(layer: str, name: str, value: object) -> int:
    """Return `value` as an int, 1 or more."""
    rule, hint = f"{name} is a whole number, 1 or more.", f"pass {name} as an int, for example 4."
    return as_count(f"{layer} got {name}", value, rule, hint, least=1)


def check_dropout(layer: str, value: object) -> float:
    """Return `value` as a probability."""
    rule = "dropout is a probability, from 0 to 1; it is active in training mode only."
    hint = "pass a number such as 0.1, or 0.0 for none."
    return as_number(f"{layer} got dropout", value, rule, hint, lambda p: 0 <= p <= 1)


def factory_kwargs(layer: str, device: torch.device | str | None, dtype: object) -> dict[str, Any]:
    """Return `device` and `dtype` as keywords for torch's modules; None means torch's default."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        rule = "parameters are floating-point: dtype is a torch.dtype such as torch.bfloat16."
        hint = "pass one of these, or leave dtype out for torch's default."
        raise BadType(f"{layer} got dtype={dtype!r}.", rule, hint)
    try:
        return {"device": None if device is None else torch.device(device), "dtype": dtype}
    except (RuntimeError, TypeError) as error:
        rule = "device is a torch.device, or the name of one, such as 'cpu' or 'cuda:0'."
        hint = "pass one of these, or leave device out for torch's default."
        raise BadValue(f"{layer} got device={device!r}.", rule, hint) from error


def check_base(layer: str, value: object) -> float:
    """Return `value` as a positive float."""
    rule = "the base, whose powers are the wavelengths, is a positive number."
    hint = "pass a number such as 10000.0, as in the papers."
    return as_number(f"{layer} got base", value, rule, hint, lambda base: 0 < base < math.inf)


def check_sequence(
    layer: str, name: str, x: object, width: int | None = None, projection: nn.Module | None = None
) -> Tensor:
    """Return `x` if it is (B, T, width) or (T, width), in the dtype of its projection.

    None means any width, or any dtype.
    """
    size = "d" if width is None else width
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else kind_of(x)
        rule = f"{name} has one vector per token: a floating tensor (B, T, {size}) or (T, {size})."
        hint = "pass torch.tensor(x, dtype=torch.float32); turn ids into vectors by TokenEmbedding."
        raise BadType(f"{layer} got {kind} as {name}.", rule, hint)
    if x.dim() not in (2, 3):
        rule = f"{name} is (B, T, {size}), or (T, {size}) for one sequence."
        hint = "add or merge leading dimensions, such as by x.unsqueeze(0) or x.flatten(0, -3)."
        raise BadValue(f"{layer} got {name} of shape {tuple(x.shape)}.", rule, hint)
    if width is not None and x.shape[-1] != width:
        rule = f"this layer was built for {width} features, the last dimension of {name}."
        hint = f"pass vectors of {width} features, or build the layer for {x.shape[-1]}."
        raise BadValue(f"{layer} got {name} of shape {tuple(x.shape)}.", rule, hint)
    # A subclass of Linear, or a Linear with hooks, may convert its input.
    if type(projection) is nn.Linear and not projection._forward_pre_hooks:
        dtype = projection.weight.dtype
        if x.dtype != dtype and not is_autocast(x.device):
            gave = f"{layer} got {name} of {x.dtype}, and its weights are {dtype}."
            rule = "a layer and its input have one dtype, unless autocast is on."
            hint = f"pass {name}.to({dtype}), or convert the layer with .to({x.dtype})."
            raise BadType(gave, rule, hint)
    return x


def check_type(layer: str, name: str, value: Any, *types: type) -> Any:
    """Return `value` if it is an instance of one of these types."""
    if isinstance(value, types):
        return value
    allowed = " or ".join("None" if t is type(None) else t.__name__ for t in types)
    hint = f"pass a value of this type, or leave {name} out."
    raise BadType(f"{layer} got {name}={value!r}.", f"{name} is {allowed}.", hint)
