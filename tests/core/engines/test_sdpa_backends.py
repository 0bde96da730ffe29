"""torch's kernels on a GPU, tested without one: how they would be called, and what they support."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead.core import torch_state
from clearhead.core.engines import sdpa, sdpa_backends
from clearhead.core.engines.choice import FUSED, SDPA, TRITON, choose
from clearhead.core.engines.sdpa_backends import Gpu, backends_decline, gpu_of
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.torch_state import has_values

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    """The CPU, described as a GPU."""
    monkeypatch.setattr(sdpa_backends, "capability_of", lambda device: (8, 0))
    monkeypatch.setattr(sdpa, "_on_gpu", lambda problem: True)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of torch's function, and the kernels that it may choose from."""
    recorded = []

    def called(*inputs, **keywords):
        switches = torch.backends.cuda
        on = {
            "math": switches.math_sdp_enabled(),
            "flash": switches.flash_sdp_enabled(),
            "efficient": switches.mem_efficient_sdp_enabled(),
            "cudnn": switches.cudnn_sdp_enabled(),
        }
        recorded.append(({name for name, is_on in on.items() if is_on}, inputs, keywords))
        return inputs[0]

    monkeypatch.setattr(sdpa, "torch_attention", called)
    return recorded


def problem_of(T=1500, dtype=BF16, transposed=False, **options):
    x = torch.randn((3, 1, 8, 16, T) if transposed else (3, 1, 8, T, 16), dtype=dtype)
    q, k, v = (x.transpose(-1, -2) if transposed else x).unbind()
    return make_problem(q, k, v, Options(**options))


def run(**options):
    return SDPA.compute(*problem_of(**options))


# ------------------------------------------------------------------ weights are not stored silently


def test_the_kernel_that_stores_the_weights_is_disabled_when_they_are_large(calls):
    run()
    assert calls[0][0] == {"flash", "efficient", "cudnn"}
    run(T=64)
    assert calls[1][0] == {"math", "flash", "efficient", "cudnn"}
    assert torch.backends.cuda.math_sdp_enabled()


def test_what_the_user_disabled_stays_disabled(calls):
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        run()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        run()
        assert gpu_of(torch.device("cuda")).enabled == ("cudnn",)
    assert [offered for offered, _, _ in calls] == [{"efficient", "cudnn"}, {"cudnn"}]
    assert gpu_of(torch.device("cuda")) == Gpu((8, 0), torch.backends.cudnn.is_available())


def test_a_choice_is_remembered_only_while_the_same_kernels_are_enabled():
    pytest.importorskip("triton")
    problem = replace(problem_of(mask=ch.causal)[0], device=torch.device("cuda"))
    for _ in range(2):
        assert choose(problem, "auto") is FUSED
        with sdpa_kernel([SDPBackend.MATH]):
            assert choose(problem, "auto") is TRITON
        assert choose(replace(problem, softcap=3.0), "auto") is TRITON
        assert choose(replace(problem, mask=ch.window(before=3)), "auto") is TRITON


def test_the_fused_kernels_get_a_contiguous_last_dimension(calls):
    run(transposed=True)
    assert all(x.stride(-1) == 1 for x in calls[0][1])


def test_torchs_error_without_a_kernel_becomes_an_error_in_three_parts(monkeypatch):
    def refuses(*inputs, **keywords):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(sdpa, "torch_attention", refuses)
    with pytest.raises(ch.BadValue) as caught:
        run()
    assert str(caught.value) == (
        "None of torch's fused kernels (cudnn, flash, efficient) can compute B=1 H=8 Tq=1500 "
        "Tk=1500 D=16, bfloat16 on cpu.\n"
        "  Rule: without one torch would store weights of 0.1 GB.\n"
        "  Hint: read torch's warnings, pass engine='triton' or 'tiled', or enable other kernels."
    )


def test_other_errors_of_torch_are_raised_unchanged(monkeypatch):
    def refuses(*inputs, **keywords):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sdpa, "torch_attention", refuses)
    with pytest.raises(RuntimeError, match="out of memory"):
        run()


@pytest.mark.outside
def test_it_compiles_in_one_graph():
    """Compiled on a CPU, whose kernels the same context selects."""
    problem, inputs = problem_of(dtype=F32)
    compiled = torch.compile(
        lambda *x: sdpa._call_torch(problem, *x, {}), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*inputs), sdpa.torch_attention(*inputs))


# ------------------------------------------------------------------------------------------ biases


@pytest.mark.parametrize("dtype, bias_dtype, exact", [
    (F32, F32, True), (F32, BF16, True), (F32, None, True),
    (BF16, BF16, True), (BF16, F32, False), (F16, BF16, False), (BF16, None, False),
])  # fmt: skip
def test_torch_gets_a_bias_only_if_the_dtype_of_the_queries_holds_it(
    calls, dtype, bias_dtype, exact
):
    bias = ch.alibi() if bias_dtype is None else torch.ones(8, 64, 1, dtype=bias_dtype)
    name = str(dtype).removeprefix("torch.")
    rounds = f"on a GPU torch requires a bias in {name}, which would round this one"
    for mask in (None, ch.causal):
        problem, inputs = problem_of(T=64, dtype=dtype, bias=bias, mask=mask)
        assert SDPA.why_not(problem) == ([] if exact else [rounds])
        SDPA.compute(problem, inputs)
        passed = calls[-1][2]["attn_mask"]
        assert passed.dtype == dtype and passed.shape == (1, 8, 64, 64) and passed.stride(-1) == 1


# -------------------------------------------------------------- what each kernel of torch supports


@pytest.mark.parametrize("capability, D, dropout, declined", [
    ((8, 6), 192, 0.0, False), ((8, 6), 200, 0.0, True), ((8, 9), 256, 0.0, False),
    ((8, 9), 256, 0.1, True), ((12, 0), 224, 0.0, True), ((9, 0), 224, 0.1, False),
    ((8, 0), 256, 0.1, False),
])  # fmt: skip
def test_flash_has_gradients_of_large_heads_only_on_large_gpus(capability, D, dropout, declined):
    for grad in (True, False):
        q = torch.empty(1, 2, 8, D, dtype=BF16, device="meta", requires_grad=grad)
        problem = make_problem(q, q, q, Options(dropout=dropout))[0]
        reasons = backends_decline(problem, Gpu(capability), False)["flash"]
        expected = ["has no gradient for this head size on this GPU"]
        assert reasons == (expected if declined and grad else [])


@pytest.mark.parametrize("D, Dv, Tk, reasons", [
    (64, 128, 9, []), (128, 8, 9, []), (64, 136, 9, ["needs head sizes up to 128"]),
    (64, 60, 9, ["needs head sizes that are multiples of 8"]),
    (64, 64, 1, ["needs more than one key"]),
])  # fmt: skip
def test_cudnn_supports_values_of_another_size(D, Dv, Tk, reasons):
    q, k, v = (
        torch.empty(1, 2, T, size, dtype=BF16, device="meta")
        for T, size in ((7, D), (Tk, D), (Tk, Dv))
    )
    assert backends_decline(make_problem(q, k, v)[0], Gpu((9, 0)), False)["cudnn"] == reasons


@pytest.mark.parametrize("gpu, reason", [
    (Gpu((13, 0)), "needs a GPU of compute capability 8.0 to 12.1"),
    (Gpu((8, 0), enabled=()), "is disabled by torch.backends.cuda or sdpa_kernel"),
])  # fmt: skip
def test_no_kernel_is_expected_on_an_unknown_gpu_or_if_all_are_disabled(gpu, reason):
    q = torch.empty(1, 2, 8, 64, dtype=BF16, device="meta")
    problem = make_problem(q, q, q)[0]
    assert set(map(tuple, backends_decline(problem, gpu, False).values())) == {(reason,)}


# --------------------------------------------------------------------------------------- CUDA
# graphs


def test_while_a_graph_is_captured_values_are_neither_read_nor_cached(monkeypatch):
    """A capture is simulated on a CPU: values count as unreadable."""
    with FakeTensorMode():
        on_gpu = torch.empty(3, device="cuda")
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert has_values(on_gpu) != capturing and has_values(torch.empty(3))

    q = torch.randn(1, 1, 6, 4)
    bias = torch.zeros(6, 6)
    bias[:, 4] = -torch.inf
    mask = ch.documents([0, 0, 0, 1, 1, 1])
    expected = ch.attention(q, q, q, mask=mask, bias=bias)
    mask = ch.documents([0, 0, 0, 1, 1, 1])
    monkeypatch.setattr(torch_state, "_is_captured", lambda x: True)
    torch.testing.assert_close(ch.attention(q, q, q, mask=mask, bias=bias), expected)
    assert "_cached" not in mask.__dict__
