"""Time clearhead, torch's kernels by name and the device's ceilings on a GPU, in one run.

Times are those of the device between two events, for calls without a pause between them. They queue
up while the device is busy, so the host is not timed. Decoding reads copies of its keys and values
in turn, more than a cache holds, as a model with many layers does.

A ceiling is measured before and after each peer: products of large random matrices of the case's
dtype (products of constants would be faster), or, for decoding, a sum over more memory than the
caches hold. A peer is timed only if some rows of its output are right. Tests check the gradients.

With three rounds a group is meant to take at most five minutes, so FlexAttention, which compiles
for each case, runs only for masks with holes.
"""

import statistics
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.core.errors import BadValue
from clearhead.core.functional.attention import attention
from clearhead.core.functional.look import look
from clearhead.core.functional.plan import plan
from clearhead.core.masks import Causal, Everything, Grid, causal, documents, prefix, window
from clearhead.core.masks.key_ranges import UNLIMITED
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.stats import pooled, topk

from .cases import BF16, F32, Case, documents_of
from .timing import summary

DEVICE = torch.device("cuda")
SAMPLE_SECONDS, MOST_CALLS = 0.1, 200
CLOCK = 2e9  # cycles per second, at most
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 2.0  # seconds
ROWS = 16  # of each head, whose values are checked
BEYOND_CACHE = 2**28  # bytes, about twice the L2 cache of the largest GPUs
EDGE = 8192  # of the matrices whose product is the ceiling

HEADS: dict[str, Any] = dict(H=32, G=8, D=128, dtype=BF16)
GROUPS: dict[str, list[Case]] = {
    "prefill": [
        Case(f"bf16 D={D} {'causal ' if mask is causal else ''}S={S}", H=H, G=H, D=D, Tq=S, Tk=S,
             dtype=BF16, mask=mask)
        for D, H in ((64, 32), (128, 16))
        for S in (4096, 16384)
        for mask in (Everything(), causal)
    ] + [Case("fp32 causal S=4096", Tq=4096, Tk=4096, dtype=F32, mask=causal)],
    "long": [
        Case(f"bf16 D={D} causal S=65536", H=H, G=H, D=D, Tq=65536, Tk=65536, dtype=BF16,
             mask=causal)
        for D, H in ((64, 32), (128, 16))
    ],
    "masked": [
        Case("window 512 of 16384", Tq=16384, Tk=16384, mask=window(before=511, after=0), **HEADS),
        Case("window 512 and sink 4 of 16384", Tq=16384, Tk=16384,
             mask=causal & (window(before=511, after=0) | prefix(4)), **HEADS),
        Case("64 documents in 16384", Tq=16384, Tk=16384, mask=documents_of(), **HEADS),
    ],
    "decode": [
        Case(f"decode B={B} Tk={Tk}", B=B, Tq=1, Tk=Tk, **HEADS)
        for B, Tk in ((1, 4096), (1, 65536), (8, 4096))
    ],
    "training": [
        Case(f"training D={D} S={S} causal", H=H, G=H, D=D, Tq=S, Tk=S, dtype=BF16, mask=causal,
             training=True)
        for D, H in ((64, 32), (128, 16))
        for S in (4096, 16384)
    ],
    "look": [Case("look S=16384 causal", Tq=16384, Tk=16384, mask=causal, **HEADS)],
}  # fmt: skip
LOOKS: dict[str, list[Any]] = {
    "lse, max, entropy": ["lse", "max", "entropy"],
    "topk(8)": [topk(8)],
    "received, pooled(64, 64)": ["received", pooled(64, 64)],
}
Run = Callable[[], Any]


def measure_gpu(
    groups: Sequence[str] = (),
    *,
    rounds: int = 5,
    on_result: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Time clearhead, torch's kernels and the ceilings of the GPU in one run, interleaved.

    Args:
        groups: names in `GROUPS`; none means all.
        rounds: how often everything is timed; figures are medians.
        on_result: a function that is called with every result as soon as it is measured.

    Returns:
        {"about": ..., "results": [...]}, as `measure` does. "engine" in a result is the engine of
        "clearhead", and "declined" has the reasons of peers that are not timed.

    Raises:
        BadValue: an unknown group; there is no GPU; a peer left the GPU in an error.
    """
    for name in groups:
        if name not in GROUPS:
            raise BadValue(
                f"bench got the group {name!r} on a GPU.",
                f"there are {', '.join(repr(group) for group in GROUPS)}.",
                "name one of these, or none for every group.",
            )
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        raise BadValue(
            "bench got --gpu, and torch finds no CUDA device.",
            "with --gpu a CUDA device is timed.",
            "run bench on a machine with one, or without --gpu, which times the CPU.",
        )
    results = []
    for group in groups or GROUPS:
        for case in GROUPS[group]:
            result = {"group": group, **_one(case, rounds, group == "look")}
            results.append(result)
            on_result(result)
    return {"about": _about(), "results": results}


def _about() -> dict[str, str | None]:
    """Describe the device, and the versions of the software that uses it."""
    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": _triton(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _driver() -> str | None:
    """Return the version of the driver, if its program reports it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def _one(case: Case, rounds: int, looks: bool) -> dict[str, Any]:
    q, k, v = (x.detach().to(DEVICE).requires_grad_(case.training) for x in case.tensors())
    inputs = [(q, k, v)]
    if case.decode:
        inputs += [(q, k.clone(), v.clone()) for _ in range(BEYOND_CACHE // (2 * k.nbytes))]
    truth = _true_rows(case, q, k, v)
    runs: dict[str, Run] = {}
    declined = {}
    for name, make in (_looks() if looks else PEERS).items():
        if name == "torch flex" and not _has_holes(case):
            continue  # its compilation takes most of a group's time
        try:
            with torch.set_grad_enabled(case.training):
                run = _in_turn([make(case, *tensors) for tensors in inputs])
                _refuse_wrong(run(), *truth)
                if case.training:
                    run = _with_backward(run, inputs[0])
                    run()
            _wait()  # a kernel fails later than the call that launches it
            runs[name] = run
        except Exception as error:  # any error of a peer is its reason in the table
            declined[name] = _reason(error)
            _check_device(case, name, error)
    problem, _ = make_problem(q, k, v, Options(mask=case.mask))
    work = case.work(problem)
    ceiling = read_ceiling if case.decode else partial(product_ceiling, case.dtype)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shares: dict[str, list[float]] = {name: [] for name in runs}
    tops = []
    for _ in range(rounds):
        tops.append(ceiling())
        for name, run in list(runs.items()):
            try:
                with torch.set_grad_enabled(case.training):
                    seconds[name].append(seconds_per_call(run))
            except Exception as error:  # such as too little memory beside the others
                declined[name] = _reason(error)
                del runs[name], seconds[name], shares[name]
                _check_device(case, name, error)
                continue
            tops.append(ceiling())
            shares[name].append(work / seconds[name][-1] / statistics.mean(tops[-2:]))
    ours = seconds.get("clearhead")
    with torch.set_grad_enabled(case.training):
        engine = plan(q, k, v, mask=case.mask).engine
    figures = summary(case, work, tops, seconds, shares, ours)
    return figures | {"declined": declined, "engine": engine}


def _has_holes(case: Case) -> bool:
    return case.masked and not isinstance(case.mask, Causal)


def _in_turn(runs: list[Run]) -> Run:
    """Return a function that calls the next of `runs` each time."""
    turns = cycle(runs)
    return lambda: next(turns)()


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:80]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ------------------------------------------------------------------------------- values, the device


@torch.no_grad()
def _true_rows(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return some queries, and their outputs in float64, (B, H, queries, D).

    One head is computed at a time, so tensors have the size of its keys. The mask is evaluated pair
    by pair, instead of by its ranges.
    """
    queries = torch.linspace(0, case.Tq - 1, ROWS).long().unique()
    zero = torch.zeros((), dtype=torch.long)
    grid = Grid(case.Tq, case.Tk)
    keep = case.mask.allowed(grid, zero, zero, queries.unsqueeze(1), torch.arange(case.Tk))
    hidden, queries = ~keep.to(q.device), queries.to(q.device)

    def head(b: int, h: int) -> Tensor:
        g = h // (case.H // case.G)
        scores = q[b, h, queries].double() @ k[b, g].double().T * case.D**-0.5
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[b, g].double()

    rows = [torch.stack([head(b, h) for h in range(case.H)]) for b in range(case.B)]
    return queries, torch.stack(rows)


def _refuse_wrong(answer: Any, queries: Tensor, true: Tensor) -> None:
    """Raise if a row is farther from the float64 result than four roundings of its length.

    In fp32 the limit is 1e-4, because scores and sums round more than the output. Products in tf32
    exceed it.
    """
    out = answer if isinstance(answer, Tensor) else answer.out
    allowed = max(4 * torch.finfo(out.dtype).eps, 1e-4)
    errors = (out.detach()[:, :, queries].double() - true).norm(dim=-1) / true.norm(dim=-1)
    worst = float(errors.max())
    if not worst <= allowed:  # NaN is wrong, too
        raise ValueError(f"wrong: a row is off by {worst:.1e} of its length, {allowed:.1e} allowed")


def _wait() -> None:
    """Wait for the device, which then raises the errors of its kernels."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _check_device(case: Case, name: str, error: Exception) -> None:
    """Raise if a peer's error makes all later calls of this process fail, also those of others."""
    try:
        _wait()
    except Exception as lost:
        raise BadValue(
            f"{name!r} left the GPU in an error in the case {case.name!r}: {_reason(error)}.",
            "after such an error a process cannot use the GPU, so nothing else can be timed.",
            "name the other groups, or find the error with CUDA_LAUNCH_BLOCKING=1.",
        ) from lost


# ---------------------------------------------------------------------------------- clock, ceilings


def seconds_per_call(run: Run) -> float:
    """Measure the seconds of the device per call.

    If the calls do not fit in the queue of the device, fewer are timed. A call that waits for the
    device itself does not queue up, so its waits count.
    """
    for _ in range(2):
        run()
    host = max(min(_host_seconds(run) for _ in range(3)), 1e-6)
    once, queues = _between_events(run, 1, host)
    calls = min(int(SAMPLE_SECONDS / max(once, 1e-6)), int(LONGEST_PAUSE / (2 * host)), MOST_CALLS)
    calls = max(calls, 1)
    while True:
        seconds, queued = _between_events(run, calls, host)
        if queued or not queues or calls == 1:
            return seconds
        calls //= 2


def _host_seconds(run: Run) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def _between_events(run: Run, calls: int, host: float) -> tuple[float, bool]:
    """Measure the seconds per call, and whether all calls were queued before the first began.

    The device first pauses for twice the time that the host needs to queue them, `host` for each.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    pause = min(max(2 * calls * host, SHORTEST_PAUSE), LONGEST_PAUSE)
    torch.cuda._sleep(round(pause * CLOCK))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    queued = not start.query()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / calls, queued


def product_ceiling(dtype: torch.dtype) -> float:
    """Measure the operations per second of torch's product of large matrices."""
    a, b = _matrices(dtype)
    return 2 * EDGE**3 / seconds_per_call(lambda: a @ b)


def read_ceiling() -> float:
    """Measure the bytes per second of torch's sum over 16 times EDGE^2 bytes."""
    memory = _memory()
    return memory.numel() * 4 / seconds_per_call(memory.sum)


@cache
def _matrices(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(2, EDGE, EDGE, dtype=dtype, device=DEVICE).unbind()


@cache
def _memory() -> Tensor:
    return torch.randn(EDGE * 4, EDGE, device=DEVICE)


# ------------------------------------------------------------------------------------------- peers


def _ours(case: Case, q: Tensor, k: Tensor, v: Tensor, engine: str) -> Run:
    return lambda: attention(q, k, v, mask=case.mask, engine=engine)


def _sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Run:
    rule: dict[str, Any] = {"enable_gqa": case.G != case.H}
    if isinstance(case.mask, Causal):
        rule["is_causal"] = True
    elif case.masked:
        rule["attn_mask"] = case.mask.to_bool(case.Tq, case.Tk, device=q.device)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **rule)

    return run


def _flex(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    from torch.nn.attention.flex_attention import flex_attention

    # FlexAttention reads the mask on the device.
    mask = documents(case.mask.ids.to(q.device)) if isinstance(case.mask, documents) else case.mask  # type: ignore[union-attr]  # a tensor by then
    block = mask.to_block_mask(case.Tq, case.Tk, device=q.device) if case.masked else None
    torch._dynamo.reset()  # after eight shapes it would stop compiling
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=block, enable_gqa=case.G != case.H)


def _flash_attn(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]  # optional

    if (band := case.mask.band(Grid(case.Tq, case.Tk))) is None:
        raise ValueError("it knows full, causal and window masks")
    sides = tuple(-1 if side == UNLIMITED else side for side in band)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: flash_attn_func(q, k, v, window_size=sides).transpose(1, 2)


PEERS: dict[str, Callable[..., Run]] = {
    "clearhead": partial(_ours, engine="auto"),
    "clearhead triton": partial(_ours, engine="triton"),
    "sdpa flash": partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa cudnn": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa efficient": partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "torch flex": _flex,
    "flash-attn": _flash_attn,
}


def _looks() -> dict[str, Callable[..., Run]]:
    """Return peers for the output alone, and together with some statistics."""

    def with_statistics(stats: list[Any], case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
        return lambda: look(q, k, v, mask=case.mask, stats=stats)

    looks = {f"look {name}": partial(with_statistics, stats) for name, stats in LOOKS.items()}
    return {"clearhead": PEERS["clearhead"], **looks}


def _with_backward(run: Run, tensors: tuple[Tensor, ...]) -> Run:
    grad = torch.randn_like(run())
    return lambda: torch.autograd.grad(run(), tensors, grad)
