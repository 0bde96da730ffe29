"""Check the undocumented names of transformers that clearhead uses, for `register`."""

import functools
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from ..core.errors import BadValue, how_to_install

TESTED = "5.4, 5.6, 5.18, 5.23 and 5.24"
_NAMES = {
    "": ("AttentionInterface", "AutoConfig", "AutoModel", "PreTrainedConfig"),
    "masking_utils": (
        "AttentionMaskInterface", "bidirectional_mask_function", "causal_mask_function",
        "sdpa_mask",
    ),
    "modeling_utils": ("ALL_ATTENTION_FUNCTIONS", "PreTrainedModel._from_config"),
    "models.auto.modeling_auto": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModel._model_mapping"),
    "utils.output_capturing": ("_active_collector.get",),
}  # fmt: skip
_MASK_PARAMETERS = [  # of `sdpa_mask`, which are passed by their order

    "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function",
    "attention_mask", "local_size",
]  # fmt: skip
# Functions of `masking_utils` that return a mask function, and the variables in its closure.
CLOSURES = {
    "and_masks": {"mask_functions"},
    "sliding_window_overlay": {"sliding_window"},
    "sliding_window_bidirectional_overlay": {"sliding_window"},
    "chunked_overlay": {"chunk_size", "left_padding"},
    "packed_sequence_mask_function": {"packed_sequence_mask"},
    "remap_positions_for_packed_sequence": {"mask_function"},
}
_NOT_IN_ALL = {"remap_positions_for_packed_sequence"}  # older versions do not remap positions


@functools.cache
def check_internals() -> None:
    """Raise `BadValue` if the installed transformers lacks something that clearhead reads."""
    import transformers

    if lacks := next(_missing(), None):
        gave = f"transformers {transformers.__version__} has no {lacks}, which clearhead reads."
        rule = f"clearhead is tested with transformers {TESTED}."
        raise BadValue(gave, rule, how_to_install("hf"))


def _missing() -> Iterator[str]:
    for name, members in _NAMES.items():
        path = f"transformers.{name}".rstrip(".")
        try:
            module: Any = importlib.import_module(path)
        except ImportError:
            yield path
            continue
        for member in members:
            try:
                functools.reduce(getattr, member.split("."), module)
            except AttributeError:
                yield f"{path}.{member}"
    masking = importlib.import_module("transformers.masking_utils")
    parameters = [*inspect.signature(masking.sdpa_mask).parameters]
    if parameters[: len(_MASK_PARAMETERS)] != _MASK_PARAMETERS:
        yield f"{masking.__name__}.sdpa_mask({', '.join(_MASK_PARAMETERS)})"
    for maker, variables in CLOSURES.items():
        function = getattr(masking, maker, None)
        if function is None and maker in _NOT_IN_ALL:
            continue
        constants = () if function is None else function.__code__.co_consts
        inner = [code for code in constants if isinstance(code, CodeType)]
        if not any(variables <= {*code.co_freevars} for code in inner):
            yield f"{masking.__name__}.{maker} with {', '.join(sorted(variables))}"
