"""FlexAttention with clearhead's functions, uncompiled on a CPU, has the output and gradients of
the reference. It has run compiled on a GPU only in bench.gpu."""

import sys

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import clearhead as ch
from clearhead.core.engines import FLEX
from clearhead.core.engines.gpu import flex
from clearhead.core.problem.check import Options, make_problem
from clearhead.testing import PROBLEMS

pytestmark = pytest.mark.outside

CASES = [
    "documents", "scattered and causal", "nobody sees anything", "alibi", "everything at once",
    "wide values",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "full", "one query", "prefix", "not causal", "causal to the end, fully masked queries",
        "window", "grouped", "bias per key", "soft cap", "sinks and fully masked queries")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    traced = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(flex, "compiled", lambda: traced)
    # flex_attention refuses gradients on a CPU, although its uncompiled form has them.
    monkeypatch.setattr(
        sys.modules["torch.nn.attention.flex_attention"], "_validate_device", lambda *_: None
    )


@pytest.mark.parametrize("name", CASES)
def test_flex_is_the_reference(name):
    case = PROBLEMS[name](torch.float32, 0)
    inputs = [x.detach().requires_grad_() for x in case.tensors]
    problem, checked = make_problem(*inputs, Options(**case.keywords))
    got = FLEX.answer(problem, checked).out
    seed = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    true = ch.attention(*doubles, engine="steps", **case.keywords)
    torch.testing.assert_close(got.double(), true, rtol=1e-4, atol=1e-4)
    back = torch.autograd.grad(got, inputs, seed)
    for mine, theirs in zip(back, torch.autograd.grad(true, doubles, seed.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-3)


def test_masked_nan_does_not_reach_the_output_of_flex():
    q, k, v = torch.randn(3, 1, 2, 12, 8, generator=torch.Generator().manual_seed(2)).unbind()
    k[..., 9, :], v[..., 9, :] = torch.nan, torch.inf
    problem, inputs = make_problem(q, k, v, Options(mask=ch.causal))
    out = FLEX.answer(problem, inputs).out
    clean = ch.attention(*(x[..., :9, :] for x in (q, k, v)), mask=ch.causal)
    torch.testing.assert_close(out[..., :9, :], clean)
    assert out[..., 9:, :].isnan().all()


def test_flex_lists_what_it_lacks():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ch.BadValue, match="FlexAttention is used only on CUDA devices"):
        ch.attention(q, q, q, engine="flex")
