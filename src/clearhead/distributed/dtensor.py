"""Convert DTensors with a sharded sequence to local tensors for `attention`, and the output
back."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ..core.errors import BadType, BadValue, kind_of
from .transport import Group, process_group


def local_parts(
    q: Tensor, k: Tensor, v: Tensor, group: Group
) -> tuple[tuple[Tensor, Tensor, Tensor], Group, Callable[[Tensor], Tensor]]:
    """Return the local tensors, the group along which the sequence is sharded, and a function that
    converts this rank's output to a DTensor. Plain tensors and their group are returned unchanged.

    Raises `BadType` for DTensors mixed with plain tensors, `BadValue` for placements that do not
    fit.
    """
    tensors = q, k, v
    # Importing DTensor takes longer than importing clearhead. Without the import there are none.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not any(isinstance(x, module.DTensor) for x in tensors):
        return tensors, group, lambda out: out
    from torch.distributed.tensor import DTensor, Partial, Shard

    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        rule = "either all of them are DTensors, or none is."
        hint = "distribute the others over the same mesh, or pass q.to_local() and so on."
        raise BadType(f"q, k and v are {', '.join(kind_of(x) for x in tensors)}.", rule, hint)
    dims = [i for i, placement in enumerate(q.placements) if placement == Shard(q.dim() - 2)]
    same = all(x.device_mesh == q.device_mesh and x.placements == q.placements for x in (k, v))
    heads = [p for p in q.placements if p == Shard(q.dim() - 3) and q.dim() > 2]
    unequal = heads and q.shape[-3] * k.to_local().shape[-3] != k.shape[-3] * q.to_local().shape[-3]
    others = [p for i, p in enumerate(q.placements) if i not in dims]
    bad = any(isinstance(p, Partial) or p == Shard(q.dim() - 1) for p in others)
    if len(dims) != 1 or not same or bad or unequal:
        placements_of_all = ", ".join(
            f"{n} {x.placements}" for n, x in zip("qkv", (q, k, v), strict=True)
        )
        gave = f"The placements are {placements_of_all}."
        rule = "q, k, v are placed alike: sequence along one dimension, batch and heads on others."
        hint = f"redistribute them first, for example to [Shard({q.dim() - 2})]."
        raise BadValue(gave, rule, hint)
    mesh, placements = q.device_mesh, q.placements
    along = mesh.get_group(dims[0])
    if group is not None and process_group(group) is not along:
        gave = "group= is not the group along which the DTensors are sharded."
        raise BadValue(gave, "a DTensor determines the ranks that hold its shards.", "omit group=.")
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()

    def to_dtensor(out: Tensor) -> Tensor:
        return DTensor.from_local(
            out, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return (q.to_local(), k.to_local(), v.to_local()), along, to_dtensor
