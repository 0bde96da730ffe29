"""A plain call skips the checks of `make_problem`, with the same bits; other calls do not."""

import math
import pickle
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.core.engines import cpu
from clearhead.core.engines.cpu import direct
from tests.memory import grown, needs_peak

pytestmark = pytest.mark.skipif(cpu.core is None, reason="the core is missing")

PADDED = ch.causal & ch.lengths(keys=[5, 3])
PADDED_LEFT = ~ch.prefix([3, 0])


def inputs(*shape: int, kv: int | None = None) -> tuple[Tensor, ...]:
    other = shape if kv is None else (*shape[:-3], kv, *shape[-2:])
    return torch.randn(shape), torch.randn(other), torch.randn(other)


def is_plain(*tensors: Tensor, **keywords: object) -> bool:
    return direct.output_of(*tensors, **keywords) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [None, ch.causal, ch.window(before=1), PADDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_same_bits(mask, dtype, scale):
    for _ in range(3):
        q, k, v = (x.to(dtype) for x in inputs(2, 4, 5, 8, kv=2))
        out = ch.attention(q, k, v, mask=mask, scale=scale)
        assert torch.equal(out, ch.attention(q, k, v, mask=mask, scale=scale, engine="cpu"))
        assert is_plain(q, k, v, mask=mask, scale=scale)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (1, 3, 5, 8)])
def test_of_any_number_of_dimensions(shape):
    for _ in range(2):
        q, k, v = (torch.randn(shape) for _ in range(3))
        out = ch.attention(q, k, v)
        torch.testing.assert_close(out, torch.softmax(q @ k.mT / 8**0.5, -1) @ v)
        assert is_plain(q, k, v)


def test_strides_belong_to_the_call():
    for _ in range(2):
        for q in (torch.randn(1, 2, 5, 8), torch.randn(1, 5, 2, 8).transpose(1, 2)):
            out = ch.attention(q, q, q)
            assert torch.equal(out, ch.attention(*3 * [q.contiguous()], engine="cpu"))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.mT.contiguous().mT,  # the last dimension is not contiguous: the core copies
        lambda x: torch.complex(x, -x).conj().imag,  # a negative view
        lambda x: x.requires_grad_(),
        lambda x: torch.nn.Parameter(x),
    ],
)
def test_other_tensors_are_other_calls(other):
    q, k, v = inputs(1, 2, 5, 8)
    ch.attention(q, k, v), ch.attention(q, k, v)
    changed = other(torch.randn(1, 2, 5, 8))
    out = ch.attention(changed, k, v)
    expected = torch.softmax(changed @ k.mT / 8**0.5, -1) @ v
    torch.testing.assert_close(out, expected)
    assert out.requires_grad == changed.requires_grad


RANGES = {
    "none": lambda: None,
    "band": lambda: ch.causal,
    "ranges": lambda: ~ch.prefix([3, 2]) & ch.causal,
    "bits": lambda: ch.dense(keep=torch.eye(5).bool()) | ch.causal & ch.prefix(2),
    "nothing": lambda: ch.prefix(0),
}


@pytest.mark.parametrize("mask", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", [6, 2])
def test_gradients_of_a_plain_call(mask, dtype, kv):
    """The same bits as by the operator of an engine that is named, in memory that held NaN."""
    tensors = [x.to(dtype).requires_grad_() for x in inputs(2, 6, 5, 8, kv=kv)]
    out = ch.attention(*tensors, mask=mask())
    other = ch.attention(*tensors, mask=mask(), engine="cpu")
    assert out.grad_fn.name() == "RecordedCallBackward" != other.grad_fn.name()
    upstream = torch.randn_like(out)
    expected = torch.autograd.grad(other, tensors, upstream)
    leftovers = [torch.full_like(x, math.nan) for x in tensors * 2]
    del leftovers
    got = torch.autograd.grad(out, tensors, upstream)
    assert torch.equal(out, other) and all(map(torch.equal, got, expected))


def test_gradients_have_the_mask_of_the_call():
    """Not that of a caller's tensor which has changed since."""
    q, k, v = inputs(1, 2, 5, 8)
    keep = torch.rand(5, 5) < 0.7
    mask = ch.dense(keep=keep)
    out, other = (ch.attention(q.requires_grad_(), k, v, mask=mask) for _ in range(2))
    (expected,) = torch.autograd.grad(other.square().sum(), q)
    keep.logical_not_()
    (got,) = torch.autograd.grad(out.square().sum(), q)
    assert torch.equal(got, expected) and got.any()


def test_a_second_derivative_of_a_plain_call_is_refused():
    q, k, v = inputs(1, 2, 5, 8)
    out = ch.attention(q.requires_grad_(), k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(ch.BadValue, match="second derivative"):
        grad.sum().backward()


def escaped(transform):
    """A tensor that a finished torch.func transform has wrapped."""
    found = []
    transform(lambda x: (found.append(x), x.sum())[1])(torch.randn(1, 2, 5, 8))
    return found[0]


def test_one_number_for_all():
    """An expanded number has strides of 0 everywhere, and is not contiguous."""
    q, k, v = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, 5, 8)
    ch.attention(q, k, v)
    sevens = torch.full((), 7.0).expand(1, 2, 5, 8)
    assert torch.equal(ch.attention(q, sevens, v), ch.attention(q, sevens, v, engine="cpu"))
    torch.testing.assert_close(ch.attention(q, k, sevens), torch.full_like(q, 7.0))


@pytest.mark.parametrize("mask", [ch.dense(keep=torch.eye(5).bool()) & ch.causal, ~ch.prefix(2)])
def test_masks_of_ranges_and_bits(mask):
    q, k, v = inputs(1, 2, 5, 8)
    assert is_plain(q, k, v, mask=mask)
    assert torch.equal(
        ch.attention(q, k, v, mask=mask), ch.attention(q, k, v, mask=mask, engine="cpu")
    )


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)])
@pytest.mark.parametrize("stats", [
    ["lse"], ["entropy", ch.topk(2)], ["received", "max"], ["max", "effective", "lse"],
    [ch.mass({"first": (0, 2), "own": ch.window(0, 0)}), ch.weighted(torch.arange(5.0))],
], ids=str)  # fmt: skip
def test_statistics_of_a_plain_call(shape, stats):
    """The same as by the path with all checks, in the caller's number of dimensions."""
    q, k, v = (torch.randn(shape) for _ in range(3))
    seen = ch.look(q, k, v, mask=ch.causal, stats=stats)
    other = ch.look(q, k, v, mask=ch.causal, stats=stats, engine="cpu")
    assert torch.equal(seen.out, ch.attention(q, k, v, mask=ch.causal))
    for name in seen.names:
        for x, y in zip(*map(parts, (getattr(seen, name), getattr(other, name))), strict=True):
            assert torch.equal(x, y) and x.shape[: len(shape) - 2] == shape[:-2]


def test_statistics_from_a_generator_are_read_once():
    """Also if the core cannot compute one, so that the call takes the path with all checks."""
    q, k, v = inputs(2, 5, 8)
    by = torch.tensor([1.0, torch.nan, 2.0, 3.0, 4.0])
    seen = ch.look(q, k, v, stats=(s for s in ["lse", ch.topk(2, by=by)]))
    assert seen.names == ("lse", "topk")


def parts(result):
    """Return the tensors of a statistic."""
    if isinstance(result, Tensor):
        return [result]
    return list(result.values() if isinstance(result, dict) else result)


@pytest.mark.parametrize("copy", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_look_that_was_not_read_is_copied_and_saved(copy, tmp_path):
    q, k, v = (torch.randn(3, 5, 8) for _ in range(3))
    stats = ["entropy", "lse", ch.topk(2), ch.mass({"first": ch.prefix(1)})]
    look = partial(ch.look, q, k, v, mask=ch.causal, stats=stats)
    read = look()
    loaded = ch.load(look().save(tmp_path / "look.safetensors"))
    for other in (copy(look()), loaded):
        assert other.names == read.names and other.about == read.about
        assert torch.equal(other.out, read.out)
        for name in read.names:
            assert all(map(torch.equal, parts(getattr(other, name)), parts(getattr(read, name))))
    with pytest.raises(AttributeError, match="'max'"):
        _ = look().max


@pytest.mark.parametrize(
    "look", [ch.look, partial(ch.look, engine="cpu")], ids=["plain", "checked"]
)
def test_a_look_has_the_numbers_of_its_call(look):
    """They do not follow a change of `by` between the call and the first access."""
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    w = (q.double() @ k.double().mT / math.sqrt(8)).softmax(-1)
    by = torch.rand(5)
    expected = (w * by).sum(2)
    seen = look(q, k, v, stats=[ch.received(by=by), ch.weighted(by), ch.pooled(1, 1, by=by)])
    by.fill_(100.0)
    assert torch.allclose(seen.received.double(), expected, atol=1e-5)
    assert torch.allclose(seen.weighted["all"].sum(-1).double(), expected.sum(-1), atol=1e-5)
    assert torch.allclose(seen.pooled[..., 0, 0].double(), expected.sum(-1) / 5, atol=1e-5)


def read_in_inference_mode(look):
    with torch.inference_mode():
        _ = look.effective


def read_in_a_transform(look):
    torch.func.grad(lambda x: (x * look.effective).sum())(torch.ones(()))


@pytest.mark.parametrize("read", [read_in_inference_mode, read_in_a_transform])
def test_statistics_do_not_depend_on_where_they_are_first_read(read):
    q, k, v = inputs(1, 2, 5, 8)
    stats = ["effective", "lse", "received", ch.value_weighted({"first": (0, 1)}, by=torch.ones(5))]
    look, other = (ch.look(q, k, v, stats=stats) for _ in range(2))
    read(look)
    factor = torch.ones((), requires_grad=True)
    for name in other.names:
        for x, y in zip(*(parts(getattr(of, name)) for of in (look, other)), strict=True):
            assert x.data_ptr() and torch.equal(x, y)
            (gradient,) = torch.autograd.grad((factor * x).sum(), factor)
            assert torch.allclose(gradient, y.sum())


def test_a_change_of_a_statistic_in_place_concerns_no_other():
    stats = ["entropy", "lse", "max", ch.mass({"first": (0, 1), "other": (1, 5)})]
    look = ch.look(*inputs(1, 2, 5, 8), stats=stats)
    factor, expected = torch.ones((), requires_grad=True), look.lse.sum().item()
    product = (factor * look.lse).sum()
    for x in (look.entropy, look.mass["first"]):
        x.mul_(factor)
    look.max.zero_()
    (gradient,) = torch.autograd.grad(product, factor)
    assert gradient.item() == pytest.approx(expected)


@needs_peak
def test_a_statistic_has_memory_of_its_own_which_is_freed():
    q, k = torch.randn(1, 4, 7001, 8), torch.randn(1, 4, 17, 8)
    stats = ["entropy", "lse", ch.topk(17), ch.mass({"first": (0, 1), "other": (1, 5)})]

    def looks(count):  # 6 MB of results each
        for _ in range(count):
            look = ch.look(q, k, k, stats=stats)
            results = [x for name in look.names for x in parts(getattr(look, name))]
            memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in results}
            assert [*memory.values()] == [x.nbytes for x in results]

    looks(10)
    assert grown(lambda: looks(20)) < 60


def test_a_compiled_function_reads_a_look():
    look = ch.look(*inputs(1, 2, 5, 8), stats=["effective"])
    read = torch.compile(lambda look, x: look.effective * x, backend="eager", fullgraph=True)
    assert torch.equal(read(look, torch.ones(1)), look.effective)


class Exchanged(torch.overrides.TorchFunctionMode):
    """A mode that returns other tensors than torch's functions: of another dtype, or shorter."""

    MAKE = ("new_empty", "new_zeros", "empty_like", "zeros_like", "empty", "zeros", "contiguous")

    def __init__(self, exchange):
        self.exchange = exchange

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return self.exchange(made) if getattr(function, "__name__", "") in self.MAKE else made


@pytest.mark.parametrize("exchange", [
    Tensor.bfloat16, Tensor.double, lambda x: x[..., :1], lambda x: x.new_full((1, 1, 1, 1), 3.0),
], ids=["narrower", "wider", "shorter", "one"])  # fmt: skip
def test_a_mode_does_not_exchange_buffers_of_the_core(exchange):
    q, k, v = inputs(1, 2, 5, 8)
    x, turned = q.clone().requires_grad_(), k.mT.contiguous().mT

    def answers():
        yield ch.attention(q, k, v)
        yield ch.attention(q, turned, v)  # reads a copy of the keys
        yield from torch.autograd.grad(ch.attention(x, k, v, softcap=2.0).sum(), x)
        seen = ch.look(
            q, k, v, stats=["entropy", "received", ch.topk(2), ch.mass({"first": (0, 2)})]
        )
        yield from (seen.out, seen.entropy, seen.received, seen.topk.weights, seen.mass["first"])
        seen = ch.look(x, k, v, stats=["lse", "entropy", "received"])
        yield from torch.autograd.grad(sum(y.sum() for y in (seen.lse, seen.received)), x)
        yield from torch.autograd.grad(ch.look(x, k, v, stats=["entropy"]).entropy.sum(), x)

    expected = list(answers())
    with Exchanged(exchange):
        got = list(answers())
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))


UNREADABLE = {
    "None": lambda x: None,
    "numpy": lambda x: x.numpy(),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x[0]]),
    "float64": lambda x: x.double(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: torch.complex(x, x),
    "empty": lambda x: x[:, :0],
    "freed": lambda x: (x.untyped_storage().resize_(0) and None) or x,
    "of a subclass": lambda x: x.as_subclass(type("Sub", (Tensor,), {})),
    "left over from grad": lambda x: escaped(torch.func.grad),
    "left over from vmap": lambda x: escaped(torch.vmap),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_what_the_core_cannot_read_is_not_plain(kind):
    q, k, v = inputs(1, 2, 5, 8)
    ch.attention(q, k, v)
    other = UNREADABLE[kind](torch.randn(1, 2, 5, 8))
    assert not is_plain(other, k, v)
    assert not is_plain(q, k, other)


def test_torch_passes_its_tensors_to_c():
    """Otherwise every call would be checked, which no other test detects."""
    assert is_plain(*inputs(1, 2, 5, 8))


def test_batched_gradients():
    q, k, v = inputs(1, 2, 3, 4)
    call = lambda x: ch.attention(x, k, v)  # noqa: E731
    call(q), call(q)
    vectorized = torch.autograd.functional.jacobian(call, q, vectorize=True)
    torch.testing.assert_close(vectorized, torch.autograd.functional.jacobian(call, q))


def test_under_transforms_and_edits():
    q, k, v = inputs(3, 2, 5, 8)
    out = ch.attention(q, k, v), ch.attention(q, k, v)
    vmapped = torch.vmap(ch.attention)(*(x.unsqueeze(1) for x in (q, k, v)))
    assert torch.equal(vmapped.squeeze(1), out[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ch.attention(q, k, v), out[1])

    class Model(torch.nn.Module):
        def forward(self, q):
            return ch.attention(q, k, v)

    model = Model()
    model(q)
    with ch.watch(model, stats=["max"]) as recording:
        model(q)
    assert len(recording) == 1
    with ch.intervene(model, [ch.edits.knock_out(ch.lengths(keys=1))]):
        edited = model(q)
    torch.testing.assert_close(edited, ch.attention(q, k[:, :, 1:], v[:, :, 1:]))


def test_a_position_in_a_tensor_may_move():
    q, k, v = inputs(1, 1, 2, 8)
    position = torch.tensor([0])
    mask = ch.Causal(align=position)
    before = ch.attention(q, k, v, mask=mask)
    mask.align.fill_(1)
    moved = ch.attention(q, k, v, mask=mask)
    assert torch.equal(moved, ch.attention(q, k, v, mask=ch.Causal(align=1), engine="cpu"))
    assert not torch.equal(moved, before)


STEPS = {
    "no mask": lambda t: None,
    "everything": lambda t: ch.everything,
    "causal at the end": lambda t: ch.Causal(align="end"),
    "causal at a position": lambda t: ch.Causal(align=t - 1),
    "padded": lambda t: PADDED_LEFT,
}


@pytest.mark.parametrize("mask", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("cache", ["grown", "filled"])
@pytest.mark.parametrize("kv", [4, 2])
def test_steps_of_decoding(mask, cache, kv):
    """From fewer keys than padding to more."""
    keys, values = torch.randn(2, 2, kv, 20, 8)
    for t in range(1, 20):
        q, k, v = torch.randn(2, 4, 1, 8), keys[:, :, :t], values[:, :, :t]
        if cache == "grown":
            k, v = k.contiguous(), v.contiguous()
        out = ch.attention(q, k, v, mask=mask(t))
        assert torch.equal(out, ch.attention(q, k, v, mask=mask(t), engine="cpu"))
        reference = ch.attention(q, k, v, mask=mask(t), engine="steps")
        torch.testing.assert_close(out, reference, rtol=1e-6, atol=1e-6)
    assert is_plain(q, k, v, mask=mask(t))


@pytest.mark.parametrize("shape", [(1, 8), (4, 1, 8)])
def test_steps_without_a_batch(shape):
    for t in range(1, 6):
        q, k, v = torch.randn(shape), *torch.randn(2, *shape[:-2], t, 8)
        out = ch.attention(q, k, v)
        torch.testing.assert_close(out, torch.softmax(q @ k.mT / 8**0.5, -1) @ v)
        assert is_plain(q, k, v)


def test_steps_of_one_cache_for_a_batch():
    for t in range(1, 6):
        q, k, v = torch.randn(3, 2, 1, 8), *torch.randn(2, 1, 2, t, 8)
        out = ch.attention(q, k, v)
        torch.testing.assert_close(out, torch.softmax(q @ k.mT / 8**0.5, -1) @ v)


def test_calls_that_are_not_a_step_of_decoding():
    """One query that does not see all keys, or whose position is not known."""
    q, k, v = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, 5, 8)
    ch.attention(q, k, v)
    third = ch.attention(q, k, v, mask=ch.Causal(align=2))
    assert torch.equal(third, ch.attention(q, k[:, :, :3], v[:, :, :3]))
    last = ch.attention(q, k, v, mask=ch.Causal(align="end") & ch.window(before=1, align="end"))
    torch.testing.assert_close(last, ch.attention(q, k[:, :, 3:], v[:, :, 3:]))
    with pytest.raises(ch.BadValue, match="align"):
        ch.attention(q, k, v, mask=ch.causal)
    with pytest.raises(ch.BadValue, match="every key has one value"):
        ch.attention(q, k, v[:, :, :4])
    with pytest.raises(ch.BadValue):
        ch.attention(q, k[0], v[0])


def test_errors_are_raised_again():
    q, k, v = inputs(1, 2, 5, 8)
    ch.attention(q, k, v)
    with pytest.raises(ch.BadType):
        ch.attention(q, k, v, scale=True)
    with pytest.raises(ch.BadType):
        ch.attention(q, k, v.double())
    with pytest.raises(ch.BadValue):
        ch.attention(q, k[:, :, :, :4], v)


WRONG = {
    "softcap": [0.0, -2.0, math.nan, math.inf],
    "scale": [math.nan, math.inf],
    "dropout": [-0.1, 1.5, math.nan],
    "seed": [1],
    "lengths": [ch.lengths(keys=6)],
    "dense": [ch.dense(keep=torch.ones(4, 5, dtype=torch.bool))],
    "bias": [torch.zeros(2, 5)],
    "sinks": [torch.zeros(3)],
}


@pytest.mark.parametrize("call", [ch.attention, ch.look])
@pytest.mark.parametrize("name, wrong", [(n, x) for n, of in WRONG.items() for x in of], ids=str)
def test_a_wrong_argument_of_a_call_that_is_plain_without_it(call, name, wrong):
    """Errors of a call that names an engine, or a whole number, do not reach the quick checks."""
    keyword = "mask" if isinstance(wrong, ch.masks.Mask) else name
    with pytest.raises(ch.BadValue, match=name):
        call(*inputs(2, 5, 8), **{keyword: wrong})
