"""Divergences by the C++ core on every instruction-set level, compared with those in float64,
which torch computes (tests/core/functional/test_divergence.py)."""

import math
from collections import namedtuple

import pytest
import torch

import clearhead as ch
from clearhead.core.engines.cpu import Cpu, divergence
from clearhead.core.problem.check import Options, make_problem
from tests.core.engines.cpu.test_kernels import (
    DTYPES,
    LEVELS,
    draw,
    level as level,
    make_qkv,
    threads as threads,
    widened,
)
from tests.pairs import pairs
from tests.problems import PROBLEMS

Numbers = namedtuple("Numbers", "kl reverse_kl mass lost")
OTHER_MASKS = {"every": None, "recent": ch.prefix(1) | ch.window(before=3, after=0)}
CASES = [name for name in PROBLEMS if name not in ("dropout by seed", "large scores")]


def by_core(q, k, v, other_k, other_mask=None, **keywords):
    """What the core computes; an error if it leaves the call to torch."""
    problem, inputs = make_problem(q, k, v, Options(**keywords))
    assert Cpu().why_not(problem) == []
    other = problem
    if other_mask is not None:
        both = other_mask if problem.mask is None else problem.mask & other_mask
        other, _ = make_problem(q, k, v, Options(**{**keywords, "mask": both}))
    _, others = make_problem(q, other_k, v, Options(**keywords))
    computed = divergence.core_divergences(problem, inputs, other, others)
    assert computed is not None
    return Numbers(*computed)


def check(q, k, v, other_k, other_mask=None, rtol=1e-5, atol=1e-6, **keywords):
    got = by_core(q, k, v, other_k, other_mask, **keywords)
    wide = (x.double() for x in (q, k, v, other_k))
    true = ch.divergence(*wide, other_mask=other_mask, **widened(keywords))
    for name, number in got._asdict().items():
        assert bool((number >= 0).all())
        torch.testing.assert_close(
            number.double(), getattr(true, name), rtol=rtol, atol=atol, msg=name
        )


@pytest.mark.parametrize(
    "name, other, dtype, level",
    pairs(CASES, OTHER_MASKS, DTYPES, LEVELS),
    indirect=["level"],
    ids=str,
)
def test_every_named_problem(name, other, dtype, level):
    case = PROBLEMS[name](dtype, 0)
    other_mask, (Tq, Tk) = OTHER_MASKS[other], (case.q.shape[2], case.k.shape[2])
    if other_mask is not None and Tq != Tk:
        other_mask = ch.dense(keep=draw(Tq, Tk) > -0.5)
    other_k = case.k + 0.3 * draw(*case.k.shape, seed=5).to(dtype)
    check(*case.tensors, other_k, other_mask, **case.keywords)


KEYS = {
    "rounded to fp16": lambda k: k.half().float(),
    "other keys": lambda k: draw(*k.shape, seed=7),
    "keys that rise": lambda k: k + torch.linspace(0, 3, k.shape[2])[:, None],
    "one key that is larger": lambda k: k * torch.linspace(1, 0, k.shape[2]).pow(9)[:, None] * 4,
}


@pytest.mark.parametrize("D", [1, 13, 64])
@pytest.mark.parametrize("keys", KEYS)
def test_long_texts(keys, D, level):
    """Maxima of both attentions change from block to block, in the same and in other blocks."""
    q, k, v = make_qkv(1, 4, 2, Tq=401, Tk=401, D=D)
    for other_mask in (None, ch.window(before=250, after=0)):
        check(q, k, v, KEYS[keys](k), other_mask, mask=ch.causal)
        check(q, KEYS[keys](k), v, k, other_mask, mask=ch.causal)


def test_a_small_divergence_has_its_digits(level):
    """In float32, differences of logits and of sums would be noise here, or negative."""
    q, k, v = make_qkv(1, 2, 2, Tq=211, Tk=211, D=32)
    other_k = k + 1e-4 * draw(*k.shape, seed=3)
    check(q, k, v, other_k, mask=ch.causal, rtol=1e-4, atol=1e-13)
    kl = by_core(q, k, v, other_k, mask=ch.causal).kl
    assert 1e-12 < float(kl[:, :, 50:].min()) and float(kl.max()) < 1e-6


def test_a_soft_cap_that_is_reached(level):
    q, k, v = make_qkv(1, 2, 2, Tq=53, Tk=53, D=16)
    for other_k in (k + 0.1 * draw(*k.shape, seed=3), -k):
        check(20 * q, k, v, other_k, softcap=5.0)


def test_lost_keys_with_almost_all_weight(level):
    """In float32 the weights that are kept would be 0."""
    q, k, v = (x.clone() for x in make_qkv(1, 1, 1, Tq=7, Tk=11, D=4))
    q[..., 0], k[..., 0], k[:, :, 3, 0] = 8.0, -9.0, 20.0
    keep = torch.ones(7, 11, dtype=torch.bool)
    keep[:, 3] = False
    got = by_core(q, k, v, k, ch.dense(keep=keep), mask=ch.everything)
    check(q, k, v, k, ch.dense(keep=keep), mask=ch.everything)
    assert bool((got.reverse_kl > 100).all()) and bool(got.lost.eq(1).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_keys_do_not_count(bad, level):
    q, k, v = make_qkv(1, 4, 2, Tq=61, Tk=61, D=8)
    other_k = k + 0.3 * draw(*k.shape, seed=3)
    mask, other_mask = ch.lengths([50]) & ch.causal, ch.window(before=5, after=0)
    want = by_core(q, k, v, other_k, other_mask, mask=mask)
    k[:, :, 50:] = other_k[:, :, 50:] = bad
    got = by_core(q, k, v, other_k, other_mask, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_bits_depend_on_neither_threads_nor_other_rows(level, threads):
    q, k, v = make_qkv(2, 4, 2, Tq=499, Tk=499, D=24)
    other_k = k + 0.3 * draw(*k.shape, seed=3)
    threads(1)
    want = by_core(q, k, v, other_k, mask=ch.causal)
    threads(2)
    got = by_core(q, k, v, other_k, mask=ch.causal)
    alone = by_core(*(x[1:, :2] for x in (q, k[:, :1], v[:, :1], other_k[:, :1])), mask=ch.causal)
    for x, y, z in zip(got, want, alone, strict=True):
        assert torch.equal(x, y) and torch.equal(x[1:, :2], z)


@pytest.mark.parametrize("scale", [30.0, math.nan])
def test_larger_logits_and_nan_are_left_to_float64(scale, level):
    q, k, v = make_qkv(1, 2, 2, Tq=31, Tk=31, D=32)
    q = q * scale
    problem, inputs = make_problem(q, k, v, Options(mask=ch.causal))
    assert divergence.core_divergences(problem, inputs, problem, inputs) is None
    got = ch.divergence(q, k, v, k + 0.1 * draw(*k.shape, seed=3), mask=ch.causal)
    assert bool(got.kl.isnan().all()) == math.isnan(scale)
