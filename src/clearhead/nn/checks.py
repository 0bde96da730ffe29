"""The checks of arguments that several layers share; attention itself checks the rest."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadType, BadValue, as_count, as_number, kind_of
from ..torch_state import is_autocast


def check_size(layer: str, name: str, value: object) -> int:
    """`value` as an int, 1 or more."""
    hint = f"pass {name} as an int, for example 4."
    return as_count(
        f"{layer} got {name}", value, f"{name} is a whole number, 1 or more.", hint, least=1
    )


def check_dropout(layer: str, value: object) -> float:
    """`value` as a probability."""
    rule = "dropout is a probability, from 0 to 1; it acts in training mode only."
    hint = "pass a number such as 0.1, or 0.0 for none."
    return as_number(f"{layer} got dropout", value, rule, hint, lambda p: 0 <= p <= 1)


def factory_kwargs(layer: str, device: torch.device | str | None, dtype: object) -> dict[str, Any]:
    """`device` and `dtype` for the layer's parameters, as torch's own modules take them; None means
    torch's default."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise BadType(
            f"{layer} got dtype={dtype!r}.",
            "parameters are floating-point: dtype is a torch.dtype such as torch.bfloat16.",
            "pass one of these, or leave dtype out for torch's default.",
        )
    try:
        return {"device": None if device is None else torch.device(device), "dtype": dtype}
    except (RuntimeError, TypeError) as error:
        raise BadValue(
            f"{layer} got device={device!r}.",
            "device is a torch.device, or the name of one, such as 'cpu' or 'cuda:0'.",
            "pass one of these, or leave device out for torch's default.",
        ) from error


def check_base(layer: str, value: object) -> float:
    """`value` as a positive float."""
    rule = "the wavelengths are powers of the base, a positive number."
    hint = "pass a number such as 10000.0, the papers' own."
    return as_number(f"{layer} got base", value, rule, hint, lambda base: 0 < base < math.inf)


def check_sequence(
    layer: str, name: str, x: object, width: int | None = None, projection: nn.Module | None = None
) -> Tensor:
    """`x`, if it is (B, T, width) or (T, width), in the dtype of the projection that it goes into;
    None means any."""
    shown = "d" if width is None else width
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else kind_of(x)
        raise BadType(
            f"{layer} got {kind} as {name}.",
            f"{name} holds one vector per token: a floating tensor (B, T, {shown}) or (T, {shown})"
            ".",
            "pass vectors as torch.tensor(x, dtype=torch.float32); look ids up first, for example "
            "with TokenEmbedding.",
        )
    if x.dim() not in (2, 3):
        raise BadValue(
            f"{layer} got {name} of shape {tuple(x.shape)}.",
            f"{name} is (B, T, {shown}), or (T, {shown}) for one sequence.",
            "add or merge leading dimensions, for example with x.unsqueeze(0) or x.flatten(0, -3).",
        )
    if width is not None and x.shape[-1] != width:
        raise BadValue(
            f"{layer} got {name} of shape {tuple(x.shape)}.",
            f"the last dimension of {name} is {width}, as the layer was built.",
            f"pass vectors of {width} features, or build the layer for {x.shape[-1]}.",
        )
    # A subclass of Linear, or one with hooks, may convert its input.
    if type(projection) is nn.Linear and not projection._forward_pre_hooks:
        dtype = projection.weight.dtype
        if x.dtype != dtype and not is_autocast(x.device):
            raise BadType(
                f"{layer} got {name} of {x.dtype}, and its weights are {dtype}.",
                "a layer and what it reads have one dtype, unless autocast is on.",
                f"pass {name}.to({dtype}), or convert the layer with .to({x.dtype}).",
            )
    return x


def check_type(layer: str, name: str, value: Any, *kinds: type) -> Any:
    """`value`, if it is an instance of one of these classes."""
    if isinstance(value, kinds):
        return value
    wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    raise BadType(
        f"{layer} got {name}={value!r}.",
        f"{name} is {wanted}.",
        f"pass {name} as such, or leave it out.",
    )
