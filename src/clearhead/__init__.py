"""clearhead: attention with a clear head. Exact, fast, and open to look into.

The letters, in every docstring and error: B batch, H query heads, G key/value heads, Tq queries,
Tk keys, D head size, Dv value size. True means "may look".
"""

from . import compat, hf, nn, views
from .attend import (
    attention,
    look,
    matrix,
)
from .biases import alibi, bias
from .errors import AttentionError, BadType, BadValue
from .explain import explain
from .lesson import explain_text
from .masks import (
    Causal,
    causal,
    dense,
    documents,
    everything,
    lengths,
    prefix,
    window,
)
from .matrix import Matrix
from .plan import Plan, plan
from .scaling import why_scale
from .stats import (
    Look,
    map,
    mass,
    rows,
    topk,
)
from .trace import Step, Trace
from .watch import watch

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
    "map",
    "rows",
    "matrix",
    "Matrix",
    "watch",
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
    "compat",
    "hf",
    "views",
    "AttentionError",
    "BadValue",
    "BadType",
]

__version__ = "0.1.0"

# A trace is pure data and knows no view; here, where both are known, a notebook learns to show it.
Trace._repr_html_ = views.html.notebook  # type: ignore[attr-defined]  # given here, as said above
