"""Compile the Triton kernels for a GPU that is not there, down to its machine code: python
compile_kernels.py CAPABILITY (80, 86 or 90). The calls are the engine's own, on CPU tensors; its
launch is replaced by its `warmup`. Fails if one does not compile, or wants more shared memory than
the GPU has; prints the registers and the stack of each.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import clearhead as ch
from clearhead import stats
from clearhead.engines.triton.arguments import args_of
from clearhead.engines.triton.launch import attend
from clearhead.engines.triton.operator import FOR_GRADIENTS
from clearhead.engines.triton.statistics import answer_and_stats
from clearhead.problem.check import Options, make_problem
from clearhead.stats import parse_stats

CAPABILITY = int(sys.argv[1])
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}[CAPABILITY]  # bytes a program may take


class Absent:
    """A driver for a device that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


launch = JITFunction.run
compiled: set[str] = set()


def compile_only(self, *args, grid, warmup, **keywords):
    kernel = launch(self, *args, grid=grid, warmup=True, **keywords)
    assert kernel.metadata.shared <= SHARED, (self.__name__, kernel.metadata.shared)
    compiled.add(self.__name__)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers = next(line for line in used.splitlines() if "REG" in line).split()[:2]
    print(f"{self.__name__:18} {kernel.metadata.shared:7} B shared,", *registers, flush=True)


def problem_of(dtype, Tq, Tk, D, H=8, G=8, **keywords):
    q, k = (torch.zeros(1, heads, T, D, dtype=dtype) for heads, T in ((H, Tq), (G, Tk)))
    return make_problem(q, k, k, Options(**keywords))


def forward_and_back(dtype, Tq, Tk, D, atomic=False, **keywords):
    print(str(dtype).removeprefix("torch."), f"Tq={Tq} Tk={Tk} D={D}", *keywords)
    problem, inputs = problem_of(dtype, Tq, Tk, D, **keywords)
    rule = args_of(problem)
    out, found, _ = attend(*inputs, rule, FOR_GRADIENTS)
    arguments = out, found["lse"], out, found["lse"], found["max"][0], found["share"]
    torch.ops.clearhead.triton_attend_backward(
        *arguments, *inputs, *rule, atomic, isinstance(rule.bias, torch.Tensor)
    )


def count(dtype, Tq, Tk, D, **keywords):
    print("statistics")
    problem, inputs = problem_of(dtype, Tq, Tk, D, **keywords)
    asked = ["entropy", stats.topk(8), stats.mass({"sink": ch.prefix(1)}), "received",
             stats.map(8, 8), stats.rows([0])]  # fmt: skip
    answer_and_stats(problem, inputs, parse_stats(asked, problem.grid), True)


if __name__ == "__main__":
    driver.set_active(Absent())
    JITFunction.run = compile_only
    full = sys.argv[2:] == ["all"]
    ranges = ch.window(before=99, after=0) | ch.prefix(4)
    forward_and_back(torch.bfloat16, 512, 512, 128, mask=ch.causal)
    forward_and_back(torch.bfloat16, 512, 512, 128, atomic=True, mask=ch.causal)
    forward_and_back(
        torch.bfloat16, 512, 512, 64, mask=ranges, softcap=30.0, dropout=0.1, seed=1,
        bias=torch.zeros(512, 512), sinks=torch.zeros(8),
    )  # fmt: skip
    attend(
        *(x := problem_of(torch.float16, 1, 4096, 128, H=32, G=8))[1], args_of(x[0]), frozenset()
    )
    count(torch.bfloat16, 512, 512, 64, mask=ch.causal)
    if full:
        for dtype in (torch.bfloat16, torch.float32):
            for D in (64, 128, 256):
                for atomic in (False, True):
                    forward_and_back(dtype, 512, 512, D, atomic, mask=ch.causal)
        count(torch.float32, 512, 512, 128, mask=ranges)
    missing = {"attend_tiles", "merge_splits", "row_products", "query_gradients", "key_gradients",
               "bias_gradients", "sum_weights", "exact_rows"} - compiled  # fmt: skip
    assert not missing, missing
