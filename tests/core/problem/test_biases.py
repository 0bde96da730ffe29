"""The slopes of ALiBi are made once for a number of heads, and by no tracer."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import clearhead as ch
from clearhead.core.masks import Grid
from clearhead.core.problem import biases

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten():
    biases._cached_slopes.cache_clear()


def attend(x):
    return ch.attention(x, x, x, mask=ch.causal, bias=ch.alibi(), engine="tiled")


def kept() -> torch.Tensor:
    return ch.alibi().of(Grid(5, 5, H=2), CPU, torch.float32)


def test_slopes_are_those_of_the_paper_and_made_once():
    assert kept() is kept()
    assert kept().tolist() == [2.0**-4, 2.0**-8]
    assert kept() is not ch.alibi().of(Grid(5, 5, H=2)) and kept().dtype == torch.float32
    given = ch.alibi([0.5]).of(Grid(5, 5, H=3), CPU, torch.float64)
    assert given.tolist() == [0.5] * 3 and given.dtype == torch.float64


def test_no_fake_tensor_is_kept():
    with FakeTensorMode():
        fake = torch.empty(1, 2, 5, 8)
        assert isinstance(attend(fake), FakeTensor)
    assert type(kept()) is torch.Tensor and kept().sum() == 2.0**-4 + 2.0**-8


@pytest.mark.outside
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_slopes_compile_in_one_graph(backend):
    x = torch.randn(1, 2, 5, 8)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)(x)
    assert biases._cached_slopes.cache_info().currsize == 0
    torch.testing.assert_close(compiled, attend(x))


@pytest.mark.parametrize("trace", [
    lambda x: make_fx(attend)(x)(x), lambda x: torch.func.vmap(attend)(x[None])[0],
    lambda x: torch.jit.trace(attend, x, check_trace=False)(x),
], ids=["make_fx", "vmap", "jit"])  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of constants
def test_tracers_and_transforms_keep_nothing(trace):
    x = torch.randn(1, 2, 5, 8)
    traced = trace(x)
    assert biases._cached_slopes.cache_info().currsize == 0
    torch.testing.assert_close(traced, attend(x))


def test_slopes_made_in_inference_serve_training():
    with torch.inference_mode():
        attend(torch.randn(1, 2, 5, 8))
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    assert not kept().is_inference()
    (kept() * x.sum((0, 2, 3))).sum().backward()
    assert x.grad is not None and attend(x).isfinite().all()
