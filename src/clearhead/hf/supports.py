"""Can a transformers model run on clearhead? Told before it runs."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import BadType, kind_of
from .interface import calls_interface, computes_attention
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
        try:
            return _of_modules(_without_weights(library, model, NAME))
        except KeyError as error:
            if error.args != (NAME,):
                raise
            chosen = _without_weights(library, model, "eager")
    except Exception as error:  # whatever a configuration that does not fit makes a model raise
        kind = type(model).__name__
        return Support(False, f"no model can be made of this {kind} alone: {error!r}.")
    own = _names(chosen, computes_attention)
    return Support(
        False,
        f"{type(chosen).__name__} takes its attention ({own}) from a table of its own, where "
        f"transformers raises KeyError for {NAME!r}.{_way_out(chosen)}",
    )


def _of_modules(model: nn.Module) -> Support:
    name = type(model).__name__
    answered, own = _names(model, calls_interface), _names(model, computes_attention)
    if answered:
        others = f"; {own} compute attention themselves and are not watched" if own else ""
        return Support(True, f"{name} hands over its attention in {answered}{others}.")
    if own:
        return Support(False, f"{name} computes its attention itself ({own}).{_way_out(model)}")
    return Support(False, f"no module of {name} calls transformers' attention interface.")


def _names(model: nn.Module, has: Any) -> str:
    return ", ".join(sorted({kind.__name__ for kind in map(type, model.modules()) if has(kind)}))


def _way_out(model: nn.Module) -> str:
    if not getattr(model, "_supports_sdpa", False):
        return ""
    return " Load it with attn_implementation='sdpa' and run it inside of compat.patched()."


def _without_weights(library: Any, config: Any, implementation: str) -> nn.Module:
    """The model that a configuration describes, on the meta device."""
    config = copy.deepcopy(config)  # transformers writes the implementation into it
    known = [x for x in config.architectures or () if hasattr(library, x)]
    with torch.device("meta"):
        if known:
            return getattr(library, known[0])._from_config(
                config, attn_implementation=implementation
            )
        return library.AutoModel.from_config(
            config, attn_implementation=implementation, trust_remote_code=False
        )
