"""Dropout: by seed a function of the cell alone, without one as torch's generator decides."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.core.engines import cpu, tiled
from clearhead.core.engines.choice import ENGINES
from clearhead.core.problem import dropout
from clearhead.core.problem.check import Options, make_problem

needs_core = pytest.param("cpu", marks=pytest.mark.skipif(not cpu.core, reason=cpu.status()))
MANY = 2, 4, 100, 100, 8  # B, H, Tq, Tk, D: more weights than are drawn one by one


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(2)
    q = torch.randn(2, 6, 13, 5, generator=source)
    k, v = (torch.randn(2, 3, 17, d, generator=source) for d in (5, 7))
    return q, k, v


def cells(seed: int, p: float, B: int = 2, H: int = 3, Tq: int = 5, Tk: int = 7) -> Tensor:
    b, h, q, k = (torch.arange(n) for n in (B, H, Tq, Tk))
    return dropout.keep_mask(
        seed, p, b.reshape(-1, 1, 1, 1), h.reshape(-1, 1, 1), q.reshape(-1, 1), k
    )


def mixed(key: int, word: int) -> int:
    """The hash once more, in plain integers."""
    x = (key ^ (word * 0x9E3779B1 + 0x7F4A7C15)) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 11, 2**32, 2**63 - 1])
def test_the_hash_in_plain_integers(seed):
    """64-bit tensors overflow on the way; the 32 bits that count are those of whole numbers."""
    got = cells(seed, 0.4)
    for b in range(2):
        for h in range(3):
            for q in range(5):
                for k in range(7):
                    key = mixed(mixed(0, seed & 0xFFFFFFFF), seed >> 32)
                    for place in (b, h, q, k):
                        key = mixed(key, place)
                    assert bool(got[b, h, q, k]) == (key >= round(0.4 * 2**32))


def test_the_cells_of_a_seed_never_change():
    """Written down, so that a saved experiment drops the same cells in every version."""
    rows = cells(7, 0.5, 1, 1, 2, 12)[0, 0].int().tolist()
    assert rows == [[0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1]]


def test_about_p_of_the_cells_are_dropped():
    for p in (0.1, 0.5, 0.9):
        kept = cells(3, p, 4, 8, 128, 128).double()
        assert abs(float(kept.mean()) - (1 - p)) < 4 * (p * (1 - p) / kept.numel()) ** 0.5
    assert cells(3, 0.0).all() and not cells(3, 1.0).any()


def test_no_axis_and_no_seed_repeats_another():
    kept = cells(5, 0.5, 2, 2, 64, 64).double() - 0.5
    others = [kept.transpose(2, 3), kept.flip(0), kept.flip(1), kept.roll(1, 2), kept.roll(1, 3)]
    others += [cells(seed, 0.5, 2, 2, 64, 64).double() - 0.5 for seed in (4, 6, 5 + 2**32)]
    for other in others:  # correlation of 16,384 coins: 5 standard deviations
        assert abs(float((kept * other).mean()) * 4) < 5 / 128


def test_more_dropout_drops_the_same_cells_and_more():
    assert (cells(9, 0.3) | ~cells(9, 0.6)).all()


def test_every_engine_and_every_tiling_drops_the_same(qkv, monkeypatch):
    keywords = dict(mask=ch.Causal(align="end"), dropout=0.4, seed=11)
    trace = ch.explain(*qkv, **keywords)
    kept = cells(11, 0.4, 2, 6, 13, 17)
    torch.testing.assert_close(trace["dropped"], trace["weights"] * kept / 0.6)
    asked, _ = make_problem(*qkv, Options(**keywords))
    for engine in ENGINES:
        if not engine.why_not(asked):
            got = ch.attention(*qkv, engine=engine.name, **keywords)
            torch.testing.assert_close(got, trace["output"])
    for size in (1, 4, 100):
        monkeypatch.setattr(tiled, "TILE_QUERIES", size)
        monkeypatch.setattr(tiled, "TILE_KEYS", size + 1)
        torch.testing.assert_close(ch.attention(*qkv, engine="tiled", **keywords), trace["output"])


def test_a_seed_needs_dropout_that_may_be_zero(qkv):
    q, k, v = qkv
    for call in (
        lambda **given: ch.attention(q, k, v, **given),
        lambda **given: ch.look(q, k, v, **given).out,
        lambda **given: ch.explain(q, k, v, **given)["output"],
        lambda **given: ch.matrix(q, k, **given) @ v,
    ):
        with pytest.raises(ch.BadValue, match="seed=7 was passed without dropout="):
            call(seed=7)
        torch.testing.assert_close(call(seed=7, dropout=0.0), call())
    with pytest.raises(ch.BadValue, match="seed=7 was passed without dropout="):
        ch.plan(q, k, v, seed=7)


def test_dropout_by_seed_leaves_the_generator_alone(qkv):
    before = torch.get_rng_state()
    ch.attention(*qkv, dropout=0.3, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_reference_draws_as_nn_dropout_on_the_weights(qkv):
    torch.manual_seed(123)
    trace = ch.explain(*qkv, dropout=0.5)
    torch.manual_seed(123)
    assert torch.equal(trace["dropped"], F.dropout(trace["weights"], 0.5))
    torch.manual_seed(123)
    assert torch.equal(ch.attention(*qkv, dropout=0.5, engine="steps"), trace["output"])


@pytest.mark.parametrize("name", [e.name for e in ENGINES])
def test_without_a_seed_the_generator_decides(name, qkv, monkeypatch):
    monkeypatch.setattr(cpu, "FEW_WEIGHTS", 0)
    asked, _ = make_problem(*qkv, Options(dropout=0.5))
    if reasons := next(e for e in ENGINES if e.name == name).why_not(asked):
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    torch.manual_seed(5)
    first, other = (ch.attention(*qkv, dropout=0.5, engine=name) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(ch.attention(*qkv, dropout=0.5, engine=name), first)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "name, seed", [("steps", None), ("tiled", None), ("steps", 4), ("tiled", 4), ("cpu", 4)]
)
def test_dropout_of_everything_gives_zero_and_of_nothing_changes_nothing(name, seed, qkv):
    q, k, v = (x.requires_grad_() for x in qkv)
    out = ch.attention(q, k, v, dropout=1.0, seed=seed, engine=name)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    none = ch.attention(q, k, v, dropout=0.0, seed=seed, engine=name)
    assert torch.equal(none, ch.attention(q, k, v, engine=name))


@pytest.mark.parametrize("name", ["steps", "tiled", needs_core])
def test_backward_drops_the_same_weights_as_forward(name, monkeypatch):
    """The backward pass recomputes tiles; a draw without a seed must be the same."""
    monkeypatch.setattr(cpu, "FEW_WEIGHTS", 0)
    monkeypatch.setattr(tiled, "TILE_QUERIES", 3)
    monkeypatch.setattr(tiled, "TILE_KEYS", 2)
    q, k = torch.randn(1, 1, 7, 4), torch.randn(1, 1, 5, 4)
    v = torch.eye(5).reshape(1, 1, 5, 5).requires_grad_()
    out = ch.attention(q, k, v, dropout=0.5, engine=name)  # the dropped weights themselves
    (back,) = torch.autograd.grad(out[..., 0].sum(), v)
    torch.testing.assert_close(back[0, 0, :, 0], out[0, 0].sum(0).detach())


# ------------------------------------------------ many weights: the generator gives the core a seed


def many() -> list[Tensor]:
    B, H, Tq, Tk, D = MANY
    assert B * H * Tq * Tk > dropout.FEW_WEIGHTS
    source = torch.Generator().manual_seed(3)
    return [torch.randn(B, H, t, D, generator=source, requires_grad=True) for t in (Tq, Tk, Tk)]


def drawn(answer) -> Tensor:
    torch.manual_seed(8)
    return answer()


@pytest.mark.skipif(not cpu.core, reason=cpu.status())
def test_the_trace_of_many_weights_shows_the_cells_that_the_core_drops():
    q, k, v = many()
    keywords = dict(mask=ch.causal, dropout=0.3)
    assert ch.plan(q, k, v, **keywords).engine == "cpu"
    out = drawn(lambda: ch.attention(q, k, v, **keywords))
    trace = drawn(lambda: ch.explain(q, k, v, **keywords))
    torch.testing.assert_close(out, trace["output"])
    seed = trace.settings["seed"]
    assert torch.equal(out, ch.attention(q, k, v, seed=seed, **keywords))
    assert seed == int(drawn(dropout.draw_seed))


@pytest.mark.outside
@pytest.mark.skipif(not cpu.core, reason=cpu.status())
def test_whoever_follows_a_call_gets_the_draw_of_the_core():
    q, k, v = many()

    def make_problem(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ch.attention(q, k, v, dropout=0.3)

    def with_gradient(f) -> list[Tensor]:
        out = drawn(lambda: f(q, k, v))
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    true = with_gradient(make_problem)
    for follower in (
        torch.compile(make_problem, fullgraph=True, backend="aot_eager"),
        lambda *x: checkpoint(make_problem, *x, use_reentrant=False),
        lambda *x: torch.func.vjp(make_problem, *x)[0],
    ):
        for a, b in zip(with_gradient(follower), true, strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(not cpu.core, reason=cpu.status())
def test_vmap_draws_for_each_example_or_for_all():
    q, k, v = (torch.stack([x, x]) for x in many())

    def by(randomness: str) -> Tensor:
        make_problem = torch.func.vmap(
            lambda *x: ch.attention(*x, dropout=0.3), randomness=randomness
        )
        return drawn(lambda: make_problem(q, k, v))

    same, different = by("same"), by("different")
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        by("error")
