"""The edit `cache`: its formats against their definitions, and where it applies."""

import hashlib

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.nn import MultiHeadAttention
from tests.models.two_blocks import TwoBlocks, ids

quants = pytest.importorskip("gguf.quants", reason="extra `hf` is not installed")
pytestmark = pytest.mark.outside

T, D = 11, 32


class Layer(torch.nn.Module):
    """Attention of fixed queries, keys and values: 4 heads that read 2 key heads."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn(2, heads, T, D, generator=generator) for heads in (4, 2, 2)
        )

    def forward(self, k=None, v=None):
        k, v = self.k if k is None else k, self.v if v is None else v
        return ch.attention(self.q, k, v, mask=ch.causal)


def blocks(x):
    return x.reshape(*x.shape[:-1], -1, 32)


def of_8_bits(x):
    """q8_0 by its definition: the largest of 32 numbers becomes 127 steps of a float16."""
    step = blocks(x).abs().amax(-1, keepdim=True) / 127
    count = torch.where(step == 0, 0.0, blocks(x) / step).round()
    return (count * step.half().float()).reshape(x.shape)


def of_4_bits(x):
    """q4_1 by its definition: 15 steps from the smallest to the largest, both float16."""
    low, high = blocks(x).amin(-1, keepdim=True), blocks(x).amax(-1, keepdim=True)
    step = (high - low) / 15
    count = ((blocks(x) - low) / step + 0.5).floor().clamp(0, 15)
    return (count * step.half().float() + low.half().float()).reshape(x.shape)


def of_uneven_levels(x):
    """iq4_nl by its definition, in float64: the scale has the least squared error, weighted."""
    levels = torch.tensor(quants.IQ4_NL.kvalues, dtype=torch.float64)
    y = blocks(x).double()
    largest = y.gather(-1, y.abs().argmax(-1, keepdim=True))
    nearest = levels[(y / largest * -127).unsqueeze(-1).sub(levels).abs().argmin(-1)]
    scale = (y**3 * nearest).sum(-1, keepdim=True) / (y * nearest).square().sum(-1, keepdim=True)
    return (nearest * scale.half()).reshape(x.shape).float()


FORMATS = {
    "iq4_nl": of_uneven_levels,
    "q8_0": of_8_bits,
    "q4_1": of_4_bits,
    "bf16": lambda x: x.bfloat16().float(),
    "fp16": lambda x: x.clamp(-65504, 65504).half().float(),
    "fp8_e4m3": lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).float(),
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_named_format_is_its_definition(form):
    layer = Layer()
    layer.k[0, 0, 0, 0], layer.v[1, 1, 2, 0] = 500.0, 1e5
    with ch.intervene(layer, [ch.edits.cache(keys=form, values=form)]):
        got = layer()
    assert torch.equal(got, layer(FORMATS[form](layer.k), FORMATS[form](layer.v)))
    assert not torch.equal(got, layer())


def test_the_bits_of_ggml():
    """The digest is of what ggml's `quantize_row_iq4_nl_ref` stores, libggml-python 0.20.2."""
    n = torch.arange(4096 * 32)
    x = (n * 7919 % 1009 - 504).float() / 64 * (1 + n // 32 % 37)
    read = ch.edits.cache(keys="iq4_nl")._read_back(x.view(1, 1, -1, 64), "iq4_nl")
    digest = "f3fbc777b29f58fd9570f1854e6bbf7842a6a7f4d9734a6999ba5777608441e5"
    assert hashlib.sha256(read.numpy().tobytes()).hexdigest() == digest


@pytest.mark.parametrize("fewer, more", [("q4_0", "q5_0"), ("q4_1", "q5_1"), ("q5_0", "q8_0")])
def test_more_bits_err_less(fewer, more):
    layer = Layer()
    errors = []
    for form in (fewer, more):
        with ch.intervene(layer, [ch.edits.cache(values=form)]):
            read = layer()
        errors.append(float((read - layer()).abs().max()))
    assert errors[0] > 1.5 * errors[1] > 0


def test_it_applies_to_the_selected_key_heads_positions_and_texts():
    layer = Layer()
    edit = ch.edits.cache(keys="q4_0", heads=[1], positions=[2, -1], batch=range(1, 2))
    with ch.intervene(layer, [ch.edits.cache(keys="q4_0")]), ch.watch(layer, inputs=True) as all_of:
        layer()
    with ch.intervene(layer, [edit]), ch.watch(layer, inputs=True) as some:
        layer()
    expected = layer.k.clone()
    for position in (2, T - 1):
        expected[1, 1, position] = all_of[0].key[1, 1, position]
    assert torch.equal(some[0].key, expected) and not torch.equal(expected, layer.k)
    assert torch.equal(some[0].value, layer.v)


def test_a_function_is_a_format():
    layer = Layer()
    with ch.intervene(layer, [ch.edits.cache(values=lambda x: 2 * x)]):
        got = layer()
    torch.testing.assert_close(got, 2 * layer())


def test_effects_measure_each_key_head():
    """The loss with a cache in one key head, against a model that reads these keys."""
    torch.manual_seed(0)
    model = TwoBlocks().eval()
    inputs = ids()
    edit = ch.edits.cache(keys=lambda x: x.round())
    effects = ch.effects(model, inputs, metric=lambda y: y.square().mean(), edits=edit)
    with torch.no_grad():
        plain = float(model(inputs).square().mean())
        for effect in effects:
            one = ch.edits.cache(
                keys=lambda x: x.round(), layers=[effect.layer], heads=[effect.head]
            )
            with ch.intervene(model, [one]):
                edited = float(model(inputs).square().mean())
            assert effect.exact == pytest.approx(edited - plain, rel=1e-3, abs=1e-6)


def test_bits():
    bits = {form: ch.edits.cache(keys=form, values=form).bits for form in ("q8_0", "q4_1", "bf16")}
    assert bits == {"q8_0": 8.5, "q4_1": 5.0, "bf16": 16}
    assert ch.edits.cache(keys="q8_0", values="q4_0").bits == 6.5
    assert ch.edits.cache(keys="q8_0").bits is None


def test_repr():
    def rounded(x):
        return x

    edit = ch.edits.cache(keys="q8_0", values=rounded, layers=[1])
    assert repr(edit) == "cache(keys='q8_0', values=rounded, layers=[1])"


def run(edit, layer=None):
    layer = layer or Layer()
    with ch.intervene(layer, [edit]):
        return layer()


@pytest.mark.parametrize("make, error, part", [
    (lambda: ch.edits.cache(), BadValue, "neither a format of keys nor of values"),
    (lambda: ch.edits.cache(keys="q8"), BadValue, "did you mean 'q8_0'?"),
    (lambda: ch.edits.cache(values=8), BadType, "or a function of a tensor"),
    (lambda: run(ch.edits.cache(keys="q4_0", heads=[2])), BadValue, "head 2 reads key head 1"),
    (lambda: run(ch.edits.cache(keys=lambda x: x[:1])), BadValue, "convert what it returns"),
    (lambda: run(ch.edits.cache(keys=lambda x: None)), BadValue, "returned None"),
])  # fmt: skip
def test_errors(make, error, part):
    with pytest.raises(error) as raised:
        make()
    assert part in str(raised.value)


def test_vectors_that_no_block_divides():
    layer = MultiHeadAttention(12, heads=2)
    with pytest.raises(BadValue, match="blocks of 32 numbers"):
        with ch.intervene(layer, [ch.edits.cache(keys="q4_0")]):
            layer(torch.randn(1, 5, 12))
