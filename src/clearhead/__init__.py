"""clearhead: attention with a clear head. Exact, fast, and open to look into.

The letters, in every docstring and error: B batch, H query heads, G key/value heads, Tq queries,
Tk keys, D head size, Dv value size. True means "may look".
"""

from . import compat as compat, hf as hf, nn as nn, views as views
from .attend import (
    attention as attention,
    explain as explain,
    look as look,
    matrix as matrix,
)
from .biases import alibi as alibi, bias as bias
from .errors import AttentionError as AttentionError, BadType as BadType, BadValue as BadValue
from .lesson import explain_text as explain_text
from .masks import (
    Causal as Causal,
    causal as causal,
    dense as dense,
    documents as documents,
    everything as everything,
    lengths as lengths,
    prefix as prefix,
    window as window,
)
from .matrix import Matrix as Matrix
from .plan import Plan as Plan, plan as plan
from .scaling import why_scale as why_scale
from .stats import (
    Look as Look,
    map as map,
    mass as mass,
    rows as rows,
    topk as topk,
)
from .trace import Step as Step, Trace as Trace
from .watch import watch as watch

__version__ = "0.1.0"

# A trace is pure data and knows no view; here, where both are known, a notebook learns to show it.
Trace._repr_html_ = lambda trace: views.html.in_notebook(views.html.page(trace))  # type: ignore[attr-defined]
