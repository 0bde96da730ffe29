"""`divergence` against both softmaxes written out in float64."""

import math

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from tests.memory import grown, needs_peak

B, H, G, T, D, DV = 2, 6, 3, 97, 32, 16
SUMMED = 1e-6  # of numbers that are returned in float32


def tensors(seed=0, noise=0.1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, of_k, of_v = (
        torch.randn(B, heads, T, size, generator=generator).to(dtype)
        for heads, size in ((H, D), (G, D), (G, DV), (G, D), (G, DV))
    )
    return q, k, v, k + noise * of_k, v + noise * of_v


def weights(q, k, mask, scale=None, softcap=None, sinks=None, bias=None):
    """The softmax over keys, and over the sink in the last column if there is one."""
    q, k = q.double(), k.double().repeat_interleave(H // G, 1)
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~mask.to_bool(T, T), -math.inf)
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(B, H, T, 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1).nan_to_num(0.0)


def kl(w, other):
    return torch.where(w > 0, w * (w / other).log(), 0.0).sum(-1)


WINDOW = ch.prefix(4) | ch.window(before=30, after=0)
CALLS = {
    "every key": {},
    "causal": {"mask": ch.causal},
    "soft cap": {"mask": ch.causal, "softcap": 3.0},
    "sinks": {"mask": ch.causal, "sinks": torch.linspace(-2, 2, H)},
    "bias": {"mask": ch.causal, "bias": torch.linspace(-3, 3, T * T).reshape(T, T).sin()},
    "fully masked queries": {"mask": ch.causal & ~ch.prefix(2)},
    "logits of 90": {"mask": ch.causal, "scale": 4.0},
}


@pytest.mark.parametrize("other_mask", [None, WINDOW], ids=["kept", "dropped"])
@pytest.mark.parametrize("call", CALLS)
def test_divergences_are_those_of_float64(call, other_mask):
    keywords = CALLS[call]
    q, k, v, k2, v2 = tensors()
    got = ch.divergence(q, k, v, k2, v2, other_mask=other_mask, **keywords)

    mask = keywords.get("mask")
    both = other_mask if mask is None else mask if other_mask is None else mask & other_mask
    w = weights(q, k, **{"mask": None, **keywords})
    other = weights(q, k2, **{**keywords, "mask": both})
    seen = torch.ones(T, T, dtype=torch.bool) if both is None else both.to_bool(T, T)
    sink = torch.ones(T, w.shape[-1] - T, dtype=torch.bool)
    seen = torch.cat([seen, sink], -1)

    for name, expected in (
        ("kl", kl(w, other)),
        ("reverse_kl", kl(other, w).masked_fill((other.sum(-1) == 0) & (w.sum(-1) > 0), math.inf)),
        ("mass", (w * seen).sum(-1)),
        ("lost", (w * ~seen).amax(-1)),
    ):
        number = getattr(got, name)
        assert number.dtype == torch.float32
        torch.testing.assert_close(number.double(), expected, rtol=1e-5, atol=SUMMED, msg=name)
    assert bool((got.kl >= 0).all()) and bool((got.reverse_kl >= 0).all())

    out = ch.attention(q, k, v, **keywords)
    assert torch.equal(got.out, out)
    z, z2 = (x[..., :T] @ y.double().repeat_interleave(H // G, 1) for x, y in ((w, v), (other, v2)))
    error = ((z2 - z).norm(dim=-1) / z.norm(dim=-1)).nan_to_num(0.0)
    torch.testing.assert_close(got.error.double(), error, rtol=1e-4, atol=1e-5)


def test_dropped_keys_alone_cost_the_logarithm_of_what_is_kept():
    q, k, v, _, _ = tensors()
    got = ch.divergence(q, k, v, other_mask=WINDOW, mask=ch.causal)
    torch.testing.assert_close(got.reverse_kl, -got.mass.log(), rtol=1e-5, atol=1e-6)
    assert bool(got.kl[:, :, :31].eq(0).all()) and bool(got.kl[:, :, 40:].isinf().all())


def test_a_small_rounding_is_seen_beside_a_weight_near_1():
    """In float32, differences of entropies and sums would be 0 or negative here."""
    q, k, v, _, _ = tensors()
    k[:, :, 0] = 0
    k[:, :, 0, 0], q[..., 0] = 200.0, 3.0  # a logit of 106, where the others are near 0
    k2 = k + 1e-3 * torch.randn(k.shape, generator=torch.Generator().manual_seed(3))
    got = ch.divergence(q, k, v, k2, mask=ch.causal)
    expected = kl(weights(q, k, ch.causal), weights(q, k2, ch.causal))
    assert float(expected[:, :, 1:].max()) < 1e-30 and bool((got.kl >= 0).all())
    torch.testing.assert_close(got.kl.double(), expected, rtol=0, atol=1e-13)


def test_the_same_keys_have_no_divergence():
    q, k, v, _, _ = tensors()
    got = ch.divergence(q, k, v, k.clone(), v.clone(), mask=ch.causal)
    assert torch.equal(got.kl, torch.zeros(B, H, T)) and torch.equal(got.error, got.kl)
    assert torch.equal(got.mass, torch.ones(B, H, T)) and torch.equal(got.lost, got.kl)


def test_a_query_whose_keys_are_all_dropped():
    q, k, v, _, _ = tensors()
    got = ch.divergence(q, k, v, other_mask=~ch.prefix(1), mask=ch.causal)
    assert bool(got.kl[:, :, 0].isinf().all()) and bool(got.reverse_kl[:, :, 0].isinf().all())
    assert bool((got.mass[:, :, 0] == 0).all()) and bool((got.error[:, :, 0] == 1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    q, k, v, k2, v2 = tensors(dtype=dtype)
    got = ch.divergence(q, k, v, k2, v2, mask=ch.causal)
    expected = kl(weights(q, k, ch.causal), weights(q, k2, ch.causal))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert got.kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.kl.double(), expected, rtol=tolerance, atol=tolerance)


def test_leading_dimensions_may_be_missing():
    q, k, v, k2, v2 = (x[0, 0] for x in tensors())
    got = ch.divergence(q, k, v, k2, v2, mask=ch.causal)
    assert got.kl.shape == (T,) and got.other.shape == (T, DV)
    whole = ch.divergence(*(x[None, None] for x in (q, k, v, k2, v2)), mask=ch.causal)
    assert torch.equal(whole.kl[0, 0], got.kl)


@needs_peak
def test_memory_does_not_grow_with_the_square():
    """The weights of 12,000 tokens take 1,150 MB in float64."""
    q = torch.randn(1, 1, 12_000, 8, generator=torch.Generator().manual_seed(0))
    ch.divergence(q[:, :, :99], q[:, :, :99], q[:, :, :99], q[:, :, :99] / 2, mask=ch.causal)
    assert grown(lambda: ch.divergence(q, q, q, q / 2, mask=ch.causal)) < 100


def test_a_saved_divergence_is_loaded(tmp_path):
    q, k, v, k2, v2 = tensors()
    got = ch.divergence(q, k, v, k2, v2)
    loaded = ch.load(got.save(tmp_path / "divergence.safetensors"))
    assert torch.equal(loaded.kl, got.kl) and repr(loaded) == repr(got)
    assert "reverse_kl" in repr(got)


@pytest.mark.parametrize("arguments, error, part", [
    ({}, BadValue, "neither other keys, nor other values, nor another mask"),
    ({"other_k": torch.zeros(B, G, T - 1, D)}, BadValue, "matches the exact tensor"),
    ({"other_k": torch.zeros(B, G, T, D).double()}, BadValue, "convert it with .to(k)"),
    ({"other_v": [1.0]}, BadValue, "got other_v of a list"),
    ({"other_mask": ch.dense(keep=torch.ones(3, 3, dtype=torch.bool))}, BadValue, "97"),
    ({"other_k": torch.zeros(B, G, T, D), "is_causal": True}, BadType, "mask=clearhead.causal"),
])  # fmt: skip
def test_errors(arguments, error, part):
    q, k, v, _, _ = tensors()
    with pytest.raises(error) as raised:
        ch.divergence(q, k, v, **arguments)
    assert part in str(raised.value)
