"""Keep calls out of the graphs of torch.compile that a graph cannot hold."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from ..errors import BadValue

Arguments = ParamSpec("Arguments")
Out = TypeVar("Out")


def eagerly(function: Callable[Arguments, Out]) -> Callable[Arguments, Out]:
    """Break the graph of torch.compile around a function, so that it runs as without it.

    Raises `BadValue` with ``fullgraph=True``, which allows no break.
    """
    breaking = torch._disable_dynamo(function)  # torch.compiler.disable, imported at the first call

    @wraps(function)
    def run(*args: Arguments.args, **keywords: Arguments.kwargs) -> Out:
        if torch.compiler.is_dynamo_compiling():
            _must_break_graph()
        elif get_eval_frame_callback() is None:  # else the compiler would trace what it calls
            return function(*args, **keywords)
        return breaking(*args, **keywords)

    return run


def _must_break_graph() -> None:
    from torch._dynamo.exc import UserError, UserErrorType
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if InstructionTranslator.current_tx().one_graph:
        raise not_in_graph(UserError, UserErrorType.ANTI_PATTERN, "")


# The compiler calls this function while it traces, and does not trace into it.
_must_break_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def not_in_graph(kind: type[Exception], *args: object) -> BadValue:
    """Return the error for a call that a graph cannot hold.

    It is of a `kind` that the compiler understands too; it would wrap others.
    """
    of_both = type("NotInGraph", (BadValue, kind), {})
    gave = "Attention over ranks or with a mask from outside the graph was called in torch.compile."
    rule = "a graph holds neither messages between ranks nor the masks of transformers."
    hint = "compile without fullgraph=True, so that the graph breaks at this call."
    error = of_both(gave, rule, hint)
    kind.__init__(error, *args)
    return error
