"""Keep calls that send messages out of the graphs of torch.compile."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ..core.errors import BadValue

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def eagerly(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Break the graph of torch.compile around a function, so that it runs as without it.

    Raises `BadValue` with ``fullgraph=True``, which allows no break.
    """

    @wraps(function)
    def run(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args, **keywords)
        _must_break_graph()
        return torch.compiler.disable(function)(*args, **keywords)

    return run


def _must_break_graph() -> None:
    from torch._dynamo.exc import UserError, UserErrorType
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if not InstructionTranslator.current_tx().one_graph:
        return

    class NotInGraph(BadValue, UserError):
        """The compiler passes on an error of its own kind, and wraps all others."""

        def __init__(self, gave: str, rule: str, hint: str) -> None:
            UserError.__init__(self, UserErrorType.ANTI_PATTERN, "")
            BadValue.__init__(self, gave, rule, hint)

    raise NotInGraph(
        "A function of clearhead.distributed was called in torch.compile(..., fullgraph=True).",
        "a graph cannot hold the messages between ranks, so it breaks at such a call.",
        "compile without fullgraph=True.",
    )


# The compiler calls this function while it traces, and does not trace into it.
_must_break_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
