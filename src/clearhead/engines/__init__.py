"""What computes attention. An engine is a file or a folder; `choice.py` says which one answers."""

from .choice import (
    BY_NAME,
    CORE,
    ENGINES,
    FLEX,
    SDPA,
    STEPS,
    TILED,
    TRITON,
    answer,
    choose,
    compute_stats,
    first_able,
    named,
    order,
    order_on,
)

__all__ = [
    "BY_NAME",
    "CORE",
    "ENGINES",
    "FLEX",
    "SDPA",
    "STEPS",
    "TILED",
    "TRITON",
    "answer",
    "choose",
    "compute_stats",
    "first_able",
    "named",
    "order",
    "order_on",
]
