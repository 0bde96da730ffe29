"""Check whether a transformers model can run on clearhead, without running it."""

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import BadType, kind_of
from ..torch_state import compiled_parts
from .inspect_model import asks_for_mask, calls_interface, computes_attention, misreads_masks
from .passed_keywords import refused_keywords
from .projections import without_projection
from .register import NAME, register, transformers

# Packages whose modules call the interface in their own code, if they do.
_KNOWN_CODE = {"torch", "transformers"}


class Support(NamedTuple):
    """The answer of `supports`: True, False, or None where it cannot be known without a run. It is
    true only for True, and printed it gives the reason."""

    supported: bool | None
    reason: str

    def __bool__(self) -> bool:
        return self.supported is True

    def __str__(self) -> str:
        answer = {True: "yes", False: "no", None: "cannot tell"}[self.supported]
        return f"{answer}: {self.reason}"


def supports(model: Any) -> Support:
    """Can this transformers model run with ``attn_implementation="clearhead"`` and be watched?

    >>> print(ch.hf.supports(transformers.BloomConfig()))  # doctest: +SKIP
    no: BloomModel computes its attention itself (BloomAttention).

    `model` is a model or its configuration; of a configuration the model is made without weights,
    on the meta device. Nothing is run: the answer is read from the code of the model's modules, and
    "cannot tell" is the answer where that does not show it. Where only some layers hand their
    attention to transformers' interface, the answer is yes, and the reason names those that do not:
    they run as ever and are not watched. The reason also says where it is not known what the heads
    write into the residual stream.
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
            why = " ".join(f"{type(error).__name__}: {error}".split())
            return Support(None, f"no model can be made of this {kind} alone: {why}")
    eager = _without_weights(library, model, "eager")
    own = _kinds(eager, computes_attention)
    return Support(
        False,
        f"{type(eager).__name__} takes its attention ({_list(own)}) from a table of its own, where "
        f"transformers raises KeyError for {NAME!r}.{_hint(own)}",
    )


def _of_modules(model: nn.Module) -> Support:
    name = type(model).__name__
    if "" in compiled_parts(model):
        return Support(False, "attention in a compiled graph is not watched.")
    answered, own = _kinds(model, calls_interface), _kinds(model, computes_attention)
    if answered:
        for obstacle in (_misread(model), _refused(model)):
            if obstacle is not None:
                return obstacle
        rest = f"; not in {_list(own)}, where nothing is watched" if own else ""
        if unknown := without_projection(model):
            rest += f"; what its heads write is not known: {unknown}"
        return Support(True, f"{name} hands over its attention in {_list(answered)}{rest}.")
    if own:
        itself = f"{name} computes its attention itself ({_list(own)}).{_hint(own)}"
        return Support(False, itself)
    reason = f"no module of {name} calls transformers' attention interface"
    if others := _kinds(model, lambda kind: kind.__module__.split(".")[0] not in _KNOWN_CODE):
        return Support(None, f"{reason}; what {_list(others)} calls elsewhere is not known.")
    return Support(False, f"{reason}.")


def _refused(model: nn.Module) -> Support | None:
    """The answer for a model that passes to its attention function what clearhead refuses."""
    uncertain = None
    for module in model.modules():
        kind = type(module)
        if not calls_interface(kind):
            continue
        refused = refused_keywords(module)
        if refused is None:
            unread = (
                f"the code of {kind.__name__} does not show how it calls its attention function."
            )
            uncertain = uncertain or Support(None, unread)
        for keyword, certain in refused or ():
            passes = f"{kind.__name__} passes {keyword} to its attention function"
            if certain:
                return Support(False, f"{passes}, which clearhead does not answer.")
            run = f"{passes} where it has a value, which clearhead does not answer; a run tells."
            uncertain = uncertain or Support(None, run)
    return uncertain


def _misread(model: nn.Module) -> Support | None:
    """The answer for a model that a boolean mask would mislead, or that makes one for a part which
    computes its attention itself."""
    for module in model.modules():
        kind, config = type(module), type(getattr(module, "config", None))
        if asks_for_mask(kind) and misreads_masks(config.__module__):
            return Support(False, f"{kind.__name__} needs a mask of numbers.")
    return None


def _kinds(model: nn.Module, has: Callable[..., bool]) -> list[type[nn.Module]]:
    return sorted({*filter(has, map(type, model.modules()))}, key=lambda kind: kind.__name__)


def _list(kinds: list[type[nn.Module]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _hint(own: list[type[nn.Module]]) -> str:
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
