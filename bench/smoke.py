"""Check in a minute whether the engines for a GPU start, and compute right numbers:

    python -m bench.smoke [WORD ...]

It compares output, gradients, statistics, a step of decoding and a replayed CUDA graph with float64
on the CPU, prints the error of each, and exits with 1 if one is wrong. With words, it does so for
the checks whose names have one of them. Nothing is imported from the tests. Without a GPU,
TRITON_INTERPRET=1 runs all but the graph, with small sizes.
"""

import os
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

import clearhead as ch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
S, D, DTYPE = (43, 16, torch.float32) if INTERPRETED else (517, 64, torch.bfloat16)
HOLES = ch.window(before=20, after=0, align="end") | ch.prefix(4)
MASKS = {"plain": ch.everything, "causal": ch.causal, "holes": HOLES}


def draw(Tq: int, Tk: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2, 4, T, D, generator=source).to(DTYPE) for T in (Tq, Tk, Tk))


def moved(tensors: tuple[Tensor, ...], exact: bool) -> tuple[Tensor, ...]:
    """Copy tensors to the GPU, or to float64 on the CPU; they require gradients."""
    to = ("cpu", torch.float64) if exact else (DEVICE, DTYPE)
    return tuple(x.detach().to(*to, copy=True).requires_grad_() for x in tensors)


def step(tensors: tuple[Tensor, ...], seed: Tensor, engine: str, mask: ch.Mask) -> list[Tensor]:
    out = ch.attention(*tensors, mask=mask, engine=engine)
    return [out, *torch.autograd.grad(out, tensors, seed.to(out))]


def training(engine: str, mask: ch.Mask, masked_nan: bool) -> float:
    """Return the largest error of the output and the gradients of a training step.

    With `masked_nan` the last key and value are NaN, and so are the results of the last query.
    """
    q, k, v = draw(S, S)
    if masked_nan:
        k[:, :, -1], v[:, :, -1] = float("nan"), float("nan")
    last = slice(0, S - 1 if masked_nan else S)
    seed = torch.randn(q.shape, generator=torch.Generator().manual_seed(8)).to(DTYPE)
    if masked_nan:
        seed[:, :, -1] = 0
    found = step(moved((q, k, v), False), seed, engine, mask)
    true = step(moved((q, k, v), True), seed, "steps", mask)
    parts = 2 if masked_nan else 4  # keys' gradients are NaN too
    return max(
        error(x[:, :, last], y[:, :, last]) for x, y in list(zip(found, true, strict=True))[:parts]
    )


def looking(engine: str, mask: ch.Mask) -> float:
    """Return the largest error of statistics; the output must have the bits of `attention`."""
    tensors = draw(S, S)
    wanted = ["lse", "max", "entropy", "received"]
    with torch.no_grad():
        there, exact = moved(tensors, False), moved(tensors, True)
        seen = ch.look(*there, mask=mask, stats=wanted, engine=engine)
        assert torch.equal(seen.out, ch.attention(*there, mask=mask, engine=engine))
        true = ch.look(*exact, mask=mask, stats=wanted, engine="steps")
    return max(error(getattr(seen, name), getattr(true, name)) for name in wanted)


def weighing(engine: str, mask: ch.Mask, queries: int) -> float:
    """Return the largest error of statistics by a number for every key of every head, and of groups
    by id and by distance, of the last queries."""
    q, k, v = draw(S, S)
    source = torch.Generator().manual_seed(9)
    numbers, ids = torch.rand(2, 4, S, generator=source), torch.arange(S) % 7
    groups = {
        "first": ch.prefix(1), "near": ch.window(before=9, after=0, align="end"),
        "same": ch.documents(ids, queries=ids[-queries:]),
    }  # fmt: skip
    wanted = [
        ch.mass(groups), ch.weighted(numbers - 0.5, groups), ch.topk(4, by=numbers),
        ch.received(by=numbers), ch.pooled(3, 5, by=numbers),
    ]  # fmt: skip
    with torch.no_grad():
        there, exact = (moved((q[:, :, -queries:], k, v), x) for x in (False, True))
        seen = ch.look(*there, mask=mask, stats=wanted, engine=engine)
        assert torch.equal(seen.out, ch.attention(*there, mask=mask, engine=engine))
        true = ch.look(*exact, mask=mask, stats=wanted, engine="steps")
    pairs = [(seen.received, true.received), (seen.pooled, true.pooled)]
    pairs += [(seen.topk.weights, true.topk.weights)]
    for name in groups:
        pairs += [(seen.mass[name], true.mass[name]), (seen.weighted[name], true.weighted[name])]
    return max(error(x, y) for x, y in pairs)


def decoding(engine: str) -> float:
    tensors = draw(1, 3 * S)
    mask = ch.Causal(align="end")
    with torch.no_grad():
        there, exact = moved(tensors, False), moved(tensors, True)
        out = ch.attention(*there, mask=mask, engine=engine)
        return error(out, ch.attention(*exact, mask=mask, engine="steps"))


def replayed(engine: str, mask: ch.Mask) -> float:
    """Return the error of a captured training step that is replayed with other numbers."""
    tensors = moved(draw(S, S), False)
    seed = torch.randn(tensors[0].shape, device=DEVICE, dtype=DTYPE)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # autograd's first work must be outside the graph
        for _ in range(3):
            step(tensors, seed, engine, mask)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tensors, seed, engine, mask)
    with torch.no_grad():
        for x in tensors:
            x.copy_(x.flip(-1) * 0.5)
    graph.replay()
    true = step(moved(tensors, True), seed.cpu(), "steps", mask)
    return max(error(x, y) for x, y in zip(captured, true, strict=True))


def error(x: Tensor, true: Tensor) -> float:
    """Return the largest error as a fraction of the largest number; infinite if there is NaN."""
    x, true = x.detach().cpu().double(), true.detach()
    fraction = float((x - true).abs().max() / true.abs().max())
    return fraction if fraction == fraction else float("inf")


def main() -> int:
    checks: dict[str, Callable[[], float]] = {}
    for engine in ("triton", "fused"):
        masks = {n: m for n, m in MASKS.items() if engine == "triton" or n != "holes"}
        for name, mask in masks.items():
            checks[f"{engine} training {name}"] = lambda e=engine, m=mask: training(e, m, False)
        checks[f"{engine} masked NaN"] = lambda e=engine: training(e, ch.causal, True)
        checks[f"{engine} look"] = lambda e=engine: looking(e, ch.causal)
        for queries in (S, 1):
            checks[f"{engine} look by numbers, {queries}"] = lambda e=engine, n=queries: weighing(
                e, ch.Causal(align="end"), n
            )
        checks[f"{engine} decoding"] = lambda e=engine: decoding(e)
        if not INTERPRETED:
            checks[f"{engine} graph"] = lambda e=engine: replayed(e, ch.causal)
    if words := sys.argv[1:]:
        checks = {n: check for n, check in checks.items() if any(word in n for word in words)}
    wrong = 0
    for name, check in checks.items():
        begin = perf_counter()
        try:
            found, reason = check(), ""
        except Exception as failure:  # the next check may pass
            found, reason = float("inf"), f"  {type(failure).__name__}: {failure}"
        right = found <= 8 * max(torch.finfo(DTYPE).eps, 1e-6)
        wrong += not right
        seconds = perf_counter() - begin
        print(f"{'right' if right else 'WRONG':6} {name:28} {found:8.1e} {seconds:5.1f} s{reason}")
    print("all right" if not wrong else f"{wrong} of {len(checks)} are wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; TRITON_INTERPRET=1 runs the checks on a CPU.")
    sys.exit(main())
