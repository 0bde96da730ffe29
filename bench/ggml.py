"""Call the attention of ggml on a CPU (`ggml_flash_attn_ext`), from the wheel libggml-python."""

import ctypes
import importlib.util
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # enum ggml_type
SPARE = 2**24  # bytes of a context besides its tensors


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)
    ]  # fmt: skip


class _Plan(ctypes.Structure):
    _fields_ = [
        ("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p), ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p), ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p), ("use_ref", ctypes.c_bool),
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Load ggml's base and its engine for a CPU."""
    spec = importlib.util.find_spec("libggml")
    if spec is None:
        raise ModuleNotFoundError("libggml-python is not installed", name="libggml")
    folder = Path(spec.origin).parent / "lib64"
    base = ctypes.CDLL(folder / "libggml-base.so", mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(folder / "libggml-cpu.so")
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    base.ggml_init.restype, base.ggml_init.argtypes = pointer, [_InitParams]
    base.ggml_free.argtypes = [pointer]
    base.ggml_new_tensor_4d.restype = pointer
    base.ggml_new_tensor_4d.argtypes = [pointer, ctypes.c_int, size, size, size, size]
    base.ggml_get_data.restype, base.ggml_get_data.argtypes = pointer, [pointer]
    base.ggml_flash_attn_ext.restype = pointer
    base.ggml_flash_attn_ext.argtypes = [pointer] * 5 + [number] * 3
    base.ggml_new_graph.restype, base.ggml_new_graph.argtypes = pointer, [pointer]
    base.ggml_build_forward_expand.argtypes = [pointer, pointer]
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, pointer, pointer, size, size, size, pointer
    ]  # fmt: skip
    cpu.ggml_graph_plan.restype = _Plan
    cpu.ggml_graph_plan.argtypes = [pointer, ctypes.c_int, pointer]
    cpu.ggml_graph_compute.argtypes = [pointer, ctypes.POINTER(_Plan)]
    cpu.ggml_cpu_init()
    return base, cpu


class Attention:
    """Attention of ggml without a mask, of q (B, H, Tq, D), k (B, G, Tk, D) and v (B, G, Tk, D).

    ggml copies k and v to `format`, and q to float32. In a format of blocks it rounds q as well.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, format: str, threads: int) -> None:
        base, self._cpu = _libraries()
        size = 4 * (q.numel() + k.numel() + v.numel()) + SPARE  # of float32, the largest format
        self._base, self._context = base, base.ggml_init(_InitParams(size, None, False))
        tensors = [self._tensor(q, "f32"), self._tensor(k, format), self._tensor(v, format)]
        out = base.ggml_flash_attn_ext(self._context, *tensors, None, q.shape[-1] ** -0.5, 0.0, 0.0)
        self._graph = base.ggml_new_graph(self._context)
        base.ggml_build_forward_expand(self._graph, out)
        self._plan = self._cpu.ggml_graph_plan(self._graph, threads, None)
        self._work = (ctypes.c_char * max(self._plan.work_size, 1))()
        self._plan.work_data = ctypes.addressof(self._work)
        B, H, Tq, D = q.shape
        data = (ctypes.c_float * q.numel()).from_address(base.ggml_get_data(out))
        self._out = torch.frombuffer(data, dtype=torch.float32).view(B, Tq, H, D)

    def _tensor(self, x: Tensor, format: str) -> int:
        x = x.float().contiguous()
        to: int = self._base.ggml_new_tensor_4d(self._context, TYPES[format], *reversed(x.shape))
        data, rows = self._base.ggml_get_data(to), x.numel() // x.shape[-1]
        if format == "f32":
            ctypes.memmove(data, x.data_ptr(), x.numel() * 4)
        else:
            self._base.ggml_quantize_chunk(
                TYPES[format], x.data_ptr(), data, 0, rows, x.shape[-1], None
            )
        return to

    def __call__(self) -> Tensor:
        """Return the output, (B, H, Tq, D), a view of memory that the next call overwrites."""
        if self._cpu.ggml_graph_compute(self._graph, ctypes.byref(self._plan)):
            raise RuntimeError("ggml_graph_compute failed")
        return self._out.transpose(1, 2)

    def __del__(self) -> None:
        self._base.ggml_free(self._context)
