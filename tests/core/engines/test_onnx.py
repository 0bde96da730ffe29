"""ONNX's conformance cases for `Attention`, by the public call; and comparisons with onnxruntime.

The installed `onnx` computes the expected outputs of its cases with its NumPy reference, and its
runner compares them.
"""

from collections import Counter

import numpy as np
import onnx
import onnx.backend.test.case.node as node_cases
import onnx.backend.test.case.node.attention
import onnx.backend.test.runner
import onnxruntime
import pytest
import torch

import clearhead as ch
from clearhead.core.engines import cpu
from clearhead.core.engines.choice import ENGINES
from clearhead.core.errors import BadValue
from tests.core.engines.onnx_cases import INPUTS, OUTPUTS, answer_of

pytestmark = pytest.mark.outside

# Every case exists twice; the `_expanded` one is the same problem in ONNX's primitive operators.
CASES = {
    case.name: case
    for case in node_cases._NodeTestCases
    if case.name.startswith("test_attention_") and not case.name.endswith("_expanded")
}


def node_of(case):
    (node,) = case.model.graph.node
    assert node.op_type == "Attention"
    return node


def dtype_of(case):
    return case.data_sets[0][0][0].dtype.name


def compare(case, got, rtol=None):
    """Compare every output, its shape and its dtype, as ONNX's runner does."""
    ((_, wanted),) = case.data_sets
    assert len(wanted) == len([name for name in node_of(case).output if name])
    onnx.backend.test.runner.Runner.assert_similar_outputs(
        wanted, got, rtol=rtol or case.rtol, atol=case.atol
    )


def answers(case, node=None, **how):
    ((inputs, _),) = case.data_sets
    return answer_of(node or node_of(case), inputs, **how)


def test_the_pinned_onnx_has_93_cases():
    opsets = Counter(case.model.opset_import[0].version for case in CASES.values())
    assert opsets == {23: 69, 24: 13, 25: 11}
    assert len(CASES) == 93
    assert Counter(map(dtype_of, CASES.values())) == {"float32": 82, "float16": 6, "bfloat16": 5}
    modes = [said.i for c in CASES.values() for said in node_of(c).attribute if "mode" in said.name]
    raw = [c for c in CASES.values() if "qk_matmul_output" in node_of(c).output]
    assert set(modes) == {1, 2, 3} and len(raw) > len(modes)  # 0 is the default


@pytest.mark.parametrize("name", CASES)
def test_conformance(name):
    """Compared with the case's own tolerance.

    ONNX does not define the internal precision. For float16 its tolerance is less than two steps of
    the dtype, which allows one rounding, as in the C++ core. Without the core, `auto` chooses
    torch's float16 kernel, which rounds the weights too; so 16-bit problems are computed in
    float32.
    """
    case = CASES[name]
    half = dtype_of(case) in ("float16", "bfloat16")
    compare(case, answers(case, within=torch.float32 if half and cpu.core is None else None))


@pytest.mark.parametrize("engine", [engine.name for engine in ENGINES])
@pytest.mark.parametrize("name", CASES)
def test_every_engine_conforms(name, engine):
    """Computed in the dtype of the case. The error may be two steps of float16, as the runner
    allows two steps of bfloat16. The reference computes a requested matrix of scores for every
    engine."""
    case = CASES[name]
    try:
        got = answers(case, engine=engine)
    except BadValue as declined:
        assert f"engine={engine!r} cannot compute" in declined.gave
        assert engine not in ("steps", "tiled"), "in plain torch nothing needs declining"
        pytest.skip(declined.rule)
    compare(case, got, rtol=2**-9 if dtype_of(case) == "float16" else None)


@pytest.mark.parametrize(
    "attribute",
    "is_causal scale softcap left_window_size right_window_size qk_matmul_output_mode".split(),
)
def test_forgetting_an_attribute_fails_a_case(attribute):
    """Without an attribute a case fails, so the tolerances are not too large."""
    failed = 0
    for case in CASES.values():
        node = onnx.NodeProto()
        node.CopyFrom(node_of(case))
        del node.attribute[:]
        node.attribute.extend(a for a in node_of(case).attribute if a.name != attribute)
        if len(node.attribute) < len(node_of(case).attribute):
            failed += not agrees(case, answers(case, node, within=torch.float32))
    assert failed


@pytest.mark.parametrize("slot", ["attn_mask", "nonpad_kv_seqlen"])
def test_forgetting_an_input_fails_a_case(slot):
    failed = 0
    for case in CASES.values():
        ((inputs, _),) = case.data_sets
        node = onnx.NodeProto()
        node.CopyFrom(node_of(case))
        place = INPUTS.index(slot)
        if len(node.input) > place and node.input[place]:
            at = len([name for name in node.input[:place] if name])
            node.input[place] = ""
            failed += not agrees(case, answer_of(node, inputs[:at] + inputs[at + 1 :]))
    assert failed


def agrees(case, got):
    try:
        compare(case, got, rtol=2**-9)
    except AssertionError:
        return False
    return True


# --------------------------------------------------------------------------------- onnxruntime


RUNTIME_CASES = {
    "full": {},
    "causal": {"is_causal": 1},
    "grouped, value size of its own": {"shapes": [(2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13)]},
    "scale and soft cap": {"scale": 0.71, "softcap": 1.5},
    "boolean mask": {"mask": (2, 1, 5, 11), "kind": bool},
    "floating mask for each head": {"mask": (6, 5, 11)},
    "causal with a past": {"is_causal": 1, "past": 3},
    "a past and a mask": {"past": 3, "mask": (5, 14)},
    "a cache kept outside": {"is_causal": 1, "real": [11, 7]},
    "more queries than real keys": {"is_causal": 1, "real": [3, 8]},
    "raw scores": {"qk_matmul_output_mode": 0},
    "weights": {"qk_matmul_output_mode": 3, "mask": (5, 11)},
    "three dimensions": {
        "shapes": [(2, 5, 42), (2, 11, 21), (2, 11, 39)],
        "q_num_heads": 6,
        "kv_num_heads": 3,
    },
}


@pytest.mark.parametrize("name", RUNTIME_CASES)
def test_onnxruntime_gives_the_same(name):
    """Compare with an independent implementation in C++, on normal numbers and prime sizes."""
    said = dict(RUNTIME_CASES[name])
    source = np.random.default_rng(7)
    shapes = said.pop("shapes", [(2, 6, 5, 7), (2, 6, 11, 7), (2, 6, 11, 7)])
    mask, kind, past = said.pop("mask", None), said.pop("kind", float), said.pop("past", 0)

    def draw(*shape):
        return source.standard_normal(shape).astype(np.float32)

    given = {slot: draw(*shape) for slot, shape in zip(INPUTS, shapes, strict=False)}
    if "real" in said:
        given["nonpad_kv_seqlen"] = np.array(said.pop("real"))
    if mask:
        given["attn_mask"] = draw(*mask) if kind is float else draw(*mask) > -0.5
    if past:
        for slot in ("past_key", "past_value"):
            given[slot] = draw(2, 6, past, 7)
    wanted = ["Y"]
    wanted += ["present_key", "present_value"] if past else []
    wanted += ["qk_matmul_output"] if "qk_matmul_output_mode" in said else []
    model, node = one_node(said, given, wanted)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    theirs = session.run(wanted, given)
    ours = answer_of(node, list(given.values()))
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def one_node(said, given, wanted):
    """A model of one `Attention` node, in the newest operator set that onnxruntime supports."""
    helper, types = onnx.helper, onnx.TensorProto
    kinds = {"float32": types.FLOAT, "bool": types.BOOL, "int64": types.INT64}
    last = max(map(INPUTS.index, given)) + 1
    node = helper.make_node(
        "Attention",
        [slot if slot in given else "" for slot in INPUTS[:last]],
        [slot if slot in wanted else "" for slot in OUTPUTS[: OUTPUTS.index(wanted[-1]) + 1]],
        **said,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [
            helper.make_tensor_value_info(slot, kinds[x.dtype.name], x.shape)
            for slot, x in given.items()
        ],
        [
            helper.make_tensor_value_info(
                slot, types.FLOAT, [None] * (given["Q"].ndim if slot == "Y" else 4)
            )
            for slot in wanted
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.checker.check_model(model)
    return model, node


# ------------------------------------------------------------------------- torch.onnx.export


class Capped(torch.nn.Module):
    """A rule that torch's function lacks, so the reference becomes part of the model."""

    def forward(self, x):
        x = x.unsqueeze(1)
        return ch.attention(x, x, x, mask=ch.window(before=3), softcap=5.0, bias=ch.alibi([0.5]))


class Each(torch.nn.ModuleList):
    """Several layers in one program, which return their outputs for the same input."""

    def __init__(self, *layers):
        super().__init__(layers)

    def forward(self, x):
        return [layer(x) for layer in self]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's exporter uses deprecated functions of torch
def test_exported_layers_run_in_onnxruntime_for_every_length(tmp_path):
    layer = Each(
        ch.nn.CausalAttention(16, 16, 32), ch.nn.MultiHeadAttention(16, 4, kv_heads=2, causal=True),
        ch.nn.TransformerBlock(16, 4, causal=True, relative=ch.nn.RelativePositions(4)), Capped(),
    ).eval()  # fmt: skip
    shapes = ({1: torch.export.Dim.DYNAMIC},)
    file = str(tmp_path / "layer.onnx")
    torch.onnx.export(
        layer, (torch.randn(2, 7, 16),), file, dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    session = onnxruntime.InferenceSession(file)
    (name,) = (x.name for x in session.get_inputs())
    for length in (7, 11):
        x = torch.randn(2, length, 16)
        with torch.no_grad():
            for got, want in zip(session.run(None, {name: x.numpy()}), layer(x), strict=True):
                np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
