"""Compare `compat.scaled_dot_product_attention` with torch's: outputs, gradients, models."""

import inspect
import threading
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch.testing import assert_close

import clearhead as ch
from clearhead import compat
from clearhead.core.engines import choice
from clearhead.core.errors import AttentionError, BadType, BadValue
from tests.pairs import pairs

TORCH = F.scaled_dot_product_attention
OURS = compat.scaled_dot_product_attention

# The tolerances (rtol, atol) of correct results. In 16-bit types torch's kernels also round inside,
# and a gradient is rounded more often than the output.
FORWARD = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-5, 2e-6),
    torch.bfloat16: (2**-6, 2**-6),
    torch.float16: (2**-9, 2**-9),
}
BACKWARD = {
    torch.float64: (1e-9, 1e-11),
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (2**-4, 2**-4),
    torch.float16: (2**-7, 2**-7),
}
DTYPES = list(FORWARD)
B, H, G, L, S, E, Ev = 2, 6, 3, 5, 11, 7, 13


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are tiny: more threads would only wait for one another, ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(*shape, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=source).to(dtype)


def qkv(*shapes, dtype=torch.float32):
    return tuple(draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def same(tensors, mask=None, **keywords):
    """Check that torch's output and ours are close, with the gradients of q, k, v and a mask."""
    learns = [*tensors, mask] if mask is not None and mask.is_floating_point() else [*tensors]
    results = []
    for function in (TORCH, OURS):
        leaves = [x.detach().requires_grad_() for x in learns]
        out = function(*leaves[:3], leaves[3] if len(leaves) > 3 else mask, **keywords)
        grads = torch.autograd.grad(out, leaves, draw(*out.shape, dtype=out.dtype, seed=9))
        results.append((out, grads))
    (want, want_grads), (got, got_grads) = results
    dtype = tensors[0].dtype
    close(got, want, FORWARD[dtype])
    # One gradient may be 0 because large terms cancel (a lone key): the others show how large.
    size = max((float(grad.abs().max()) for grad in want_grads if grad.numel()), default=1.0)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        close(got_grad, want_grad, BACKWARD[dtype], size)
    with torch.no_grad():  # other kernels may answer when nothing learns
        close(OURS(*tensors, mask, **keywords), TORCH(*tensors, mask, **keywords), FORWARD[dtype])


def close(got, want, tolerance, size=1.0):
    assert got.shape == want.shape and got.dtype == want.dtype
    rtol, atol = tolerance
    # Sums of many terms err in proportion to their largest, not to what is left of them.
    largest = float(want.detach().abs().max()) if want.numel() else 1.0
    assert_close(got, want, rtol=rtol, atol=atol * max(1.0, size, largest))


# ------------------------------------------------------------------------------- the signature


def test_the_signature_is_torchs():
    """Names, order, defaults and what is keyword only, from torch's own schema."""
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    theirs = [
        (
            a.name,
            a.default_value if a.has_default_value() else inspect.Parameter.empty,
            a.kwarg_only,
        )
        for a in schema.arguments
    ]
    ours = [
        (p.name, p.default, p.kind is inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(OURS).parameters.values()
    ]
    assert ours == theirs
    documented = TORCH.__doc__.split(")")[0].replace("\n", " ").split("(")[1]
    assert [part.split("=")[0].strip() for part in documented.split(",")] == [n for n, *_ in ours]


def test_positions():
    q, k, v = qkv((B, H, L, E), (B, H, S, E), (B, H, S, E))
    mask = draw(L, S) > -1
    assert_close(OURS(q, k, v, mask, 0.0, False), TORCH(q, k, v, mask, 0.0, False))
    assert_close(OURS(q, k, v, None, 0.0, True), TORCH(q, k, v, None, 0.0, True))
    for function in (TORCH, OURS):
        with pytest.raises(TypeError):
            function(q, k, v, None, 0.0, False, 1.0)


# ------------------------------------------------------------------------------------ the grid

SHAPES = {
    "2-D": [(L, E), (S, E), (S, Ev)],
    "3-D": [(H, L, E), (H, S, E), (H, S, Ev)],
    "4-D": [(B, H, L, E), (B, H, S, E), (B, H, S, Ev)],
    "4-D, equal sizes": [(B, H, S, E), (B, H, S, E), (B, H, S, E)],
    "5-D": [(3, B, H, L, E), (3, B, H, S, E), (3, B, H, S, Ev)],
    "more queries than keys": [(B, H, S, E), (B, H, L, E), (B, H, L, Ev)],
    "batch and heads broadcast": [(B, 1, L, E), (1, H, S, E), (H, S, Ev)],
    "one query head": [(B, 1, L, E), (B, H, S, E), (B, H, S, Ev)],
    "ranks differ": [(L, E), (B, H, S, E), (H, S, Ev)],
    "5-D broadcasts": [(3, 1, H, L, E), (B, 1, S, E), (3, B, H, S, Ev)],
    "one query": [(B, H, 1, E), (B, H, S, E), (B, H, S, E)],
    "one key": [(B, H, L, E), (B, H, 1, E), (B, H, 1, Ev)],
}


@pytest.mark.parametrize("shapes, is_causal, dtype", pairs(SHAPES, [False, True], DTYPES), ids=str)
def test_shapes(shapes, is_causal, dtype):
    same(qkv(*SHAPES[shapes], dtype=dtype), is_causal=is_causal)


MASKS = [
    tuple(n if keep else 1 for n, keep in zip((B, H, L, S), kept, strict=True))[skip:]
    for kept in product([True, False], repeat=4)
    for skip in range(3)
    if all(kept[:skip])  # the dimensions left out do not matter
]


@pytest.mark.parametrize(
    "shape, Ev, kind, dtype", pairs(MASKS, [E, Ev], ["bool", "float"], DTYPES), ids=str
)
def test_every_mask_that_broadcasts(shape, Ev, kind, dtype):
    tensors = qkv((B, H, L, E), (B, H, S, E), (B, H, S, Ev), dtype=dtype)
    mask = draw(*shape, dtype=dtype)
    same(tensors, mask > -0.5 if kind == "bool" else mask)


@pytest.mark.parametrize("shape", [(), (1,), (S,), (1, S), (L, 1), (L, S)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_a_lone_head(shape, kind):
    tensors = qkv((L, E), (S, E), (S, Ev))
    same(tensors, draw(*shape) > -0.5 if kind == "bool" else draw(*shape))


@pytest.mark.parametrize("shape", [(S,), (1,), ()], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_torch_documents_and_does_not_take(shape, kind):
    """A 1-D mask broadcasts to the scores; torch's dispatch stumbles over it beside 4-D queries."""
    q, k, v = qkv((B, H, L, E), (B, H, S, E), (B, H, S, Ev))
    mask = draw(*shape) > -0.5 if kind == "bool" else draw(*shape)
    with pytest.raises(IndexError):
        TORCH(q, k, v, mask)
    assert_close(OURS(q, k, v, mask), TORCH(q, k, v, mask.expand(L, S)))


@pytest.mark.parametrize("shape", [(3, 1, 1, 1, S), (1, B, 1, L, S), (3, B, H, L, S), (H, L, S)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_five_dimensions(shape, kind):
    tensors = qkv(*SHAPES["5-D"])
    mask = draw(*shape)
    same(tensors, mask > -0.5 if kind == "bool" else mask)


@pytest.mark.parametrize("shapes", ["4-D", "4-D, equal sizes", "more queries than keys", "2-D"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_and_causal_both_apply(kind, shapes):
    tensors = qkv(*SHAPES[shapes])
    L, S = tensors[0].shape[-2], tensors[1].shape[-2]
    corner = torch.ones(L, S).tril().bool()
    mask = draw(L, S) > -0.5 if kind == "bool" else draw(L, S)
    mask[:, 0] = True  # a row that sees nothing is NaN in some of torch's kernels
    together = mask & corner if kind == "bool" else mask.masked_fill(~corner, float("-inf"))
    results = []
    for function, rule, is_causal in ((TORCH, together, False), (OURS, mask, True)):
        leaves = [x.clone().requires_grad_() for x in (*tensors, rule)[: 4 - (kind == "bool")]]
        out = function(*leaves[:3], rule if kind == "bool" else leaves[3], is_causal=is_causal)
        results.append((out, *torch.autograd.grad(out, leaves, draw(*out.shape, seed=9))))
    assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_and_causal_are_what_torchs_fused_kernel_makes_of_them(kind):
    """Its other kernel, for heads of two sizes, refuses the two together."""
    tensors, mask = qkv((B, H, L, E), (B, H, S, E), (B, H, S, E)), draw(L, S)
    given = mask > -0.5 if kind == "bool" else mask
    close(OURS(*tensors, given, 0.0, True), TORCH(*tensors, given, 0.0, True), FORWARD[q.dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_float32_mask_for_other_dtypes(dtype):
    tensors = qkv((B, H, L, E), (B, H, S, E), (B, H, S, Ev), dtype=dtype)
    same(tensors, draw(L, S))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_mask_is_not_rounded(dtype):
    """In bfloat16, 1000 and 1002 are one number; a mask of distances would lose them."""
    q = k = torch.zeros(1, 1, 3, 8, dtype=dtype)
    v = torch.eye(3, dtype=dtype).expand(1, 1, 3, 3)
    mask = torch.tensor([4000.0, 4001.0, 4002.0]).expand(3, 3)
    want = torch.softmax(torch.tensor([0.0, 1.0, 2.0]), 0).to(dtype).expand(1, 1, 3, 3)
    close(TORCH(q, k, v, mask), want, FORWARD[dtype])
    close(OURS(q, k, v, mask), want, FORWARD[dtype])


@pytest.mark.parametrize("scale", [0.0, 1.0, 0.3, -1.7, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale(scale, is_causal):
    same(qkv(*SHAPES["4-D"]), scale=scale, is_causal=is_causal)


@pytest.mark.parametrize("scale", [0.0, -1.7, 3e-87])
@pytest.mark.parametrize("Ev", [E, Ev])
def test_causal_with_a_scale_that_is_not_positive(Ev, scale):
    """torch's fused kernel scales the -inf of is_causal too, to NaN or +inf; its mask is right."""
    q, k, v = qkv((B, H, L, E), (B, H, S, E), (B, H, S, Ev))
    want = TORCH(q, k, v, torch.ones(L, S).tril().bool(), scale=scale)
    close(OURS(q, k, v, is_causal=True, scale=scale), want, FORWARD[torch.float32])


GROUPS = {
    "grouped": [(B, H, L, E), (B, G, S, E), (B, G, S, Ev)],
    "one key head": [(B, H, L, E), (B, 1, S, E), (B, 1, S, Ev)],
    "key and value heads differ": [(B, H, L, E), (B, 2, S, E), (B, 3, S, Ev)],
    "value heads as queries": [(B, H, L, E), (B, G, S, E), (B, H, S, Ev)],
    "as many": [(B, H, L, E), (B, H, S, E), (B, H, S, Ev)],
    "3-D": [(H, L, E), (G, S, E), (G, S, Ev)],
    "5-D": [(3, B, H, L, E), (3, B, G, S, E), (3, B, G, S, Ev)],
    "batch broadcasts": [(H, L, E), (B, G, S, E), (1, G, S, Ev)],
}


@pytest.mark.parametrize(
    "shapes, rule, dtype", pairs(GROUPS, ["none", "causal", "bool", "float"], DTYPES), ids=str
)
def test_grouped_heads(shapes, rule, dtype):
    tensors = qkv(*GROUPS[shapes], dtype=dtype)
    mask = {"bool": draw(H, L, S) > -0.5, "float": draw(H, L, S, dtype=dtype)}.get(rule)
    same(tensors, mask, enable_gqa=True, is_causal=rule == "causal")


EMPTY = {
    "no batch": [(0, H, L, E), (0, H, S, E), (0, H, S, Ev)],
    "no heads": [(B, 0, L, E), (B, 0, S, E), (B, 0, S, Ev)],
    "no queries": [(B, H, 0, E), (B, H, S, E), (B, H, S, Ev)],
    "no keys": [(B, H, L, E), (B, H, 0, E), (B, H, 0, Ev)],
    "neither": [(B, H, 0, E), (B, H, 0, E), (B, H, 0, E)],
    "no features": [(B, H, L, 0), (B, H, S, 0), (B, H, S, Ev)],
    "no values": [(B, H, L, E), (B, H, S, E), (B, H, S, 0)],
    "no batch of five": [(3, 0, H, L, E), (3, 0, H, S, E), (3, 0, H, S, Ev)],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", EMPTY)
def test_empty(shapes, is_causal):
    same(qkv(*EMPTY[shapes]), is_causal=is_causal)


@pytest.mark.parametrize("rule", ["none", "causal", "mask"])
def test_any_strides(rule):
    heads_last = qkv((B, L, H, E), (B, S, H, E), (B, S, H, Ev))
    tensors = [x.transpose(1, 2) for x in heads_last]
    tensors[1] = draw(B, H, 2 * S, E)[:, :, ::2]
    tensors[2] = draw(1, 1, S, Ev).expand(B, H, S, Ev)
    mask = draw(S, L).t() if rule == "mask" else None
    same(tuple(tensors), mask, is_causal=rule == "causal")


def test_gradients_are_the_derivatives():
    q, k, v, mask = (
        x.requires_grad_()
        for x in (
            *qkv((2, 2, 3, 2), (2, 1, 5, 2), (2, 1, 5, 3), dtype=torch.float64),
            draw(2, 1, 3, 5, dtype=torch.float64),
        )
    )
    assert torch.autograd.gradcheck(lambda *x: OURS(*x, enable_gqa=True), (q, k, v, mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [(267, 1, 8), (267, 3, 16), (1030, 1, 16)], ids=str)
def test_the_sizes_of_torchs_own_tests(size, is_causal, dtype):
    """Longer than a tile, and no multiple of one."""
    S, H, E = size
    same(qkv(*[(2, H, S, E)] * 3, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize(
    "shape, kind, dtype",
    pairs([(267, 514), (1, 514), (2, 1, 267, 1), (2, 3, 267, 514)], ["bool", "float"], DTYPES),
    ids=str,
)
def test_masks_of_the_sizes_of_torchs_own_tests(shape, kind, dtype):
    tensors = qkv((2, 3, 267, 8), (2, 3, 514, 8), (2, 3, 514, 8), dtype=dtype)
    same(tensors, draw(*shape) > -0.5 if kind == "bool" else draw(*shape, dtype=dtype))


def test_a_wide_band_of_minus_infinity():
    """Whole tiles in which some rows see nothing yet: torch's kernel once gave NaN here."""
    place = torch.arange(600)
    far = (place.unsqueeze(1) - place).abs() < 300
    mask = torch.zeros(600, 600).masked_fill(far & (place != 0), float("-inf"))
    same(qkv(*[(1, 2, 600, 16)] * 3), mask)


sizes = st.integers(1, 9)


@given(
    engine=st.sampled_from(choice.ENGINES),
    sizes=st.tuples(sizes, sizes, sizes, sizes, sizes, sizes),
    lead=st.integers(0, 2),
    group=st.booleans(),
    rule=st.sampled_from(["none", "causal", "bool", "float"]),
    kept=st.tuples(*[st.booleans()] * 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.none() | st.floats(-2, 2),
)
def test_any_call(engine, sizes, lead, group, rule, kept, dtype, scale):
    B, G, L, S, E, Ev = sizes
    H = 2 * G if group else G
    front = (B, 2)[:lead]
    tensors = qkv((*front, H, L, E), (*front, G, S, E), (*front, G, S, Ev), dtype=dtype)
    shape = [n if keep else 1 for n, keep in zip((*front, H, L, S), kept, strict=False)]
    mask = draw(*shape, dtype=dtype)
    if rule == "causal" and scale is not None and scale < 1e-30:
        scale = 1 - scale  # torch's own answer is NaN: the test above
    keywords = {"scale": scale, "enable_gqa": group, "is_causal": rule == "causal"}
    with pytest.MonkeyPatch.context() as patch:  # `auto` tries this engine first
        patch.setattr(choice, "ENGINES", (engine, *choice.ENGINES))
        same(tensors, {"bool": mask > -0.5, "float": mask}.get(rule), **keywords)


# ------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("rule", ["none", "causal", "bool", "float", "grouped", "2-D"])
@pytest.mark.parametrize("p", [0.3, 0.8])
def test_dropout_drops_what_torch_drops(rule, p):
    """The values are a unit matrix, so the output is the weights, and each 0 is a dropped one."""
    heads = {"grouped": G}.get(rule, H)
    q, k = qkv((B, H, S, E), (B, heads, S, E))
    v = torch.eye(S).expand(B, heads, S, S)
    if rule == "2-D":
        q, k, v = q[0, 0], k[0, 0], v[0, 0]
    mask = {"bool": draw(S, S) > -0.5, "float": draw(S, S)}.get(rule)
    keywords = {"is_causal": rule == "causal", "enable_gqa": rule == "grouped"}
    outs = []
    for function in (TORCH, OURS):
        torch.manual_seed(5)
        outs.append(function(q, k, v, mask, p, **keywords))
    want, got = outs
    assert ((want == 0) == (got == 0)).all()
    assert_close(got, want)
    allowed = TORCH(q, k, v, mask, **keywords) > 0
    dropped = ((got == 0) & allowed).sum() / allowed.sum()
    assert abs(dropped - p) < 4 * (p * (1 - p) / int(allowed.sum())) ** 0.5


def test_dropout_of_everything():
    q, k, v = qkv(*SHAPES["4-D"])
    assert_close(OURS(q, k, v, None, 1.0), torch.zeros(B, H, L, Ev))


# ------------------------------------------------------------------- what is better defined here


def blind_row(kind, dtype=torch.float32):
    keep = torch.ones(L, S, dtype=torch.bool)
    keep[2] = False
    if kind == "bool":
        return keep
    return torch.zeros(L, S, dtype=dtype).masked_fill(~keep, float("-inf"))


@pytest.mark.parametrize("Ev", [E, Ev])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_sees_nothing_gives_0(dtype, kind, Ev):
    tensors = qkv((B, H, L, E), (B, H, S, E), (B, H, S, Ev), dtype=dtype)
    q, k, v = (x.requires_grad_() for x in tensors)
    out = OURS(q, k, v, blind_row(kind, dtype))
    assert (out[:, :, 2] == 0).all() and (out[:, :, 1] != 0).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (q.grad[:, :, 2] == 0).all()


@pytest.mark.parametrize("hostile", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rule", ["bool", "float", "causal"])
def test_nothing_leaks_from_behind_the_mask(rule, hostile):
    q, k, v = qkv((B, H, L, E), (B, H, S, E), (B, H, S, Ev))
    keep = torch.ones(L, S, dtype=torch.bool)
    keep[:, 7:] = False
    masks = {"bool": keep, "float": draw(L, S).masked_fill(~keep, float("-inf")), "causal": None}
    keywords = {"attn_mask": masks[rule], "is_causal": rule == "causal"}
    want = TORCH(q, k, v, **keywords)
    for x in (k, v):
        spoiled = x.clone()
        spoiled[:, :, 7:] = hostile
        leaves = [
            y.clone().requires_grad_()
            for y in (q, spoiled if x is k else k, spoiled if x is v else v)
        ]
        out = OURS(*leaves, **keywords)
        assert_close(out, want)
        out.sum().backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_torchs_signature_answers_with_shapes_alone():
    x = torch.randn(2, 4, 5, 8, device="meta")
    assert ch.compat.scaled_dot_product_attention(x, x, x).shape == (2, 4, 5, 8)


@pytest.mark.parametrize("learns", ["q", "k", "v", "bias", "sinks"])
def test_shapes_alone_know_what_learns(learns):
    shapes = {"q": (5, 8), "k": (7, 8), "v": (7, 6), "bias": (5, 7), "sinks": (4,)}
    x = {
        name: torch.zeros(shape if name == "sinks" else (2, 4, *shape), device="meta")
        for name, shape in shapes.items()
    }
    x[learns].requires_grad_()
    assert ch.attention(**x).requires_grad
    assert not ch.attention(**{**x, learns: x[learns].detach()}).requires_grad


# ------------------------------------------------------------------------------------- errors


q, k, v = qkv((B, H, L, E), (B, H, S, E), (B, H, S, Ev))
WRONG = {
    "one dimension": (BadValue, (q[0, 0, 0], k, v), {}),
    "head sizes": (BadValue, (q, k[..., :-1], v), {}),
    "lengths": (BadValue, (q, k, v[:, :, :-1]), {}),
    "batches": (BadValue, (q, k.repeat(2, 1, 1, 1)[:3], v), {}),
    "heads": (BadValue, (q, k[:, :G], v[:, :G]), {}),
    "heads do not divide": (BadValue, (q, k[:, :4], v[:, :4]), {"enable_gqa": True}),
    "heads each do not divide": (BadValue, (q, k[:, :4], v[:, :3]), {"enable_gqa": True}),
    "more key heads": (BadValue, (q[:, :2], k, v), {"enable_gqa": True}),
    "dtypes differ": (BadType, (q, k.double(), v), {}),
    "whole numbers": (BadType, (q.int(), k.int(), v.int()), {}),
    "complex numbers": (BadType, (q.cfloat(), k.cfloat(), v.cfloat()), {}),
    "mask of whole numbers": (BadType, (q, k, v, torch.ones(L, S).int()), {}),
    "mask of bytes": (BadType, (q, k, v, torch.ones(L, S).byte()), {}),
    "mask in float64": (BadType, (q, k, v, torch.zeros(L, S).double()), {}),
    "mask in float16": (BadType, (q, k, v, torch.zeros(L, S).half()), {}),
    "mask too long": (BadValue, (q, k, v, torch.zeros(L, S + 1)), {}),
    "mask transposed": (BadValue, (q, k, v, torch.zeros(S, L)), {}),
    "mask of five dimensions": (BadValue, (q, k, v, torch.zeros(1, B, H, L, S)), {}),
    "mask of heads beside none": (BadValue, (q[0, 0], k[0, 0], v[0, 0], torch.zeros(1, L, S)), {}),
    "mask longer than one query": (BadValue, (q[:, :, :1], k, v, torch.zeros(L, S)), {}),
    "mask is a list": (BadType, (q, k, v, [[True]]), {}),
    "query is a list": (BadType, ([[1.0]], k, v), {}),
    "dropout above 1": (BadValue, (q, k, v, None, 1.5), {}),
    "dropout below 0": (BadValue, (q, k, v, None, -0.5), {}),
    "dropout is None": (BadType, (q, k, v, None, None), {}),
    "dropout is a word": (BadType, (q, k, v, None, "0.1"), {}),
    "query is sparse": (BadType, (q.to_sparse(), k, v), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    kind, given, keywords = WRONG[name]
    with pytest.raises(AttentionError) as caught:
        OURS(*given, **keywords)
    error = caught.value
    assert type(error) is kind
    assert all(part.endswith(".") for part in (error.gave, error.rule, error.hint))
    if name != "dropout below 0":  # some of torch's paths do not look
        with pytest.raises((RuntimeError, TypeError, IndexError)):
            TORCH(*given, **keywords)


def test_an_error_in_full():
    with pytest.raises(BadValue) as caught:
        OURS(q, k, v, torch.zeros(S, L))
    assert str(caught.value) == (
        "attn_mask has shape (11, 5); the scores are (2, 6, 5, 11).\n"
        "  Rule: attn_mask broadcasts to the scores, (..., Hq, L, S).\n"
        "  Hint: make each of its dimensions that size or 1."
    )


# --------------------------------------------------------------------------- in place of torch


@pytest.fixture
def stand_in(monkeypatch):
    """Replace torch's function for one call, and count the calls of ours."""

    def run(call):
        asked = []

        def counting(*given, **keywords):
            asked.append(1)
            return OURS(*given, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", counting)
            out = call()
        return out, len(asked)

    return run


def test_the_name_itself_can_be_replaced(monkeypatch):
    want = TORCH(q, k, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", OURS)
    assert_close(F.scaled_dot_product_attention(q, k, v), want)
    with pytest.raises(BadValue):  # and an error leaves it as it was
        F.scaled_dot_product_attention(q, k, v, torch.zeros(S, L))
    assert_close(F.scaled_dot_product_attention(q, k, v), want)


MHA = {
    "self": {},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(S), "is_causal": True},
    "mask": {"attn_mask": draw(S, S)},
    "mask per head": {"attn_mask": draw(B * H, S, S) > 1},
    "padding": {"key_padding_mask": torch.arange(S).expand(B, S) >= torch.tensor([[S], [4]])},
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("rule", MHA)
def test_multihead_attention(rule, dropout, stand_in):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(H * 4, H, dropout=dropout, batch_first=True)
    x = draw(B, S, H * 4)

    def call():
        torch.manual_seed(1)
        layer.zero_grad()
        out, _ = layer(x, x, x, need_weights=False, **MHA[rule])
        out.square().sum().backward()
        return [out, *(p.grad.clone() for p in layer.parameters())]

    want = call()
    got, asked = stand_in(call)
    assert asked
    assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_transformer_encoder_layer(norm_first, dropout, stand_in):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        24, 6, 32, dropout=dropout, batch_first=True, norm_first=norm_first
    )
    x, mask = draw(B, S, 24), nn.Transformer.generate_square_subsequent_mask(S)

    def call():
        torch.manual_seed(1)
        return layer(x, src_mask=mask, is_causal=True)

    want = call()
    got, asked = stand_in(call)
    assert asked
    assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.outside
def test_a_llama(stand_in, monkeypatch):
    """The SDPA path of transformers: grouped heads, a padding mask, then steps with a cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(31, (B, S))
    real = torch.ones(B, S, dtype=torch.long)
    real[1, :4] = 0

    def call():
        first = model(ids, attention_mask=real, use_cache=True)
        more = torch.cat([real, real.new_ones(B, 1)], 1)
        step = model(ids[:, :1], attention_mask=more, past_key_values=first.past_key_values)
        return [first.logits[0], first.logits[1, 4:], step.logits, model(ids).logits]

    with torch.no_grad():
        want = call()
        got, asked = stand_in(call)
    assert asked >= 3 * config.num_hidden_layers
    assert_close(got, want, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- patched


def test_patched_puts_ours_in_torchs_place_and_takes_it_back():
    want = TORCH(q, k, v)
    with compat.patched():
        assert F.scaled_dot_product_attention is not TORCH
        out = F.scaled_dot_product_attention(q, k, v)
        assert (
            out.equal(OURS(q, k, v)) and F.scaled_dot_product_attention.__name__ == TORCH.__name__
        )
        with compat.patched(), pytest.raises(BadValue):
            F.scaled_dot_product_attention(q, k, v, torch.zeros(S, L))
        with pytest.raises(BadValue):  # still ours, after the inner block
            F.scaled_dot_product_attention(q, k, v, torch.zeros(S, L))
    with pytest.raises(ZeroDivisionError), compat.patched():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is TORCH
    assert torch.backends.mha.get_fastpath_enabled()
    assert_close(F.scaled_dot_product_attention(q, k, v), want)


def test_patched_holds_in_its_own_thread_only():
    """Two threads, one of them inside a block, and the last one to leave restores torch's."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        with compat.patched():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    inside.wait()
    with pytest.raises(RuntimeError, match="must match"):  # torch's own error
        F.scaled_dot_product_attention(q, k, v, torch.zeros(S, L))
    with compat.patched():
        leave.set()
        thread.join()
        with pytest.raises(BadValue):
            F.scaled_dot_product_attention(q, k, v, torch.zeros(S, L))
    assert F.scaled_dot_product_attention is TORCH


def test_patched_as_a_decorator():
    @compat.patched()
    def name():
        return F.scaled_dot_product_attention(q, k, v, torch.zeros(S, L))

    with pytest.raises(BadValue):
        name()
    assert F.scaled_dot_product_attention is TORCH


def test_patched_leaves_what_others_put_there(monkeypatch):
    def theirs(*given, **keywords):
        return TORCH(*given, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with compat.patched():
        assert F.scaled_dot_product_attention(q, k, v).equal(OURS(q, k, v))
    assert F.scaled_dot_product_attention is theirs
    with compat.patched():
        F.scaled_dot_product_attention = theirs
    assert F.scaled_dot_product_attention is theirs


@pytest.mark.parametrize("engine", choice.ENGINES)
def test_no_engine_calls_the_function_that_replaces_torchs(engine, monkeypatch):
    monkeypatch.setattr(choice, "ENGINES", (engine, *choice.ENGINES))
    with compat.patched():
        assert_close(F.scaled_dot_product_attention(q, k, v), TORCH(q, k, v))


@pytest.mark.outside
def test_patched_is_compiled_into_a_graph_and_out_of_it_again():
    asked = []

    def backend(graph, _):
        asked.append("clearhead" in graph.code)
        return graph

    def run(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    x = draw(1, 2, 5, 8)
    results = [compiled(x)]
    with compat.patched():
        results.append(compiled(x))
    results.append(compiled(x))
    assert asked == [False, True]
    for out in results:
        assert_close(out, TORCH(x, x, x, is_causal=True))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transformer_encoder_is_watched_while_patched(padded, norm_first, grad):
    """In evaluation mode too, in which torch would take a fused path without this function."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 6, 32, batch_first=True, norm_first=norm_first)
    model, x = nn.TransformerEncoder(layer, 2).eval(), draw(B, S, 24)
    padding = torch.arange(S).expand(B, S) >= torch.tensor([[S], [4]])
    call = {"src_key_padding_mask": padding} if padded else {}
    with torch.set_grad_enabled(grad):
        want = model(x, **call)
        with compat.patched(), ch.watch(model, stats=["entropy"]) as seen:
            got = model(x, **call)
    assert [c.module for c in seen] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert seen[0].entropy.shape == (B, 6, S)
    assert_close(got[~padding], want[~padding], rtol=1e-5, atol=1e-5)


def test_multihead_attention_is_watched_while_patched():
    layer, x = nn.MultiheadAttention(24, 6, batch_first=True).eval(), draw(B, S, 24)
    with torch.no_grad():
        want, _ = layer(x, x, x, need_weights=False)
        with compat.patched(), ch.watch(layer) as seen:
            got, _ = layer(x, x, x, need_weights=False)
    assert len(seen) == 1
    assert_close(got, want)


@pytest.mark.outside
def test_an_sdpa_model_of_transformers_is_watched_while_patched(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    sizes = dict(vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=6)
    config = transformers.BertConfig(**sizes, intermediate_size=32, attn_implementation="sdpa")
    model, ids = transformers.BertModel(config).eval(), torch.randint(31, (B, S))
    real = (torch.arange(S).expand(B, S) < torch.tensor([[S], [4]])).long()
    with torch.no_grad():
        want = model(ids, attention_mask=real).last_hidden_state
        with compat.patched(), ch.watch(model, stats=["entropy"]) as seen:
            got = model(ids, attention_mask=real).last_hidden_state
    assert len(seen) == 2 and "attention" in seen[0].module
    assert_close(got[real.bool()], want[real.bool()], rtol=1e-4, atol=1e-5)


def test_autocast():
    """Mixed dtypes meet in autocast's; float64 stays itself."""
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((q, k, v), (q.half(), k, v.bfloat16()), (q.double(), k.double(), v.double())):
            want, got = TORCH(*given), OURS(*given)
            close(got, want, FORWARD[want.dtype])
        want, got = (function(q, k, v, draw(L, S)) for function in (TORCH, OURS))
        close(got, want, FORWARD[torch.bfloat16])
