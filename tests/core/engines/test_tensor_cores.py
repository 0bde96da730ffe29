"""The engines for a GPU, on a GPU, with sizes and dtypes of its tensor cores.

Output, gradients and statistics are compared with float64 on the CPU, by the bounds of
`clearhead.testing`. `pytest -n 14 -m first` runs a selection, to begin with. Without
a GPU only the last part runs: the same checks on the CPU with small sizes, for `tiled`, and with
TRITON_INTERPRET=1 for the Triton kernels.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import clearhead as ch
from clearhead.core.problem.check import Options, make_problem
from tests.core.stats.test_stats import assert_same, dense
from tests.problems import naive_attention, within_yardstick

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

SKIPPED = INTERPRETED or not torch.cuda.is_available()
on_gpu = pytest.mark.skipif(
    SKIPPED, reason="kernels are interpreted" if INTERPRETED else "torch finds no CUDA device"
)
pytestmark = [
    pytest.mark.timeout(900),  # the first call of a kind compiles
    # torch's compiler warns that tf32 is off, and of its own deprecations.
    *(pytest.mark.filterwarnings(f"ignore::{kind}")
      for kind in ("UserWarning", "DeprecationWarning", "FutureWarning") if not SKIPPED),
]  # fmt: skip

ENGINES = ["triton", "fused", "sdpa"]
CAUSAL = ch.Causal(align="end")
HOLES = ch.window(before=99, after=0, align="end") | ch.prefix(4)


class Shape(NamedTuple):
    Tq: int
    Tk: int
    H: int
    G: int


class Call(NamedTuple):
    """The arguments of a call of `attention`: three tensors and keywords."""

    tensors: tuple[Tensor, ...]
    keywords: dict[str, object]

    @property
    def learning(self) -> tuple[Tensor, ...]:
        given = (*self.tensors, *self.keywords.values())
        return tuple(x for x in given if isinstance(x, Tensor) and x.requires_grad)


# --------------------------------------------------------------------------------------- problems

SHAPES = [Shape(517, 517, 4, 2), Shape(1, 4100, 8, 2), Shape(130, 2100, 2, 1)]
SIZES = [64, 72, 80, 100, 128, 256]
B = 2
Draw = Callable[..., Tensor]


def bits(shape: Shape) -> ch.Mask:
    """About half of the cells, and none of the second query."""
    source = torch.Generator().manual_seed(1)
    keep = torch.rand(B, 1, shape.Tq, shape.Tk, generator=source) < 0.5
    keep[:, :, 1:2] = False
    return ch.dense(keep=keep)


def lengths(shape: Shape) -> ch.Mask:
    return ch.lengths(keys=[shape.Tk // 2 + 1, shape.Tk], queries=[shape.Tq, shape.Tq // 2 + 1])


RULES: dict[str, Callable[[Shape, Draw], dict[str, object]]] = {
    "causal": lambda s, draw: {"mask": CAUSAL},
    "everything": lambda s, draw: {},
    "holes": lambda s, draw: {"mask": HOLES},
    "bits": lambda s, draw: {"mask": bits(s)},
    "lengths": lambda s, draw: {"mask": lengths(s)},
    "bias": lambda s, draw: {"bias": draw(s.H, s.Tq, s.Tk), "mask": CAUSAL},
    "bias that learns": lambda s, draw: {"bias": draw(s.H, s.Tq, s.Tk).requires_grad_()},
    "sinks": lambda s, draw: {"sinks": draw(s.H).requires_grad_(), "mask": CAUSAL},
    "soft cap": lambda s, draw: {"softcap": 1.5, "mask": HOLES},
    "dropout": lambda s, draw: {"dropout": 0.3, "seed": 11, "mask": CAUSAL},
    "all": lambda s, draw: {
        "bias": draw(s.H, 1, s.Tk).requires_grad_(), "sinks": draw(s.H).requires_grad_(),
        "softcap": 3.0, "dropout": 0.2, "seed": 7, "mask": HOLES,
    },
}  # fmt: skip


def draw_call(shape: Shape, D: int, dtype: torch.dtype, rule: str) -> Call:
    """Draw a call on the CPU, with numbers of `dtype`."""
    source = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=source).to(dtype)

    Tq, Tk, H, G = shape
    q, k, v = (draw(B, *sizes, D).requires_grad_() for sizes in ((H, Tq), (G, Tk), (G, Tk)))
    return Call((q, k, v), RULES[rule](shape, draw))


def moved(call: Call, device: torch.device, dtype: torch.dtype) -> Call:
    """Move a call to a device and dtype. The mask stays on its device, as for a user's call."""

    def move(x: Tensor) -> Tensor:
        return x.detach().to(device, dtype, copy=True).requires_grad_(x.requires_grad)

    return Call(*tree_map_only(Tensor, move, tuple(call)))


def skip_where_declined(engine: str, call: Call) -> None:
    plan = ch.plan(*call.tensors, engine=engine, **call.keywords)
    if plan.engine is None:
        pytest.skip(f"{engine}: {'; '.join(plan.declined[engine])}")


# ------------------------------------------------------------------------------------- the checks


def by(engine: str) -> Callable[..., Tensor]:
    return lambda *tensors, **keywords: ch.attention(*tensors, engine=engine, **keywords)


def plain(*tensors: Tensor, bias: Tensor | None = None, **keywords) -> Tensor:
    bias = None if bias is None else ch.bias(bias)
    return naive_attention(*tensors, bias=bias, **keywords)


def answers(attend: Callable[..., Tensor], call: Call, seed: Tensor) -> list[Tensor]:
    """The output and all gradients, on the CPU."""
    out = attend(*call.tensors, **call.keywords)
    grads = torch.autograd.grad(out, call.learning, seed.to(out))
    return [x.detach().cpu() for x in (out, *grads)]


@lru_cache(maxsize=1)
def expected(
    shape: Shape, D: int, dtype: torch.dtype, rule: str
) -> tuple[Call, Tensor, list[Tensor], list[Tensor]]:
    """Return the call, the seed of the gradients, the true results, and those of plain torch in
    `dtype`. They are cached for the next engine."""
    call = draw_call(shape, D, dtype, rule)
    source = torch.Generator().manual_seed(5)
    seed = torch.randn(B, shape.H, shape.Tq, D, generator=source).to(dtype)
    true = answers(by("steps"), moved(call, CPU, F64), seed)
    return call, seed, true, answers(plain, call, seed)


def check(what: str, got: Tensor, true: Tensor, ruler: Tensor) -> None:
    """Compare 64 rows at a time, because under a causal mask the numbers of the first rows are a
    hundred times larger and would hide errors of the last. Zeros would fail."""
    assert got.shape == true.shape == ruler.shape and got.dtype == ruler.dtype, what
    parts = (x.split(64, -2) if x.dim() > 1 else [x] for x in (got, true, ruler))
    for part, (a, b, c) in enumerate(zip(*parts, strict=True)):
        largest = float(b.abs().max())
        # In float32 a sequential sum of many products rounds more than torch's on a CPU.
        size = largest * (8 if a.dtype == F32 else 1)
        fits, figures = within_yardstick(a, b, c, size)
        assert fits, f"{what}, part {part}: {figures}, of {largest:.3g}"
        if largest:
            zeros_fit, _ = within_yardstick(torch.zeros_like(a), b, c, size)
            assert not zeros_fit, f"{what}, part {part}: zeros would have passed"


def check_answers(
    engine: str, device: torch.device, shape: Shape, D: int, dtype: torch.dtype, rule: str
) -> None:
    call, seed, true, ruler = expected(shape, D, dtype, rule)
    there = moved(call, device, dtype)
    skip_where_declined(engine, there)
    got = answers(by(engine), there, seed)
    learning = [f"gradient {i}" for i in range(len(there.learning))]
    for what, *numbers in zip(["out", *learning], got, true, ruler, strict=True):
        check(what, *numbers)


def check_statistics(
    engine: str, device: torch.device, shape: Shape, D: int, dtype: torch.dtype, rule: str
) -> None:
    """Scores and weights are computed wide in every dtype. The output has the same bits as without
    statistics."""
    near = ch.window(before=40, after=0, align="end")
    wanted = [
        "lse", "max", "entropy", "effective", ch.topk(8), "received", ch.pooled(13, 29),
        ch.mass({"first": ch.prefix(3), "near": near}), ch.exact_rows([0, shape.Tq // 2, -1]),
    ]  # fmt: skip
    compare_statistics(engine, device, draw_call(shape, D, dtype, rule), dtype, wanted)


def check_weighted(
    engine: str, device: torch.device, shape: Shape, D: int, dtype: torch.dtype, rule: str
) -> None:
    """Statistics by a number for every key of every head, and groups by id and by distance."""
    source = torch.Generator().manual_seed(4)
    numbers = torch.rand(B, shape.H, shape.Tk, generator=source)
    ids = torch.randint(0, 9, (B, shape.Tk), generator=source)
    groups = {
        "first": ch.prefix(3), "self": ch.window(before=0, after=0, align="end"),
        "near": ch.window(before=40, after=0, align="end"),
        "same": ch.documents(ids, queries=ids[:, -shape.Tq:]) & ~ch.prefix(1),
    }  # fmt: skip
    wanted = [
        ch.mass(groups), ch.weighted(numbers - 0.5, groups),
        ch.value_weighted({"near": groups["near"]}, by=numbers), ch.topk(8, by=numbers),
        ch.received(by=numbers), ch.pooled(13, 29, by=numbers),
    ]  # fmt: skip
    compare_statistics(engine, device, draw_call(shape, D, dtype, rule), dtype, wanted)


def compare_statistics(
    engine: str, device: torch.device, call: Call, dtype: torch.dtype, wanted: list
) -> None:
    there = moved(call, device, dtype)
    with torch.no_grad():
        skip_where_declined(engine, there)
        seen = ch.look(*there.tensors, stats=wanted, engine=engine, **there.keywords)
        assert torch.equal(seen.out, by(engine)(*there.tensors, **there.keywords))
        wide = moved(call, CPU, F64)
        problem, inputs = make_problem(*wide.tensors, Options(**wide.keywords))
        true = dense(problem, inputs, wanted)
    found = {name: on_cpu(getattr(seen, name)) for name in seen.names}
    assert_same(found, true, rtol=1e-4, atol=4e-6, keys_of="float64")


def on_cpu(result):
    return tree_map_only(Tensor, Tensor.cpu, result)


def check_long(engine: str, device: torch.device, S: int, D: int, dtype: torch.dtype) -> None:
    """One causal head. Only a few queries have a gradient, so the true results depend only on these
    queries, and are of the size queries x S."""
    source = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, S, D, generator=source).to(dtype) for _ in range(3))
    sending = torch.tensor([S // 3, S // 2, S - 65, S - 1])
    looked_at = torch.cat([torch.tensor([0, 1, 62, 64]), sending])
    seed = torch.zeros(1, 1, S, D, dtype=dtype)
    seed[:, :, sending] = torch.randn(len(sending), D, generator=source).to(dtype)

    there = moved(
        Call(tuple(x.requires_grad_() for x in (q, k, v)), {"mask": CAUSAL}), device, dtype
    )
    skip_where_declined(engine, there)
    grads_in = seed.to(device)
    before = reset_memory(device)
    with torch.no_grad():
        wanted = ["lse", "entropy", ch.topk(2), "received", ch.pooled(16, 16)]
        seen = ch.look(*there.tensors, stats=wanted, engine=engine, **there.keywords)
    out = by(engine)(*there.tensors, **there.keywords)
    grads = torch.autograd.grad(out, there.learning, grads_in)
    # 40 tensors of the size of q; one bit for each pair would be 2 GB for S = 131072.
    assert peak_memory(device) - before <= 40 * S * D * dtype.itemsize
    assert not engine.startswith("triton") or torch.equal(out, seen.out)

    def rows_of(queries: Tensor, to: torch.dtype, seed: Tensor | None) -> list[Tensor]:
        few, keys, values = (x.detach().to(to).requires_grad_() for x in (q[:, :, queries], k, v))
        keep = torch.arange(S) <= queries.unsqueeze(1)
        rows = naive_attention(few, keys, values, mask=ch.dense(keep=keep))
        if seed is None:
            return [rows.detach()]
        return list(torch.autograd.grad(rows, (few, keys, values), seed.to(to)))

    (true,), (ruler,) = (rows_of(looked_at, to, None) for to in (F64, dtype))
    for i, query in enumerate(looked_at.tolist()):
        check(
            f"query {query}",
            *(x[:, :, i : i + 1] for x in (out.detach().cpu()[:, :, looked_at], true, ruler)),
        )
    true, ruler = (rows_of(sending, to, seed[:, :, sending]) for to in (F64, dtype))
    dq, dk, dv = (x.cpu() for x in grads)
    assert not dq[:, :, : S // 3].any()
    for i, query in enumerate(sending.tolist()):
        check(
            f"dq of {query}", *(x[:, :, i : i + 1] for x in (dq[:, :, sending], true[0], ruler[0]))
        )
    check("dk", dk, true[1], ruler[1])
    check("dv", dv, true[2], ruler[2])

    x = (q[:, :, looked_at].double() @ k.double().mT * D**-0.5).detach()
    x = x.masked_fill(torch.arange(S) > looked_at.unsqueeze(1), float("-inf"))
    lse = x.logsumexp(-1)
    weights = (x - lse.unsqueeze(-1)).exp()
    entropy = torch.special.entr(weights).sum(-1)
    for name, numbers in (("lse", lse), ("entropy", entropy)):
        torch.testing.assert_close(
            getattr(seen, name).cpu()[:, :, looked_at].double(), numbers, rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(
        seen.topk.weights.cpu()[:, :, looked_at].double(), weights.topk(2).values,
        rtol=1e-3, atol=1e-6,
    )  # fmt: skip
    assert float(seen.received.sum(dtype=F64)) == pytest.approx(S, rel=1e-4)
    assert float(seen.pooled.sum(-1).mean()) == pytest.approx(1, rel=1e-4)


def reset_memory(device: torch.device) -> int:
    """Return the bytes in use on a GPU, and reset the maximum that `peak_memory` returns."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_memory(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.max_memory_allocated(device)


def check_one_graph(
    engine: str, device: torch.device, shape: Shape, D: int, dtype: torch.dtype, backend: str
) -> None:
    """With torch.compile as one graph, output and gradients are those of eager calls."""
    there = moved(draw_call(shape, D, dtype, "holes"), device, dtype)
    skip_where_declined(engine, there)

    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ch.attention(q * 2, k, v, engine=engine, mask=HOLES).relu()

    compiled = torch.compile(answer, fullgraph=True, backend=backend)
    got, true = (
        (out, *torch.autograd.grad(out.float().sum(), there.learning))
        for out in (f(*there.tensors) for f in (compiled, answer))
    )
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a, b)


# --------------------------------------------------------------------------------------- on a GPU


def marks(shape: Shape, D: int, dtype: torch.dtype, rule: str) -> list[pytest.MarkDecorator]:
    """Select the combinations. Every head size with one rule, and every rule with one head size,
    are not slow. The 32 that run first have every rule with D = 64, and causal attention with the
    head sizes and dtypes of models."""
    every_rule = D == 64 and dtype == BF16 and shape.Tq > 1
    causal = rule == "causal" and D in (64, 128) and dtype != F16
    first = [pytest.mark.first] if every_rule or causal else []
    return first if rule == "causal" or D == 80 or first else [pytest.mark.slow]


# If they are skipped, only one runs.
CELLS = [
    pytest.param(
        shape, D, dtype, rule,
        id=f"{shape.Tq}x{shape.Tk}-{D}-{str(dtype).removeprefix('torch.')}-{rule}",
        marks=marks(shape, D, dtype, rule),
    )
    for shape in SHAPES for D in SIZES for dtype in (BF16, F16, F32) for rule in RULES
][: 1 if SKIPPED else None]  # fmt: skip


@on_gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape, D, dtype, rule", CELLS)
def test_output_and_gradients_are_as_exact_as_torchs(engine, shape, D, dtype, rule):
    check_answers(engine, GPU, shape, D, dtype, rule)


@on_gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape, D, dtype, rule", CELLS)
def test_statistics_are_those_of_dense_weights(engine, shape, D, dtype, rule):
    check_statistics(engine, GPU, shape, D, dtype, rule)


@on_gpu
@pytest.mark.first
@pytest.mark.parametrize("shape, D, dtype, rule", [
    (SHAPES[0], 64, BF16, "causal"), (SHAPES[0], 64, BF16, "all"), (SHAPES[0], 128, BF16, "causal"),
    (SHAPES[0], 64, F32, "holes"), (SHAPES[1], 64, BF16, "causal"), (SHAPES[2], 64, F16, "bits"),
])  # fmt: skip
def test_statistics_by_numbers_are_those_of_dense_weights(shape, D, dtype, rule):
    check_weighted("triton", GPU, shape, D, dtype, rule)


@on_gpu
@pytest.mark.parametrize("engine", ENGINES)
def test_a_long_sequence_takes_memory_of_its_length(engine):
    check_long(engine, GPU, 131072, 64, BF16)


@on_gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("engine", ["triton", "fused", "sdpa"])
def test_one_graph_without_breaks(engine, dtype):
    check_one_graph(engine, GPU, SHAPES[0], 128, dtype, "inductor")


@on_gpu
@pytest.mark.first
@pytest.mark.parametrize("engine, rule", [
    ("triton", "everything"), ("triton", "causal"), ("triton", "holes"), ("fused", "causal"),
])  # fmt: skip
def test_a_cuda_graph_replays_output_and_gradients(engine, rule):
    call = moved(draw_call(SHAPES[0], 128, BF16, rule), GPU, BF16)
    seed = torch.randn_like(call.tensors[0])

    def step() -> tuple[Tensor, ...]:
        out = by(engine)(*call.tensors, **call.keywords)
        return out, *torch.autograd.grad(out, call.learning, seed)

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # autograd's first work must be outside the graph
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    with torch.no_grad():
        for x in call.tensors:
            x.copy_(x.flip(-1) * 0.5)
    graph.replay()
    for a, b in zip(replayed, step(), strict=True):
        assert torch.equal(a, b) and a.any()


# ------------------------------------------------------------------------ the same checks on a CPU

HERE = ["tiled", *(["triton"] if INTERPRETED else [])]
SMALL = Shape(70, 83, 4, 2)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", HERE)
def test_the_checks_of_answers_run_here(engine, rule, dtype):
    check_answers(engine, CPU, SMALL, 20, dtype, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", HERE)
def test_the_checks_of_statistics_run_here(engine, rule):
    check_statistics(engine, CPU, SMALL, 20, F16, rule)


@pytest.mark.parametrize("rule", ["causal", "all"])
@pytest.mark.parametrize("engine", HERE)
def test_the_checks_of_statistics_by_numbers_run_here(engine, rule):
    check_weighted(engine, CPU, SMALL, 20, F16, rule)


@pytest.mark.parametrize("engine", HERE)
def test_the_checks_of_a_long_sequence_run_here(engine):
    check_long(engine, CPU, 300, 20, F16)


@pytest.mark.outside
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("engine", HERE)
def test_the_check_of_one_graph_runs_here(engine):
    check_one_graph(engine, CPU, SMALL, 20, F16, "aot_eager")
