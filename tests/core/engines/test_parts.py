"""`largest_parts` on every level of the core and by torch, against dense float64."""

import pytest
import torch

import clearhead as ch
from clearhead.core.engines import parts as module
from clearhead.core.engines.cpu import extension
from clearhead.core.problem.check import Options, make_problem

LEVELS = [n for n, _, present in (extension.core.levels() if extension.core else ()) if present]
HERE = "clearhead.core.engines.parts"
CASES = {
    "nothing": {},
    "causal": {"mask": ch.causal},
    "window and a bias": {"mask": ch.window(31, 0), "bias": torch.linspace(-2, 2, 211)},
    "a soft cap and sinks": {"softcap": 3.0, "sinks": torch.tensor([1.0, -2, 0.5, 0, 3, 1])},
    "ragged": {"mask": ch.lengths([211, 13]) & ch.causal},
}  # fmt: skip


@pytest.fixture(params=[*LEVELS, "torch"])
def level(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(f"{HERE}.lists_parts", lambda *_: False)
        for name, size in {"BLOCK": 3, "TILE_KEYS": 51, "TILE_CELLS": 12 * 51 * 17}.items():
            monkeypatch.setattr(f"{HERE}.{name}", size)
        yield request.param
    else:
        before = extension.use_level(request.param)
        yield request.param
        extension.use_level(before)


def problem_of(case, dtype=torch.float32, scale=1.0):
    """Two texts, six heads with two key heads, 211 tokens, and a direction for each query."""
    seed = torch.Generator().manual_seed(3)
    q, x = (torch.randn(2, 6, 211, 13, generator=seed) for _ in range(2))
    k, v = (torch.randn(2, 2, 211, 13, generator=seed) for _ in range(2))
    q = (q * scale).to(dtype)
    settings = {"mask": None, "bias": None, "softcap": None, "sinks": None, **CASES[case]}
    options = Options(scale=None, dropout=None, seed=None, **settings)
    return *make_problem(q, k.to(dtype), v.to(dtype), options), x


def dense(problem, inputs, x):
    """All parts, (B, H, Tq, Tk), in float64."""
    q, k, v = (y.double() for y in inputs)
    bias = None if problem.bias is None else problem.bias.numbers.double()
    sinks = None if problem.sinks is None else problem.sinks.double()
    settings = {"mask": problem.mask, "bias": bias, "sinks": sinks, "softcap": problem.softcap}
    weights = ch.matrix(q, k, engine="steps", **settings).to_dense()
    return weights * (x.double() @ v.repeat_interleave(3, 1).mT)


def check(found, parts):
    """The numbers are the largest, and each is that of its key."""
    n = found.keys.shape[-1]
    tolerance = 1e-5 * parts.abs().sum(-1, keepdim=True)
    largest = parts.abs().topk(n, -1).values
    assert bool(((found.parts.abs() - largest).abs() <= tolerance).all())
    of_keys = parts.gather(-1, found.keys.clamp(min=0)).masked_fill(found.keys < 0, 0)
    assert bool(((found.parts - of_keys).abs() <= tolerance).all())
    falling = found.keys.sort(-1, descending=True).values
    assert bool(((falling.diff(dim=-1) < 0) | (falling[..., 1:] < 0)).all())  # no key twice
    assert torch.equal(found.keys < 0, found.parts == 0)


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_the_dense_matrix(case, level):
    problem, inputs, x = problem_of(case)
    for n in (1, 5, 40):
        check(module.largest_parts(problem, inputs, x, n), dense(problem, inputs, x))


def apart(v):  # so norms of values are far above their parts
    return v + 30 * torch.randn(v.shape[-1], generator=torch.Generator().manual_seed(4))


TEXTS = {
    "random": lambda q, k, v: (q, k, v),
    "values with a large mean": lambda q, k, v: (q, k, apart(v)),
    "values of which the squares are 0": lambda q, k, v: (q, k, v * 1e-25),
    "scores that rise with each key": lambda q, k, v: (
        q * 0 + 1, k + torch.linspace(0, 4, 700)[:, None], v
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_they_are_those_of_long_texts(text, level):
    """After the first blocks of keys, the core multiplies only keys that may enter a list."""
    seed = torch.Generator().manual_seed(5)
    q, x = (torch.randn(1, 3, 700, 16, generator=seed) for _ in range(2))
    k, v = (torch.randn(1, 1, 700, 16, generator=seed) for _ in range(2))
    q, k, v = TEXTS[text](q, k, v)
    options = Options(scale=None, dropout=None, seed=None, mask=ch.causal, bias=None, softcap=None,
                      sinks=None)  # fmt: skip
    problem, inputs = make_problem(q, k, v, options)
    for n in (1, 5, 40):
        check(module.largest_parts(problem, inputs, x, n), dense(problem, inputs, x))


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_a_list_does_not_depend_on_other_queries(level):
    problem, inputs, x = problem_of("nothing")
    options = Options(scale=None, dropout=None, seed=None, mask=None, bias=None, softcap=None,
                      sinks=None)  # fmt: skip
    x[:, :, ::2] *= 1000  # other queries find other keys
    alone, of_one = make_problem(inputs.q[:, :, 7:8], inputs.k, inputs.v, options)
    want = module.largest_parts(problem, inputs, x, 5)
    found = module.largest_parts(alone, of_one, x[:, :, 7:8].contiguous(), 5)
    assert all(torch.equal(a, b[:, :, 7:8]) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("level", LEVELS, indirect=True)  # torch.topk takes any of equal numbers
def test_of_equal_parts_the_first(level):
    problem, inputs, x = problem_of("causal")
    same = type(inputs)(inputs.q * 0, inputs.k, torch.ones_like(inputs.v))
    keys = module.largest_parts(problem, same, torch.ones_like(x), 4).keys
    assert keys[0, 0, 200].tolist() == [0, 1, 2, 3]


def test_masked_values_that_are_nan_do_not_count(level):
    problem, inputs, x = problem_of("ragged")
    want = module.largest_parts(problem, inputs, x, 5)
    inputs.v[1, :, 13:] = torch.nan
    inputs.k[1, :, 13:] = torch.inf
    found = module.largest_parts(problem, inputs, x, 5)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize(
    ("where", "number"),
    [(x, torch.nan) for x in ("q", "k", "v", "direction")] + [(x, torch.inf) for x in "kv"],
)
def test_a_visible_part_of_nan_comes_first(where, number, level):
    problem, inputs, x = problem_of("ragged")
    {**inputs._asdict(), "direction": x}[where][:, 1, 8, 3] = number  # of both texts
    found = module.largest_parts(problem, inputs, x, 5)

    q, k, v = (y.double() for y in inputs)
    k, v = (y.repeat_interleave(3, 1) for y in (k, v))
    key = torch.arange(211)
    sees = (key <= key[:, None]) & (key < torch.tensor([211, 13]).reshape(2, 1, 1, 1))
    scores = (q @ k.mT / 13**0.5).masked_fill(~sees, -torch.inf)
    parts = (scores.softmax(-1) * (x.double() @ v.mT)).masked_fill(scores == -torch.inf, 0)
    unsure = parts.isnan()
    assert 0 < parts.isfinite().all(-1).sum() < 2 * 6 * 211
    assert torch.equal(found.parts.isnan().sum(-1), unsure.sum(-1).clamp(max=5))
    assert bool((found.parts.isnan().int().diff(dim=-1) <= 0).all())
    assert torch.equal(unsure.gather(-1, found.keys.clamp(min=0)), found.parts.isnan())
    same = ~unsure.any(-1)  # the other queries
    largest = parts.abs().topk(5, -1).values
    torch.testing.assert_close(
        found.parts[same].abs().double(), largest[same], rtol=1e-4, atol=1e-6
    )


def test_scores_that_rise_by_thousands(level):
    problem, inputs, x = problem_of("causal", scale=3000.0)
    found = module.largest_parts(problem, inputs, x, 3)
    parts = dense(problem, inputs, x)
    error = (found.parts[..., 0] - parts.gather(-1, found.keys[..., :1]).squeeze(-1)).abs()
    assert bool((error <= 1e-2 * parts.abs().sum(-1)).all())  # scores have three digits left


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, level):
    problem, inputs, x = problem_of("causal", dtype)
    check(module.largest_parts(problem, inputs, x, 5), dense(problem, inputs, x))


def test_in_float64_torch_computes():
    problem, inputs, x = problem_of("causal", torch.float64)
    found = module.largest_parts(problem, inputs, x.double(), 5)
    assert found.parts.dtype == torch.float64
    check(found, dense(problem, inputs, x))
