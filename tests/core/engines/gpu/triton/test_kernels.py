"""The Triton kernels compared with float64, in cases that the tests of all engines do not have.

With a GPU the kernels run on it (not yet done). Without one they are interpreted on a CPU:
`test_triton.py` runs this file; by hand: TRITON_INTERPRET=1 pytest tests/core/engines/gpu/triton.
"""

import os

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead import stats
from clearhead.core import torch_state
from clearhead.core.engines.choice import TRITON
from clearhead.core.engines.gpu.replay import Records
from clearhead.core.masks import Grid
from clearhead.core.problem.biases import TensorBias
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.stats import map_tensors, parse_stats
from tests.core.stats.test_stats import assert_same, dense, everything_for, flat
from tests.problems import PROBLEMS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
pytestmark = pytest.mark.outside
if DEVICE.type == "cpu" and not INTERPRETED:
    pytest.skip("test_triton.py runs it, interpreted", allow_module_level=True)


def there(x):
    """Move a tensor, or the bias of one, to the device of the kernels; return anything else."""
    if isinstance(x, TensorBias):
        return ch.bias(x.tensor.to(DEVICE))
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def draw(B=1, H=2, G=1, Tq=37, Tk=53, D=16, Dv=24, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    shapes = (B, H, Tq, D), (B, G, Tk, D), (B, G, Tk, Dv)
    return tuple(torch.randn(s, generator=source).to(dtype) for s in shapes)


@pytest.fixture(autouse=True)
def new_calls(monkeypatch):
    """No call repeats the steps of an earlier one (test_replay.py tests that), since some tests
    replace functions that choose the steps."""
    monkeypatch.setattr(Records, "call", lambda self, run, args, *others: run(*args))


def steps(*qkv, **keywords):
    return ch.attention(*(x.double() for x in qkv), engine="steps", **keywords)


def triton(*qkv, engine="triton", **keywords):
    """Compute on the device of the kernels, and move the result back, with its gradient."""
    asked = {name: there(x) for name, x in keywords.items()}
    return ch.attention(*map(there, qkv), engine=engine, **asked).cpu()


# -------------------------------------------------------------------------------- tiles and splits


@pytest.mark.parametrize("Tq, Tk", [(1, 1100), (16, 600), (130, 129)])
@pytest.mark.parametrize("mask", [
    ch.everything,
    ch.Causal(align="end"),
    ch.window(before=70, after=9, align="end"),
    ch.window(before=300, after=0, align="end") | ch.prefix(5),
], ids=["full", "causal", "window", "holes"])  # fmt: skip
def test_lengths_around_tiles_and_splits(Tq, Tk, mask):
    q, k, v = (x.requires_grad_() for x in draw(Tq=Tq, Tk=Tk))
    out = triton(q, k, v, mask=mask)
    true = steps(q, k, v, mask=mask)
    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=3e-6)
    seed = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), seed)
    expected = torch.autograd.grad(true, (q, k, v), seed.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keywords", [
    {"mask": ch.Causal(align="end")},
    {"mask": ch.window(before=9, align="end") | ch.prefix(3), "dropout": 0.2, "seed": 3},
], ids=["causal", "ranges and dropout"])  # fmt: skip
def test_descriptors_copy_the_same_numbers(keywords, dtype, monkeypatch):
    """The bits are those of tiles that are read by addresses, also where a tile has fewer rows."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from clearhead.core.engines.gpu.triton import launch_backward, launch_forward

    tensors = [x.requires_grad_() for x in draw(H=4, G=2, Tq=37, Tk=53, dtype=dtype)]
    seed = torch.randn(1, 4, 37, 24).to(dtype)
    real, real_view, viewed = launch_forward.tile_from, launch_forward.described, []

    def copied(*args):
        return real(*args)._replace(copied=True)

    def view(*args):
        viewed.append(real_view(*args))
        return viewed[-1]

    def step():
        launch_forward.forward_tiles.cache_clear()
        out = triton(*tensors, **keywords)
        return out, *torch.autograd.grad(out, tensors, seed)

    plain = step()
    monkeypatch.setattr(launch_forward, "described", view)
    for module in (launch_forward, launch_backward):
        monkeypatch.setattr(module, "tile_from", copied)
    described = step()
    launch_forward.forward_tiles.cache_clear()
    assert len(viewed) >= 6 and all(isinstance(x, TensorDescriptor) for x in viewed)
    for a, b in zip(plain, described, strict=True):
        assert torch.equal(a, b)


SPLIT = {"softcap": 3.0, "sinks": torch.tensor([0.5]), "dropout": 0.2, "seed": 3}


@pytest.mark.parametrize("Tq, Tk, splits, keywords", [
    (17, 1100, 2, {"mask": ch.Causal(align="end")}),
    (65, 2200, 2, {"mask": ch.window(before=2140, after=9, align="end"), "bias": torch.ones(2200)}),
    (40, 2200, 2, {"mask": ch.window(before=2100, align="end") | ch.prefix(5), **SPLIT}),
], ids=["one tile", "tiles", "all"])  # fmt: skip
def test_many_keys_are_split_also_for_a_chunk_of_queries(Tq, Tk, splits, keywords, monkeypatch):
    from clearhead.core.engines.gpu.triton import launch_forward

    made = []
    real = launch_forward.splits_of
    monkeypatch.setattr(
        launch_forward, "splits_of", lambda *a: (made.append(real(*a)), made[-1])[1]
    )
    q, k, v = (x.requires_grad_() for x in draw(H=1, Tq=Tq, Tk=Tk))
    out, true = triton(q, k, v, **keywords), steps(q, k, v, **keywords)
    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=3e-6)
    seed = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), seed)
    expected = torch.autograd.grad(true, (q, k, v), seed.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=3e-5)
    statistics = ["lse", "max", "entropy", stats.topk(5), "received", stats.pooled(7, 9)]
    q, k, v = (x.detach() for x in (q, k, v))
    again, found = look(q, k, v, statistics=statistics, **keywords)
    assert torch.equal(again, out)
    true = truth(q, k, v, statistics=statistics, **keywords)
    assert_same(found, true, 1e-5, 6e-6, keys_of="float64")
    assert [n for n, *_ in made] == [splits] * 2


@pytest.mark.parametrize("keywords", [
    {"mask": ch.Causal(align="end")},
    {"mask": ch.window(before=9, align="end") | ch.prefix(3), "dropout": 0.2, "seed": 3},
], ids=["causal", "ranges and dropout"])  # fmt: skip
def test_heads_that_read_the_same_keys_are_split(keywords, monkeypatch):
    """Three heads for each of two, of which a program takes two."""
    from clearhead.core.engines.gpu.triton import launch_backward

    assert launch_backward.splits_of_heads(32, 64, 4096) == (4, 8)
    assert launch_backward.splits_of_heads(32, 8, 256) == (4, 8)
    assert launch_backward.splits_of_heads(4, 1, 4096) == (4, 1)
    assert launch_backward.splits_of_heads(4, 256, 4096) == (1, 4)
    q, k, v = (x.requires_grad_() for x in draw(H=6, G=2, Tq=37, Tk=70))
    out, true = triton(q, k, v, **keywords), steps(q, k, v, **keywords)
    seed = torch.randn_like(out)
    expected = torch.autograd.grad(true, (q, k, v), seed.double(), retain_graph=True)
    grads = []
    for of_split, split in ((60, (2, 2)), (2048, (1, 3))):
        monkeypatch.setattr(launch_backward, "LEAST_OF_SPLIT", of_split)
        assert launch_backward.splits_of_heads(3, 6, 37) == split
        grads.append(torch.autograd.grad(out, (q, k, v), seed, retain_graph=True))
        for a, b in zip(grads[-1], expected, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=3e-5)
    assert not torch.equal(grads[0][1], grads[1][1])  # another order of the heads


def test_keys_beyond_a_band_are_in_no_split():
    from clearhead.core.engines.gpu.triton.arguments import Sizes
    from clearhead.core.engines.gpu.triton.launch_forward import Tiles, splits_of
    from clearhead.core.engines.operators import KernelArgs

    def split(Tq, Tk, queries, before=2**60, after=2**60):
        rule = KernelArgs(1.0, 0.0, before, after)
        return splits_of(rule, Sizes(1, 1, 1, Tq, Tk), Tiles(1, queries, 64, 4, 2))

    assert split(1, 2**16, 16) == (64, 0, 1024)
    assert split(1, 2**16, 16, 1000 - 2**16, 2**16) == (2, 2**16 - 1024, 512)
    assert split(1, 2**16, 4, 1000 - 2**16, 2**16) == (4, 2**16 - 1024, 256)
    assert split(1, 2**16, 16, after=700) == (2, 0, 512)
    assert split(128, 2**16, 128) == (16, 0, 4096) and split(129, 2**16, 128) == (8, 0, 8192)
    assert split(128, 2**16, 128, 5000 - 2**16, 2**16) == (2, 2**16 - 5056, 4096)
    assert split(2**12, 2**12, 128)[0] == split(2**16, 2**16, 128)[0] == 1
    for before, after in ((-(2**60), 2**60), (2**60, -(2**60))):  # all beyond the keys
        assert split(17, 900, 32, before, after)[0] == 1
        q, k, v = draw(Tq=17, Tk=90)
        assert not triton(q, k, v, mask=ch.Causal(align=-50) & ch.window(0, 0, align=500)).any()


@pytest.mark.parametrize("H, G", [(6, 2), (8, 1), (3, 3)])
def test_heads_that_share_a_tile(H, G):
    """With few queries a tile holds the query heads of a key head, each with its own rule; their
    number need not be a power of 2."""
    q, k, v = draw(H=H, G=G, Tq=2, Tk=600)
    keep = torch.rand(H, 1, 600, generator=torch.Generator().manual_seed(1)) < 0.7
    keywords = {
        "mask": ch.dense(keep=keep),
        "bias": ch.alibi(align="end"),
        "sinks": torch.linspace(-1, 2, H),
    }  # fmt: skip
    got = triton(q, k, v, **keywords)
    torch.testing.assert_close(got, steps(q, k, v, **keywords).float())


def test_an_example_has_the_same_bits_in_any_batch():
    for Tq, Tk in ((1, 600), (40, 600), (17, 1100)):
        q, k, v = draw(B=3, Tq=Tq, Tk=Tk)
        mask = ch.Causal(align="end")
        together = triton(q, k, v, mask=mask)
        for b in range(3):
            alone = triton(*(x[b : b + 1] for x in (q, k, v)), mask=mask)
            assert torch.equal(together[b : b + 1], alone)


@pytest.mark.parametrize("mask, most", [
    (ch.window(before=20, after=0), 0.35),
    (ch.documents(torch.arange(256) // 32) & ch.causal, 0.30),
    (ch.window(before=20, after=0) | ch.prefix(4), 0.50),
    (ch.dense(keep=(torch.arange(256) // 32).unsqueeze(1) == torch.arange(256) // 32), 0.30),
], ids=["window", "documents", "two ranges", "bits"])  # fmt: skip
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter counts products")
def test_empty_tiles_cost_no_product(mask, most, monkeypatch):
    from triton.runtime.interpreter import interpreter_builder

    products = []
    real = type(interpreter_builder).create_dot
    monkeypatch.setattr(
        type(interpreter_builder), "create_dot", lambda *a: (products.append(1), real(*a))[1]
    )

    def count(mask):
        products.clear()
        q, k, v = (x.requires_grad_() for x in draw(H=1, Tq=256, Tk=256))
        triton(q, k, v, mask=mask).sum().backward()
        return len(products)

    assert count(mask) < most * count(ch.everything)


BIASES = [(1, 1, 1, 1), (53,), (2, 37, 53), (2, 1, 37, 53), (1, 2, 1, 53), (2, 2, 37, 1)]


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_the_gradient_of_a_bias_sums_over_broadcast_dimensions(shape):
    q, k, v = draw(B=2)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    keywords = {"mask": ch.Causal(align="end"), "softcap": 3.0}
    out = triton(q, k, v, bias=bias, **keywords)
    seed = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, bias, seed)
    (true,) = torch.autograd.grad(steps(q, k, v, bias=bias, **keywords), bias, seed.double())
    torch.testing.assert_close(got, true, rtol=1e-4, atol=3e-5)


def test_which_queries_see_a_tile_is_computed_once_for_a_mask(monkeypatch):
    from clearhead.core.engines.gpu.triton import launch_backward

    made = []
    compute = launch_backward.compute_seen_from
    monkeypatch.setattr(
        launch_backward, "compute_seen_from", lambda *a: (made.append(a[2:]), compute(*a))[1]
    )
    mask = ch.window(before=9, after=0) | ch.prefix(2)
    grads = {}
    for T in (40, 40, 24, 40):
        q, k, v = (x.requires_grad_() for x in draw(Tq=T, Tk=T))
        (grad,) = torch.autograd.grad(triton(q, k, v, mask=mask).sum(), k)
        assert torch.equal(grad, grads.setdefault(T, grad))
    assert len(made) == 3  # a mask caches its last ranges
    monkeypatch.setattr(
        launch_backward, "has_values", lambda *tensors: False
    )  # as during a capture
    mask = ch.window(before=9, after=0) | ch.prefix(3)
    for _ in range(2):
        torch.autograd.grad(triton(q, k, v, mask=mask).sum(), k)
    assert len(made) == 5


class Calls(TorchDispatchMode):
    """Records which torch operations were called."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made.append(func)
        return func(*args, **(kwargs or {}))


def test_the_first_kernel_of_a_backward_pass_lowers_its_flag(monkeypatch):
    """Its memory is not cleared before, which would be a kernel more."""
    from clearhead.core.engines.gpu.triton import launch_backward

    seen, run = [], launch_backward._start
    monkeypatch.setattr(
        launch_backward, "_start", lambda *args: (seen.append(args[3].item()), run(*args))[1]
    )
    fill = lambda x, *size, **how: x.new_full(size if type(size[0]) is int else size[0], 7, **how)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", fill)
    q, k, v = (x.requires_grad_() for x in draw(H=1, Tq=5, Tk=5))
    triton(q, k, v, mask=ch.causal).sum().backward()
    assert seen == [0, 0]


def test_ranges_that_all_queries_share_need_no_tree():
    """The queries that see a tile are those of the general algorithm for the same ranges row by
    row."""
    from clearhead.core.engines.gpu.triton.arguments import Sizes
    from clearhead.core.engines.gpu.triton.launch_backward import compute_seen_from

    sizes = Sizes(2, 1, 1, 37, 90)
    keep = torch.zeros(2, 1, 1, 90, dtype=torch.bool)
    keep[0, 0, 0, 3:20] = keep[0, 0, 0, 33:35] = keep[1, 0, 0, 50:] = True
    for mask in (ch.prefix(5), ch.prefix(0), ch.lengths(keys=[17, 90]), ch.dense(keep=keep),
                 ch.prefix(4) | ch.lengths(keys=[0, 64]), ch.everything):  # fmt: skip
        ranges = mask.key_ranges(Grid(37, 90, 2))
        assert ranges.lo.shape[2] == 1
        with Calls() as calls:
            shared = compute_seen_from(ranges.lo, ranges.hi, sizes, 16, 32)
        assert len(calls.made) <= 9
        each_row = (x.expand(-1, -1, 37, -1) for x in (ranges.lo, ranges.hi))
        general = compute_seen_from(*each_row, sizes, 16, 32)
        for first, last, low, high in zip(*(x.flatten() for x in (*shared, *general)), strict=True):
            assert first.dtype == last.dtype == torch.int32
            assert (first, last) == (low, high) or (first >= last and low >= high)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_changes_nothing(dtype):
    q, k, v = (x.requires_grad_() for x in draw(Tq=20, Tk=20))
    bias = torch.randn(20, 20, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def grads():
        return torch.autograd.grad(triton(q, k, v, bias=bias).sum(), (q, k, v, bias))

    expected = grads()
    torch.set_default_dtype(dtype)
    try:
        found = grads()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("scale", [0.5, 0.69, 1.0])
def test_the_largest_products_of_a_float(scale):
    """3e38 each, which a unit above 1 would turn into infinities."""
    q, k = torch.full((17, 1), 3e19), torch.full((23, 1), 1e19)
    k[5:], v = -1e19, torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    got, true = (f(q, k, v, scale=scale) for f in (triton, steps))
    torch.testing.assert_close(got, true.float())
    (of_v,), (true_of_v,) = (torch.autograd.grad(x.sum(), v) for x in (got, true))
    torch.testing.assert_close(of_v, true_of_v)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU rounds so by itself")
@pytest.mark.parametrize("size", [1e5, 1e9, 1e18])
def test_large_logits_where_a_product_and_a_sum_are_rounded_once(size, monkeypatch):
    """The interpreter rounds twice; here it rounds `fma` once, as a GPU does."""
    from triton.runtime import interpreter

    def fused(self, x, y, z):
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
    q, k, v = draw(Tq=21, Tk=10)
    q, k, v = (x.requires_grad_() for x in (q * size**0.5, k * size**0.5, v))
    got, true = (f(q, k, v) for f in (triton, steps))
    torch.testing.assert_close(got, true.float(), rtol=1e-3, atol=1e-2)
    (of_v,), (true_of_v,) = (torch.autograd.grad(x.sum(), v) for x in (got, true))
    torch.testing.assert_close(of_v, true_of_v, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("mask", [
    ch.Causal(align="end"), ch.window(before=30, after=0) | ch.prefix(3),
])  # fmt: skip
def test_a_soft_cap_hides_masked_nan(mask):
    """The gradient of the cap multiplies by a number of the masked cell too."""
    q, k, v = draw(Tq=37, Tk=37)
    k[0, 0, 30], v[0, 0, 30] = float("nan"), float("inf")
    seed = torch.randn(1, 2, 37, 24, generator=torch.Generator().manual_seed(3))
    seed[:, :, 30:] = 0
    found, true = (
        torch.autograd.grad(f(*x, mask=mask, softcap=2.0), x, seed.to(x[0].dtype))
        for f, x in (
            (triton, [y.clone().requires_grad_() for y in (q, k, v)]),
            (steps, [y.double().requires_grad_() for y in (q, k, v)]),
        )
    )
    torch.testing.assert_close(found[0][:, :, :30], true[0][:, :, :30].float())
    assert found[0][:, :, :30].isfinite().all() and found[0][:, :, :30].any()


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter calls another product")
def test_products_that_differ_in_their_last_bit_give_no_weight_above_its_row(monkeypatch):
    """As those of transposed tiles may. Each key appears twice, so weights are 0 and 0.5, and the
    last bit of such large products is more than 2^10."""
    from clearhead.core.engines.gpu.triton import backward

    exact = backward.product

    q, k, v = draw(Tq=21, Tk=10)
    q, k = q * 1e5, k.repeat(1, 1, 2, 1) * 1e6
    q, k, v = (x.requires_grad_() for x in (q, k, v.repeat(1, 1, 2, 1)))
    out, true = triton(q, k, v), steps(q, k, v)
    expected = torch.autograd.grad(true.sum(), v)[0]
    monkeypatch.setattr(backward, "product", lambda *of: exact(*of) * 1.00000012)
    of_q, of_k, of_v = torch.autograd.grad(out.sum(), (q, k, v))
    assert of_q.isfinite().all() and of_k.isfinite().all()
    torch.testing.assert_close(of_v, expected, rtol=1e-4, atol=1e-4)
    received = ch.look(q.detach(), k.detach(), v.detach(), engine="triton", stats=["received"])
    assert received.received.max() <= 21


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("keywords", [
    {"mask": ch.lengths(keys=101)},  # all queries see the same keys: whole tiles of them
    {"mask": ch.Causal(align="end"), "bias": ch.alibi(align="end"), "dropout": 0.2, "seed": 3},
    {"mask": ch.window(before=30, align="end") | ch.prefix(5), "softcap": 3.0},
    {"bias": torch.randn(2, 70, 150, generator=torch.Generator().manual_seed(4))},
], ids=["lengths", "alibi and dropout", "ranges and cap", "bias"])  # fmt: skip
def test_transposed_tiles_give_the_same_gradients(keywords, turns, monkeypatch):
    from clearhead.core.engines.gpu.triton import launch_backward

    monkeypatch.setattr(launch_backward, "transposes_tiles", lambda *of: turns)
    q, k, v = (x.requires_grad_() for x in draw(Tq=70, Tk=150))
    out, true = triton(q, k, v, **keywords), steps(q, k, v, **keywords)
    seed = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), seed)
    expected = torch.autograd.grad(true, (q, k, v), seed.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=3e-5)


def test_gradients_have_the_same_bits_each_time():
    q, k, v = (x.requires_grad_() for x in draw(Tq=50, Tk=50))
    keywords = {"bias": torch.randn(50, 50, requires_grad=True), "sinks": torch.randn(2)}
    first, second = (
        torch.autograd.grad(triton(q, k, v, **keywords).sum(), (q, k, v, keywords["bias"]))
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_and_both_infinities_in_values_are_distinguished(dtype):
    """Columns of one kind, which fill a tile, and columns with two kinds."""
    q, k, v = draw(Tq=130, Tk=150, dtype=dtype)
    nan, inf = float("nan"), float("inf")
    for column, bad in enumerate((nan, inf, -inf)):
        v[..., column] = bad
        v[0, 0, 100, 4 + column] = bad
    v[0, 0, 3, 8], v[0, 0, 5, 8] = inf, -inf
    v[0, 0, 3:70, 9], v[0, 0, 70:, 9] = -inf, inf
    mask = ch.window(before=90, after=0, align="start")
    got, true = triton(q, k, v, mask=mask), steps(q, k, v, mask=mask)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(got), kind(true))
        assert kind(true).any()


@pytest.mark.parametrize("known", [True, False], ids=["read", "not read, as in a capture"])
def test_a_bias_may_hold_anything(known, monkeypatch):
    """The bias has -inf in cells, whole rows and whole tiles, and NaN and +inf. Keys and values
    that the -inf masks are not finite."""
    if not known:
        monkeypatch.setattr(torch_state, "_is_captured", lambda x: True)
    nan, inf = float("nan"), float("inf")
    q, k, v = draw(Tq=70, Tk=150)
    k[0, 0, 140], v[0, 0, 140], v[0, 0, 141, 3] = nan, nan, inf
    bias = torch.randn(2, 70, 150, generator=torch.Generator().manual_seed(2))
    bias[:, 5:30, ::7] = bias[:, 40:] = bias[:, :, 140:142] = -inf
    bias[0, 3], bias[0, 4, 20], bias[1, 8, 6] = -inf, nan, inf
    seed = torch.randn(1, 2, 70, 24, generator=torch.Generator().manual_seed(3))

    def answers(f, *tensors):
        tensors = [x.clone().requires_grad_() for x in tensors]
        out = f(*tensors[:3], bias=tensors[3])
        return out, *torch.autograd.grad(out, tensors, seed.to(out.dtype))

    found = answers(triton, q, k, v, bias)
    true = answers(steps, q, k, v, bias)
    for got, expected in zip(found, true, strict=True):
        torch.testing.assert_close(
            got, expected.to(got.dtype), rtol=1e-4, atol=3e-5, equal_nan=True
        )
    assert found[0].isnan().any() and found[0].isfinite().any()


def test_every_setting_that_allows_tf32_is_used():
    from clearhead.core.engines.gpu.triton.launch_forward import dot_precision

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    for setting, expected in (("medium", "tf32"), ("high", "tf32"), ("highest", "tf32x3")):
        torch.set_float32_matmul_precision(setting)
        assert dot_precision(torch.float32) == expected
    for setting, expected in (("tf32", "tf32"), ("ieee", "tf32x3")):
        matmul.fp32_precision = setting
        assert dot_precision(torch.float32) == expected
        triton(*draw(Tq=3, Tk=3))
    assert dot_precision(torch.float16) == "ieee"
    matmul.fp32_precision = before


def test_dropout_without_a_seed_follows_torchs_generator():
    q, k, v = draw()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(triton(q, k, v, dropout=0.5))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


# ------------------------------------------------------------------------------------- statistics


def look(*qkv, statistics=None, merges=False, **keywords):
    """Compute the statistics that the kernels finish, or with `merges` their accumulators, which
    torch finishes."""
    keywords = {name: there(x) for name, x in keywords.items()}
    problem, inputs = make_problem(*map(there, qkv), Options(**keywords))
    asked = everything_for(problem) if statistics is None else statistics
    parsed = parse_stats(asked, problem.grid)
    out, results = TRITON.answer(problem, inputs, parsed)
    if merges:
        results = TRITON.partial(problem.without_dropout, inputs, parsed).finish()
    return out.cpu(), {name: map_tensors(x, lambda y: y.cpu()) for name, x in results.items()}


def truth(*qkv, statistics=None, **keywords):
    problem, inputs = make_problem(*(x.double() for x in qkv), Options(**keywords))
    return dense(problem, inputs, everything_for(problem) if statistics is None else statistics)


SOON = {
    "prefix", "scattered and causal", "sinks and fully masked queries", "everything at once",
    "dropout by seed", "no queries", "no keys",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SOON else pytest.mark.slow) for n in PROBLEMS]
)
@pytest.mark.parametrize("merges", [False, True], ids=["finished", "accumulated"])
def test_statistics_are_those_of_dense_weights(name, merges):
    case = PROBLEMS[name](torch.float32, 0)
    out, found = look(*case.tensors, merges=merges, **case.keywords)
    assert torch.equal(out, triton(*case.tensors, **case.keywords).view_as(out))
    # "large scores" multiplies the rounding of a dot product by 300.
    rtol, atol = (1e-3, 1e-4) if name == "large scores" else (1e-5, 4e-6)
    assert_same(found, truth(*case.tensors, **case.keywords), rtol, atol, keys_of="float64")


@pytest.mark.parametrize("merges", [False, True], ids=["finished", "accumulated"])
@pytest.mark.parametrize("Tq, Tk", [(1, 1100), (40, 100)])
def test_statistics_around_tiles_and_splits(Tq, Tk, merges):
    qkv = draw(Tq=Tq, Tk=Tk)
    mask = ch.window(before=300, after=0, align="end") | ch.prefix(5)
    statistics = [
        "lse", "max", "entropy", stats.topk(9), "received", stats.pooled(13, 29),
        stats.mass({"sink": ch.prefix(3), "near": ch.window(before=4, align="end"), "all": (0, 9)}),
        stats.exact_rows([0, Tq - 1, Tq // 2, 0]),
    ]  # fmt: skip
    out, found = look(*qkv, statistics=statistics, merges=merges, mask=mask)
    true = truth(*qkv, statistics=statistics, mask=mask)
    assert_same(found, true, 1e-5, 4e-6, keys_of="float64")
    assert torch.equal(out, triton(*qkv, mask=mask))


@pytest.mark.parametrize("Tq, softcap", [(1, None), (40, 5.0)])
def test_statistics_by_numbers_and_by_ids(Tq, softcap):
    q, k, v = draw(B=2, Tq=Tq, Tk=600 if Tq == 1 else 70)
    Tk = k.shape[2]
    source = torch.Generator().manual_seed(2)
    n = torch.rand(q.shape[1], Tk, generator=source)
    n[:, 3], signed = 0.0, n[0] - 0.5
    ids, others = torch.randint(0, 3, (2, q.shape[0], Tk), generator=source)
    same, other = (ch.documents(x, queries=x[:, -Tq:]) for x in (ids, others))
    near = ch.window(before=9, after=0, align="end")
    groups = {
        "same": same & ~ch.prefix(2), "both": same & other & near, "near": near, "span": (2, 33),
        "two ranges": near | ch.prefix(5), "none": ~ch.everything,
    }  # fmt: skip
    statistics = [
        "received", stats.mass(groups), stats.weighted(signed, groups),
        stats.value_weighted({"same": same}, by=n), stats.topk(5, by=n), stats.pooled(1, 7, by=n),
    ]  # fmt: skip
    keywords = dict(mask=ch.Causal(align="end"), softcap=softcap)
    out, computed = look(q, k, v, statistics=statistics, **keywords)
    true = truth(q, k, v, statistics=statistics, **keywords)
    assert_same(computed, true, 1e-5, 4e-6, keys_of="float64")
    assert torch.equal(out, triton(q, k, v, **keywords))
    by_key = look(q, k, v, statistics=[stats.received(by=signed)], **keywords)[1]["received"]
    torch.testing.assert_close(by_key, computed["received"] * signed)


def test_a_number_that_is_nan_reaches_only_queries_that_see_its_key():
    q, k, v = draw(Tq=40, Tk=40)
    n = torch.rand(40, generator=torch.Generator().manual_seed(3))
    n[33], n[35] = float("nan"), float("inf")
    late = {"all": ch.everything, "late": ch.window(before=3, after=0), "early": (0, 9)}
    sums = look(q, k, v, mask=ch.causal, statistics=[stats.weighted(n, late)])[1]["weighted"]
    assert sums["all"][..., 33:].isnan().all() and not sums["all"][..., :33].isnan().any()
    assert sums["late"].isnan().any((0, 1)).nonzero().flatten().tolist() == [33, 34, 35, 36]
    assert sums["late"].isinf().any((0, 1)).nonzero().flatten().tolist() == [37, 38]
    assert sums["early"].isfinite().all()


@pytest.mark.parametrize("n", [1, 2, 7, 16, 40])
def test_ties_go_to_the_lower_key(n):
    """Scores have few different values, so that ties are inside the n, at its edge, across
    tiles."""
    x = torch.randint(0, 3, (23, 211), generator=torch.Generator().manual_seed(n)).float()
    x[3] = 1.0
    q, k = torch.zeros(23, 2), torch.zeros(211, 2)
    _, found = look(q, k, k, bias=ch.bias(x), statistics=[stats.topk(n)])
    keys = found["topk"].keys[0, 0]
    assert torch.equal(keys, x.sort(dim=-1, descending=True, stable=True).indices[:, :n])


def test_nan_reaches_only_queries_that_see_it():
    """Key 10 is NaN and masked for queries 0 to 9; query 10, in the tile of query 9, sees it."""
    q, k, v = (torch.randn(13, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    broken = k.clone()
    broken[10] = float("nan")
    statistics = ["lse", "max", "entropy", stats.pooled(13, 13), stats.exact_rows([9])]
    clean, dirty = (
        flat(look(q, x, v, mask=ch.causal, statistics=statistics)[1]) for x in (k, broken)
    )
    for name in ("lse", "max", "entropy"):
        assert torch.equal(dirty[name][..., :10], clean[name][..., :10])
        assert dirty[name][..., 10:].isnan().all()
    assert torch.equal(dirty["exact_rows"], clean["exact_rows"])
    assert torch.equal(dirty["pooled"][..., :10, :], clean["pooled"][..., :10, :])


# ------------------------------------------------------------------------------------ the operator

RULES = {
    "causal": {"mask": ch.Causal(align="end")},
    "ranges": {"mask": ch.window(before=9, align="end") | ch.prefix(3)},
    "all": {
        "mask": ch.dense(keep=torch.arange(37 * 53).reshape(37, 53) % 5 > 0),
        "bias": (53,), "softcap": 2.0, "sinks": (2,), "dropout": 0.2, "seed": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "all" else pytest.mark.slow) for n in RULES]
)
def test_the_operator_keeps_torchs_contract(name):
    from clearhead.core.engines.gpu.triton import operator  # noqa: F401  # it defines the operators
    from clearhead.core.engines.gpu.triton.arguments import args_of

    q, k, v = (there(x).requires_grad_() for x in draw())
    made = {n: torch.randn(x, requires_grad=True, device=DEVICE) if isinstance(x, tuple) else x
            for n, x in RULES[name].items()}  # fmt: skip
    problem, inputs = make_problem(q, k, v, Options(**made))
    arguments = tuple(
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in (*inputs, *args_of(problem))
    )
    torch.library.opcheck(torch.ops.clearhead.triton_attend.default, arguments)
    out, lse, top, share = torch.ops.clearhead.triton_attend(*arguments)
    back = torch.ones_like(out), None, out, lse, top, share, *arguments, True
    detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in back)
    if problem.bias is None:
        detached = (*detached[:-1], False)
    torch.library.opcheck(
        torch.ops.clearhead.triton_attend_backward.default, detached,
        test_utils=["test_schema", "test_faketensor"],
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", [pytest.param("causal", marks=pytest.mark.slow), "ranges"])
def test_one_graph_without_breaks(name):
    q, k, v = (x.requires_grad_() for x in draw())

    def answer(q, k, v):
        return triton(q * 2, k, v, **RULES[name]).relu()

    compiled = torch.compile(answer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), answer(q, k, v))
    got, true = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, answer))
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_narrows_nothing():
    q, k, v = draw()
    plain = triton(q, k, v)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert triton(q, k, v).equal(plain)


def test_a_second_derivative_names_the_hint():
    q, k, v = (x.requires_grad_() for x in draw())
    (grad,) = torch.autograd.grad(triton(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(ch.BadValue, match="first derivatives"):
        torch.autograd.grad(grad.sum(), k)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own
def test_a_gradient_in_forward_mode_names_the_hint():
    q, k, v = (x.requires_grad_() for x in draw(Tq=5, Tk=7))
    out = triton(q, k, v)
    with forward_ad.dual_level(), pytest.raises(ch.BadValue, match="forward mode"):
        torch.autograd.grad(out, q, forward_ad.make_dual(out.detach(), out.detach()))


@pytest.mark.parametrize("keywords, reason", [
    ({"dtype": torch.float64}, "do not support float64"),
    ({"D": 264}, "head sizes up to 256"),
])  # fmt: skip
def test_it_lists_what_it_cannot_compute(keywords, reason):
    with pytest.raises(ch.BadValue, match=reason):
        triton(*draw(Tq=3, Tk=3, **keywords))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter launches nothing")
def test_a_cuda_graph_replays_the_kernels():
    """Not yet run: there was no GPU."""
    q, k, v = map(there, draw())
    ch.attention(q, k, v, mask=ch.Causal(align="end"), engine="triton")  # compiles first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ch.attention(q, k, v, mask=ch.Causal(align="end"), engine="triton")
    q.copy_(q.flip(-1))
    graph.replay()
    torch.testing.assert_close(
        out.cpu(), triton(q, k, v, mask=ch.Causal(align="end")), rtol=0, atol=0
    )


@pytest.mark.skipif(INTERPRETED, reason="the interpreter launches nothing")
def test_a_cuda_graph_replays_statistics():
    """Not yet run: there was no GPU."""
    q, k, v = map(there, draw())
    wanted = ["entropy", ch.topk(3), "received", ch.pooled(4, 4), ch.exact_rows([0, 5, -1])]

    def look():
        return ch.look(q, k, v, mask=ch.Causal(align="end"), stats=wanted, engine="triton")

    look()  # compiles first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = look()
    q.copy_(q.flip(-1))
    graph.replay()
    again = look()
    for name in ("entropy", "received", "pooled", "exact_rows"):
        assert torch.equal(getattr(seen, name), getattr(again, name)), name


def without_waiting(call):
    """Return `call()`; no operation of torch in it makes the host wait for a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    names = {event.name.removeprefix("aten::") for event in profile.events()}
    assert "new_empty" in names
    assert not names & {
        "item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "bincount",
        "masked_select", "lift_fresh", "_unique2", "repeat_interleave",
    }  # fmt: skip
    return result


IDS = torch.arange(53) // 7, torch.arange(37) // 7
KEEP = torch.ones(37, 53).tril(30).bool()
BIAS = torch.linspace(-3.0, 3.0, 53).masked_fill(~KEEP, float("-inf"))


@pytest.mark.skipif(not INTERPRETED, reason="profiled on a CPU")
@pytest.mark.parametrize("keywords", [
    lambda: {"bias": BIAS, "mask": ch.Causal(align="end")},
    lambda: {"sinks": torch.linspace(-1.0, 1.0, 2), "dropout": 0.2},
    lambda: {"bias": ch.alibi(align="end"), "softcap": 5.0, "dropout": 0.2, "seed": 3},
    lambda: {"mask": ch.documents(IDS[0], queries=IDS[1]) & ch.Causal(align="end")},
    lambda: {"mask": ch.dense(keep=KEEP) | ch.prefix(2)},
], ids=["bias", "sinks", "alibi", "documents", "dense"])  # fmt: skip
def test_a_training_step_does_not_wait_for_the_device(keywords, monkeypatch):
    """As in a capture, where masks and biases are made too."""

    def step():
        tensors = [x.requires_grad_() for x in draw()]
        out = ch.attention(*tensors, engine="triton", **keywords())
        return torch.autograd.grad(out, tensors, out.detach())

    step()
    monkeypatch.setattr(torch_state, "_is_captured", lambda x: True)
    assert all(x.isfinite().all() for x in without_waiting(step))


@pytest.mark.skipif(not INTERPRETED, reason="profiled on a CPU")
@pytest.mark.parametrize("mask", [
    ch.Causal(align="end"),
    ch.window(before=9, align="end") | ch.prefix(3),
    ch.documents(torch.arange(53) // 9, torch.arange(37) // 7),
    ch.lengths(keys=41),
], ids=["causal", "ranges", "documents", "lengths"])  # fmt: skip
def test_statistics_do_not_wait_for_the_device(mask, monkeypatch):
    """As in a capture, after a first call: no operation makes the host wait for a GPU."""
    q, k, v = draw()
    n = torch.rand(53)
    same = ch.documents(torch.arange(53) % 5, torch.arange(37) % 5)
    wanted = [
        "entropy", ch.topk(3, by=n), "received", ch.pooled(4, 4, by=n), ch.exact_rows([0, 5, -1]),
        ch.weighted(n, {"same": same, "near": ch.window(before=3, align="end")}),
    ]  # fmt: skip
    asked = {"mask": mask, "stats": wanted, "engine": "triton"}
    first = ch.look(q, k, v, **asked)
    monkeypatch.setattr(torch_state, "_is_captured", lambda x: True)
    seen = without_waiting(lambda: ch.look(q, k, v, **asked))
    for name in ("entropy", "received", "pooled", "exact_rows"):
        assert torch.equal(getattr(seen, name), getattr(first, name)), name


def test_positions_are_created_on_the_device(monkeypatch):
    """Nothing is copied from the host, for positions in any order, also repeated ones."""
    from clearhead.core.engines.gpu.triton.statistics import _positions

    monkeypatch.setattr(torch, "tensor", None)
    for places in ([0], [3, 4, 5], [7, 2, 3, 3, 4, 11], [5, 4, 3]):
        found = _positions(places, DEVICE)
        assert found.tolist() == places and found.dtype == torch.int32


def test_statistics_with_torchs_kernel():
    """`look` by torch's kernel has torch's bits, and the statistics of the Triton kernels."""
    q, k, v = map(there, draw(Tk=37))
    seen = ch.look(q, k, v, stats=["entropy", "received"], engine="sdpa")
    assert torch.equal(seen.out, ch.attention(q, k, v, engine="sdpa"))
    true = truth(*(x.cpu() for x in (q, k, v)), statistics=["entropy", "received"])
    torch.testing.assert_close(seen.entropy.cpu(), true["entropy"].float(), rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(seen.received.cpu(), true["received"].float(), rtol=1e-5, atol=4e-6)
