"""ONNX's `Attention` operator (opsets 23 to 25), put to clearhead.

ONNX says with attributes and optional inputs what clearhead says with masks and a bias. This page
is the translation; all arithmetic between Q, K, V and the answers happens in clearhead.
"""

import ml_dtypes
import numpy as np
import onnx
import torch
from torch import Tensor

import clearhead as ch
from clearhead.masks import Mask

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


def answer_of(
    node: onnx.NodeProto,
    arrays: list[np.ndarray],
    engine: str = "auto",
    within: torch.dtype | None = None,
) -> list[np.ndarray]:
    """The outputs the node names, in order. `arrays` holds the inputs it names.

    `within` is the dtype of the problem, if not that of the inputs; the answers come back rounded,
    once, to that of the inputs.
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

    # ONNX's softmax happens in `softmax_precision`. Ours happens in float32, or in float64 for
    # float64 inputs, so only a wish for float64 needs asking in it; no wish gets less than it says.
    dtype, wish = q.dtype, said.get("softmax_precision")
    wide = torch.float64 if wish == onnx.TensorProto.DOUBLE else within or dtype
    keywords = {
        "mask": who_may_look(given, said, q, k),
        "bias": added(given.get("attn_mask"), k, wide),
        "scale": said.get("scale"),
        "softcap": said.get("softcap") or None,  # 0 is ONNX's word for no cap
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
    """Causal, windows, padding and a boolean mask, each a rule of the algebra, met with `&`."""
    before, after = said.get("left_window_size", -1), said.get("right_window_size", -1)
    real, cells = given.get("nonpad_kv_seqlen"), given.get("attn_mask")
    # Query 0 stands behind the past; with a cache that lives outside, behind the keys that are
    # real but for the queries' own. That can be negative: then the first queries see nothing.
    start: int | Tensor = 0
    if "past_key" in given:
        start = given["past_key"].shape[2]
    elif real is not None:
        start = real - q.shape[2]

    mask: Mask = ch.everything
    if said.get("is_causal"):
        mask = mask & ch.Causal(align=start)
    if before >= 0 or after >= 0:  # -1 leaves a side open, as None does
        sides = (None if size < 0 else size for size in (before, after))
        mask = mask & ch.window(*sides, align=start)
    if real is not None:
        mask = mask & ch.lengths(keys=real)
    if cells is not None:
        if cells.shape[-1] < k.shape[2]:  # keys a short mask does not speak of are blocked
            mask = mask & ch.lengths(keys=cells.shape[-1])
        if cells.dtype == torch.bool:
            mask = mask & ch.dense(keep=to_length(cells, k.shape[2], False))
    return mask


def added(cells: Tensor | None, k: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A floating mask is a bias; behind its end the padding is blocked, so what it adds is 0."""
    if cells is None or cells.dtype == torch.bool:
        return None
    return to_length(cells, k.shape[2], 0.0).to(dtype)


def to_length(cells: Tensor, Tk: int, filling: float) -> Tensor:
    return torch.nn.functional.pad(cells, (0, Tk - cells.shape[-1]), value=filling)


def matrix(trace: ch.Trace, mode: int) -> Tensor:
    """What `qk_matmul_output_mode` asks for, by the names of our steps; a step that was not asked
    for changed nothing, so the one before it stands for it."""
    last = {0: "scaled", 1: "capped", 2: "masked", 3: "weights"}[mode]
    order = ("scores", "scaled", "capped", "biased", "masked", "weights")
    happened = [name for name in order[: order.index(last) + 1] if name in trace]
    return trace[happened[-1]]


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def to_torch(array: np.ndarray) -> Tensor:
    """NumPy has no bfloat16 of its own; its bits travel as integers."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(x: Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()
