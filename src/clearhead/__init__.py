"""clearhead: attention with a clear head. Exact, fast, and open to look into.

The letters, in every docstring and error: B batch, H query heads, G key/value heads, Tq queries,
Tk keys, D head dimension, Dv value size. True means "may look".
"""

import importlib
from typing import TYPE_CHECKING


def _in_subinterpreter() -> bool:
    for name in ("_interpreters", "_xxsubinterpreters"):  # since Python 3.13, and before
        try:
            interpreters = importlib.import_module(name)
        except ImportError:
            continue
        return bool(interpreters.get_current() != interpreters.get_main())
    return False


# Before torch is imported, which would hang in a subinterpreter or raise SystemError.
if _in_subinterpreter():
    raise ImportError(
        "clearhead was imported in a subinterpreter.\n"
        "  Rule: torch can be imported only in the main interpreter of a process.\n"
        "  Hint: import clearhead in the main interpreter, or in another process."
    )

from . import distributed, hf, nn
from .core import errors as errors, masks as masks, stats as stats
from .core.errors import AttentionError, BadType, BadValue
from .core.files.results import load
from .core.functional import compat
from .core.functional.attention import attention
from .core.functional.divergence import Divergence, divergence
from .core.functional.explain import explain, explain_weights
from .core.functional.look import Look, look
from .core.functional.matrix import Matrix, matrix
from .core.functional.plan import Plan, plan
from .core.functional.trace import Step, Trace
from .core.masks import (
    Causal,
    Mask as Mask,
    causal,
    dense,
    documents,
    everything,
    lengths,
    prefix,
    window,
)
from .core.problem.biases import alibi, bias
from .core.stats import exact_rows, mass, pooled, received, topk, value_weighted, weighted
from .core.stats.weight_statistics import drop_error
from .models.effects.compare_caches import CacheDamage, compare_caches
from .models.effects.effect_table import Effect, Effects
from .models.effects.effects import effects
from .models.effects.metrics import logit_difference
from .models.inspect import edits
from .models.inspect.intervene import Intervention, intervene
from .models.inspect.recording import Recording
from .models.inspect.rollout import rollout
from .models.inspect.watch import watch
from .models.monitor.clip import qk_clip
from .models.monitor.monitor import Monitor as monitor
from .models.report import Report, report, report_batch, report_weights
from .models.weights.circuits import Circuits, circuits
from .models.weights.logit_attribution import logit_attribution
from .models.weights.logit_parts import LogitAttribution
from .models.why import Why, why
from .nn.explain_text import explain_text

__all__ = [  # noqa: RUF022 (in the order in which the manual shows them)
    "attention", "explain", "explain_text", "explain_weights", "Trace", "Step", "look", "Look",
    "topk", "mass", "weighted", "value_weighted", "received", "drop_error", "pooled", "exact_rows",
    "matrix", "Matrix", "watch", "Recording", "intervene", "Intervention", "edits", "effects",
    "Effects", "Effect", "logit_difference", "logit_attribution", "LogitAttribution", "why", "Why",
    "circuits", "Circuits", "report", "report_batch", "report_weights", "Report", "rollout",
    "divergence", "Divergence", "compare_caches", "CacheDamage", "monitor", "qk_clip", "survey",
    "Survey", "load", "plan", "Plan", "causal", "Causal", "window", "prefix", "lengths",
    "documents", "dense", "everything", "alibi", "bias", "nn", "distributed", "compat", "hf",
    "views", "AttentionError", "BadValue", "BadType",
]  # fmt: skip

__version__ = "0.2.0"


if TYPE_CHECKING:
    from . import views
    from .corpus import Survey, survey

_LATER = {"Survey": "corpus", "survey": "corpus", "views": "views"}


def __getattr__(name: str) -> object:
    """Import what few programs need when it is first used, so `import clearhead` is faster."""
    if name not in _LATER:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    return module if _LATER[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
