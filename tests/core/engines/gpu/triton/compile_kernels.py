"""Compile the Triton kernels to machine code of a GPU, without the GPU:

    python compile_kernels.py CAPABILITY [first | few | all]

CAPABILITY is 80, 86, 89, 90, 100 or 120. `first` compiles a decoding step; `few`, the default,
every kernel; `all` every head size, dtype and variant. The engine's own calls run on CPU tensors;
Triton's `warmup` replaces the launch. The script fails if a kernel does not compile, or needs more
shared memory than the GPU has. It prints for each kernel its registers and stack, and for each
innermost loop that multiplies tiles: all instructions, reads and writes of spilled registers
(local), and loads that fill a pipeline (async). It also fails if the first call of a kernel takes
more registers or stack than its limit, or has such a loop that spills, or has no pipeline. For
capabilities without limits, this is only required of the shortest loop, over tiles without a mask.

Another Triton is tested by its folder in front: PYTHONPATH=FOLDER:src python compile_kernels.py 90.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import clearhead as ch
from clearhead import stats
from clearhead.core.engines.gpu.triton import launch_backward, launch_forward
from clearhead.core.engines.gpu.triton.arguments import args_of
from clearhead.core.engines.gpu.triton.launch_forward import attend
from clearhead.core.engines.gpu.triton.operator import FOR_GRADIENTS
from clearhead.core.engines.gpu.triton.repair import repair_gradients, repair_output
from clearhead.core.engines.gpu.triton.statistics import accumulated, finished
from clearhead.core.masks.key_group import duplicate_keys
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.stats import parse_stats

CAPABILITY = int(sys.argv[1])
# KB that a block may have (CUDA programming guide, technical specifications by capability).
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[CAPABILITY] * 1024
BF16, FP32 = torch.bfloat16, torch.float32


class Absent:
    """A driver for a device that this machine does not have."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


run = JITFunction.run
compiled: set[str] = set()
too_large: list[str] = []
beyond_limits: list[str] = []
PRODUCTS = "HMMA", "HGMMA", "UTCHMMA", "IMMA", "FFMA"  # FFMA only with `FMA_LOOP` of them
FMA_LOOP = 256


class Limit(NamedTuple):
    """The most registers of a thread, and bytes of its stack."""

    registers: int
    stack: int


# Causal, bf16, D = 128 (sums of weights: D = 64), for Triton 3.6 and 3.7.
CAUSAL = {
    80: {
        "attend_tiles": Limit(255, 0), "query_gradients": Limit(255, 32),
        "key_gradients": Limit(255, 0), "sum_weights": Limit(255, 0),
    },
    90: {
        "attend_tiles": Limit(224, 0), "query_gradients": Limit(248, 0),
        "key_gradients": Limit(255, 16), "sum_weights": Limit(255, 0),
    },
}  # fmt: skip
DESCRIBED = {  # the same if tiles are copied by descriptors, at 9.0
    "attend_tiles": Limit(176, 0), "query_gradients": Limit(208, 0),
    "key_gradients": Limit(255, 0),
}  # fmt: skip
# The limit of the next call of each kernel, which then leaves the table.
limits: dict[str, Limit] = {}


class Loop(NamedTuple):
    """An innermost loop that multiplies tiles, in instructions."""

    all: int
    products: int
    local: int
    pipelined: int

    def __str__(self) -> str:
        return f"{self.all}:{self.products} products, {self.local} local, {self.pipelined} async"


def loops_of(code: str) -> list[Loop]:
    """Find the innermost loops that multiply in a listing of machine code: between a branch to an
    earlier address, and that address."""
    code = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(.*)$", code, re.M)
    lines = [(int(at, 16), name, rest) for at, name, rest in code]
    spans = []
    for at, name, rest in lines:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    found = []
    for first, last in spans:
        if any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans):
            continue
        names = [name.partition(".")[0] for at, name, _ in lines if first <= at <= last]
        products = sum(name in PRODUCTS[:-1] for name in names)
        fused = names.count("FFMA")
        if products or fused >= FMA_LOOP:
            local = names.count("LDL") + names.count("STL")
            pipelined = names.count("LDGSTS") + names.count("UTMALDG")
            found.append(Loop(len(names), products or fused, local, pipelined))
    return found


def compile_only(self, *args, grid, warmup, **keywords):
    kernel = run(self, *args, grid=grid, warmup=True, **keywords)
    compiled.add(self.__name__)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{x}:(\d+)", used)[1]) for x in ("REG", "STACK"))
    line = f"{self.__name__:18} {kernel.metadata.shared:7} B shared,"
    print(line, f"{registers} registers, {stack} B stack", flush=True)
    loops = loops_of(code)
    for loop in loops:
        print("    loop", loop)
    if limit := limits.pop(self.__name__, None):
        compared = loops if CAPABILITY in CAUSAL else [min(loops)]
        slow = [loop for loop in compared if loop.local or not loop.pipelined]
        if registers > limit.registers or stack > limit.stack or slow or not loops:
            beyond_limits.append(f"{line} {registers} registers, {stack} B stack, {slow}; {limit}")
    if kernel.metadata.shared > SHARED:
        too_large.append(f"{line} {keywords}")


def problem_of(dtype, Tq, Tk, D, H=8, G=8, **keywords):
    q, k = (torch.zeros(1, heads, T, D, dtype=dtype) for heads, T in ((H, Tq), (G, Tk)))
    return make_problem(q, k, k, Options(**keywords))


def forward_and_back(dtype, Tq, Tk, D, **keywords):
    print(str(dtype).removeprefix("torch."), f"Tq={Tq} Tk={Tk} D={D}", *keywords)
    problem, inputs = problem_of(dtype, Tq, Tk, D, **keywords)
    rule = args_of(problem)
    out, sums = torch.zeros(1, 8, Tq, D, dtype=dtype), torch.zeros(1, 8, Tq)
    attend(*inputs, rule, FOR_GRADIENTS)
    torch.ops.clearhead.triton_attend_backward(
        out, sums, out, sums, sums, sums, *inputs, *rule,
        isinstance(rule.bias, torch.Tensor),
    )  # fmt: skip


def with_descriptors(dtype, D):
    print("descriptors")
    modules, real = (launch_forward, launch_backward), launch_forward.tile_from
    for module in modules:
        module.tile_from = lambda *args: real(*args)._replace(copied=True)
    launch_forward.forward_tiles.cache_clear()
    forward_and_back(dtype, 512, 512, D, mask=ch.causal)
    launch_forward.forward_tiles.cache_clear()
    for module in modules:
        module.tile_from = real


def repaired(dtype, Tq, D):
    print("repair", str(dtype).removeprefix("torch."), f"Tq={Tq} D={D}")
    problem, (q, k, v) = problem_of(dtype, Tq, Tq, D, mask=ch.causal)
    rule, lse = args_of(problem), torch.zeros(1, 8, Tq)
    flag = repair_output(q, k, v, rule, torch.zeros_like(q), lse)
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    repair_gradients(q, q, lse, flag, q, k, v, rule, grads)


def with_splits(dtype, D, Tq=1, **keywords):
    print("splits", str(dtype).removeprefix("torch."), f"Tq={Tq} D={D}", *keywords)
    problem, inputs = problem_of(dtype, Tq, 8192, D, H=32, G=8, **keywords)
    attend(*inputs, args_of(problem), frozenset())


def count(dtype, Tq, Tk, D, n=8, **keywords):
    print("statistics", str(dtype).removeprefix("torch."), f"D={D}", *keywords)
    problem, inputs = problem_of(dtype, Tq, Tk, D, **keywords)
    asked = ["entropy", stats.topk(n), stats.mass({"sink": ch.prefix(1)}), "received",
             stats.pooled(8, 8), stats.exact_rows([0])]  # fmt: skip
    finished(problem, inputs, parse_stats(asked, problem.grid), True)


def count_by_numbers(dtype, T, D, **keywords):
    print("statistics by numbers and ids", str(dtype).removeprefix("torch."), f"D={D}", *keywords)
    problem, inputs = problem_of(dtype, T, T, D, **keywords)
    n, ids = torch.ones(T), torch.zeros(T, dtype=torch.long)
    groups = {
        "sink": ch.prefix(1), "near": ch.window(before=40, after=0),
        "duplicate": duplicate_keys(ids),
    }  # fmt: skip
    asked = ["entropy", stats.mass(groups), stats.value_weighted(groups, by=n), stats.topk(2, by=n),
             stats.pooled(8, 8, by=n)]  # fmt: skip
    accumulated(problem, inputs, parse_stats(asked, problem.grid))


if __name__ == "__main__":
    driver.set_active(Absent())
    JITFunction.run = compile_only
    launch_forward.shared_memory = lambda device: SHARED
    ranges = ch.window(before=99, after=0) | ch.prefix(4)
    everything = dict(
        mask=ranges, softcap=30.0, dropout=0.1, seed=1, bias=torch.zeros(512, 512),
        sinks=torch.zeros(8),
    )  # fmt: skip
    which = sys.argv[2] if sys.argv[2:] else "few"
    if which != "first":
        limits |= CAUSAL.get(CAPABILITY, dict.fromkeys(CAUSAL[90], Limit(255, 2**20)))
        forward_and_back(BF16, 512, 512, 128, mask=ch.causal)
        if CAPABILITY == 90:
            limits |= DESCRIBED
            with_descriptors(BF16, 128)
            limits["key_gradients"] = Limit(255, 8)
            forward_and_back(BF16, 512, 512, 64, mask=ch.causal)
        forward_and_back(BF16, 512, 512, 64, **everything)
        repaired(BF16, 512, 64)
    with_splits(torch.float16, 128)
    if which != "first":
        with_splits(BF16, 128, Tq=128, mask=ch.Causal(align="end"))
        if CAPABILITY == 90:  # on 10.0 statistics spill
            limits["attend_tiles"] = Limit(255, 0)
        count(BF16, 512, 512, 64, mask=ch.causal)
        count_by_numbers(BF16, 512, 64, mask=ch.causal)
    if which == "all":
        for dtype in (BF16, FP32):
            for D in (64, 128, 256):
                # In float32 this needs less memory than `everything`, and no matrix units.
                if dtype == BF16 or CAPABILITY < 100:
                    forward_and_back(dtype, 512, 512, D, mask=ch.causal)
                forward_and_back(dtype, 512, 512, D, **everything)
                with_splits(dtype, D, bias=torch.zeros(8192))
                with_splits(dtype, D, Tq=128)
            forward_and_back(dtype, 17, 512, 128, mask=ch.Causal(align="end"))
            count(dtype, 512, 512, 256, mask=ranges)
        count(BF16, 512, 512, 128, n=64, mask=ch.causal)
        count_by_numbers(FP32, 512, 256, mask=ranges)
        torch.set_float32_matmul_precision("high")
        forward_and_back(FP32, 512, 512, 256, mask=ch.causal)
    expected = {"attend_tiles", "merge_splits"}
    if which != "first":
        expected |= {"row_products", "query_gradients", "key_gradients", "bias_gradients",
                     "sum_weights", "store_exact_rows", "pool_parts", "raise_flag"}  # fmt: skip
    missing = expected - compiled
    assert not missing, missing
    assert not beyond_limits, "\n".join(beyond_limits)
    assert not too_large, f"more than {SHARED} bytes:\n" + "\n".join(too_large)
