"""torch.func.functionalize, and calls in a batched backward pass: torch's numbers, or an error with
the reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functionalize, grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import clearhead as ch
from tests.pairs import pairs

torch.manual_seed(0)
Q, K, V = (torch.randn(2, 2, T, 8) for T in (3, 7, 7))
KEEP = torch.rand(3, 7) > 0.4
KEEP[:, 0] = True
RULES = {
    "no mask": ({}, None),
    "lengths": (
        {"mask": ch.lengths(keys=[4, 5])},
        torch.arange(7) < torch.tensor([4, 5]).view(2, 1, 1, 1),
    ),
    "bias": ({"bias": KEEP.float().log()}, KEEP),
}
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:There is a performance drop:UserWarning"
    ),  # torch's function
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]
TRANSFORMS = {
    "functionalize": lambda f: functionalize(f)(Q),
    "without views": lambda f: functionalize(f, remove="mutations_and_views")(Q),
    "around grad": lambda f: functionalize(grad(lambda x: f(x).sum()))(Q),
    "inside of grad": lambda f: grad(lambda x: functionalize(f)(x).sum())(Q),
    "around vmap": lambda f: functionalize(vmap(f))(torch.stack([Q, 2 * Q])),
    "inside of vmap": lambda f: vmap(functionalize(f))(torch.stack([Q, 2 * Q])),
    "between": lambda f: vmap(functionalize(grad(lambda x: f(x).sum())))(torch.stack([Q, 2 * Q])),
    "around jacrev": lambda f: functionalize(jacrev(lambda x: f(x).sum(-1)))(Q),
    "recorded": lambda f: make_fx(functionalize(f))(Q)(2 * Q),
    "recorded with its gradient": lambda f: make_fx(functionalize(grad(lambda x: f(x).sum())))(Q)(
        Q
    ),
}


@pytest.mark.parametrize(
    "transform, rule, engine", pairs(TRANSFORMS, RULES, ["auto", "sdpa", "tiled"])
)
def test_functionalize_returns_torchs_numbers(transform, rule, engine):
    ours, allowed = RULES[rule]
    run = TRANSFORMS[transform]
    got = run(lambda x: ch.attention(x, K, V, engine=engine, **ours))
    expected = run(lambda x: F.scaled_dot_product_attention(x, K, V, attn_mask=allowed))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_functionalize_in_forward_mode_works_though_torchs_function_fails():
    def tangent(wrap, x):
        return jvp(wrap(lambda x: ch.attention(x, K, V)), (x,), (x + 1,))[1]

    torch.testing.assert_close(tangent(functionalize, Q), tangent(lambda f: f, Q))


@pytest.mark.parametrize("statistic", ["lse", "entropy", "received"])
def test_statistics_under_functionalize(statistic):
    def look(x: Tensor) -> Tensor:
        return getattr(ch.look(x, K, V, stats=[statistic]), statistic)

    torch.testing.assert_close(functionalize(look)(Q), look(Q))
    inside = grad(lambda x: look(x).sum())
    torch.testing.assert_close(functionalize(inside)(Q), inside(Q))
    around = grad(lambda x: functionalize(look)(x).sum())
    if statistic == "received":
        with pytest.raises(ch.BadValue, match=r"torch\.func\.grad inside functionalize"):
            around(Q)
    else:
        torch.testing.assert_close(around(Q), inside(Q))


class _InBackward(torch.autograd.Function):
    """The identity, whose backward pass calls a function of the gradient."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.call(gradient), None


SEEDS = torch.stack([Q, 2 * Q, Q - 1])


def batched(call, **keywords):
    x = Q.clone().requires_grad_()
    out = _InBackward.apply(x, call)
    return torch.autograd.grad(out, x, SEEDS, is_grads_batched=True, **keywords)[0]


CALLS = {
    "queries": lambda x: ch.attention(x, K, V),
    "values": lambda x: ch.attention(Q, Q, x, mask=ch.causal),
    "everything": lambda x: ch.attention(
        x, K, V, mask=ch.Causal(align="end") & ch.lengths(keys=[4, 5]), bias=ch.alibi(align="end"),
        softcap=2.0, sinks=torch.ones(2), dropout=0.3, seed=2,
    ),
    "a mask": lambda x: ch.attention(Q, K, V, mask=ch.dense(keep=x[0, 0, :, :7] > 0)),
    "lengths": lambda x: ch.attention(Q, K, V, mask=ch.lengths(keys=(x[:, 0, 0, 0] > 0) + 2)),
    "a bias": lambda x: ch.attention(Q, K, V, bias=x[..., :7]),
    "float64": lambda x: ch.attention(x.double(), K.double(), V.double()).float(),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_a_batched_backward(call):
    one_by_one = torch.stack([CALLS[call](seed) for seed in SEEDS])
    torch.testing.assert_close(batched(CALLS[call]), one_by_one)


def test_a_batched_backward_is_differentiated_again():
    seeds = SEEDS.clone().requires_grad_()
    x = Q.clone().requires_grad_()
    found = []
    for attention in (ch.attention, F.scaled_dot_product_attention):
        out = _InBackward.apply(x, lambda g, attention=attention: attention(g, K, V))
        (first,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), seeds)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("call, reason", [
    (lambda x: ch.attention(x, K, V, engine="tiled"), "no batching rules"),
    (lambda x: ch.attention(x, K, V, engine="steps"), "no batching rules"),
    (lambda x: ch.attention(x, K, V, dropout=0.5), "has no dropout"),
    (lambda x: ch.look(x, K, V, stats=["lse"]).out, "look was called in a backward pass"),
    (lambda x: ch.explain(x, K, V)["output"], "explain was called in a backward pass"),
    (lambda x: ch.matrix(x, K) @ V, "matrix was called in a backward pass"),
])  # fmt: skip
def test_what_torch_cannot_batch_is_refused(call, reason):
    with pytest.raises(ch.BadValue, match=reason):
        batched(call)


def test_forward_mode_jacobians_are_computed():
    """torch batches tangents in the same way, outside a backward pass."""
    jacobian = torch.autograd.functional.jacobian

    def call(x):
        return ch.attention(x, K, V).sum(-1)

    forward = jacobian(call, Q, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(forward, jacobian(call, Q, vectorize=True))
