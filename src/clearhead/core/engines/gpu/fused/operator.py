"""Call torch's fused kernels, and define the operator `clearhead::fused_attend`.

Under a causal mask, `triton/repair.py` checks the results on the device, forward and backward. The
operator puts the calls under autograd and tracers. Without a GPU the tests run it with torch's
fused kernel for a CPU and Triton's interpreter, and the calls for a GPU on fake tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....errors import BadValue
from ....masks.key_ranges import UNLIMITED
from ....problem.problem import Inputs, Problem
from ....torch_state import is_plain
from ...operators import KernelArgs, define_operator, is_recordable, recorded_call, with_rows
from ...sdpa_backends import gpu_of, is_causal, preferred
from ..replay import replayed

aten = torch.ops.aten

# `Library` must outlive its definitions. The C++ core has defined the namespace.
_library = torch.library.Library("clearhead", "FRAGMENT")


class Forward(NamedTuple):
    """The arguments of a fused kernel. `lse`: whether the log-sum-exp is computed too."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    lse: bool


class Backward(NamedTuple):
    """The arguments of the gradient of a fused kernel; `lse` is (B, H, Tq), contiguous."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    causal: bool


class Kernel(NamedTuple):
    """A fused kernel of torch and its gradient. `forward` returns the output, and the log-sum-exp
    in contiguous memory."""

    forward: Callable[[Forward], tuple[Tensor, Tensor]]
    backward: Callable[[Backward], tuple[Tensor, Tensor, Tensor]]


def attend(p: Problem, inputs: Inputs, lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """Compute the output, and with `lse` the log-sum-exp (B, H, Tq), which has no gradient, of a
    problem for which `why_not_direct` returns no reason."""
    rule = KernelArgs(p.scale, 0.0, UNLIMITED, 0 if is_causal(p) else UNLIMITED)
    plain = is_plain(*inputs)
    if plain and not p.grad:
        out, sums, _ = compute(*inputs, rule, lse)
    elif plain and not lse and is_recordable(p, rule):
        return _RecordedCall.apply(*inputs, rule), None
    else:
        out, sums, _ = _operator.attend(*inputs, *rule)
    return out, sums if lse else None


@replayed
def compute(
    q: Tensor, k: Tensor, v: Tensor, rule: KernelArgs, lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output, the log-sum-exp (empty without `lse`), and the flag of the repair, which
    has no value without a causal mask."""
    q, k, v = (with_rows(x) for x in (q, k, v))
    causal = rule.after == 0
    out, sums = kernel_for(q, k, v, causal).forward(Forward(q, k, v, rule.scale, causal, lse))
    if not causal:
        return out, sums, q.new_empty(1, dtype=torch.int32)
    from ..triton.repair import repair_output

    return out, sums, repair_output(q, k, v, rule, out, sums if lse else None)


@replayed
def gradients(
    dout: Tensor, out: Tensor, lse: Tensor, flag: Tensor, q: Tensor, k: Tensor, v: Tensor,
    rule: KernelArgs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k and v. This may raise the flag."""
    q, k, v, dout, out = (with_rows(x) for x in (q, k, v, dout, out))
    dout = dout.contiguous() if 0 in dout.stride() else dout
    causal = rule.after == 0
    of = Backward(dout, q, k, v, out, lse, rule.scale, causal)
    grads = kernel_for(q, k, v, causal).backward(of)
    if causal:
        from ..triton.repair import repair_gradients

        repair_gradients(dout, out, lse, flag, q, k, v, rule, grads)
    return grads


# ---------------------------------------------------------------------------------- torch's kernels


def kernel_for(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Kernel:
    """Return the preferred kernel that torch accepts for these tensors.

    Raises `BadValue` if it accepts none; its warnings then have the reasons.
    """
    if q.device.type == "cpu":
        return FOR_CPU
    cuda = torch.backends.cuda
    of = cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    accepts = {
        "cudnn": cuda.can_use_cudnn_attention,
        "flash": cuda.can_use_flash_attention,
        "efficient": cuda.can_use_efficient_attention,
    }
    names = preferred(gpu_of(q.device))
    for name in names:
        if accepts[name](of):
            return FOR_GPU[name]
    for name in names:
        accepts[name](of, True)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {q.dtype}"
    gave = f"None of torch's fused kernels ({', '.join(names)}) accepts this call: {shapes}."
    rule = "torch's warnings list what each kernel requires."
    raise BadValue(gave, rule, "pass engine='triton' or engine='tiled'.")


def _no_seed(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state of dropout, which a gradient without dropout does not read."""
    seed = q.new_empty(2, dtype=torch.uint64)
    return seed, seed


def _flash(of: Forward) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        of.q, of.k, of.v, 0.0, of.causal, False, scale=of.scale
    )
    return out, lse


def _flash_backward(of: Backward) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_backward(
        of.dout, of.q, of.k, of.v, of.out, of.lse, None, None, of.q.shape[2], of.k.shape[2],
        0.0, of.causal, *_no_seed(of.q), scale=of.scale,
    )  # fmt: skip


def _efficient(of: Forward) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        of.q, of.k, of.v, None, of.lse, 0.0, of.causal, scale=of.scale
    )
    padded = lse.shape[2] > of.q.shape[2]  # to a multiple of 32
    return out, lse.narrow(2, 0, of.q.shape[2]).contiguous() if padded else lse


def _efficient_backward(of: Backward) -> tuple[Tensor, Tensor, Tensor]:
    missing = -of.lse.shape[2] % 32
    lse = F.pad(of.lse, (0, missing), value=float("inf")) if missing else of.lse
    *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
        of.dout, of.q, of.k, of.v, None, of.out, lse, *_no_seed(of.q), 0.0,
        [True, True, True, False], of.causal, scale=of.scale,
    )  # fmt: skip
    return tuple(grads)


_cudnn_lse_dims = 4  # of the log-sum-exp of torch's cuDNN kernel, which differ by version


def _cudnn(of: Forward) -> tuple[Tensor, Tensor]:
    global _cudnn_lse_dims
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        of.q, of.k, of.v, None, of.lse, 0.0, of.causal, False, scale=of.scale
    )
    if not of.lse:
        return out, of.q.new_empty(0, dtype=torch.float32)
    _cudnn_lse_dims = lse.dim()
    return out, lse.reshape(of.q.shape[:3])


def _cudnn_backward(of: Backward) -> tuple[Tensor, Tensor, Tensor]:
    lse = of.lse.unsqueeze(-1) if _cudnn_lse_dims == 4 else of.lse
    return aten._scaled_dot_product_cudnn_attention_backward(
        of.dout, of.q, of.k, of.v, of.out, lse, *_no_seed(of.q), None, None, None,
        of.q.shape[2], of.k.shape[2], 0.0, of.causal, scale=of.scale,
    )  # fmt: skip


def _on_cpu(of: Forward) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        of.q, of.k, of.v, 0.0, of.causal, scale=of.scale
    )
    return out, lse.contiguous()


def _on_cpu_backward(of: Backward) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        of.dout, of.q, of.k, of.v, of.out, of.lse, 0.0, of.causal, scale=of.scale
    )


FOR_GPU = {
    "cudnn": Kernel(_cudnn, _cudnn_backward),
    "flash": Kernel(_flash, _flash_backward),
    "efficient": Kernel(_efficient, _efficient_backward),
}
FOR_CPU = Kernel(_on_cpu, _on_cpu_backward)  # for the tests


# ------------------------------------------------------------------------------------ the operator


def _attend(q: Tensor, k: Tensor, v: Tensor, rule: KernelArgs) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, flag = compute(q, k, v, rule, True)
    if out.stride() != (strides := _layout(q, v)):
        out = torch.empty_strided(out.shape, strides, dtype=q.dtype, device=q.device).copy_(out)
    return out, lse, flag


def _layout(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the strides of the output, which a compiled graph must know: those of q, if its memory
    has no gaps and Dv = D, otherwise contiguous."""
    dense = q.is_contiguous() or q.transpose(1, 2).is_contiguous()
    if dense and q.shape[3] == v.shape[3]:
        return q.stride()
    H, Tq, Dv = q.shape[1], q.shape[2], v.shape[3]
    return H * Tq * Dv, Tq * Dv, Dv, 1


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = *q.shape[:3], v.shape[3]
    return (
        torch.empty_strided(shape, _layout(q, v), dtype=q.dtype, device=q.device),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(1, dtype=torch.int32),
    )


def _gradients(
    dout: Tensor, dlse: None, out: Tensor, lse: Tensor, flag: Tensor,
    q: Tensor, k: Tensor, v: Tensor, rule: KernelArgs, bias_grad: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute `gradients`, contiguous, as a compiled graph expects them, and without a write to the
    flag."""
    grads = gradients(dout, out, lse, flag.clone(), q, k, v, rule)
    return *(x.contiguous() for x in grads), None, None


_operator = define_operator(
    _library, "fused_attend", "the engine of torch's fused kernels",
    devices=("CUDA", "CPU"),  # on a CPU for the tests
    flags="", outputs="out lse flag", differentiable=1,
    attend=_attend, gradients=_gradients, shapes=_shapes,
)  # fmt: skip

_RecordedCall = recorded_call(
    lambda q, k, v, rule: compute(q, k, v, rule, True),
    lambda dout, _, *rest: gradients(dout, *rest[:-1]),
    _operator.backward,
)
