"""Find the keywords that a module passes to its attention function, by reading its code.

transformers' modules look the function up in `ALL_ATTENTION_FUNCTIONS` and call it with keywords.
clearhead refuses an unknown keyword when the model runs; this module finds it before.
"""

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import NamedTuple

from torch import nn

from .attention import KEYWORDS
from .inspect_model import TABLE, functions_of, names_in
from .register import NAME


class Refused(NamedTuple):
    """A keyword that clearhead refuses.

    `certain` is False if only a run shows whether the module passes it.
    """

    keyword: str
    certain: bool


def refused_keywords(module: nn.Module) -> list[Refused] | None:
    """Return the refused keywords that the module passes to its attention function.

    None if its code cannot be read, or does not contain the call.
    """
    refused = []
    calls = 0
    for function in functions_of(type(module)):
        if TABLE not in names_in(function):
            continue
        code = _read(function)
        if code is None:
            return None
        calls += len(code.calls)
        for call in code.calls:
            for keyword in call.keywords:
                if keyword.arg is None or keyword.arg in KEYWORDS:
                    continue
                judge = _Judge(code, {**function.__globals__, "self": module})
                passed = _both(judge.runs(call), judge.has_value(keyword.value))
                if passed is not False:
                    refused.append(Refused(keyword.arg, certain=passed is True))
    return refused if calls else None


class _Code(NamedTuple):
    """The code of a function, the parent of each node, and the calls of the attention function."""

    tree: ast.AST
    parents: dict[ast.AST, ast.AST]
    calls: list[ast.Call]


@functools.lru_cache
def _read(function: FunctionType) -> _Code | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return None
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and _has(node.value, TABLE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and _is_attention(x.func, bound)]
    return _Code(tree, parents, calls)


def _is_attention(called: ast.expr, bound: set[str]) -> bool:
    """Return whether this is the attention function, and not the table or one of its methods."""
    if isinstance(called, ast.Name):
        return called.id in bound
    return isinstance(called, ast.Subscript | ast.Call) and _has(called, TABLE)


def _has(node: ast.AST, name: str) -> bool:
    used = (getattr(x, "id", getattr(x, "attr", None)) for x in ast.walk(node))
    return name in used


class _Judge:
    """Evaluates conditions in the code of a known module's function, without running it.

    Results are True or False, or None if they depend on the inputs.
    """

    def __init__(self, code: _Code, names: dict[str, object]) -> None:
        self.code, self.names = code, names
        self.variables: set[str] = set()  # whose values are being evaluated

    def runs(self, node: ast.AST) -> bool | None:
        """Return whether the conditions hold under which this code runs."""
        result: bool | None = True
        while (parent := self.code.parents.get(node)) is not None:
            if isinstance(parent, ast.If) and node is not parent.test:
                known, value = self.evaluate(parent.test)
                holds = (bool(value) == (node in parent.body)) if known else None
                result = _both(result, holds)
            node = parent
        return result

    def has_value(self, node: ast.expr) -> bool | None:
        """Return whether this expression is neither None nor a switch, True or False."""
        known, value = self.evaluate(node)
        if known:
            return not (value is None or isinstance(value, bool))
        if not isinstance(node, ast.Name):
            return True  # it is computed
        if node.id in self.variables:
            return None
        self.variables.add(node.id)
        outcomes = [
            _both(self.runs(assigned), self.has_value(assigned.value))
            for assigned in self.assignments(node.id)
        ]
        self.variables.remove(node.id)
        if True in outcomes:
            return True
        return None if None in outcomes or not outcomes else False

    def assignments(self, name: str) -> Iterator[ast.Assign]:
        for node in ast.walk(self.code.tree):
            if isinstance(node, ast.Assign) and any(_has(x, name) for x in node.targets):
                yield node

    def evaluate(self, node: ast.expr) -> tuple[bool, object]:
        """Return whether the value is known, and the value. Nothing is called."""
        if any(isinstance(x, ast.Call | ast.NamedExpr | ast.Await) for x in ast.walk(node)):
            return False, None
        expression = ast.fix_missing_locations(ast.Expression(_Loaded().visit(copy.deepcopy(node))))
        try:
            return True, eval(compile(expression, "<condition>", "eval"), self.names)
        except Exception:  # a variable of the function, mostly
            return False, None


class _Loaded(ast.NodeTransformer):
    """Replaces `_attn_implementation` by clearhead's name, as in a model loaded with it."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Constant(NAME) if node.attr == "_attn_implementation" else node


def _both(a: bool | None, b: bool | None) -> bool | None:
    if a is False or b is False:
        return False
    return None if a is None or b is None else True
