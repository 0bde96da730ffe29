"""clearhead: attention with a clear head. Exact, fast, and open to look into.

The letters, in every docstring and error: B batch, H query heads, G key/value heads, Tq queries,
Tk keys, D head size, Dv value size. True means "may look".
"""

import importlib


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
from .errors import AttentionError, BadType, BadValue, renamed
from .errors.moved import keep_old_names
from .files.results import load
from .functional import compat
from .functional.attention import attention
from .functional.explain import explain
from .functional.explain_weights import explain_weights
from .functional.look import Look, look
from .functional.matrix import Matrix, matrix
from .functional.plan import Plan, plan
from .functional.why_scale import why_scale
from .inspection import edits
from .inspection.circuits import Circuits, circuits
from .inspection.effect_table import Effect, Effects
from .inspection.effects import effects
from .inspection.intervene import Intervention, intervene
from .inspection.logit_attribution import logit_attribution
from .inspection.logit_parts import LogitAttribution
from .inspection.metrics import logit_difference
from .inspection.recording import Recording
from .inspection.report import Report, report, report_batch, report_weights
from .inspection.rollout import rollout
from .inspection.watch import watch
from .masks import (
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
from .nn.explain_text import explain_text
from .problem.biases import alibi, bias
from .stats import exact_rows, mass, pooled, received, topk, value_weighted, weighted
from .survey import Survey, survey
from .trace import Step, Trace

__all__ = [  # noqa: RUF022 (in the order in which the manual shows them)
    "attention",
    "explain",
    "explain_text",
    "explain_weights",
    "Trace",
    "Step",
    "look",
    "Look",
    "topk",
    "mass",
    "weighted",
    "value_weighted",
    "received",
    "pooled",
    "exact_rows",
    "matrix",
    "Matrix",
    "watch",
    "Recording",
    "intervene",
    "Intervention",
    "edits",
    "effects",
    "Effects",
    "Effect",
    "logit_difference",
    "logit_attribution",
    "LogitAttribution",
    "circuits",
    "Circuits",
    "report",
    "report_batch",
    "report_weights",
    "Report",
    "rollout",
    "survey",
    "Survey",
    "load",
    "plan",
    "Plan",
    "causal",
    "Causal",
    "window",
    "prefix",
    "lengths",
    "documents",
    "dense",
    "everything",
    "alibi",
    "bias",
    "why_scale",
    "nn",
    "distributed",
    "compat",
    "hf",
    "views",
    "AttentionError",
    "BadValue",
    "BadType",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """Import the explorer, also called `views`, when it is first used, and explain removed names.

    So `import clearhead` loads nothing of HTML, the terminal or plots.
    """
    if name in ("explorer", "views"):
        return importlib.import_module(".explorer", __name__)
    if name == "flow":
        raise AttributeError(
            "clearhead.flow was removed: use clearhead.rollout, or the maximum flow of networkx on "
            "the rows that watch records."
        )
    if new := renamed(name, __all__):
        return globals()[new]
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


keep_old_names()
