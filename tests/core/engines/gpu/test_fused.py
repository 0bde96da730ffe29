"""torch's fused kernels, called directly, and the repair of masked NaN.

Without a GPU, the calls for a GPU run on fake tensors. With TRITON_INTERPRET=1 (`test_triton.py`
runs this file so), the repair runs after torch's fused kernel for a CPU.
"""

import os
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead.core.engines.operators import KernelArgs
from clearhead.core.engines.sdpa_backends import Gpu
from clearhead.core.masks.key_ranges import UNLIMITED
from clearhead.core.problem.biases import TensorBias

pytest.importorskip("triton")

from clearhead.core.engines.gpu.fused import operator
from clearhead.core.engines.gpu.triton import launch_backward, launch_forward, repair

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_triton.py runs it, interpreted"
)
NAN, INF = float("nan"), float("inf")


# ------------------------------------------------------------------- the calls for a GPU, on fakes


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Describe a GPU that accepts every kernel, and list the Triton kernels that would start."""
    started = []
    for module in (launch_forward, launch_backward, repair):
        monkeypatch.setattr(
            module, "start", lambda kernel, *args, **keywords: started.append(kernel.__name__)
        )
        monkeypatch.setattr(module, "on_device", lambda x: nullcontext())
    monkeypatch.setattr(launch_forward, "shared_memory", lambda device: 227 * 1024)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *of: of)
    for name in operator.FOR_GPU:
        accepts = lambda of, debug=False: True  # noqa: E731
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", accepts)
    return started


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "plain"])
@pytest.mark.parametrize("name", operator.FOR_GPU)
def test_torchs_kernels_are_called_as_they_are_declared(name, causal, on_a_gpu, monkeypatch):
    """The fakes of torch check every argument, and would raise if a value were read."""
    monkeypatch.setattr(operator, "gpu_of", lambda device: Gpu((9, 0), enabled=(name,)))
    dtype, G = (torch.float32, 4) if name == "efficient" else (torch.bfloat16, 2)
    rule = KernelArgs(0.125, 0.0, UNLIMITED, 0 if causal else UNLIMITED)
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, 320, heads, 64, dtype=dtype, device="cuda").transpose(1, 2)
            for heads in (4, G, G)
        )
        computed = out, lse, flag = operator._attend(q, k, v, rule)
        for x, fake in zip(computed, operator._shapes(q, k, v, *rule), strict=True):
            assert (x.shape, x.stride(), x.dtype) == (fake.shape, fake.stride(), fake.dtype)
        grads = operator.gradients(torch.empty_like(out), out, lse, flag, q, k, v, rule)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    forward, backward = ["raise_flag", "attend_tiles"], ["row_products", "query_gradients"]
    repaired = [*forward, "raise_flag", *backward, "key_gradients"]
    assert on_a_gpu == (repaired if causal else [])


def test_a_call_that_torch_refuses_names_the_hint(on_a_gpu, monkeypatch):
    warned = []
    refuses = lambda of, debug=False: warned.append(debug)  # noqa: E731
    monkeypatch.setattr(operator, "gpu_of", lambda device: Gpu((9, 0), enabled=("flash",)))
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", refuses)
    q = torch.empty(1, 2, 5, 8, device="meta")
    with pytest.raises(ch.BadValue, match=r"fused kernels \(flash\) accepts this call"):
        operator.kernel_for(q, q, q, True)
    assert warned == [False, True]


def test_the_check_of_a_bias_on_a_gpu_reads_no_value(monkeypatch):
    """A tensor without values would raise. Every -inf becomes a mask, unread."""
    from clearhead.core.problem import check

    monkeypatch.setattr(check.torch_state, "has_values", lambda *tensors: True)
    bias = TensorBias(torch.empty(2, 5, 7, device="meta"))
    mask, bias = check._infinities_to_mask(bias, ch.causal)
    assert "dense" in repr(mask) and isinstance(bias, TensorBias)


# ------------------------------------------------------------------------- the repair, interpreted


class NoWait(TorchDispatchMode):
    """Raise where a GPU would make the host wait for a value."""

    def __torch_dispatch__(self, function, types, args=(), keywords=None):
        assert "local_scalar" not in str(function) and "nonzero" not in str(function), function
        return function(*args, **(keywords or {}))


def answers(engine, tensors, seed):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out = ch.attention(*tensors, mask=ch.causal, engine=engine)
    return out.detach(), *torch.autograd.grad(out, tensors, seed.to(out.dtype))


@interpreted
@pytest.mark.parametrize("where", ["nowhere", "keys", "values", "infinite keys", "dout", "queries"])
def test_masked_nan_is_repaired(where):
    """The numbers are those of the Triton kernels; what sees no NaN is right."""
    source = torch.Generator().manual_seed(3)
    q, k, v, seed = (torch.randn(2, 2, 43, 16, generator=source) for _ in range(4))
    changed = {"keys": k, "values": v, "infinite keys": k, "dout": seed, "queries": q}.get(where)
    if changed is not None:
        changed[1, 0, 29, 3] = INF if "infinite" in where else NAN
    found, triton = (answers(engine, (q, k, v), seed) for engine in ("fused", "triton"))
    for x, y in zip(found, triton, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-6, equal_nan=True)
    assert any(x.isnan().any() for x in triton) == (changed is not None)
    true = answers("steps", (q.double(), k.double(), v.double()), seed)
    for x, y in list(zip(found, true, strict=True))[:2]:  # output and queries' gradients
        torch.testing.assert_close(x[:, :, :29].double(), y[:, :, :29], rtol=1e-5, atol=2e-6)


@interpreted
def test_nothing_is_computed_again_without_need(monkeypatch):
    """A repair writes only rows that are not finite: here it would write other keys' output."""
    q, k, v = torch.randn(3, 1, 2, 21, 16).unbind()
    rule = KernelArgs(0.25, 0.0, UNLIMITED, 0)
    out, lse, flag = operator.compute(q, k, v, rule, True)
    before = out.clone(), lse.clone()
    repair.repair_output(q, -k, v, rule, out, lse)
    assert not flag.any() and torch.equal(out, before[0]) and torch.equal(lse, before[1])
    out[0, 1, 3, 5] = INF
    repair.repair_output(q, -k, v, rule, out, lse)
    true = ch.attention(q, -k, v, mask=ch.causal, engine="steps")
    torch.testing.assert_close(out[0, 1, 3], true[0, 1, 3])
    out[0, 1, 3] = before[0][0, 1, 3]
    assert torch.equal(out, before[0])


@interpreted
@pytest.mark.parametrize("engine", ["triton", "fused"])
def test_rows_that_see_no_nan_keep_their_bits(engine):
    q, k, v = torch.randn(3, 2, 2, 21, 16).unbind()
    seed = torch.randn(2, 2, 21, 16)
    before = answers(engine, (q, k, v), seed)
    k[0, :, -1], v[0, :, -1], seed[0, :, -1] = NAN, INF, 0.0
    after = answers(engine, (q, k, v), seed)
    for x, y in list(zip(after, before, strict=True))[:2]:  # output and queries' gradients
        assert torch.equal(x[:, :, :-1][1], y[:, :, :-1][1])
        torch.testing.assert_close(x[0, :, :-1], y[0, :, :-1], rtol=1e-5, atol=2e-6)
        assert x[0, :, -1].isnan().all()


@interpreted
def test_the_log_sum_exp_comes_from_torchs_kernel(monkeypatch):
    """`look` for it alone sweeps nothing, waits for nothing, and has the bits of `attention`."""
    q, k, v = torch.randn(3, 2, 2, 21, 16).unbind()
    monkeypatch.setattr("clearhead.core.engines.choice.TRITON.statistics", None)
    for mask in (ch.causal, None):
        with NoWait():
            seen = ch.look(q, k, v, mask=mask, stats=["lse"], engine="fused")
            out = ch.attention(q, k, v, mask=mask, engine="fused")
        assert torch.equal(seen.out, out)
        true = ch.look(*(x.double() for x in (q, k, v)), mask=mask, stats=["lse"], engine="steps")
        torch.testing.assert_close(seen.lse.double(), true.lse, rtol=1e-5, atol=1e-6)


@interpreted
def test_a_training_step_reads_no_value():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 21, 16).unbind())
    with NoWait():
        out = ch.attention(q, k, v, mask=ch.causal, engine="fused")
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
