"""Check every argument of a call once, and make a `Problem` of them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import torch_state
from ..errors import BadType, BadValue, as_count, as_number, kind_of, must_be_strided
from ..errors.limits import MOST_SEED
from ..masks import Dense, Grid, Mask, everything, intersect
from ..masks.values import as_4d
from .biases import DTYPES, Bias, TensorBias, bias as as_bias
from .problem import Inputs, Problem

# A cap this large changes no score, and score / cap would underflow in float32.
LARGEST_CAP = 2.0**100


class Options(NamedTuple):
    """The unchecked keywords of a call, for `make_problem`."""

    mask: Mask | None = None
    bias: Bias | Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float | None = None
    seed: int | None = None


DEFAULTS = Options()


def make_problem(
    q: Tensor, k: Tensor, v: Tensor, options: Options = DEFAULTS
) -> tuple[Problem, Inputs]:
    """Check the arguments, and return the problem and its tensors with four dimensions."""
    torch_state.one_thread_after_fork()
    mask, bias, scale, softcap, sinks, dropout, seed = options
    input_dims = 4
    if not _is_usual(q, k, v):
        q, k, v, input_dims = _four_dimensions(*_as_autocast(q, k, v))
    (B, H, Tq, D), (_, G, Tk, _), Dv = q.shape, k.shape, v.shape[-1]
    grid = Grid(Tq, Tk, B, H)
    mask = _checked_mask(mask, grid)
    if bias is not None:
        bias = bias if isinstance(bias, Bias) else as_bias(bias)
        bias.check(grid)
        _must_have_values_as_q("bias", bias.numbers, q)
        if isinstance(bias, TensorBias) and not torch_state.records_grad(bias.tensor):
            bias = TensorBias(torch_state.without_repeats(bias.tensor))
        if isinstance(bias, TensorBias) and "meta" not in (bias.tensor.device.type, q.device.type):
            if bias.tensor.device != q.device:
                bias = TensorBias(bias.tensor.to(q.device))
            mask, bias = _infinities_to_mask(bias, mask)
            if isinstance(bias, TensorBias) and q.dtype != torch.float64:
                bias = bias.within(torch.float32)
    if sinks is not None:
        sinks = _checked_sinks(sinks, H)
        _must_have_values_as_q("sinks", sinks, q)
        sinks = sinks.to(q.device)
    numbers = None if bias is None else bias.numbers
    grad = torch_state.records_grad(q, k, v, sinks, numbers)
    problem = Problem(
        B, H, G, Tq, Tk, D, Dv, q.dtype, q.device, mask, bias,
        scale=1.0 / math.sqrt(max(D, 1)) if scale is None else _checked_scale(scale),
        softcap=None if softcap is None else _checked_softcap(softcap), sinks=sinks,
        dropout=0.0 if dropout is None else checked_dropout(dropout),
        seed=None if seed is None else _checked_seed(seed, dropout),
        grad=grad, input_dims=input_dims,
    )  # fmt: skip
    return problem, Inputs(q, k, v)


# ------------------------------------------------------------------------------------- the checks


def must_have_values(problem: Problem, verb: str) -> None:
    """Raise `BadValue` if tensors have no values for `verb` to show.

    This is so for meta tensors, and while gradients are batched.
    """
    if torch_state.batches_gradients():
        gave = f"{verb} was called in a backward pass of is_grads_batched=True."
        rule = f"torch batches few operations in it: attention(...), but not {verb}(...)."
        hint = "compute the gradients one by one, or by torch.func.vmap over torch.func.vjp."
        raise BadValue(gave, rule, hint)
    if problem.device.type == "meta":
        rule = "a meta tensor has a shape but no numbers."
        hint = "use plan(...), or attention(...) for the shape of the output."
        raise BadValue(f"{verb} got meta tensors: {problem.describe()}.", rule, hint)


def _is_usual(q: object, k: object, v: object) -> bool:
    """Do q, k and v have four dimensions, one dtype and matching sizes, as in most calls?

    One function checks all of this, because a small call spends most of its time in checks.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    if (q.is_nested or k.is_nested or v.is_nested) or not (
        q.dim() == 4 == k.dim() == v.dim() and q.dtype is k.dtype is v.dtype in DTYPES
    ):
        return False
    B, H, _, D = q.shape
    Bk, G, Tk, Dk = k.shape
    Bv, Gv, Tv, _ = v.shape
    same = B == Bk == Bv and D == Dk and G == Gv and Tk == Tv
    same = same and G > 0 and H % G == 0 and q.device == k.device == v.device
    return same and q.layout is k.layout is v.layout is torch.strided


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors of different dtypes to the dtype of autocast, as torch does.

    Under autocast some layers return this dtype and some do not.
    """
    if not all(isinstance(x, Tensor) and x.dtype in DTYPES[:3] for x in tensors):
        return tensors
    device = tensors[0].device
    if len({x.dtype for x in tensors}) == 1 or not torch_state.is_autocast(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device.type)) for x in tensors)


def _four_dimensions(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            rule = "queries, keys and values are torch tensors."
            hint = f"pass torch.as_tensor({name})." if x is not None else f"pass {name}, a tensor."
            raise BadType(f"{name} is {kind_of(x)}.", rule, hint)
        rule = "queries, keys and values are dense tensors with strides."
        hint = f"pass {name}.to_padded_tensor(0) and lengths(...), or join texts: documents(...)."
        must_be_strided(name, x, rule, hint)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if len({x.dim() for x in (q, k, v)}) > 1 or not 2 <= q.dim() <= 4:
        rule = "q is (B, H, Tq, D), k (B, G, Tk, D), v (B, G, Tk, Dv); all may omit B, or B and H."
        hint = "pass all three with the same number of dimensions, 2 to 4; unsqueeze(0) adds one."
        raise BadValue(f"The shapes are {shapes}.", rule, hint)
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in DTYPES:
        rule = "queries, keys and values are all float16, all bfloat16, all float32 or all float64."
        hint = "convert them, for example with .float() or .to(q.dtype)."
        raise BadType(f"The dtypes are q {q.dtype}, k {k.dtype}, v {v.dtype}.", rule, hint)
    if len({x.device for x in (q, k, v)}) > 1:
        rule = "queries, keys and values are on one device."
        hint = "move them, for example with .to(q.device)."
        raise BadValue(f"The devices are q {q.device}, k {k.device}, v {v.device}.", rule, hint)
    input_dims = q.dim()
    q, k, v = (as_4d(x) if input_dims < 4 else x for x in (q, k, v))
    if q.shape[-1] != k.shape[-1]:
        gave = f"Queries have {q.shape[-1]} features and keys {k.shape[-1]} ({shapes})."
        rule = "a score is a dot product, so queries and keys have the same head size D."
        raise BadValue(gave, rule, "project both to the same size; check that k is not transposed.")
    if k.shape[1:3] != v.shape[1:3]:
        of_k, of_v = tuple(k.shape[1:3]), tuple(v.shape[1:3])
        gave = f"Keys have (G, Tk) = {of_k} and values {of_v} ({shapes})."
        rule = "every key has one value: k is (B, G, Tk, D) and v is (B, G, Tk, Dv)."
        raise BadValue(gave, rule, "pass both with the same heads and the same length.")
    H, G = q.shape[1], k.shape[1]
    if (G == 0 and H != 0) or (G and H % G):
        rule = "H is a multiple of G, and query head i reads key head i // (H // G)."
        hint = "change the number of heads, or repeat the key heads yourself."
        raise BadValue(f"There are H={H} query heads and G={G} key heads ({shapes}).", rule, hint)
    batches = {x.shape[0] for x in (q, k, v)} - {1}
    if len(batches) > 1:
        gave = f"The batch sizes are {q.shape[0]}, {k.shape[0]} and {v.shape[0]} ({shapes})."
        rule = "q, k and v have one batch size; a batch of 1 broadcasts."
        raise BadValue(gave, rule, "pass all three with the same batch size, or 1.")
    B = batches.pop() if batches else 1
    q, k, v = (x if x.shape[0] == B else x.expand(B, -1, -1, -1) for x in (q, k, v))
    return q, k, v, input_dims


def _checked_mask(mask: object, grid: Grid) -> Mask:
    if mask is None:
        return everything
    if isinstance(mask, Mask):
        mask.check(grid)
        mask.must_fit(grid)
        return mask
    what, rule = repr(mask), "a mask is an object of clearhead."
    hint = "pass clearhead.causal, window(before=...), lengths(...), documents(...) or dense(...)."
    if isinstance(mask, type) and issubclass(mask, Mask):
        what, rule = f"the class {mask.__name__}", "a mask is an instance of its class."
        hint = f"call it: {mask.__name__}(...); plain causal is `clearhead.causal`."
    elif isinstance(mask, str):
        what = f"the string {mask!r}"
        rule = "a mask is an object of clearhead, such as clearhead.causal."
        hint = "pass mask=clearhead.causal; clearhead.core.masks.parse(text) reads a notation."
    elif str(getattr(mask, "dtype", None)) in ("bool", "torch.bool"):  # NumPy's or torch's
        kind = "a boolean tensor" if isinstance(mask, Tensor) else "an array of booleans"
        what = f"{kind} of shape {tuple(mask.shape)}"  # type: ignore[attr-defined]  # as its dtype
        rule = "a boolean mask must state what True means, because libraries disagree."
        hint = "pass dense(keep=mask) if True means may look, and otherwise dense(drop=mask)."
    elif isinstance(mask, Tensor):
        what = f"a tensor of dtype {mask.dtype}"
        rule = "a mask is a rule, and numbers that are added to scores are a bias."
        hint = "pass dense(keep=mask.bool()) if 1 means may look, or 0 and -inf as bias=."
    elif callable(mask) or hasattr(mask, "mask_mod"):
        what = kind_of(mask)
        rule = "a mask is an object of clearhead, not a function as in FlexAttention."
        hint = "pass clearhead.causal, window(before=...) or documents(...); for another mask_mod, "
        hint += "dense(keep=torch.nn.attention.flex_attention.create_mask(mask_mod, B, H, Tq, Tk))."
    elif isinstance(mask, Bias):
        rule = "a mask selects keys, and a bias is added to the scores."
        hint = "pass it as bias=."
    raise BadType(f"mask is {what}.", rule, hint)


def _must_have_values_as_q(name: str, x: Tensor | None, q: Tensor) -> None:
    if x is not None and x.device.type == "meta" != q.device.type:
        gave = f"{name} is a meta tensor of shape {tuple(x.shape)}; q is on {q.device}."
        hint = f"pass {name} with numbers, or all tensors on meta for the shape of the output."
        raise BadValue(gave, "a meta tensor has a shape but no numbers.", hint)


def _infinities_to_mask(bias: TensorBias, mask: Mask) -> tuple[Mask, Bias]:
    """Move -inf in a bias to the mask, so that NaN in a blocked value has no effect.

    On a CPU this reads whether the bias has a -inf. Elsewhere the host would wait for the answer,
    and a CUDA graph could not be captured, so there every bias becomes a mask too.
    """
    numbers = bias.tensor
    known = numbers.device.type == "cpu" and torch_state.has_values(numbers)
    if known and (not numbers.numel() or math.isfinite(numbers.detach().amin().item())):
        return mask, bias
    blocked = torch.isneginf(torch_state.without_repeats(numbers))
    if known and not bool(blocked.any()):
        return mask, bias
    rule = Dense(~blocked if blocked.dim() else ~blocked.reshape(1))
    return intersect(mask, rule), TensorBias(bias.tensor.masked_fill(blocked, 0.0))


def _checked_sinks(sinks: object, H: int) -> Tensor:
    if not isinstance(sinks, Tensor) or sinks.dtype not in DTYPES:
        rule = "sinks are extra logits, one floating-point number per query head."
        hint = f"pass a floating tensor of shape ({H},)."
        raise BadType(f"sinks is {getattr(sinks, 'dtype', type(sinks).__name__)}.", rule, hint)
    must_be_strided("sinks", sinks)
    # Two comparisons, because `in (1, H)` fails while torch.compile traces dynamic shapes.
    if sinks.dim() > 1 or (sinks.dim() and sinks.shape[0] != 1 and sinks.shape[0] != H):
        rule = "sinks are extra logits, one per query head, (H,)."
        hint = f"pass a tensor of shape ({H},)."
        raise BadValue(f"sinks has shape {tuple(sinks.shape)} for H={H} query heads.", rule, hint)
    return sinks.reshape(-1).expand(H)


def _checked_scale(scale: object) -> float:
    _must_not_need_gradient("scale", scale)
    rule = "scale is a finite number, or None for 1/sqrt(D)."
    return as_number("scale", scale, rule, "pass another scale, or leave it out.")


def _checked_softcap(softcap: object) -> float | None:
    _must_not_need_gradient("softcap", softcap)
    rule = "softcap is a positive, finite number, or None for no cap."
    hint = "pass another softcap, or leave it out."
    cap = as_number("softcap", softcap, rule, hint, lambda cap: 0 < cap < math.inf)
    return cap if cap < LARGEST_CAP else None


def _must_not_need_gradient(name: str, value: object) -> None:
    if isinstance(value, Tensor) and value.requires_grad:
        gave, rule = f"{name} requires a gradient.", f"{name} is a constant, and gets no gradient."
        hint = f"pass {name}=float({name}), or learn t in attention(t * q, k, v, scale=1)."
        raise BadType(gave, rule, hint)


def checked_dropout(p: object) -> float:
    rule = "dropout is the probability that a weight is dropped, from 0 to 1."
    hint = "pass a number such as 0.1; layers pass 0.0 outside training."
    return as_number("dropout", p, rule, hint, lambda p: 0.0 <= p <= 1.0)


def _checked_seed(seed: object, dropout: object) -> int:
    rule = "a seed is a whole number from 0 to 2^63 - 1; None means torch's generator decides."
    number = as_count("seed", seed, rule, "pass a number such as 42.", most=MOST_SEED)
    if dropout is None:
        gave = f"seed={seed!r} was passed without dropout=."
        hint = "pass dropout=0.1 with it, dropout=0.0 outside training, or no seed."
        raise BadValue(gave, "a seed only decides which weights dropout drops.", hint)
    return number
