"""Refuse weights that cannot be read here: those that are divided over ranks, by tensor parallelism
or FSDP, and those that are offloaded."""

from typing import Any

import torch.distributed as dist
from torch import nn

from ...core.errors import BadValue


def heads_must_be_whole(name: str, module: nn.Module) -> None:
    """Raise `BadValue` if tensor parallelism divides the heads of a module that calls attention.

    Its matrices are then divided while it runs. Those that FSDP divides are whole while it runs.
    """
    if _is_divided(module):
        raise BadValue(
            f"The heads of {name or 'the model'} are divided over ranks by tensor parallelism.",
            "heads are numbered in the whole layer, and this rank computes only some of them.",
            "load the model without tensor parallelism; distributed.sharded divides a long text "
            "over ranks.",
        )


def weights_must_be_whole(call: str, model: nn.Module) -> None:
    """Raise `BadValue` if weights of a model that does not run are divided over ranks or offloaded.

    Offloaded ones are on the meta device, without numbers, except while their module runs.
    """
    meta = next((name for name, x in model.named_parameters() if x.is_meta), None)
    if meta is not None:
        raise BadValue(
            f"{call} got a {type(model).__name__} whose weight {meta} is on the meta device.",
            "it reads the weights outside of the modules; offloaded ones are loaded only while "
            "their module runs.",
            "load the model without offloading, on one device; watch and effects accept it as it "
            "is.",
        )
    if _is_divided(model):
        raise BadValue(
            f"{call} got a {type(model).__name__} whose weights are divided over ranks.",
            "it reads the complete weights.",
            "load the model on one rank.",
        )


def _is_divided(module: nn.Module) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    for parameter in module.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)  # of a DTensor, which imports slowly
        placements = getattr(parameter, "placements", ())
        is_matrix = parameter.dim() > 1
        if is_matrix and any(x.is_shard() and mesh.size(i) > 1 for i, x in enumerate(placements)):
            return True
    return False
