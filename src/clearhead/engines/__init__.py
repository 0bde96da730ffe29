"""The engines, which compute attention: each is a file or a folder, and `choice.py` selects one."""

from .choice import (
    BY_NAME,
    CORE,
    ENGINES,
    FLEX,
    FUSED,
    SDPA,
    STEPS,
    TILED,
    TRITON,
    answer,
    choose,
    compute_stats,
    first_capable,
    named,
    order,
    order_on,
)

__all__ = [
    "BY_NAME",
    "CORE",
    "ENGINES",
    "FLEX",
    "FUSED",
    "SDPA",
    "STEPS",
    "TILED",
    "TRITON",
    "answer",
    "choose",
    "compute_stats",
    "first_capable",
    "named",
    "order",
    "order_on",
]
