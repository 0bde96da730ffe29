"""Why a head looks where it looks: the parts of a score, from what wrote query and key."""

from .result import Why
from .why import Reasons, why

__all__ = ["Reasons", "Why", "why"]
