"""Check whether a transformers model can run on clearhead, without running it."""

import copy
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..core.errors import BadValue, must_be_of
from ..core.torch_state import compiled_parts
from .attention import UnknownKeyword
from .inspect_model import asks_for_mask, calls_interface, computes_attention, misreads_masks
from .passed_keywords import unknown_keywords
from .projections import without_projection
from .register import NAME, register, transformers

# Packages whose modules call the interface in their own code, if they do.
_KNOWN_CODE = {"torch", "transformers"}


class Support(NamedTuple):
    """The result of `supports`, with its reason.

    `supported` is None if only a run can show it. ``bool(support)`` is True only for True.
    """

    supported: bool | None
    reason: str

    def __bool__(self) -> bool:
        return self.supported is True

    def __str__(self) -> str:
        answer = {True: "yes", False: "no", None: "cannot tell"}[self.supported]
        return f"{answer}: {self.reason}"


def supports(model: Any) -> Support:
    """Check whether a transformers model can run on clearhead, and so be watched.

    >>> print(ch.hf.supports(transformers.BloomConfig()))  # doctest: +SKIP
    no: BloomModel computes its attention itself (BloomAttention).

    `model` is a model or its configuration, from which a model is built without weights on the meta
    device. The result is read from the code of the model's modules, and where that names a keyword
    that clearhead does not know, from a run on the meta device; it is None if these do not show it.
    If only some layers use transformers' attention interface, the result is yes, and the reason
    names the other ones, which run as usual and are not watched. The reason also states if the
    vectors that the heads write into the residual stream are unknown.

    Raises `BadType` for any other object, and `Missing` if transformers is not installed.
    """
    library = transformers()
    if isinstance(model, nn.Module):
        return _of_modules(model)
    rule = "it checks a transformers model or its configuration."
    hint = "pass the model, or transformers.AutoConfig.from_pretrained(folder)."
    must_be_of(library.PreTrainedConfig, "supports", model, rule, hint)
    register()
    try:
        return _of_modules(without_weights(library, model, NAME))
    except Exception as error:  # a model may raise anything for a configuration that does not fit
        if error.args != (NAME,):
            kind = type(model).__name__
            why = " ".join(f"{type(error).__name__}: {error}".split())
            return Support(None, f"no model can be built from this {kind} alone: {why}")
    eager = without_weights(library, model, "eager")
    own = _classes(eager, computes_attention)
    return Support(
        False,
        f"{type(eager).__name__} reads its attention ({_list(own)}) from its own table, where "
        f"transformers raises KeyError for {NAME!r}.{_hint(own)}",
    )


def _of_modules(model: nn.Module) -> Support:
    name = type(model).__name__
    if "" in compiled_parts(model):
        return Support(False, "attention in a compiled graph is not watched.")
    calling, own = _classes(model, calls_interface), _classes(model, computes_attention)
    if calling:
        for obstacle in (_misread(model), _refused(model)):
            if obstacle is not None:
                return obstacle
        rest = f"; not in {_list(own)}, where nothing is watched" if own else ""
        if unknown := without_projection(model):
            rest += f"; what its heads write is unknown: {unknown}"
        return Support(True, f"{name} uses the attention interface in {_list(calling)}{rest}.")
    if own:
        itself = f"{name} computes its attention itself ({_list(own)}).{_hint(own)}"
        return Support(False, itself)
    reason = f"no module of {name} calls transformers' attention interface"
    if others := _classes(model, lambda kind: kind.__module__.split(".")[0] not in _KNOWN_CODE):
        return Support(None, f"{reason}; what {_list(others)} calls elsewhere is unknown.")
    return Support(False, f"{reason}.")


def _refused(model: nn.Module) -> Support | None:
    """Return the result for a model that passes a refused keyword to its attention function.

    None if it passes none. Where its code names one, which may be None, the model runs on the meta
    device.
    """
    named: dict[str, list[str]] = {}
    for kind in _classes(model, calls_interface):
        keywords = unknown_keywords(kind)
        if keywords is None:
            unread = f"the code of {kind.__name__} does not show how it calls its attention"
            return Support(None, f"{unread} function.")
        if keywords:
            named[kind.__name__] = keywords
    if not named:
        return None
    try:
        with torch.device("meta"), torch.no_grad():
            built = without_weights(transformers(), cast(Any, model).config, NAME).eval()
            assert type(built) is type(model), "another model of the same configuration"
            built(torch.zeros(1, 3, dtype=torch.long))
    except UnknownKeyword as error:
        return Support(False, error.reason)
    except Exception:  # models need inputs of many kinds
        passes = " and ".join(f"{kind} passes {', '.join(x)}" for kind, x in named.items())
        run = "which clearhead does not support; run it to know."
        return Support(None, f"{passes} to its attention function if it has a value, {run}")
    return None


def _misread(model: nn.Module) -> Support | None:
    """Return the result for a model that would misread a boolean mask; None for any other.

    Such a model adds the mask to scores, or creates it for a part that computes attention itself.
    """
    for module in model.modules():
        kind, config = type(module), type(getattr(module, "config", None))
        if asks_for_mask(kind) and misreads_masks(config.__module__):
            return Support(False, f"{kind.__name__} needs an additive mask.")
    return None


def _classes(model: nn.Module, has: Callable[..., bool]) -> list[type[nn.Module]]:
    return sorted({*filter(has, map(type, model.modules()))}, key=lambda kind: kind.__name__)


def _list(classes: list[type[nn.Module]]) -> str:
    return ", ".join(kind.__name__ for kind in classes)


def _hint(own: list[type[nn.Module]]) -> str:
    files = (inspect.getsource(sys.modules[kind.__module__]) for kind in own)
    if not any("scaled_dot_product_attention(" in file for file in files):
        return ""
    return " Load it with attn_implementation='sdpa' and run it inside compat.patched()."


def of_folder(path: Path) -> nn.Module:
    """Build the model of a folder, a GGUF file or a name in the local cache of the hub on the meta
    device, to compute shapes. Raises `BadValue` without a configuration that transformers knows."""
    library = transformers()
    register()
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    try:
        config = library.AutoConfig.from_pretrained(
            path.parent if gguf else str(path), local_files_only=True, **gguf
        )
        return without_weights(library, config, NAME)
    except Exception as error:  # a configuration may be anything
        gave = f"No model can be built from {str(path)!r}: {' '.join(str(error).split())}"
        rule = "its config.json or GGUF file has an architecture with the attention interface."
        hint = "check the path; clearhead.hf.supports(config) says more."
        raise BadValue(gave, rule, hint) from error


def without_weights(library: Any, config: Any, implementation: str) -> nn.Module:
    """Build the model of a configuration on the meta device.

    Its class is the one that the configuration names, or the first that transformers can build.
    """
    config = copy.deepcopy(config)  # transformers writes the implementation to it
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
