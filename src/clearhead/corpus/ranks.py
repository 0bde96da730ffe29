"""Find which part of a survey this process computes: the environment of torchrun and SLURM."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from ..core.errors import BadValue


class Rank(NamedTuple):
    """One of `world` workers, numbered from 0."""

    number: int
    world: int

    def split(self, shards: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the shards of this worker, and those of the others, the next worker's first.

        >>> Rank(1, 3).split(range(5))
        ([1, 4], [2, 0, 3])
        """
        parts = [list(shards[(self.number + i) % self.world :: self.world])
                 for i in range(self.world)]  # fmt: skip
        return parts[0], [number for part in parts[1:] for number in part]


ALONE = Rank(0, 1)
# The variables of the rank, of the number of ranks, and of the first rank.
VARIABLES = (
    ("CLEARHEAD_RANK", "CLEARHEAD_WORLD_SIZE", ""),
    ("RANK", "WORLD_SIZE", ""),  # torchrun
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("SLURM_PROCID", "SLURM_NTASKS", ""),
)


def rank_of_environment() -> Rank:
    """Return the rank of this process; 0 of 1 if the environment has none.

    Raises `BadValue` for a rank that is not a number below the number of ranks.
    """
    for rank, world, first in VARIABLES:
        if rank not in os.environ or world not in os.environ:
            continue
        try:
            index = int(os.environ[rank]) - int(os.environ.get(first, 0))
            count = int(os.environ[world])
            if not 0 <= index < count:
                raise ValueError
        except ValueError:
            raise BadValue(
                f"{rank} is {os.environ[rank]!r}, and {world} {os.environ[world]!r}.",
                "a rank is a number from 0 up to, but not including, the number of ranks.",
                f"set both, or unset {rank}.",
            ) from None
        return Rank(index, count)
    return ALONE
