"""Can a transformers model run on clearhead? Told before it runs."""

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import BadType, kind_of
from .inspect_model import calls_interface, computes_attention
from .register import NAME, register, transformers


class Support(NamedTuple):
    """What `supports` found. It is true or false, and printed it says why."""

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        return f"{'yes' if self else 'no'}: {self.reason}"


def supports(model: Any) -> Support:
    """Can this transformers model run with ``attn_implementation="clearhead"`` and be watched?

    >>> print(ch.hf.supports(transformers.BloomConfig()))  # doctest: +SKIP
    no: BloomModel computes its attention itself (BloomAttention).

    `model` is a model or its configuration; of a configuration the model is made without weights,
    on the meta device. Where only some layers hand their attention to transformers' interface, the
    answer is yes, and the reason names those that do not: they run as ever and are not watched.
    Raises `BadType` for anything else, and `Missing` if transformers is not installed.
    """
    library = transformers()
    if isinstance(model, nn.Module):
        return _of_modules(model)
    if not isinstance(model, library.PreTrainedConfig):
        raise BadType(
            f"supports got {kind_of(model)}.",
            "it is told by a model of transformers, or by its configuration.",
            "pass the model, or transformers.AutoConfig.from_pretrained(folder).",
        )
    register()
    try:
        return _of_modules(_without_weights(library, model, NAME))
    except Exception as error:  # whatever a model makes of a configuration that does not fit
        if error.args != (NAME,):
            kind = type(model).__name__
            return Support(False, f"no model can be made of this {kind} alone: {error!r}.")
    eager = _without_weights(library, model, "eager")
    own = _kinds(eager, computes_attention)
    return Support(
        False,
        f"{type(eager).__name__} takes its attention ({_list(own)}) from a table of its own, where "
        f"transformers raises KeyError for {NAME!r}.{_way_out(own)}",
    )


def _of_modules(model: nn.Module) -> Support:
    name = type(model).__name__
    answered, own = _kinds(model, calls_interface), _kinds(model, computes_attention)
    if answered:
        others = f"; not in {_list(own)}, where nothing is watched" if own else ""
        return Support(True, f"{name} hands over its attention in {_list(answered)}{others}.")
    if own:
        itself = f"{name} computes its attention itself ({_list(own)}).{_way_out(own)}"
        return Support(False, itself)
    return Support(False, f"no module of {name} calls transformers' attention interface.")


def _kinds(model: nn.Module, has: Callable[..., bool]) -> list[type[nn.Module]]:
    return sorted({*filter(has, map(type, model.modules()))}, key=lambda kind: kind.__name__)


def _list(kinds: list[type[nn.Module]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _way_out(own: list[type[nn.Module]]) -> str:
    files = (inspect.getsource(sys.modules[kind.__module__]) for kind in own)
    if not any("scaled_dot_product_attention(" in file for file in files):
        return ""
    return " Load it with attn_implementation='sdpa' and run it inside of compat.patched()."


def _without_weights(library: Any, config: Any, implementation: str) -> nn.Module:
    """The model that a configuration describes, on the meta device: of the class that it names, or
    of the first that transformers can make of it."""
    config = copy.deepcopy(config)  # transformers writes the implementation into it
    named = [getattr(library, x) for x in config.architectures or () if hasattr(library, x)]
    autos = [library.AutoModel, *vars(library.models.auto.modeling_auto).values()]
    autos = [x for x in autos if isinstance(x, type) and hasattr(x, "from_config")]
    autos = [x for x in autos if type(config) in (x._model_mapping or ())]
    failed: Exception | None = None
    for make in [x._from_config for x in named] + [x.from_config for x in autos]:
        try:
            with torch.device("meta"):
                return make(config, attn_implementation=implementation)
        except Exception as error:
            failed = failed or error
            if error.args == (NAME,):
                break
    raise failed or KeyError(f"transformers has no class for {type(config).__name__}")
