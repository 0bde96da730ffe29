"""What the source of a transformers model tells about its attention."""

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch

# They hand over their attention, and read the mask as 0 and -inf in other places, or add to it.
_READ_MASKS = {"transformers.models.nllb_moe", "transformers.models.deepseek_v4"}


@torch.compiler.assume_constant_result
def hands_attention_over(configuration: str) -> bool:
    """Does the model whose configuration comes from this module of transformers hand its attention
    to the interface, as far as its source says? One of somebody else is believed to."""
    return _source_hands_over(configuration)


@lru_cache
def _source_hands_over(configuration: str) -> bool:
    room, _, name = configuration.rpartition(".configuration_")
    if not room.startswith("transformers.models."):
        return True
    if room in _READ_MASKS:
        return False
    found = find_spec(f"{room}.modeling_{name}")
    if found is None or found.origin is None:
        return True
    source = Path(found.origin).read_text(encoding="utf-8")
    return "ALL_ATTENTION_FUNCTIONS" in source or not re.search(r"[Ss]oftmax\(", source)
