"""ONNX's `Attention` operator (opsets 23 to 25), computed by clearhead.

ONNX has attributes and optional inputs where clearhead has masks and a bias. This file translates
them; clearhead does all arithmetic between Q, K, V and the outputs.
"""

import ml_dtypes
import numpy as np
import onnx
import torch
from torch import Tensor

import clearhead as ch
from clearhead.core.masks import Mask

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


def answer_of(
    node: onnx.NodeProto,
    arrays: list[np.ndarray],
    engine: str = "auto",
    within: torch.dtype | None = None,
) -> list[np.ndarray]:
    """Compute the outputs that the node names, in order; `arrays` holds its inputs.

    `within` is the dtype of the problem, if it is not that of the inputs; the outputs are rounded
    once, to the dtype of the inputs.
    """
    slots = [slot for slot, name in zip(INPUTS, node.input, strict=False) if name]
    given = {slot: to_torch(array) for slot, array in zip(slots, arrays, strict=True)}
    said = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    wanted = [slot for slot, name in zip(OUTPUTS, node.output, strict=False) if name]

    q, k, v = given["Q"], given["K"], given["V"]
    flat = q.dim() == 3  # (B, T, heads * D) instead of (B, heads, T, D)
    if flat:
        q = split_heads(q, said["q_num_heads"])
        k, v = (split_heads(x, said["kv_num_heads"]) for x in (k, v))
    if "past_key" in given:
        k, v = torch.cat([given["past_key"], k], 2), torch.cat([given["past_value"], v], 2)

    # ONNX computes the softmax in `softmax_precision`, clearhead in float32, or in float64 for
    # float64 inputs. So only a precision of float64 needs other inputs; no precision is less than
    # requested.
    dtype, wish = q.dtype, said.get("softmax_precision")
    wide = torch.float64 if wish == onnx.TensorProto.DOUBLE else within or dtype
    keywords = {
        "mask": who_may_look(given, said, q, k),
        "bias": added(given.get("attn_mask"), k, wide),
        "scale": said.get("scale"),
        "softcap": said.get("softcap") or None,  # 0 means no cap in ONNX
        "engine": engine,
    }
    tensors = [x.to(wide) for x in (q, k, v)]
    answers = {"present_key": k, "present_value": v}
    if "qk_matmul_output" in wanted:
        trace = ch.explain(*tensors, **keywords)
        answers["Y"] = trace["output"]
        answers["qk_matmul_output"] = matrix(trace, said.get("qk_matmul_output_mode", 0))
    else:
        answers["Y"] = ch.attention(*tensors, **keywords)
    if flat:
        answers["Y"] = answers["Y"].transpose(1, 2).flatten(2)
    return [to_numpy(answers[slot].to(dtype)) for slot in wanted]


def who_may_look(given: dict[str, Tensor], said: dict[str, int], q: Tensor, k: Tensor) -> Mask:
    """Return the mask: causal, windows, padding and a boolean mask, combined by `&`."""
    before, after = said.get("left_window_size", -1), said.get("right_window_size", -1)
    real, cells = given.get("nonpad_kv_seqlen"), given.get("attn_mask")
    # Query 0 is after the past. With an external cache it is after the real keys, without those of
    # the queries. That can be negative: then the first queries are fully masked.
    start: int | Tensor = 0
    if "past_key" in given:
        start = given["past_key"].shape[2]
    elif real is not None:
        start = real - q.shape[2]

    mask: Mask = ch.everything
    if said.get("is_causal"):
        mask = mask & ch.Causal(align=start)
    if before >= 0 or after >= 0:  # -1 means no limit, as None does
        sides = (None if size < 0 else size for size in (before, after))
        mask = mask & ch.window(*sides, align=start)
    if real is not None:
        mask = mask & ch.lengths(keys=real)
    if cells is not None:
        if cells.shape[-1] < k.shape[2]:  # keys beyond a short mask are masked
            mask = mask & ch.lengths(keys=cells.shape[-1])
        if cells.dtype == torch.bool:
            mask = mask & ch.dense(keep=to_length(cells, k.shape[2], False))
    return mask


def added(cells: Tensor | None, k: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return a floating mask as a bias. Padding beyond its end is masked, so the bias is 0
    there."""
    if cells is None or cells.dtype == torch.bool:
        return None
    return to_length(cells, k.shape[2], 0.0).to(dtype)


def to_length(cells: Tensor, Tk: int, filling: float) -> Tensor:
    return torch.nn.functional.pad(cells, (0, Tk - cells.shape[-1]), value=filling)


def matrix(trace: ch.Trace, mode: int) -> Tensor:
    """Return the step that `qk_matmul_output_mode` requests. If the step is missing it changes
    nothing, so the step before it is returned."""
    last = {0: "scaled", 1: "capped", 2: "masked", 3: "weights"}[mode]
    order = ("scores", "scaled", "capped", "biased", "masked", "weights")
    happened = [name for name in order[: order.index(last) + 1] if name in trace]
    return trace[happened[-1]]


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def to_torch(array: np.ndarray) -> Tensor:
    """Convert to torch. NumPy has no bfloat16, so its bits are passed as integers."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(x: Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()
