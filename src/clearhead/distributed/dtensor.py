"""DTensors whose sequence is sharded over a dimension of their mesh: in and out of `attention`."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import BadType, BadValue, kind_of
from .transport import Group, process_group


def of_dtensors(
    q: Tensor, k: Tensor, v: Tensor, group: Group
) -> tuple[tuple[Tensor, Tensor, Tensor], Group, Callable[[Tensor], Tensor]]:
    """The local parts, the group along which the sequence is sharded, and what makes of this rank's
    output what the caller wants. Plain tensors, and the group that was given, stay as they are.

    Raises `BadType` for DTensors beside plain tensors, `BadValue` for placements that do not fit.
    """
    tensors = q, k, v
    # Importing them takes longer than all of clearhead, and nobody has one who has not.
    if "torch.distributed.tensor" not in sys.modules:
        return tensors, group, lambda out: out
    from torch.distributed.tensor import DTensor, Partial, Shard

    if not any(isinstance(x, DTensor) for x in tensors):
        return tensors, group, lambda out: out
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        raise BadType(
            f"q, k and v are {', '.join(kind_of(x) for x in tensors)}.",
            "either all of them are DTensors, or none is.",
            "distribute the others over the same mesh, or pass q.to_local() and so on.",
        )
    dims = [i for i, placement in enumerate(q.placements) if placement == Shard(q.dim() - 2)]
    same = all(x.device_mesh == q.device_mesh and x.placements == q.placements for x in (k, v))
    heads = [p for p in q.placements if p == Shard(q.dim() - 3) and q.dim() > 2]
    unequal = heads and q.shape[-3] * k.to_local().shape[-3] != k.shape[-3] * q.to_local().shape[-3]
    others = [p for i, p in enumerate(q.placements) if i not in dims]
    bad = any(isinstance(p, Partial) or p == Shard(q.dim() - 1) for p in others)
    if len(dims) != 1 or not same or bad or unequal:
        shown = ", ".join(f"{n} {x.placements}" for n, x in zip("qkv", (q, k, v), strict=True))
        raise BadValue(
            f"The placements are {shown}.",
            f"q, k and v are placed alike on one mesh, their sequence (dimension {q.dim() - 2}) "
            "sharded along one dimension of it, batch and heads along others or replicated.",
            f"redistribute them first, for example to [Shard({q.dim() - 2})].",
        )
    mesh, placements = q.device_mesh, q.placements
    along = mesh.get_group(dims[0])
    if group is not None and process_group(group) is not along:
        raise BadValue(
            "group= was given, and is not the one along which the DTensors are sharded.",
            "a DTensor knows the ranks that hold its shards.",
            "leave group= out.",
        )
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    stride, size = [], 1
    for n in reversed(shape):
        stride.append(size)
        size *= n

    def back(out: Tensor) -> Tensor:
        return DTensor.from_local(
            out, mesh, placements, run_check=False, shape=shape, stride=tuple(reversed(stride))
        )

    return (q.to_local(), k.to_local(), v.to_local()), along, back
