"""`edits.cache` of KIVI with a residual, against a loop over queries in float64, and the divergence
of attention that reads exact keys in some pairs."""

import math

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.core.functional import divergence
from clearhead.core.masks.text_positions import Positions
from clearhead.core.problem.check import Options, make_problem
from clearhead.models.inspect.edits.edit import EditSite

R, T, H, G, D = 8, 37, 4, 2, 32
B = 2


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, heads, T, D, generator=generator) for heads in (H, G, G))


def rounded(x, steps, dim):
    """KIVI's rounding of groups of 32 along a dimension, in float64."""
    parts = []
    for y in x.double().split(32, dim):
        low, high = y.amin(dim, keepdim=True), y.amax(dim, keepdim=True)
        step = (high - low) / steps
        parts.append(low + step * ((y - low) / step).round())
    return torch.cat(parts, dim)


def by_query(q, k, v, steps):
    """Output and weights, one query after the other, of KIVI's cache of the tokens so far."""
    of_k, of_v = rounded(k, steps, 2), rounded(v, steps, 3)
    outs, weights = [], []
    for i in range(T):
        new_keys, new_values = (i + 1) // R * R, max(i + 1 - R, 0)
        keys = torch.cat([of_k[:, :, :new_keys], k[:, :, new_keys : i + 1].double()], 2)
        values = torch.cat([of_v[:, :, :new_values], v[:, :, new_values : i + 1].double()], 2)
        keys, values = (x.repeat_interleave(H // G, 1) for x in (keys, values))
        w = (q[:, :, i : i + 1].double() @ keys.mT / math.sqrt(D)).softmax(-1)
        outs.append(w @ values)
        weights.append(torch.nn.functional.pad(w, (0, T - 1 - i)))
    return torch.cat(outs, 2), torch.cat(weights, 2)


def edited(q, k, v, edit):
    problem, inputs = make_problem(q, k, v, Options(ch.causal))
    site = EditSite(0, "", 0)
    out = ch.attention(q, k, v, mask=ch.causal)
    return edit.edit_output(out, problem, inputs, site), edit.exact(problem, site)


@pytest.mark.parametrize("form, steps", [("kivi2", 3), ("kivi4", 15)])
def test_a_query_reads_what_the_cache_has_then(form, steps):
    q, k, v = drawn()
    edit = ch.edits.cache(keys=form, values=form, residual=R)
    out, (of_keys, _) = edited(q, k, v, edit)
    expected, w2 = by_query(q, k, v, steps)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

    rounded_k = edit.rounded(*make_problem(q, k, v, Options(ch.causal)), EditSite(0, "", 0)).k
    got = ch.divergence(q, k, v, rounded_k, mask=ch.causal, exact_mask=of_keys)
    exact = k.double().repeat_interleave(H // G, 1)
    scores = q.double() @ exact.mT / math.sqrt(D)
    w = scores.masked_fill(~torch.ones(T, T).tril().bool(), -math.inf).softmax(-1)
    kl = torch.where(w > 0, w * (w / w2).log(), 0.0).sum(-1)
    torch.testing.assert_close(got.kl.double(), kl, rtol=1e-5, atol=1e-6)
    assert float(kl[:, :, R:].min()) > 0 and bool(got.kl[:, :, : R - 1].eq(0).all())


def test_groups_and_windows_begin_at_the_first_token_of_a_text():
    """The second text has 5 columns of padding before it."""
    q, k, v = drawn()
    edit = ch.edits.cache(keys="kivi2", values="kivi2", residual=R)
    at = Positions(start=(0, -5), first_key=(0, -5), length=(T, T - 5))
    problem, inputs = make_problem(q, k, v, Options(ch.causal & ~ch.lengths([0, 5])))
    out = edit.edit_output(torch.empty_like(q), problem, inputs, EditSite(0, "", 0, at))
    alone, _ = edited(*(x[1:, :, 5:] for x in (q, k, v)), edit)
    torch.testing.assert_close(out[1:, :, 5:], alone)
    torch.testing.assert_close(out[:1], edited(*(x[:1] for x in (q, k, v)), edit)[0])


def test_the_last_query_alone_as_in_decoding():
    q, k, v = drawn()
    edit = ch.edits.cache(keys="kivi2", values="kivi2", residual=R)
    problem, inputs = make_problem(q[:, :, -1:], k, v, Options(ch.Causal(align="end")))
    site = EditSite(0, "", 0, Positions(start=T - 1))
    out = edit.edit_output(q[:, :, -1:], problem, inputs, site)
    torch.testing.assert_close(out, edited(q, k, v, edit)[0][:, :, -1:])


def test_only_the_named_heads_and_texts_change():
    q, k, v = drawn()
    edit = ch.edits.cache(keys="kivi2", residual=R, heads=[1], batch=range(1, 2))
    out, _ = edited(q, k, v, edit)
    plain, every = ch.attention(q, k, v, mask=ch.causal), ch.edits.cache(keys="kivi2", residual=R)
    assert torch.equal(out[0], plain[0]) and torch.equal(out[1, :2], plain[1, :2])
    torch.testing.assert_close(out[1, 2:], edited(q, k, v, every)[0][1, 2:])
    assert edit.for_copy(range(2)) is None  # copies of a batch would be computed for each of them


@pytest.mark.parametrize("engine", ["core", "torch"])
def test_pairs_with_the_exact_key(engine, monkeypatch):
    """With sinks, a soft cap, dropped keys and fully masked queries, against both softmaxes."""
    if engine == "torch":
        monkeypatch.setattr(divergence, "core_divergences", lambda *_: None)
    q, k, v = drawn()
    other_k, other_v = (x + 0.3 * y for x, y in zip((k, v), drawn(1)[1:], strict=True))
    mask, other_mask = ch.causal & ~ch.prefix(1), ch.prefix(3) | ch.window(before=19, after=0)
    exact = ch.window(before=6, after=0)
    sinks, cap = torch.linspace(-1, 1, H), 4.0
    got = ch.divergence(
        q, k, v, other_k, other_v, other_mask=other_mask, exact_mask=exact, mask=mask,
        softcap=cap, sinks=sinks,
    )  # fmt: skip

    def logits(keys):
        x = q.double() @ keys.double().repeat_interleave(H // G, 1).mT / math.sqrt(D)
        return cap * torch.tanh(x / cap)

    cells, same, seen = (m.to_bool(T, T) for m in (mask, exact, mask & other_mask))
    sink = sinks.double().reshape(1, -1, 1, 1).expand(B, H, T, 1)
    x = torch.cat([logits(k).masked_fill(~cells, -math.inf), sink], -1)
    y = torch.where(same, logits(k), logits(other_k)).masked_fill(~seen, -math.inf)
    w, w2 = x.softmax(-1), torch.cat([y, sink], -1).softmax(-1)
    reverse = torch.where(w2 > 0, w2 * (w2 / w).log(), 0.0).sum(-1)
    torch.testing.assert_close(got.reverse_kl.double(), reverse, rtol=1e-5, atol=1e-6)
    of_exact, of_other = (x.double().repeat_interleave(H // G, 1) for x in (v, other_v))
    z2 = (w2[..., :T] * same) @ of_exact + (w2[..., :T] * ~same) @ of_other
    torch.testing.assert_close(got.other.double(), z2, rtol=1e-5, atol=1e-5)


def test_errors():
    with pytest.raises(BadValue, match="residual=0"):
        ch.edits.cache(keys="kivi2", residual=0)
    with pytest.raises(BadType, match="residual='8'"):
        ch.edits.cache(keys="kivi2", residual="8")
    q, k, v = drawn()
    edit = ch.edits.cache(keys="kivi2", residual=R)
    with pytest.raises(BadValue, match="Autograd records"):
        edited(q.clone().requires_grad_(), k, v, edit)
    with pytest.raises(BadValue, match="was watched"):
        edit.visible_problem(*make_problem(q, k, v, Options(ch.causal)), EditSite(0, "", 0))
    assert "residual=8" in repr(edit)
