"""Calls that repeat the steps of an earlier one.

With TRITON_INTERPRET=1 (`test_triton.py` runs this file so) the steps are those of the engines for
a GPU.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import clearhead as ch
from clearhead.core.engines import choice
from clearhead.core.engines.gpu import replay
from clearhead.core.engines.gpu.recorder import (
    STREAM,
    Compiled,
    Recorder,
    do_not_record,
    start_recorded,
)
from clearhead.core.engines.gpu.replay import Records
from clearhead.core.masks.key_group import duplicate_keys
from clearhead.core.problem.check import Options, make_problem

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_triton.py runs it, interpreted"
)


def draw(*shape, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source) for _ in range(3)]


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """The second call of a kind is recorded."""
    monkeypatch.setattr(replay, "PLAIN_CALLS", 1)


# ------------------------------------------------------------------------------------- the records


def summed(x, y, dim, pair):
    """A function with a buffer that it fills, a view, an operation in place and a nested result."""
    total = x.new_zeros(x.shape[0])
    total += (x * y).sum(dim)
    unused = x.exp()
    return {"total": total, "pair": (pair[0].unsqueeze(0), unused.dtype, x)}


def test_a_third_call_repeats_the_steps_of_the_second_with_its_own_tensors(monkeypatch):
    records, calls = Records(), []

    def counted(*args):
        calls.append(args)
        return summed(*args)

    for seed in range(4):
        x, y, z = draw(3, 5, seed=seed)
        computed = records.call(counted, (x, y, 1, (z, None)))
        assert torch.equal(computed["total"], (x * y).sum(1))
        assert torch.equal(computed["pair"][0], z.unsqueeze(0))
        assert computed["pair"][1:] == (torch.float32, x)
        assert computed["pair"][0].data_ptr() == z.data_ptr()
    assert len(calls) == 2


def test_a_descriptor_is_made_of_the_tensor_of_each_call():
    @dataclass
    class Descriptor:
        base: torch.Tensor
        block: list[int]

    records, started = Records(), []

    def run(x):
        args = (Descriptor(x * 2, [16]),)
        start_recorded(started.append, args, lambda: Compiled(started.append, args, lambda: 0))
        return x + 1

    for seed in range(4):
        x, *_ = draw(3, 5, seed=seed)
        records.call(run, (x,))
        assert torch.equal(started[-1].base, x * 2) and started[-1].block == [16]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[:2],
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x.flatten(), x.new_zeros(1)])[1:].view(3, 5),
        lambda x: x.requires_grad_(),
    ],
    ids=["dtype", "shape", "strides", "alignment", "gradient"],
)
def test_another_layout_is_another_kind_of_call(change):
    records, calls = Records(), []
    run = lambda x: calls.append(x) or x + 1  # noqa: E731
    for _ in range(3):
        records.call(run, (draw(3, 5)[0],))
    assert len(calls) == 2
    records.call(run, (change(draw(3, 5)[0]),))
    assert len(calls) == 3


def test_other_arguments_and_settings_are_another_kind_of_call():
    records, calls = Records(), []
    run = lambda *args: calls.append(args) or args[0] + 1  # noqa: E731
    x = draw(3, 5)[0]
    for _ in range(3):
        records.call(run, (x, "a", "b"))
    records.call(run, (x, "c", "b"))
    records.call(run, (x, "a", "c"))
    assert len(calls) == 4
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        records.call(run, (x, "a", "b"))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(calls) == 5


def test_where_a_tuple_ends_is_a_part_of_the_kind():
    """As in groups of keys, whose number differs by statistic."""
    records = Records()
    run = lambda first, *rest: first[0] * len(first) + len(rest)  # noqa: E731
    x, y, z = draw(3, 5)
    for _ in range(3):
        assert torch.equal(records.call(run, ((x, y), z)), 2 * x + 1)
    assert torch.equal(records.call(run, ((x,), y, z)), x + 2)
    assert torch.equal(records.call(run, ((x, y, z),)), 3 * x)


ELSEWHERE = torch.ones(5)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if bool(x[0, 0] > 0) else -x,
        lambda x: x + ELSEWHERE,
        lambda x: torch.add(x, other=ELSEWHERE),
        lambda x: x.flatten()[: (x > 0).sum()],
        lambda x: do_not_record() or x + 1,
    ],
    ids=["item", "bool", "elsewhere", "keyword", "slice", "refused"],
)
def test_what_depends_on_more_than_the_layouts_is_not_recorded(run):
    """A repeated step would compute with values of the recorded call."""
    records = Records()
    for seed in range(4):
        x = draw(3, 5, seed=seed)[0]
        assert torch.equal(records.call(run, (x,)), run(x))
    assert not any(callable(x) for x in records._by_kind.values())


def test_a_call_of_a_rare_kind_is_not_recorded(monkeypatch):
    """A cache that grows makes few calls of a kind."""
    monkeypatch.setattr(replay, "PLAIN_CALLS", 6)
    records, calls = Records(), []
    run = lambda x: calls.append(x) or x + 1  # noqa: E731
    for count in range(1, 10):
        records.call(run, (draw(3, 5)[0],))
        assert len(calls) == min(count, 7)


def test_a_replayed_function_within_another_is_a_part_of_its_record():
    outer, inner = Records(), Records()
    run = lambda x: inner.call(torch.exp, (x,)) + 1  # noqa: E731
    for seed in range(3):
        x = draw(3, 5, seed=seed)[0]
        assert torch.equal(outer.call(run, (x,)), x.exp() + 1)
    assert not inner._by_kind
    inner.call(torch.exp, (x,))
    assert inner._by_kind


def test_which_arguments_are_one_tensor_is_a_part_of_the_kind():
    """As in `attention(x, x, x)`. A record of it has one parameter."""
    records, calls = Records(), []
    run = lambda *args: calls.append(args) or torch.sub(*args)  # noqa: E731
    x, y, _ = draw(3, 5)
    for _ in range(3):
        assert not records.call(run, (x, x)).any()
    assert len(calls) == 2
    for first, second in [(x, y), (y, x), (x, y.clone())]:
        assert torch.equal(records.call(run, (first, second)), first - second)
    assert torch.equal(records.call(run, (y, y)), y - y)
    assert len(calls) == 4


def test_a_record_has_the_needed_steps_and_no_tensor():
    x, y, z = draw(3, 5)
    with Recorder([x, y, z]) as recorder:
        result = summed(x, y, 1, (z, None))
    record = recorder.record(result)
    assert not any(isinstance(c, torch.Tensor) for c in record.__globals__.values())
    called = {getattr(c, "__name__", None) for c in record.__globals__.values()}
    assert {"new_zeros", "mul", "sum", "unsqueeze"} <= called
    assert record.__code__.co_nlocals == 3 + 4  # not exp, which nothing uses


def test_a_compiled_kernel_takes_addresses_and_plain_tuples():
    class Pair(NamedTuple):
        at: object
        stride: int

    started, streams = [], iter([5, 6, None])
    launch = lambda *args: started.append(args)  # noqa: E731

    def run(x):
        args = Pair(x, 5), 7, Pair(None, 1)
        compiled = Compiled(launch, (STREAM, *args), lambda: next(streams))
        start_recorded(launch, args, lambda: compiled)
        start_recorded(launch, (Pair(x, 5),), None)
        return x

    records = Records()
    for seed in range(5):
        x = draw(3, 5, seed=seed)[0]
        assert records.call(run, (x,)) is x
        last = started[-2:]
        if seed in (2, 3):
            assert last[0] == (seed + 3, (x.data_ptr(), 5), 7, Pair(None, 1))
            assert type(last[0][1]) is tuple and type(last[0][3]) is Pair
        else:  # not repeated, or a hook must see each start
            assert last[0] == (Pair(x, 5), 7, Pair(None, 1))
        assert last[1][0].at is x


# ----------------------------------------------------------------------------------- the engines

STATISTICS = ["lse"], ["entropy", "max", ch.topk(3)], ["received", ch.pooled(4, 4)]


@contextmanager
def nothing_repeated():
    replay._inside.call = True
    try:
        yield
    finally:
        replay._inside.call = False


def numbers_of(seen):
    """The output and all statistics, as a list of tensors."""
    listed = [seen.out]
    for x in (getattr(seen, name) for name in seen.names):
        listed += x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else [x]
    return listed


@interpreted
@pytest.mark.parametrize("engine", ["triton", "fused"])
@pytest.mark.parametrize("stats", [None, *STATISTICS], ids=["none", "lse", "rows", "sums"])
def test_a_repeated_call_has_the_bits_of_a_new_one(engine, stats):
    """The third call repeats the second."""

    def run(tensors):
        if stats is None:
            return [ch.attention(*tensors, mask=ch.causal, engine=engine)]
        return numbers_of(ch.look(*tensors, mask=ch.causal, stats=stats, engine=engine))

    choice._records = Records()
    for seed in range(3):
        tensors = draw(1, 2, 21, 16, seed=seed)
        if seed == 2:
            tensors[1][0, 0, 20] = float("nan")  # which only the last query sees
        computed = run(tensors)
        with nothing_repeated():
            expected = run(tensors)
        assert all(
            torch.equal(a.nan_to_num(7), b.nan_to_num(7))
            for a, b in zip(computed, expected, strict=True)
        )
    assert any(callable(x) for x in choice._records._by_kind.values())


T = 13
GROUPS = {  # by seed
    "masks": lambda seed: {"first": ch.prefix(3), "holes": ch.prefix(2) | ch.window(3, 0)},
    "distances": lambda seed: {"near": ch.window(3 + seed // 3, 0), "own": ch.window(0, 0)},
    "ids": lambda seed: {"same": ch.documents((torch.arange(T) * (seed + 2)) % 5)},
    "both": lambda seed: {"copies": duplicate_keys((torch.arange(T) * (seed + 2)) % 4)},
    "spans": lambda seed: {"title": (seed, 2 * seed + 3)},
}


@interpreted
@pytest.mark.parametrize("groups", GROUPS)
def test_a_repeated_mass_sums_over_the_groups_of_its_own_call(groups):
    choice._records = Records()
    for seed in range(4):
        q, k, v = draw(1, 1, T, 16, seed=seed)
        wanted = [ch.mass(GROUPS[groups](seed))]
        seen = ch.look(q, k, v, mask=ch.causal, stats=wanted, engine="triton").mass
        exact = (x.double() for x in (q, k, v))
        true = ch.look(*exact, mask=ch.causal, stats=wanted, engine="steps").mass
        assert seen.keys() == true.keys()
        for name, x in seen.items():
            torch.testing.assert_close(x.double(), true[name], rtol=1e-5, atol=1e-5)
    assert any(callable(x) for x in choice._records._by_kind.values())


@interpreted
def test_a_repeated_mass_notices_ids_that_changed_in_place():
    choice._records = Records()
    ids = ch.documents(torch.arange(T) % 3)
    q, k, v = draw(1, 1, T, 16)
    for step in range(4):
        if step == 3:
            ids.ids.copy_(torch.arange(T) % 5)
        seen = ch.look(q, k, v, stats=[ch.mass({"same": ids})], engine="triton")
        same = ids.ids.view(-1, 1) == ids.ids.view(1, -1)
        weights = (q @ k.mT / 4).softmax(-1)
        torch.testing.assert_close(seen.mass["same"], (weights * same).sum(-1))
    assert any(callable(x) for x in choice._records._by_kind.values())


HOLES = ch.window(before=9, after=0) | ch.prefix(2)


@interpreted
@pytest.mark.parametrize("mask", [ch.causal, HOLES], ids=["causal", "holes"])
def test_sweeps_whose_call_has_no_kind_are_repeated(mask, monkeypatch):
    """Numbers for the keys, and which keys a mask with holes allows, are arguments of a sweep."""
    from clearhead.core.engines.gpu.triton import statistics

    choice._records = Records()
    sweeps = {name: Records() for name in ("_attend", "_second_sweep")}
    for name, records in sweeps.items():
        function = getattr(statistics, name).__wrapped__
        monkeypatch.setattr(statistics, name, lambda *args, f=function, r=records: r.call(f, args))
    for seed in range(3):
        q, k, v = draw(1, 1, T, 16, seed=seed)
        by = torch.rand(T, generator=torch.Generator().manual_seed(seed))
        wanted = [
            ch.topk(3, by=by), ch.weighted(by - 0.5, {"first": ch.prefix(3)}),
            ch.pooled(3, 4, by=by), ch.exact_rows([0, 5, 6]),
        ]  # fmt: skip
        seen = ch.look(q, k, v, mask=mask, stats=wanted, engine="triton")
        exact = (x.double() for x in (q, k, v))
        true = ch.look(*exact, mask=mask, stats=wanted, engine="steps")
        for x, y in zip(numbers_of(seen), numbers_of(true), strict=True):
            torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-5)
    assert not choice._records._by_kind
    for records in sweeps.values():
        assert list(map(callable, records._by_kind.values())) == [True]


@interpreted
@pytest.mark.parametrize("stats", [["lse", "max", "entropy"], [ch.topk(3)], *STATISTICS[::2]])
def test_a_repeated_look_only_allocates_and_starts_kernels(stats):
    choice._records = Records()
    for seed in range(3):
        ch.look(*draw(1, 2, 21, 16, seed=seed), mask=ch.causal, stats=stats, engine="triton")
    (record,) = filter(callable, choice._records._by_kind.values())
    called = [record.__globals__[x] for x in record.__code__.co_names if x in record.__globals__]
    names = {x.__name__ for x in called if hasattr(x, "__name__") and not isinstance(x, type)}
    assert "new_empty" in names and names <= {"new_empty", "new_zeros"}


def test_a_statistic_with_numbers_for_the_keys_has_no_kind():
    """The numbers are tensors that a record could not replace, and they have no hash."""
    problem, _ = make_problem(*draw(1, 2, 5, 8), Options())
    assert choice.kind_of(problem, "triton", (ch.topk(2), ch.mass({"a": ch.prefix(1)})))
    for counted in (ch.topk(2, by=torch.ones(5)), ch.received(by=torch.ones(5))):
        assert choice.kind_of(problem, "triton", (counted,)) is None


@interpreted
@pytest.mark.parametrize("engine", ["triton", "fused"])
def test_a_repeated_training_step_has_the_bits_of_a_new_one(engine):
    for seed in range(4):
        tensors = [x.requires_grad_() for x in draw(1, 2, 21, 16, seed=seed)]
        seeds = draw(1, 2, 21, 16, seed=9)[0]
        out = ch.attention(*tensors, mask=ch.causal, engine=engine)
        grads = torch.autograd.grad(out, tensors, seeds)
        exact = [x.detach().double().requires_grad_() for x in tensors]
        true = ch.attention(*exact, mask=ch.causal, engine="steps")
        for x, y in zip(
            [out, *grads], [true, *torch.autograd.grad(true, exact, seeds.double())], strict=True
        ):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@interpreted
def test_a_repeated_backward_pass_reads_which_queries_see_a_tile_of_its_own_mask(monkeypatch):
    """This takes 170 calls of torch, is computed once for the layers that share a mask, and is an
    argument of the record."""
    from clearhead.core.engines.gpu.triton import operator

    records = Records()
    monkeypatch.setattr(
        operator, "_repeated_gradients", lambda *args: records.call(operator.gradients, args)
    )
    for first in (2, 3, 12):
        tensors = [x.requires_grad_() for x in draw(1, 1, 21, 16)]
        exact = [x.detach().double().requires_grad_() for x in tensors]
        mask = ch.window(before=4, after=0) | ch.prefix(first)
        grads, true = (
            torch.autograd.grad(ch.attention(*x, mask=mask, engine=engine).square().sum(), x)
            for x, engine in ((tensors, "triton"), (exact, "steps"))
        )
        for x, y in zip(grads, true, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    (record,) = records._by_kind.values()
    assert not any("scatter" in str(c) for c in record.__globals__.values())


@interpreted
@pytest.mark.parametrize("engine", ["triton", "fused"])
def test_a_recorded_call_is_refused_where_the_operator_is(engine):
    """A plain call passes autograd few arguments; the operator computes other derivatives."""
    tensors = [x.requires_grad_() for x in draw(1, 1, 5, 8)]
    out = ch.attention(*tensors, mask=ch.causal, engine=engine)
    (grad,) = torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)
    with pytest.raises(ch.BadValue, match=r"A second derivative"):
        grad.sum().backward()
    out = ch.attention(*tensors, mask=ch.causal, engine=engine)
    two = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    (batch,) = torch.autograd.grad(out, tensors[:1], two, is_grads_batched=True)
    torch.testing.assert_close(batch[0], grad.detach())
    torch.testing.assert_close(batch[1], 2 * batch[0])


@interpreted
def test_a_flag_that_one_backward_pass_raised_changes_no_other():
    """NaN in a gradient of the output raises the flag of the forward pass."""
    tensors = [x.requires_grad_() for x in draw(1, 1, 21, 16)]
    out = ch.attention(*tensors, mask=ch.causal, engine="fused")
    seed, broken = torch.ones_like(out), torch.ones_like(out)
    broken[0, 0, 20] = float("nan")
    first = torch.autograd.grad(out, tensors, seed, retain_graph=True)
    worse = torch.autograd.grad(out, tensors, broken, retain_graph=True)
    assert worse[0][0, 0, :20].equal(first[0][0, 0, :20]) and worse[0][0, 0, 20].isnan().all()
    for x, y in zip(torch.autograd.grad(out, tensors, seed), first, strict=True):
        assert torch.equal(x, y)
