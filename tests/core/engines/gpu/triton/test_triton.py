"""The Triton kernels on a machine without a GPU: interpreted on the CPU, and compiled for GPUs.

They are interpreted in a separate process, because Triton reads TRITON_INTERPRET at import.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import clearhead as ch
from clearhead.core import engines
from clearhead.core.engines import choice
from clearhead.core.engines.choice import FUSED, SDPA, TILED, TRITON, order_on
from clearhead.core.engines.gpu.triton import Triton
from clearhead.core.engines.sdpa_backends import Gpu, backends_decline
from clearhead.core.problem.check import Options, make_problem

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[5]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or INTERPRETED,
    reason="triton is not installed" if not INTERPRETED else "this is the interpreted run",
)
ALL = "tests/core/engines/test_engines.py"
# The interpreter multiplies by numpy. With OpenBLAS's kernels for AVX2, A B^T and (B A^T)^T differ
# in their last bits, so dK and dV, from transposed tiles, have other weights than forward.
SAME_BOTH_WAYS = {"OPENBLAS_CORETYPE": "Nehalem"} if platform.machine() == "x86_64" else {}
ON_EVERY_CORE = "--numprocesses=logical", "--maxprocesses=8"
OTHERS = "tests/core/engines/gpu/test_fused.py", "tests/core/engines/gpu/test_replay.py"
EXACT = f"{ALL}::test_engine_is_as_exact_as_torch"


def python(*arguments: str, interpret: bool, **variables: str) -> None:
    """Run Python in a separate process, and show its output if it fails."""
    interpreter = {"TRITON_INTERPRET": "1" if interpret else "0"}
    environment = {**os.environ, **interpreter, **SAME_BOTH_WAYS, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def interpret(*arguments: str) -> None:
    """Run tests with the kernels interpreted; slow tests too, because `-k` chooses among all."""
    pytest = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"
    python(*pytest, *arguments, interpret=True)


@needs_triton
@pytest.mark.timeout(300)
def test_as_exact_as_torch_and_the_repair_interpreted():
    """A few problems that together use every feature, and some repairs and replays, in one process;
    the slow tests run all."""
    wide = "float32 and (scattered or grouped or prefix or (no and batch) or dropout)"
    few = f"triton and (({wide}) or (once and (float32 or bfloat16)))"
    repeated = "test_replay and not (sums or sweeps or both or spans)"
    others = f"(test_fused and not (queries or values or dout)) or ({repeated})"
    interpret(EXACT, *OTHERS, "-k", f"({few}) or {others}")


@pytest.mark.slow
@needs_triton
@pytest.mark.timeout(3000)
def test_the_tests_of_all_engines_interpreted():
    interpret(ALL, "tests/core/engines/test_nan.py", "-k", "triton or fused", *ON_EVERY_CORE)


@pytest.mark.slow
@needs_triton
@pytest.mark.timeout(3000)
def test_kernels_interpreted():
    interpret("tests/core/engines/gpu/triton/test_kernels.py", *OTHERS, *ON_EVERY_CORE)


@pytest.mark.slow
@needs_triton
@pytest.mark.timeout(300)
def test_the_first_checks_of_a_gpu_pass_interpreted():
    python("-W", "ignore", "-m", "bench.smoke", interpret=True)


COMPILE = str(Path(__file__).parent / "compile_kernels.py")

COMPILED = ("80", "first"), ("90", "few"), ("100", "first")
SLOW = [pytest.param(*x, marks=pytest.mark.slow) for x in COMPILED]


@needs_triton
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability, which", [("90", "first"), *SLOW])
def test_kernels_compile_for_a_gpu(capability, which):
    """Every kernel once, and a step of decoding for two other kinds of matrix units. Who changes a
    kernel compiles all for each (CONTRIBUTING)."""
    python(COMPILE, capability, which, interpret=False)


@needs_triton
def test_tiles_fit_into_the_memory_of_a_block(monkeypatch):
    """A GPU with 99 KB gets the smaller tiles; no tile has fewer rows than the matrix units
    need."""
    from clearhead.core.engines.gpu.triton import launch_forward
    from clearhead.core.engines.gpu.triton.launch_backward import KEY_GRADIENTS, QUERY_GRADIENTS
    from clearhead.core.engines.gpu.triton.launch_forward import Tiles

    cpu = torch.device("cpu")
    tables = launch_forward.FORWARD, launch_forward.CUT, launch_forward.SWEEP
    for table in (*tables, QUERY_GRADIENTS, KEY_GRADIENTS):
        for kind, D, enough in ((torch.bfloat16, 128, 163), (torch.float32, 64, 227)):
            large, small = table[kind == torch.float32][D]
            for bytes_there, tile in ((enough * 1024, large), (99 * 1024, small)):
                monkeypatch.setattr(
                    launch_forward, "shared_memory", lambda device, found=bytes_there: found
                )
                assert launch_forward.tile_from(table, 4096, D, kind, cpu) == Tiles(1, *tile)
                assert launch_forward.tile_from(table, 3, D, kind, cpu).queries == 16


@needs_triton
@pytest.mark.parametrize(
    "kilobytes, transposed", [(99, set()), (163, {128, 256}), (227, {64, 128, 256})]
)
def test_tiles_are_transposed_where_that_takes_fewer_instructions(
    kilobytes, transposed, monkeypatch
):
    from clearhead.core.engines.gpu.triton import launch_forward
    from clearhead.core.engines.gpu.triton.launch_backward import transposes_tiles

    monkeypatch.setattr(launch_forward, "shared_memory", lambda device: kilobytes * 1024)
    for D in (64, 128, 256):
        assert transposes_tiles(torch.zeros(1, dtype=torch.float16), D) == (D in transposed)
        assert transposes_tiles(torch.zeros(1), D) == (kilobytes == 227)


@needs_triton
@pytest.mark.parametrize("kilobytes, D, ranges, keys", [
    (227, 128, False, 64), (227, 128, True, 32), (163, 64, False, 64), (163, 64, True, 32),
    (163, 128, False, 32), (99, 128, False, 32),
])  # fmt: skip
def test_gradients_of_a_bias_have_tiles_that_do_not_spill(kilobytes, D, ranges, keys, monkeypatch):
    from clearhead.core.engines.gpu.triton import launch_forward
    from clearhead.core.engines.gpu.triton.launch_backward import bias_tile
    from clearhead.core.engines.operators import KernelArgs

    monkeypatch.setattr(launch_forward, "shared_memory", lambda device: kilobytes * 1024)
    q = torch.zeros(1, 1, 512, D, dtype=torch.bfloat16)
    lo = torch.zeros(1, 1, 512, 2, dtype=torch.int32) if ranges else None
    rule = KernelArgs(1.0, 0.0, 512, 512, lo=lo, hi=lo, bias=torch.zeros(1, 1, 512, 512))
    assert bias_tile(q, q, rule).keys == keys


@needs_triton
def test_specialization_separates_what_triton_compiles_separately():
    """Compared with what Triton's own launcher determines for each argument."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.tools.tensor_descriptor import TensorDescriptor

    from clearhead.core.engines.gpu.triton.arguments import Rows
    from clearhead.core.engines.gpu.triton.start import specialization

    memory = torch.zeros(64, dtype=torch.int8)
    square = memory.view(2, 32)
    values = [
        0, 1, 2, 16, -1, -16, 2**31 - 1, 2**31, 2**31 - 16, -(2**31), -(2**31) - 1, 2**40,
        2**40 + 1, None, 1.0, 2.5, memory, memory[1:], memory[16:], memory.view(torch.uint8),
        Rows(memory, 1, 16, 3, None), Rows(memory, 2, 16, 3, None), Rows(memory, 2, 16, 5, None),
        Rows(memory[1:], 2, 16, 3, None), Rows(memory, 2, 16, 8, None), Rows(memory, 2, 16, 8, 1),
        TensorDescriptor.from_tensor(square, [1, 16]),
        TensorDescriptor.from_tensor(square, [2, 16]),
        TensorDescriptor.from_tensor(square.view(torch.uint8), [2, 16]),
    ]  # fmt: skip
    theirs = [native_specialize_impl(CUDABackend, x, False, True, True) for x in values]
    for x, of_x in zip(values, theirs, strict=True):
        for y, of_y in zip(values, theirs, strict=True):
            assert of_x == of_y or specialization((x,)) != specialization((y,)), (x, y)
    assert specialization((3, 32, 2.0, Rows(memory, 2, 16, 3, None))) == specialization(
        (5, 64, 3.0, Rows(memory, 7, 48, 9, None))
    )


@needs_triton
def test_only_some_layouts_have_a_descriptor():
    """Others are read by addresses. A descriptor needs multiples of 16 bytes and no broadcast."""
    from clearhead.core.engines.gpu.triton.arguments import Rows, described

    plain = torch.zeros(2, 3, 7, 8, dtype=torch.bfloat16)
    one = torch.zeros(84).as_strided((1, 1, 7, 8), (5, 3, 12, 1))
    for x in (plain, plain.transpose(1, 2), plain[:, 1:, ::2], one):
        descriptor = described(x, (16, 8))
        assert descriptor.base is x and descriptor.block_shape == [1, 1, 16, 8]
        assert descriptor.shape == list(x.shape)
    for x in (
        plain[..., :1, :].expand(2, 3, 7, 8), torch.zeros(2, 3, 7, 12)[:, :, :, 1:9],
        torch.zeros(2, 3, 7, 9)[..., :8], torch.zeros(2, 3, 0, 8),
    ):  # fmt: skip
        assert isinstance(described(x, (16, 8)), Rows)


@needs_triton
def test_rows_that_are_far_apart_are_copied():
    """Kernels multiply the number of a row of a tile by the distance of rows, in 32 bits."""
    from clearhead.core.engines.gpu.triton.arguments import FARTHEST_ROWS, readable

    assert 256 * FARTHEST_ROWS <= 2**31
    for distance in (FARTHEST_ROWS - 1, FARTHEST_ROWS):
        x = torch.empty_strided((2, 3, 4, 8), (64, 16, distance, 1), device="meta")
        assert (readable(x) is x) == (distance < FARTHEST_ROWS)
        assert readable(x).stride(2) in (8, FARTHEST_ROWS - 1)


@needs_triton
def test_what_triton_compiled_is_started_without_its_launcher(monkeypatch):
    import triton

    from clearhead.core.engines.gpu.triton.start import start

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: started.append((grid, args))

    class Kernel:
        arg_names, fn = ["x", "n", "A", "B"], object()

        def __getitem__(self, grid):
            return lambda *args, **keywords: (compiled.append(keywords), Compiled())[1]

    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    compiled, started, kernel = [], [], Kernel()
    x = torch.zeros(4)
    for n in (3, 5, 32, 7):
        start(kernel, n, 0, x, n, B=2, A=True, warps=8)
    start(kernel, 9, 1, x, 7, B=2, A=True, warps=8)  # another device
    assert len(compiled) == 3 and compiled[0]["num_warps"] == 8
    assert [(grid, args[1:]) for grid, args in started] == [
        ((5, 1, 1), (5, True, 2)), ((7, 1, 1), (7, True, 2)),
    ]  # fmt: skip


class Launcher:
    """Triton's launcher, by the order of the arguments of its function in C: in 3.7 it takes those
    of the kernel as one tuple."""

    def __init__(self, version, scratch):
        self.version, self.started, self.called = version, [], 0
        self.profile_scratch_size = 0
        if scratch is not None:  # AMD's has none
            self.global_scratch_size = scratch
        self.launch = lambda *arguments: self.started.append(arguments)

    def __call__(self, x, y, z, stream, function, metadata, of_launch, enter, exit, *args):
        self.called += 1
        grid, hooks = (x, y, z), (of_launch, enter, exit)
        if self.version == 6:
            self.launch(*grid, stream, function, False, None, metadata, *hooks, *args)
        else:
            self.launch(*grid, stream, function, metadata, *hooks, None, b"signature", args)


@needs_triton
@pytest.mark.parametrize("version, scratch", [(6, 0), (7, 0), (7, None), (7, 128)])
def test_a_repeated_call_starts_a_kernel_as_tritons_launcher_does(version, scratch, monkeypatch):
    from triton import knobs

    from clearhead.core.engines.gpu import replay
    from clearhead.core.engines.gpu.triton import start
    from clearhead.core.engines.gpu.triton.arguments import Rows

    launcher, plain, streams = Launcher(version, scratch), [], iter([11, 12, 13, 14])

    class Compiled:
        run, function, packed_metadata = launcher, 77, (4, 1, 2048)

        def __getitem__(self, grid):
            return lambda *args: plain.append(args)

    class Kernel:
        arg_names, fn = ["x", "n", "N"], object()

    active = SimpleNamespace(get_current_stream=lambda device: next(streams))
    monkeypatch.setattr(start, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(start, "_compiled", SimpleNamespace(get=lambda key: Compiled()))
    monkeypatch.setattr(replay, "PLAIN_CALLS", 1)

    def run(x):
        start.start(Kernel(), 6, 0, Rows(x, 5, 3, 1, None), 9, N=64)
        return x

    records = replay.Records()
    tensors = [torch.zeros(3, 5) for _ in range(5)]
    for x in tensors[:4]:
        assert records.call(run, (x,)) is x
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert records.call(run, (tensors[4],)) is tensors[4]
    assert [args[0].at is x for args, x in zip(plain, tensors[:2] + tensors[4:], strict=True)]
    assert launcher.called == (2 if scratch else 0)
    for x, stream, arguments in zip(tensors[2:4], (11, 12), launcher.started, strict=True):
        assert arguments[:5] == (6, 1, 1, stream, 77)
        assert (4, 1, 2048) in arguments
        args = arguments[-3:] if version == 6 else arguments[-1]
        assert args == ((x.data_ptr(), 5, 3, 1, None), 9, 64)


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_repeated_call_gives_the_driver_what_tritons_launcher_gives_it(tmp_path):
    """Triton's own launcher in C, with a driver that stores what it gets."""
    here = Path(__file__).parent
    headers = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/include"
    library = tmp_path / "libcuda.so.1"
    compiled = "cc", "-shared", "-fPIC", f"-I{headers}", here / "driver.c", "-o", library
    subprocess.run([*compiled, "-Wl,-soname,libcuda.so.1"], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    paths = {
        "LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    python(str(here / "start_without_device.py"), str(library), interpret=False, **paths)


@needs_triton
def test_a_power_of_2_is_tritons_own():
    import triton

    from clearhead.core.engines.gpu.triton.launch_forward import power_of_2

    for n in range(1, 5000):
        assert power_of_2(n) == triton.next_power_of_2(n)
    assert power_of_2(0) == 1


# ------------------------------------------------------------------------------ choosing on a GPU

AMPERE, TURING = Gpu((8, 0)), Gpu((7, 5))


def problem_of(dtype=torch.bfloat16, H=8, G=8, T=4096, Tk=None, D=64, Dv=None, **keywords):
    """A problem on meta tensors, as for `plan`; nothing is computed."""
    q, k, v = (
        torch.empty(1, heads, length, size, dtype=dtype, device="meta")
        for heads, length, size in ((H, T, D), (G, Tk or T, D), (G, Tk or T, Dv or D))
    )
    return make_problem(q, k, v, Options(**keywords))[0]


@pytest.mark.parametrize("keywords, gpu, first", [
    ({}, AMPERE, FUSED),
    ({"mask": ch.causal}, AMPERE, FUSED),
    ({"mask": ch.causal, "dtype": torch.float32}, AMPERE, FUSED),
    ({"mask": ch.causal, "dtype": torch.float16}, TURING, TRITON),  # which cannot repair either
    ({"mask": ch.Causal(align="end"), "T": 1, "Tk": 4096}, AMPERE, FUSED),
    ({"mask": ch.Causal(align="end"), "T": 7, "Tk": 4096}, AMPERE, TRITON),
    ({"mask": ch.causal, "dropout": 0.1}, AMPERE, TRITON),
    ({"mask": ch.causal, "D": 100}, AMPERE, TRITON),
    ({"G": 2}, AMPERE, FUSED),
    ({"dtype": torch.float32}, AMPERE, FUSED),
    ({"dtype": torch.float32, "G": 2}, AMPERE, TRITON),
    ({"dtype": torch.float32}, TURING, FUSED),
    ({"mask": ch.window(before=99, after=0)}, AMPERE, TRITON),
    ({"bias": ch.alibi()}, AMPERE, TRITON),
    ({"D": 100}, AMPERE, SDPA),
    ({"D": 100, "Dv": 60}, AMPERE, TRITON),
])  # fmt: skip
def test_the_order_follows_what_torch_can_fuse(keywords, gpu, first):
    assert order_on(problem_of(**keywords), gpu)[0] is first


def test_auto_reports_which_engine_it_chose_and_why(monkeypatch):
    """The device is described; none is needed."""
    monkeypatch.setattr("clearhead.core.engines.gpu.triton.INSTALLED", True)
    monkeypatch.setattr("clearhead.core.engines.gpu.fused.INSTALLED", True)
    for room in (choice, engines.sdpa, engines.gpu.triton, engines.gpu.fused):
        monkeypatch.setattr(room, "gpu_of", lambda device: AMPERE)
    cuda = torch.device("cuda")
    for keywords, chosen, caption in (
        ({}, FUSED, "called directly: flash or cudnn or efficient"),
        ({"mask": ch.causal}, FUSED, "cudnn or efficient; masked NaN is repaired on the device"),
        ({"mask": ch.window(before=9)}, TRITON, "written out, and q, k and v cleaned of NaN"),
        ({"D": 264}, FUSED, "efficient"),
        ({"D": 100}, SDPA, "torch's scaled_dot_product_attention: flash"),
        ({"dtype": torch.float32, "G": 2}, TRITON, "efficient: does not support grouped heads)"),
    ):
        problem = replace(problem_of(**keywords), device=cuda)
        engine, declined = choice.first_capable(problem, "auto")
        assert engine is chosen and not declined
        assert engine.caption_of(problem).endswith(caption)
        thrice = "; each product as three of tf32; " in engine.caption_of(problem)
        assert thrice == (engine is TRITON and problem.dtype == torch.float32)
    engine, declined = choice.first_capable(replace(problem_of(softcap=2.0), device=cuda), "auto")
    assert engine is TRITON and declined == {"sdpa": ["torch has no soft cap"]}
    with pytest.raises(ch.BadValue, match=r"without one torch would store weights of 0\.5 GB"):
        choice.choose(replace(problem_of(dtype=torch.float32, G=2), device=cuda), "sdpa")


def test_weights_are_not_stored_silently():
    """float32 with grouped heads has no fused kernel; torch would store 8 x 4096 x 4096 weights."""
    large = problem_of(dtype=torch.float32, G=2)
    (reason,) = SDPA.forms_weights(large, AMPERE)
    assert "flash: does not support float32" in reason
    assert "efficient: does not support grouped heads" in reason
    assert "weights of 0.5 GB" in reason
    assert not SDPA.forms_weights(problem_of(dtype=torch.float32, G=2, T=128), AMPERE)
    assert not SDPA.forms_weights(problem_of(), AMPERE)


def test_the_rules_of_torchs_kernels():
    causal = backends_decline(problem_of(mask=ch.Causal(align="start"), Tk=5000), AMPERE, False)
    assert causal["flash"] == ["supports a causal mask only if Tq = Tk"]
    assert not causal["efficient"]
    dropped = backends_decline(problem_of(D=72, Dv=36, dropout=0.1), AMPERE, True)
    assert all(dropped.values())
    assert "supports dropout only in some versions" in dropped["cudnn"]
    old_gpu = backends_decline(problem_of(), TURING, False)
    assert old_gpu["efficient"] == ["needs a GPU of compute capability 8.0 to 12.1"]


def test_the_kernels_decline_a_problem_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.randn(3, 4)
    with pytest.raises(ch.BadValue, match="the Triton kernels compute on a GPU"):
        ch.attention(q, q, q, engine="triton")
    assert choice.order(make_problem(q, q, q, Options())[0]) == choice.ENGINES


def test_without_triton_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr("clearhead.core.engines.gpu.triton.INSTALLED", False)
    (reason,) = Triton().why_not(problem_of())
    assert reason.startswith("triton is not installed: ")
    assert reason.endswith(" -m pip install 'triton>=3.6'")
    assert TILED in order_on(problem_of(), AMPERE)
