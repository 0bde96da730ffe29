"""For random shapes, strides, masks, dtypes and biases the C++ core computes what `steps` computes.

An interrupt during a long call of the core ends the call.
"""

import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given, strategies as st

import clearhead as ch
from clearhead.core.engines.cpu import Cpu
from clearhead.core.problem.check import Options, make_problem
from tests.problems import naive_attention, within_yardstick

pytest.importorskip("clearhead._kernels", reason="built without a C++ compiler")

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 65])
HEAD_SIZES = st.sampled_from([1, 2, 3, 8, 15, 16, 17, 33, 64])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ENGINE = st.sampled_from([{}, {"engine": "cpu"}])
LAYOUTS = st.sampled_from(
    ["plain", "transposed", "columns", "sliced", "every second feature", "one row", "one batch"]
)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of the shape of `x` with other strides; with strides of 0 numbers repeat."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "sliced":
        return torch.nn.functional.pad(x, (3, 2, 1, 4), value=torch.nan)[..., 1:-4, 3:-2]
    if layout == "every second feature":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if layout == "one row" and x.shape[2]:
        return x[:, :, :1].expand(x.shape)
    if layout == "one batch" and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


@st.composite
def problems(draw):
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, B, G = draw(DTYPES), draw(st.sampled_from([0, 1, 2, 3])), draw(st.sampled_from([1, 2]))
    H, Tq, Tk = G * draw(st.sampled_from([1, 2, 3])), draw(SIZES), draw(SIZES)
    D, Dv = draw(HEAD_SIZES), draw(HEAD_SIZES)
    shapes = (B, H, Tq, D), (B, G, Tk, D), (B, G, Tk, Dv)
    q, k, v = (
        laid_out(torch.randn(shape, generator=source).to(dtype), draw(LAYOUTS)) for shape in shapes
    )
    rules = [ch.everything]
    for kind in draw(st.lists(st.sampled_from(["causal", "window", "prefix", "dense", "lengths"]),
                              max_size=2)):  # fmt: skip
        align = draw(st.sampled_from(["start", "end"]))
        rules.append({
            "causal": lambda: ch.Causal(align=align),  # noqa: B023
            "window": lambda: ch.window(before=3, after=1, align=align),  # noqa: B023
            "prefix": lambda: ch.prefix(min(2, Tk)),
            "dense": lambda: ch.dense(keep=torch.rand(Tq, Tk, generator=source) < 0.6),
            "lengths": lambda: ch.lengths(keys=torch.randint(0, Tk + 1, (B,), generator=source)),
        }[kind]())  # fmt: skip
    mask = rules[0] if len(rules) == 1 else rules[1]
    if len(rules) == 3:
        mask = mask & rules[2] if draw(st.booleans()) else mask | ~rules[2]
    keywords = {"mask": mask}
    if draw(st.booleans()):
        keywords["scale"] = draw(st.sampled_from([-0.3, 0.0, 1.0]))
    if draw(st.booleans()):
        keywords["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0, 1e39]))
    if draw(
        st.booleans()
    ):  # a plain call, which has a path of its own (core/engines/cpu/direct.py)
        return (q, k, v), keywords
    if draw(st.booleans()):
        lead = draw(st.sampled_from([(), (H,), (1, 1), (B, 1), (B, H)]))
        last = draw(st.sampled_from([(1, Tk), (Tq, 1), (Tq, Tk)]))
        keywords["bias"] = ch.bias(torch.randn(*lead, *last, generator=source))
    if draw(st.booleans()):
        keywords["sinks"] = torch.randn(H, generator=source)
    if draw(st.integers(0, 3)) == 0:
        keywords["dropout"], keywords["seed"] = 0.4, draw(st.integers(0, 2**63 - 1))
    return (q, k, v), keywords


@given(problems(), ENGINE)
def test_the_core_computes_random_problems_as_the_reference_does(problem, engine):
    qkv, keywords = problem
    problem, _ = make_problem(*qkv, Options(**keywords))
    assert Cpu().why_not(problem) == []
    got = ch.attention(*qkv, **engine, **keywords)
    wide = [x.double() for x in qkv]
    exact = {n: x.double() if n == "sinks" else x for n, x in keywords.items()}
    if "bias" in exact:
        exact["bias"] = ch.bias(keywords["bias"].tensor.double())
    true = ch.attention(*wide, engine="steps", **exact)
    # The core computes 16-bit types in float32; plain torch would round every product.
    usual = keywords | {"softcap": problem.softcap}  # none for a cap that changes nothing
    yardstick = naive_attention(*(x.float() for x in qkv), **usual).to(got.dtype)
    size = max((float(x.abs().max()) for x in wide if x.numel()), default=0.0)
    sure, figures = within_yardstick(got, true, yardstick, size)
    assert got.shape == true.shape and got.dtype == qkv[0].dtype
    assert sure, f"{problem.describe()}: {figures}"


def gradients(qkv, keywords, dtype):
    """Gradients of the same numbers in `dtype`, of q, k, v, the bias and the sinks."""
    learn = [x.detach().to(dtype).requires_grad_() for x in qkv]
    asked = dict(keywords)
    for name in keywords.keys() & {"bias", "sinks"}:
        given = keywords[name].tensor if name == "bias" else keywords[name]
        learn.append(given.to(torch.float64 if dtype == torch.float64 else given.dtype))
        learn[-1] = learn[-1].detach().clone().requires_grad_()
        asked[name] = ch.bias(learn[-1]) if name == "bias" else learn[-1]
    out = ch.attention(*learn[:3], **asked)
    source = torch.Generator().manual_seed(7)
    back = torch.randn(out.shape, generator=source).to(qkv[0].dtype).to(out.dtype)
    return torch.autograd.grad(out, learn, back)


@given(problems(), ENGINE)
def test_the_core_differentiates_random_problems_as_the_reference_does(problem, engine):
    qkv, keywords = problem
    problem, _ = make_problem(*qkv, Options(**keywords))
    got = gradients(qkv, keywords | engine, qkv[0].dtype)
    true = gradients(qkv, keywords | {"engine": "steps"}, torch.float64)
    digits = torch.finfo(problem.dtype).eps if problem.dtype != torch.float32 else 4e-6
    q, k, v = (x.double() for x in qkv)
    # Terms may cancel, with equal keys all of them. Their rounding does not.
    terms = 1.0
    if q.numel() and k.numel() and v.numel():
        terms = float(max(q.abs().max(), k.abs().max()) * v.norm(dim=-1).max()) / problem.D**0.5
    for name, a, b in zip(["q", "k", "v", "first", "second"], got, true, strict=False):
        size = max(1.0, terms, float(b.abs().max()) if b.numel() else 0.0)
        error = float((a.double() - b).abs().max()) if b.numel() else 0.0
        assert a.shape == b.shape and error <= 4 * digits * size, (
            f"{problem.describe()}: {name} errs by {error:.3g} of {size:.3g}"
        )


# A shell that runs the tests in the background may make them and their children ignore interrupts.
LONG_CALLS = """
import signal, torch, clearhead as ch
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
q = torch.randn(1, 16, 8192, 64, requires_grad=True)
out = ch.attention(q, q, q, mask=ch.window(before=9, after=0), engine="cpu")
torch.autograd.grad(out.sum(), q)
out = ch.attention(q, q, q, mask=ch.causal, engine="cpu").sum()
print("backward", flush=True)
try:
    out.backward()  # all of its heads take seconds, one after another
except KeyboardInterrupt:
    q = torch.randn(1, 4, 131072, 64)
    print("forward", flush=True)
    ch.attention(q, q, q, engine="cpu")  # the better part of a minute
print("to the end")
"""


@pytest.mark.outside
def test_an_interrupt_during_a_call_of_the_core_ends_it():
    with subprocess.Popen(
        [sys.executable, "-c", LONG_CALLS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for call in ("backward", "forward"):
                assert process.stdout.readline() == f"{call}\n"
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)  # by then it is inside the call
                process.send_signal(signal.SIGINT)
            answered, said = process.communicate(timeout=100)
        finally:
            process.kill()
    assert answered == ""
    assert process.returncode == -signal.SIGINT and said.rstrip().endswith("KeyboardInterrupt")


def test_a_signal_handler_may_call_the_core_during_a_call():
    """The running call owns a thread's memory; a call from a signal handler has its own."""
    source = torch.Generator().manual_seed(0)
    q = torch.randn(16, 8, 1, 64, generator=source)
    once = torch.randn(1, 8, 80_000, 64, generator=source)
    k, v = (x.expand(16, -1, -1, -1) for x in (once, once.flip(2)))
    small = [torch.randn(2, 8, n, 64, generator=source) for n in (1, 5000, 5000)]
    true, capture_call = ch.attention(q, k, v, engine="cpu"), []
    before = signal.signal(
        signal.SIGALRM, lambda *_: capture_call.append(ch.attention(*small, engine="cpu"))
    )
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        got = ch.attention(q, k, v, engine="cpu")
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert torch.equal(got, true)
    assert all(torch.equal(x, ch.attention(*small, engine="cpu")) for x in capture_call)
