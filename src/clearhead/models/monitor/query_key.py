"""Find the parameters that compute the queries and keys of a module, and their rows by head.

Letters: H query heads, G key heads, D head size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...hf.architectures import FUSED_PROJECTIONS, QUERIES_AND_KEYS
from ...hf.projections import is_conv1d

_TOKENS_CHECKED = 8


class HeadRows(NamedTuple):
    """The outputs of a linear module that belong to each head.

    `outputs` is (n, D), for n heads, and `dim` the dimension of outputs in the weight. Parameters
    are read from the module when they are needed: those of FSDP2 are others while it runs.
    """

    module: nn.Module
    outputs: Tensor
    dim: int = 0
    weight_name: str = "weight"
    bias_name: str = "bias"

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = getattr(self.module, self.weight_name)
        return weight

    def squared_gradient(self) -> Tensor | None:
        """Return the squared norm of the gradient of each head's rows of the weight, (n,).

        A DTensor gives that of the rows of this rank, divided by the number of ranks that have the
        same; so the sum over the ranks is that of the whole weight. None without a gradient.
        """
        grad: Any = self.weight.grad
        if grad is None:
            return None
        local, first, copies = _local(grad, self.dim)
        norms = torch.linalg.vector_norm(local.detach(), dim=1 - self.dim, dtype=torch.float64)
        squares = norms.square() / copies
        rows = torch.zeros(self.weight.shape[self.dim], dtype=torch.float64, device=squares.device)
        rows[first : first + len(squares)] = squares
        return rows[self.outputs.to(rows.device)].sum(-1)

    def computes(self, x: Tensor, output: Tensor | None) -> bool:
        """Is x, (B, n, T, D), the `output` of the module, times one number and perhaps rotated?

        A rotation keeps the norm of a vector, so the norms show it at a few tokens.
        """
        if isinstance(self.module, nn.MultiheadAttention):  # it multiplies by its parameters
            return True
        B, n, T, _ = x.shape
        if output is None or (len(output), n) != (B, len(self.outputs)):
            return False
        if output.shape[1:-1].numel() != T:
            return False
        output = output.reshape(B, T, -1)
        tokens = torch.linspace(0, T - 1, min(T, _TOKENS_CHECKED)).long().to(x.device)
        before = output[:, tokens][..., self.outputs.to(x.device)].double().norm(dim=-1)
        after = x[:, :, tokens, : self.outputs.shape[1]].transpose(1, 2).double().norm(dim=-1)
        factor = (before * after).sum() / before.square().sum()
        tolerance = max(1e-3, 4 * torch.finfo(output.dtype).eps)
        return bool(((before * factor - after).abs() <= tolerance * after.max()).all())

    def scale(self, factors: Tensor) -> None:
        """Multiply the rows of each head by its factor, (n,) or (n, D), in place."""
        bias = getattr(self.module, self.bias_name, None)
        for parameter, dim in (self.weight, self.dim), (bias, 0):
            if parameter is None:
                continue
            local, first, _ = _local(parameter.data, dim)
            of_rows = torch.ones(parameter.shape[dim], dtype=torch.float64, device=local.device)
            index = self.outputs.to(local.device)
            factors = factors.to(local.device, torch.float64)
            of_rows[index] = factors.reshape(len(index), -1).expand(index.shape)
            own = of_rows[first : first + local.shape[dim]].to(local.dtype)
            local.mul_(own if local.dim() == 1 or dim == 1 else own[:, None])


class QueryKey(NamedTuple):
    """The rows of the queries, of H heads, and of the keys, of G heads.

    The last `shared` features of a query meet a key that all heads share (latent attention).
    """

    query: HeadRows
    key: HeadRows
    shared: int = 0


def query_key(module: nn.Module, H: int, G: int, D: int, Dv: int) -> QueryKey | None:
    """Find the parameters of queries and keys in a module that calls attention.

    They are known by name and shape. None for any other module, such as one with adapters around
    its projections or quantised weights.
    """
    if isinstance(module, nn.MultiheadAttention):
        return _of_multihead(module, H, D)
    parts = {name.rpartition(".")[2]: part for name, part in module.named_modules() if name}
    of_q, of_k = torch.arange(H * D).reshape(H, D), torch.arange(G * D).reshape(G, D)
    separate = next(
        (x for x in QUERIES_AND_KEYS if x in parts and QUERIES_AND_KEYS[x] in parts), None
    )
    fused = next((x for x in FUSED_PROJECTIONS if x in parts), None)
    shared = 0
    if "kv_b_proj" in parts:  # latent attention: a head has all features of a key but the rotated
        own = getattr(parts["kv_b_proj"], "out_features", 0) // H - Dv
        shared, width = D - own, H * (own + Dv)
        if own <= 0:
            return None
        of_k = torch.arange(width).reshape(H, -1)[:, :own]
        k = _rows(parts["kv_b_proj"], of_k, width)
        q = _rows(parts.get("q_b_proj", parts.get("q_proj")), of_q, H * D)
    elif separate is not None:
        q = _rows(parts[separate], of_q, H * D)
        k = _rows(parts[QUERIES_AND_KEYS[separate]], of_k, G * D)
    elif fused is not None:
        of_k = of_k + H * D
        if FUSED_PROJECTIONS[fused]:
            of_q, of_k = _grouped(H, G, D, Dv)
        q, k = (_rows(parts[fused], x, (H + G) * D + G * Dv) for x in (of_q, of_k))
    else:
        return None
    return None if q is None or k is None else QueryKey(q, k, shared)


def _grouped(H: int, G: int, D: int, Dv: int) -> tuple[Tensor, Tensor]:
    """Return the outputs of queries and keys where each group has its queries, its key, its
    value."""
    size = (H // G + 1) * D + Dv
    by_group = torch.arange(G * size).reshape(G, size)
    return by_group[:, : -D - Dv].reshape(H, D), by_group[:, -D - Dv : -Dv]


def _rows(linear: Any, outputs: Tensor, width: int) -> HeadRows | None:
    """Return rows of a linear module with `width` outputs; None for other modules."""
    if linear is None or not (type(linear) is nn.Linear or is_conv1d(linear)):
        return None
    weight, dim = linear.weight, 1 if is_conv1d(linear) else 0
    plain = isinstance(weight, nn.Parameter) and weight.is_floating_point()
    return HeadRows(linear, outputs, dim) if plain and weight.shape[dim] == width else None


def _of_multihead(module: nn.MultiheadAttention, H: int, D: int) -> QueryKey | None:
    every = torch.arange(2 * H * D).reshape(2, H, D)
    if isinstance(module.in_proj_weight, nn.Parameter):
        q, k = (HeadRows(module, x, 0, "in_proj_weight", "in_proj_bias") for x in every)
        return QueryKey(q, k)
    if module.in_proj_bias is not None:  # of queries, keys and values together
        return None
    q, k = (HeadRows(module, every[0], 0, f"{x}_proj_weight", "") for x in "qk")
    return QueryKey(q, k)


def _local(x: Any, dim: int) -> tuple[Tensor, int, int]:
    """Return this rank's part of a tensor, its first index in `dim`, and how many ranks have it."""
    if not hasattr(x, "device_mesh"):  # a DTensor, which is slow to import
        return x, 0, 1
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_of

    _, offsets = local_of(x.shape, x.device_mesh, x.placements)
    copies = 1
    for i, placement in enumerate(x.placements):
        copies *= x.device_mesh.size(i) if placement.is_replicate() else 1
    return x.to_local(), offsets[dim], copies
