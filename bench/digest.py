"""Print digests of the outputs, gradients and statistics of every engine, bit for bit.

    python -m bench.digest            # a line for each engine, instruction set and dtype
    python -m bench.digest --triton   # also the Triton kernels, interpreted (minutes)

Two versions of the code that print the same lines compute the same bits on this machine. Run it
before and after a change that should not change numbers.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

import clearhead as ch
from clearhead.core.engines.cpu import extension
from tests.problems import PROBLEMS, Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATISTICS = (
    "lse", "max", "entropy", "effective", "received", ch.topk(2), ch.mass({"first": ch.prefix(1)}),
)  # fmt: skip


def tensors(case: Case, engine: str) -> Iterator[Tensor]:
    """Compute the results of one engine for a problem; none if it declines."""
    inputs = [x.clone().requires_grad_() for x in case.tensors]
    try:
        out = ch.attention(*inputs, **case.keywords, engine=engine)
    except ch.BadValue:
        return
    yield out.detach()
    if out.requires_grad and out.numel():
        yield from torch.autograd.grad(out.float().square().sum(), inputs, allow_unused=True)
    few = [x for x in STATISTICS if min(case.k.shape) > 1 or isinstance(x, str)]
    seen = ch.look(*case.tensors, **case.keywords, engine=engine, stats=few)
    yield seen.out
    for name in seen.names:
        result = getattr(seen, name)
        if isinstance(result, Tensor):
            yield result
        else:
            yield from result.values() if isinstance(result, dict) else result


def digest(engine: str, dtype: torch.dtype) -> tuple[str, int]:
    """Return the digest of an engine over all named problems, and how many it computed."""
    total, answered = hashlib.sha256(), 0
    for number, build in enumerate(PROBLEMS.values()):  # names may change, numbers may not
        results = [x for x in tensors(build(dtype, 0), engine) if x is not None]
        answered += bool(results)
        for x in results:
            total.update(f"{number} {tuple(x.shape)} {x.dtype}".encode())
            total.update(x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return total.hexdigest()[:16], answered


def print_digests(engine: str, label: str) -> None:
    for dtype in DTYPES:
        value, answered = digest(engine, dtype)
        if answered:
            print(f"{label:16} {str(dtype)[6:]:9} {answered:3} problems  {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triton", action="store_true", help="also the interpreted Triton kernels")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return print_digests("triton", "triton")
    for level in (name for name, _, present in extension.core.levels() if present):
        extension.use_level(level)
        print_digests("cpu", f"cpu {level}")
    extension.use_level()
    for engine in ("sdpa", "tiled", "steps"):
        print_digests(engine, engine)
    if arguments.triton:
        interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
        subprocess.run([sys.executable, "-m", "bench.digest"], env=interpreted, check=True)


if __name__ == "__main__":
    main()
