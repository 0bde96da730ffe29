"""clearhead: attention with a clear head. Exact, fast, and open to look into.

The letters, in every docstring and error: B batch, H query heads, G key/value heads, Tq queries,
Tk keys, D head size, Dv value size. True means "may look".
"""

import importlib
import sys


def _in_subinterpreter() -> bool:
    for name in ("_interpreters", "_xxsubinterpreters"):  # since Python 3.13, and before
        try:
            interpreters = importlib.import_module(name)
        except ImportError:
            continue
        return bool(interpreters.get_current() != interpreters.get_main())
    return False


if (
    _in_subinterpreter()
):  # asked before torch is imported, which would hang here or raise SystemError
    raise ImportError(
        "clearhead was imported in a subinterpreter.\n"
        "  Rule: torch keeps one state for a process, and can be imported in its main interpreter "
        "only.\n"
        "  Way out: import clearhead in the main interpreter, or in a process of its own."
    )

from . import distributed, hf, nn, views
from .api import compat, edits
from .api.attention import attention
from .api.effects import effects
from .api.explain import explain
from .api.intervene import Intervention, intervene
from .api.look import Look, look
from .api.matrix import Matrix, matrix
from .api.metrics import logit_difference
from .api.plan import Plan, plan
from .api.recording import Recording
from .api.rollout import flow, rollout
from .api.watch import watch
from .api.why_scale import why_scale
from .errors import AttentionError, BadType, BadValue
from .masks import Causal, causal, dense, documents, everything, lengths, prefix, window
from .masks.mask import Mask
from .nn.explain_text import explain_text
from .problem.biases import alibi, bias
from .results.effects import Effect, Effects
from .results.trace import Step, Trace
from .stats import map as map, mass, rows, topk

# Without `map`: `from clearhead import *` would take Python's own.
__all__ = [  # noqa: RUF022 (in the order in which the manual shows them)
    "attention",
    "explain",
    "explain_text",
    "Trace",
    "Step",
    "look",
    "Look",
    "topk",
    "mass",
    "rows",
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
    "rollout",
    "flow",
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

# `import clearhead.compat` is as good as `clearhead.compat`.
sys.modules[f"{__name__}.compat"] = compat

# Traces and masks know no view; here, where both are known, a notebook learns to show them.
Trace._repr_html_ = views.html.cells.trace_cell  # type: ignore[attr-defined]  # given here
Mask._repr_html_ = views.html.cells.mask_cell  # type: ignore[attr-defined]  # given here
