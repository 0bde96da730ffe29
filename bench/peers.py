"""Define the implementations to time: each makes a function that runs a case as fast as it can.

An implementation that is not installed, or cannot compute a case, raises the reason instead.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.core.engines import cpu
from clearhead.core.errors import BadValue
from clearhead.core.functional.attention import attention
from clearhead.core.functional.plan import plan
from clearhead.core.masks import Causal, Everything
from clearhead.core.problem.blocks import in_blocks
from clearhead.core.problem.check import Options, make_problem

from .cases import Case

Run = Callable[[], Any]
NO_BFLOAT16 = "onnxruntime computes no bfloat16 on a CPU"


class Declined(Exception):
    """The reason why a peer is not timed in a case."""


def _decline(condition: bool, reason: str) -> None:
    if condition:
        raise Declined(reason)


def _decline_mask_matrix(case: Case) -> None:
    _decline(not isinstance(case.mask, (Everything, Causal)), "timed without a mask matrix only")


def clearhead(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    planned = plan(q, k, v, mask=case.mask, engine="auto").engine
    if planned != "cpu":
        raise BadValue(
            f"bench has a case that {planned} would compute: {case.name}.",
            "bench times the C++ core as clearhead.",
            "run `clearhead doctor`, which reports the state of the core.",
        )
    return lambda: attention(q, k, v, mask=case.mask)


def core_alone(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    """Return a call of the C++ core alone, without the checks of `attention`."""
    problem, inputs = make_problem(q, k, v, Options(mask=case.mask))
    return lambda: cpu.attend_or_record(problem, inputs, False)


def blocks(case: Case, q: Tensor, k: Tensor, v: Tensor, *, format: str) -> Run:
    """Decode from keys and values in 8 or 4 bits; the rate counts the bytes of the case's dtype."""
    _decline(not case.decode, "blocks: decode only")
    k, v = in_blocks(k, format), in_blocks(v, format)
    return lambda: attention(q, k, v, mask=case.mask)


def ggml(case: Case, q: Tensor, k: Tensor, v: Tensor, *, format: str) -> Run:
    """Decode by ggml, which llama.cpp runs; in blocks it rounds the query too."""
    _decline(not case.decode, "ggml: decode only")
    _decline_mask_matrix(case)  # the last query sees all keys of a causal mask
    from .ggml import Attention

    return Attention(q, k, v, format, torch.get_num_threads())


def torch_sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    grouped = case.G != case.H
    if isinstance(case.mask, Everything):
        return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    if isinstance(case.mask, Causal):
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    keep = case.mask.to_bool(case.Tq, case.Tk)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=grouped)


def eager(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    _decline(case.B * case.H * case.Tq * case.Tk > 2**28, "its matrices would not fit")
    k, v = (x.repeat_interleave(case.H // case.G, 1) for x in (k, v))
    drop = None
    if not isinstance(case.mask, Everything):
        drop = ~case.mask.to_bool(case.Tq, case.Tk)

    def run() -> Tensor:
        scores = q @ k.mT * case.D**-0.5
        scores = scores if drop is None else scores.masked_fill_(drop, -torch.inf)
        return torch.softmax(scores, -1) @ v

    return run


def flex(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    prefill = not case.decode and not case.tiny
    _decline(not prefill or case.dtype == torch.float16, "compiled for prefill only")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block = None
    if not isinstance(case.mask, Everything):
        block = create_block_mask(
            case.mask.to_flex(case.Tq, case.Tk), None, None, case.Tq, case.Tk, "cpu"
        )
    torch._dynamo.reset()  # after eight shapes it would stop compiling, and be 100 times slower
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=block, enable_gqa=case.G != case.H)


def _session(
    node: Any, inputs: list[Any], outputs: list[Any], domain: str = "", opset: int = 23
) -> Any:
    import onnx
    import onnxruntime
    from onnx import helper

    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Otherwise its threads spin after a call and take processors from the next peer.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if not domain:
        onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, ["CPUExecutionProvider"]
    )


def _declared(name: str, x: Tensor) -> Any:
    """Declare an input or output of a graph with the dtype and shape of `x`."""
    from onnx import TensorProto, helper

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.float16: TensorProto.FLOAT16,
        torch.int32: TensorProto.INT32,
    }
    return helper.make_tensor_value_info(name, kinds[x.dtype], list(x.shape))


def onnx_attention(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    from onnx import helper

    _decline(case.dtype == torch.bfloat16, NO_BFLOAT16)
    _decline_mask_matrix(case)
    causal = isinstance(case.mask, Causal)
    node = helper.make_node("Attention", ["q", "k", "v"], ["out"], is_causal=int(causal))
    session = _session(
        node, [_declared("q", q), _declared("k", k), _declared("v", v)], [_declared("out", q)]
    )
    feed = {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()}
    return lambda: session.run(None, feed)


def onnx_contrib(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    from onnx import helper

    causal = isinstance(case.mask, Causal)
    usual = case.dtype == torch.float32 and case.G == case.H
    _decline(not usual or case.decode, "MultiHeadAttention: float32, equal heads, prefill only")
    _decline_mask_matrix(case)
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["out"], domain="com.microsoft",
        num_heads=case.H, unidirectional=int(causal),
    )  # fmt: skip
    flat = {
        n: x.transpose(1, 2).flatten(2).contiguous() for n, x in zip("qkv", (q, k, v), strict=True)
    }
    session = _session(
        node,
        [_declared(n, x) for n, x in flat.items()],
        [_declared("out", flat["q"])],
        "com.microsoft",
        17,
    )
    feed = {n: x.numpy() for n, x in flat.items()}
    return lambda: session.run(None, feed)


def onnx_grouped(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    """Return a decode step with one buffer for past and present keys and values."""
    from onnx import helper

    _decline(case.dtype == torch.bfloat16, NO_BFLOAT16)
    _decline(not case.decode, "GroupQueryAttention: decode only")
    import onnxruntime as ort

    node = helper.make_node(
        "GroupQueryAttention", ["q", "k1", "v1", "past_k", "past_v", "lengths", "total"],
        ["out", "all_k", "all_v"], domain="com.microsoft", num_heads=case.H, kv_num_heads=case.G,
    )  # fmt: skip
    flat = q.transpose(1, 2).flatten(2).contiguous()
    new = torch.zeros(case.B, 1, case.G * case.D, dtype=case.dtype)
    lengths = torch.full((case.B,), case.Tk - 1, dtype=torch.int32)
    total = torch.tensor([case.Tk], dtype=torch.int32)
    session = _session(
        node,
        [_declared("q", flat), _declared("k1", new), _declared("v1", new), _declared("past_k", k),
         _declared("past_v", v), _declared("lengths", lengths),
         _declared("total", total)],
        [_declared("out", flat), _declared("all_k", k), _declared("all_v", v)], "com.microsoft", 17,
    )  # fmt: skip
    binding = session.io_binding()
    keep = {
        "q": flat.numpy(), "k1": new.numpy(), "v1": new.numpy(), "past_k": k.numpy(),
        "past_v": v.numpy(), "lengths": lengths.numpy(), "total": total.numpy(),
    }  # fmt: skip
    values = {n: ort.OrtValue.ortvalue_from_numpy(x) for n, x in keep.items()}
    for n, x in values.items():
        binding.bind_ortvalue_input(n, x)
    binding.bind_output("out")
    binding.bind_ortvalue_output("all_k", values["past_k"])
    binding.bind_ortvalue_output("all_v", values["past_v"])
    return lambda: session.run_with_iobinding(binding)


def openvino(case: Case, q: Tensor, k: Tensor, v: Tensor, precision: str) -> Run:
    import openvino as ov
    from openvino import opset13

    usual = case.dtype == torch.float32 and case.G == case.H
    _decline(not usual, "timed in float32 with equal heads only")
    _decline_mask_matrix(case)
    inputs = [opset13.parameter(list(x.shape), np.float32) for x in (q, k, v)]
    node = opset13.scaled_dot_product_attention(*inputs, causal=isinstance(case.mask, Causal))
    compiled = ov.Core().compile_model(
        ov.Model([node], inputs), "CPU",
        {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()},
    )  # fmt: skip
    request = compiled.create_infer_request()
    for i, x in enumerate((q, k, v)):
        request.set_input_tensor(i, ov.Tensor(x.numpy(), shared_memory=True))
    return lambda: request.infer()


PEERS: dict[str, Callable[..., Run]] = {
    "clearhead": clearhead,
    "clearhead core": core_alone,
    "clearhead q8_0": partial(blocks, format="q8_0"),
    "clearhead q4_0": partial(blocks, format="q4_0"),
    "ggml bf16": partial(ggml, format="bf16"),
    "ggml q8_0": partial(ggml, format="q8_0"),
    "ggml q4_0": partial(ggml, format="q4_0"),
    "torch sdpa": torch_sdpa,
    "torch eager": eager,
    "torch flex": flex,
    "onnxruntime Attention": onnx_attention,
    "onnxruntime contrib": onnx_contrib,
    "onnxruntime GQA": onnx_grouped,
    "openvino f32": partial(openvino, precision="f32"),
    "openvino bf16": partial(openvino, precision="bf16"),
}


TRAINING = ("clearhead", "torch sdpa", "torch eager")


def _with_backward(run: Run, tensors: tuple[Tensor, ...]) -> Run:
    grad = torch.randn_like(run())

    def forward_and_backward() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(run(), tensors, grad)

    return forward_and_backward


def prepare(name: str, case: Case, tensors: tuple[Tensor, ...]) -> tuple[Run | None, str]:
    """Return the function to time, or None with the reason."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if case.training and name not in TRAINING:
        return None, "not timed with gradients"
    try:
        with torch.set_grad_enabled(case.training):
            run = PEERS[name](case, *tensors)
            run = _with_backward(run, tensors) if case.training else run
            run()
        return run, ""
    except Declined as reason:
        return None, str(reason)
    except ImportError as missing:
        return None, f"not installed: {missing.name}"
    except BadValue:  # an error of clearhead must not pass as "declined"
        raise
    except Exception as error:  # any error of a peer is its reason in the table
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
