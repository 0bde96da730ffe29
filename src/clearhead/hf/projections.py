"""Find the output projection of a module, W_O, which is applied to the heads of an attention call.

The attention call of a module returns z, (B, H, T, Dv). Its heads write
``sum_h z[:, h] @ W_O[h] + bias``. The matrix is found by its name and its width, and `check`
compares its result with the output of the model.

Letters: B batch, T tokens, H query heads, Dv value size, d model size.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from ..core.errors import BadValue, kind_of
from ..nn.simple import OneHead
from .architectures import CHANGE_OUTPUT, DOUBLE_QUERIES, OUTPUT_PROJECTIONS, SCALED_BY, SCALES
from .inspect_model import calls_interface

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_TOKENS_CHECKED, _FEATURES_CHECKED = 8, 128


@dataclass(frozen=True, repr=False)
class OutputProjection:
    """The output projection of an attention call, in fp32.

    `weight` is (H, Dv, d): head h writes ``z[:, h] @ weight[h]`` into the residual stream. `bias`,
    (d,), belongs to no head; None if there is none. `module` is the name of the module that
    computes the sum. A norm, a gate or a dropout after it is not included. `parameter` is the
    tensor of the model from which `weight` was read.
    """

    weight: Tensor
    bias: Tensor | None
    module: str
    parameter: Tensor

    def __repr__(self) -> str:
        bias = "" if self.bias is None else ", with a bias"
        return f"OutputProjection({self.module or 'the model'}: {tuple(self.weight.shape)}{bias})"

    def check(self, z: Tensor, returned: object) -> None:
        """Raise `BadValue` unless the output of `module` is the projection of the heads.

        Compares `returned`, the output, with the projection of `z`, (B, H, T, Dv), at a few tokens
        and features, within rounding. Where both are NaN or infinite, they agree.
        """
        if isinstance(returned, tuple):  # torch.nn.MultiheadAttention: the output and the weights
            returned = returned[0]
        B, _, T, _ = z.shape
        d = self.weight.shape[-1]
        assert isinstance(returned, Tensor)
        if returned.numel() != B * T * d:
            raise self._disagrees(f"of shape {tuple(returned.shape)}")
        tokens = torch.linspace(0, B * T - 1, min(B * T, _TOKENS_CHECKED)).long().to(z.device)
        features = torch.linspace(0, d - 1, min(d, _FEATURES_CHECKED)).long().to(z.device)
        heads = z.detach()[tokens // T, :, tokens % T].flatten(1).double()
        weight = self.weight.flatten(0, 1).mT[features].double().mT
        wanted, most = heads @ weight, heads.abs() @ weight.abs()
        if self.bias is not None:
            bias = self.bias[features].double()
            wanted, most = wanted + bias, most + bias.abs()
        actual = returned.detach()
        if actual.dim() == 3 and actual.shape[:2] == (T, B) != (B, T):
            actual = actual.transpose(0, 1)  # torch's layout with batch_first=False
        actual = actual.reshape(B * T, d)[tokens][:, features].double()
        error = (actual - wanted).abs()
        tolerance = max(1e-5, 4 * torch.finfo(returned.dtype).eps)
        agrees = (error <= tolerance * most) | ~(actual.isfinite() | wanted.isfinite())
        if not bool(agrees.all()):
            raise self._disagrees(f"other numbers, off by {float((error / most).max()):.1g}")

    def scaled(self, model: nn.Module) -> "OutputProjection":
        """Return the projection with the layer scale after it; itself if there is none.

        A layer scale multiplies feature i of what attention writes by lambda_i (Touvron et al.
        2021). `module` is then the scale, so `check` compares its output. Raises `BadValue` for a
        layer that multiplies by a parameter of its own, because no module shows the product.
        """
        names = self.module.split(".")
        inside = next((n for n in range(len(names), 0, -1) if names[n - 1].isdigit()), 0)
        for n in range(len(names), inside - 1, -1):  # up to the layer, which has a number
            path = ".".join(names[:n])
            owner = model.get_submodule(path)
            for name in SCALES:
                scale = next(getattr(owner, name, nn.Identity()).parameters(), None)
                if scale is not None and scale.shape == self.weight.shape[-1:]:
                    by, at = scale.detach().float(), f"{path}.{name}".lstrip(".")
                    bias = None if self.bias is None else self.bias * by
                    return replace(self, weight=self.weight * by, bias=bias, module=at)
            for name in SCALED_BY:
                if isinstance(getattr(owner, name, None), Tensor):
                    gave = f"{path or 'The model'}, {kind_of(owner)}, multiplies by its own {name}."
                    rule = "what a head moves includes a layer scale, which a module must compute."
                    raise BadValue(gave, rule, "use a statistic that does not need it.")
        return self

    def must_be_finite(self) -> None:
        """Raise `BadValue` if a weight is NaN or infinite."""
        if not bool(self.weight.isfinite().all()):
            gave = f"The weights of {self.module or 'the model'} have NaN or infinity."
            rule = "what a head writes is its output times these weights."
            raise BadValue(gave, rule, "load a checkpoint from before training diverged.")

    def _disagrees(self, what: str) -> BadValue:
        gave = f"{self.module or 'The model'} returned {what}, not the heads times its weights."
        rule = "the projection reads attention's output without a gate, norm, adapter or new order."
        hint = "merge adapters into the weights; gates (Qwen3-Next) and norms are not supported."
        return BadValue(gave, rule, hint)


def output_projection(model: nn.Module, name: str, heads: int, size: int) -> OutputProjection:
    """Find the output projection after the attention calls of the module `name`.

    The calls have `heads` query heads and values of `size` Dv. Reads nn.Linear, Conv1D of
    transformers, torch.nn.MultiheadAttention and layers of clearhead.nn; a layer without projection
    gets an identity matrix. Each query head has its own part of the matrix, also if heads share
    values. `OutputProjection.check` checks that the model computes this projection.

    Raises `BadValue` if no projection is found, and for weights that are quantised, sharded, on the
    meta device, or of another kind of module.
    """
    module = model.get_submodule(name)
    if isinstance(module, OneHead):
        device = next((p.device for p in module.parameters()), None)
        identity = torch.eye(size, device=device)[None]
        return OutputProjection(identity, None, name, identity)
    path, linear = _find(model, name, heads * size)
    if linear is None:
        gave = f"No output projection was found for {name or 'the model'}, {kind_of(module)}."
        names, D = ", ".join(OUTPUT_PROJECTIONS), heads * size
        rule = f"it is linear with {heads} x {size} = {D} inputs, in or beside a module: {names}."
        hint = "use a statistic that does not need it, or rename the projection of the model."
        raise BadValue(gave, rule, hint)
    weight, bias = matrix_of(linear, path)
    runs = name if isinstance(module, nn.MultiheadAttention) else path  # it calls no out_proj
    parameter = cast(Tensor, linear.weight).detach()  # it shares the version of the weight
    return OutputProjection(weight.reshape(heads, size, -1), bias, runs, parameter)


def projection_parameter(model: nn.Module, name: str, heads: int, size: int) -> Tensor | None:
    """Return the tensor that `output_projection` reads now; None for a layer without projection."""
    _, linear = _find(model, name, heads * size)
    weight = getattr(linear, "weight", None)
    return weight.detach() if isinstance(weight, Tensor) else None


def without_projection(model: nn.Module) -> str | None:
    """Return why a transformers model has no usable output projection, without running it.

    None if no obstacle was found.
    """
    for name, module in model.named_modules():
        if not calls_interface(type(module)):
            continue
        kind = type(module).__name__
        _, linear = _find(model, name, None)
        if linear is None:
            return f"{kind} has no output projection with a known name"
        if obstacle := _obstacle(linear):
            return f"the output projection of {kind} {obstacle}"
        children = dict(module.named_children())
        changes = [n for n in children if any(part in n for part in CHANGE_OUTPUT)]
        width = input_width(linear)
        if width and getattr(children.get(DOUBLE_QUERIES), "out_features", None) == 2 * width:
            changes.append(f"the second half of {DOUBLE_QUERIES}")
        if changes:
            return f"{kind} changes its output by {changes[0]} before the projection"
    return None


def matrix_of(linear: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the matrix (in, out) and the bias (out,) of a linear module, in fp32.

    Raises `BadValue` for weights that are quantised, sharded, packed, or on the meta device.
    """
    matrix, bias = readable_matrix(linear, name)
    return matrix.float(), None if bias is None else bias.float()


def readable_matrix(linear: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the result of `matrix_of` in the dtype of the weights, without a copy."""
    weight = getattr(linear, "weight", None)
    on_meta = isinstance(weight, Tensor) and weight.is_meta
    if obstacle := _obstacle(linear) or ("is on the meta device" if on_meta else ""):
        rule = "a projection needs complete weights in fp32, fp64, bf16 or fp16."
        hint = "load the model unquantised on one device; merge adapters into the weights."
        raise BadValue(f"The projection {name!r}, {kind_of(linear)}, {obstacle}.", rule, hint)
    assert isinstance(weight, Tensor)
    bias = getattr(linear, "bias", None)
    matrix = weight.detach().T if isinstance(linear, nn.Linear) else weight.detach()
    return matrix, None if bias is None else bias.detach()


def input_width(module: nn.Module) -> int | None:
    """Return the input features of a linear module, also of a quantised or wrapped one.

    None for any other module.
    """
    width = getattr(module, "nx" if is_conv1d(module) else "in_features", None)
    return width if isinstance(width, int) else None


def is_conv1d(module: nn.Module) -> bool:
    """Return whether this is transformers' `Conv1D`, whose matrix is not transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx")


def _find(model: nn.Module, name: str, width: int | None) -> tuple[str, nn.Module | None]:
    """Return the first linear module of this input width (None: any) with the name of an output
    projection, inside the module `name` or among those that its parent runs after it; else None."""
    module = model.get_submodule(name)
    scopes = [(name, module)]
    if name:
        parent, _, own = name.rpartition(".")
        siblings = list(model.get_submodule(parent).named_children())
        later = siblings[[n for n, _ in siblings].index(own) + 1 :]
        scopes += [(f"{parent}.{n}".lstrip("."), sibling) for n, sibling in later]
    for scope, part in scopes:
        linears = {
            f"{scope}.{path}".strip("."): x
            for path, x in part.named_modules()
            if (x is not module) and input_width(x) is not None and width in (None, input_width(x))
        }
        for wanted in OUTPUT_PROJECTIONS:
            for path, linear in linears.items():
                if _last_word(path).lower() == wanted:
                    return path, linear
    return "", None


def _last_word(path: str) -> str:
    """Return the last part of a name that is not a number: to_out of attn.to_out.0."""
    return next((part for part in reversed(path.split(".")) if not part.isdigit()), "")


def _obstacle(linear: nn.Module) -> str:
    """Return why the numbers of a linear module cannot be read; "" if they can."""
    weight = getattr(linear, "weight", None)
    if not isinstance(linear, nn.Linear) and not is_conv1d(linear):
        return "is not an nn.Linear or a Conv1D"
    if hasattr(weight, "device_mesh"):  # a DTensor, which is slow to import
        return "is sharded over devices"
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return "has no matrix of weights; it is sharded or packed"
    if weight.dtype not in _DTYPES:
        return f"holds quantised weights of {weight.dtype}"
    if type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # as torchao quantises
        return f"holds its weights as {type(weight).__name__}, which may be quantised"
    return ""
