"""Scores of keys that have a pass of their own, against attention written out in float64."""

import importlib

import pytest
import torch

import clearhead as ch
from tests.fresh_process import run_program
from tests.memory import needs_peak

key_scores = importlib.import_module("clearhead.core.stats.key_scores")

B, H, G, TQ, TK, D, DV = 2, 6, 2, 41, 53, 16, 11
END = ch.Causal(align="end")
LENGTHS = [TK, 37]
SCORES = {
    "squared": ch.received(power=2),
    "largest": ch.received(reduce="max"),
    "mean": ch.received(reduce="mean"),
    "of the last": ch.received(last=7),
    "mean of the last": ch.received(last=7, reduce="mean", power=1.5),
    "drop": ch.drop_error(),
    "drop, last": ch.drop_error(last=23),
    "drop, largest": ch.drop_error(reduce="max", power=1),
}
EVERY = dict(rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    monkeypatch.setattr(key_scores, "TILE_QUERIES", 8)
    monkeypatch.setattr(key_scores, "TILE_CELLS", 8 * B * H * 16)


def drawn(dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(3)
    shapes = (B, H, TQ, D), (B, G, TK, D), (B, G, TK, DV)
    q, k, v = (torch.randn(x, generator=g) for x in shapes)
    return (scale * q).to(dtype), k.to(dtype), v.to(dtype)


def scores_of(score, q, k, v, **keywords):
    return getattr(ch.look(q, k, v, stats=[score], **keywords), score.name)


def logits(q, k, mask=None, softcap=None, sinks=None, lengths=None):
    """The logits of all keys, and of the sink, and which pairs are visible."""
    x = q.double() @ k.double().repeat_interleave(H // G, 1).mT / D**0.5
    x = x if softcap is None else softcap * (x / softcap).tanh()
    if mask is not None:
        x = x.masked_fill(~mask.to_bool(TQ, TK), -torch.inf)
    if lengths is not None:
        hidden = torch.arange(TK) >= torch.tensor(lengths).unsqueeze(1)
        x = x.masked_fill(hidden[:, None, None], -torch.inf)
    last = torch.full((H,), -torch.inf) if sinks is None else sinks
    return torch.cat([x, last.double().view(1, -1, 1, 1).expand(*x.shape[:3], 1)], -1)


def changes(x, v):
    """The change of each output if a key is dropped, from one softmax without it for each key."""
    v = torch.nn.functional.pad(v.double().repeat_interleave(H // G, 1), (0, 0, 0, 1))
    out = x.softmax(-1).nan_to_num() @ v
    without = []
    for key in range(TK):
        dropped = x.index_fill(-1, torch.tensor([key]), -torch.inf).softmax(-1).nan_to_num()
        without.append((dropped @ v - out).norm(dim=-1))
    return torch.stack(without, -1)


def expected(score, x, v, n=None):
    """A score of keys from all pairs."""
    seen = x[..., :-1] > -torch.inf
    numbers = changes(x, v) if score.name == "drop_error" else x.softmax(-1)[..., :-1].nan_to_num()
    counts = seen.any(-1)
    if score.last is not None:
        counts &= counts.flip(-1).cumsum(-1).flip(-1) <= score.last
    seen &= counts.unsqueeze(-1)
    numbers = (numbers**score.power).masked_fill(~seen, 0.0)
    total = numbers.amax(2) if score.reduce == "max" else numbers.sum(2)
    total = total / seen.sum(2).clamp(min=1) if score.reduce == "mean" else total
    return total if n is None else total * n.double()


@pytest.mark.parametrize("engine", ["auto", "cpu", "tiled", "steps"])
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_all_pairs(name, engine):
    q, k, v = drawn()
    score = SCORES[name]
    seen = ch.look(q, k, v, mask=END, stats=["entropy", score], engine=engine)
    assert torch.equal(seen.out, ch.attention(q, k, v, mask=END, engine=engine))
    assert getattr(seen, score.name).dtype == torch.float32
    torch.testing.assert_close(
        getattr(seen, score.name), expected(score, logits(q, k, END), v), **EVERY
    )


CALLS = {
    "everything": {},
    "lengths": dict(mask=ch.lengths(LENGTHS) & END),
    "window": dict(mask=ch.window(before=9, after=2, align="end")),
    "no key for some": dict(mask=END & ch.prefix(40) & ~ch.prefix(20)),
    "softcap": dict(mask=END, softcap=3.0),
    "sinks": dict(mask=END, sinks=torch.linspace(-2, 4, H)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("call", CALLS)
def test_masks_sinks_and_dtypes(call, dtype):
    q, k, v = drawn(dtype)
    keywords = {n: x.to(dtype) if n == "sinks" else x for n, x in CALLS[call].items()}
    written = keywords if call != "lengths" else dict(mask=END, lengths=LENGTHS)
    x = logits(q, k, **written)
    for score in SCORES["mean of the last"], SCORES["drop, last"]:
        got = scores_of(score, q, k, v, **keywords)
        torch.testing.assert_close(got, expected(score, x, v), **EVERY)


@pytest.mark.parametrize("scale", [30.0, 300.0])
@pytest.mark.parametrize("name", SCORES)
def test_weights_near_one(name, scale):
    """Logits up to 400: w / (1 - w) overflows, and v - z vanishes."""
    q, k, v = drawn(scale=scale)
    x, score = logits(q, k, END), SCORES[name]
    assert x.amax() > 80 and (x.softmax(-1) > 1 - 1e-12).float().mean() * TK > 0.02
    got = scores_of(score, q, k, v, mask=END)
    torch.testing.assert_close(got, expected(score, x, v), **EVERY)


def test_numbers_of_keys_multiply_scores():
    q, k, v = drawn()
    n = torch.rand(B, H, TK, generator=torch.Generator().manual_seed(1)) - 0.2
    for score in ch.received(n, power=2), ch.drop_error(n, last=9):
        got = scores_of(score, q, k, v, mask=END)
        plain = expected(score, logits(q, k, END), v, n)
        torch.testing.assert_close(got, plain, **EVERY)


def test_masked_nan_changes_nothing():
    q, k, v = drawn()
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, :, 40:], bad_v[:, :, 40:] = torch.nan, torch.inf
    mask = ch.lengths([40, 40])
    for score in SCORES.values():
        clean = scores_of(score, q, k, v, mask=mask)
        got = scores_of(score, q, bad_k, bad_v, mask=mask)
        assert torch.equal(got, clean) and not got[..., 40:].any()


def test_a_visible_nan_is_not_hidden():
    q, k, v = drawn()
    q[0, 0, 30] = torch.nan
    for score in SCORES["squared"], SCORES["largest"], SCORES["drop"]:
        got = scores_of(score, q, k, v)
        assert got[0, 0].isnan().all() and got[0, 1:].isfinite().all() and got[1].isfinite().all()


def test_an_only_key_leaves_nothing():
    q, k, v = torch.randn(3, 1, 1, 1, 4, generator=torch.Generator().manual_seed(0)).unbind()
    got = ch.look(q, k, v, stats=["drop_error"]).drop_error
    torch.testing.assert_close(got.item(), v.square().sum().item())


def test_dropout_and_gradients_do_not_change_scores():
    q, k, v = drawn()
    plain = ch.look(q, k, v, stats=[ch.received(power=2)]).received
    q.requires_grad_()
    seen = ch.look(q, k, v, stats=["entropy", ch.received(power=2)], dropout=0.5, seed=1)
    assert torch.equal(seen.received, plain) and not seen.received.requires_grad
    seen.entropy.sum().backward()
    assert q.grad.abs().sum() > 0


MEMORY = """
import torch, clearhead as ch
from tests.memory import grown

def look(S):
    for score in ch.received(reduce="mean", last=S - 9), ch.drop_error():
        ch.look(q[:S], k[:S], k[:S], mask=ch.causal, stats=[score])

torch.set_num_threads(1)
q, k = torch.randn(6144, 16), torch.randn(6144, 16)
look(300)
print(grown(lambda: look(6144)))
"""


@needs_peak
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_6144_tokens_take_no_square():
    """A dense float64 matrix would be 302 MB."""
    run = run_program(MEMORY)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 80


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ch.received(power=0.5), "received got power=0.5."),
        (lambda: ch.received(power=True), "received got power=True."),
        (lambda: ch.drop_error(reduce="least"), "reduce='least'."),
        (lambda: ch.received(last=0), "received got last=0."),
        (lambda: ch.received(last=2.5), "received got last=2.5."),
    ],
)
def test_errors(make, text):
    with pytest.raises(ch.AttentionError, match=text):
        make()


def test_vmap_is_refused():
    q, k, v = drawn()
    with pytest.raises(ch.BadValue, match=r"inside torch\.func\.vmap"):
        torch.func.vmap(lambda q, k, v: ch.look(q, k, v, stats=["drop_error"]).drop_error)(q, k, v)
