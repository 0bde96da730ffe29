"""Who else follows a call: a compiler, a transform of torch.func, derivatives that ride along."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def transformed() -> bool:
    """Does a transform (vmap, grad, vjp) stand between the numbers and who asked?"""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None
    )


def at_hand() -> bool:
    """Can numbers be looked at? Not while a graph is made of the call, nor under a transform."""
    return not torch.compiler.is_compiling() and not transformed()


def forward_mode() -> bool:
    """Are derivatives carried along with the numbers (jvp, jacfwd)? Only torch's own operations do,
    and a kernel that does not would lose them without a word."""
    return forward_ad._current_level >= 0


def plain(*tensors: Tensor | None) -> bool:
    """Are these tensors with memory behind them, and does nobody follow what happens to them?"""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(map(PLAIN.__contains__, map(type, tensors)))
    )
