"""The engines, which compute attention: each is a file or a folder, and `choice.py` selects one."""

from .choice import (
    BY_NAME,
    CORE,
    ENGINES,
    FUSED,
    SDPA,
    STEPS,
    TILED,
    TRITON,
    answer,
    choose,
    compute_stats,
    counts_with_output,
    first_capable,
    kind_of,
    named,
    order,
    order_on,
    replay,
    statistics_of,
)
from .cpu import direct
from .cpu.divergence import core_divergences
from .parts import largest_parts

__all__ = [
    "BY_NAME", "CORE", "ENGINES", "FUSED", "SDPA", "STEPS", "TILED", "TRITON", "answer",
    "choose", "compute_stats", "core_divergences", "counts_with_output", "direct",
    "first_capable", "kind_of", "largest_parts", "named", "order", "order_on", "replay",
    "statistics_of",
]  # fmt: skip
