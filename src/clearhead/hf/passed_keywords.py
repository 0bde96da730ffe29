"""Find the keywords that a module passes to its attention function, by reading its code.

transformers' modules look the function up in `ALL_ATTENTION_FUNCTIONS` and call it with keywords.
clearhead refuses an unknown keyword that has a value, when the model runs.
"""

import ast
import functools
import inspect
import textwrap
from types import FunctionType

from torch import nn

from .attention import KEYWORDS
from .inspect_model import TABLE, functions_of, names_in


def unknown_keywords(kind: type[nn.Module]) -> list[str] | None:
    """Return the keywords that modules of this class pass to their attention function, and that
    clearhead does not know.

    None if the code cannot be read, or does not contain the call.
    """
    calls: list[ast.Call] = []
    for function in functions_of(kind):
        if TABLE in names_in(function):
            if (own := _calls(function)) is None:
                return None
            calls += own
    passed = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    return sorted(passed - KEYWORDS) if calls else None


@functools.lru_cache
def _calls(function: FunctionType) -> list[ast.Call] | None:
    """Return the calls of the attention function; None if there is no code to read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return None
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and _has(node.value, TABLE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    return [x for x in ast.walk(tree) if isinstance(x, ast.Call) and _is_attention(x.func, bound)]


def _is_attention(called: ast.expr, bound: set[str]) -> bool:
    """Return whether this is the attention function, and not the table or one of its methods."""
    if isinstance(called, ast.Name):
        return called.id in bound
    return isinstance(called, ast.Subscript | ast.Call) and _has(called, TABLE)


def _has(node: ast.AST, name: str) -> bool:
    used = (getattr(x, "id", getattr(x, "attr", None)) for x in ast.walk(node))
    return name in used
