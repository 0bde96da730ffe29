"""Launching the forward kernel: tile sizes, splits of the keys, buffers.

The sizes follow from registers and shared memory (forward.py), as the compiler counts them; no
kernel was timed yet.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...operators import KernelArgs, with_rows
from .arguments import Sizes, kernel_rule, rows, sizes_of
from .forward import Groups, Out, RowSums, attend_tiles, merge_splits
from .start import start

# A split has at least so many keys, also for each query of its tile: writing what a tile of one
# head leaves to be merged, in fp32, and reading it take a sixteenth of reading its keys and values,
# or less. Where heads share a tile it is a share for each of them, and 4096 keys of eight key heads
# have a program for nearly each of the 132 processors of a large GPU. A row has at most
# `MOST_SPLITS`; where heads share no tile, a head has at most `MOST_PROGRAMS`: eight heads then
# fill a large GPU. None of it depends on the batch or the device, so an example's bits are the same
# in any batch.
LEAST_SPLIT, LEAST_OF_QUERY, MOST_SPLITS, MOST_PROGRAMS = 256, 32, 64, 16
# By fp32 or not and by head size: queries, keys, warps and stages of a tile, where a block may have
# `ROOMY` bytes of shared memory (capability 8.0, 9.0 and 10.0) and where it has 99 KB (8.6, 8.9 and
# 12.0). The largest that fit and spill few or no registers in their loops, as ptxas counts them
# (causal), and of several such the one with the fewest instructions for a cell; 64 rows at least
# where they can be had, as the matrix units of 9.0 ask. Found by compiling, and not by timing.
Table = dict[bool, dict[int, tuple[tuple[int, int, int, int], tuple[int, int, int, int]]]]
FORWARD: Table = {
    False: {
        64: ((128, 128, 8, 3), (128, 128, 8, 2)),
        128: ((128, 64, 8, 3), (128, 64, 8, 2)),
        256: ((64, 32, 8, 3), (64, 32, 8, 2)),
    },
    True: {
        64: ((64, 32, 8, 2), (64, 32, 8, 2)),
        128: ((32, 32, 8, 2), (32, 32, 8, 2)),
        256: ((16, 16, 4, 1), (16, 16, 4, 1)),
    },
}
ROOMY, TURNING = 160 * 1024, 200 * 1024
FEW_QUERIES = 16  # up to which heads that read the same keys share a tile


class Tiles(NamedTuple):
    """How a kernel is launched: heads x queries rows and `keys` keys a tile."""

    heads: int
    queries: int
    keys: int
    warps: int
    stages: int


@lru_cache(maxsize=64)
def forward_tiles(
    H: int,
    G: int,
    Tq: int,
    D: int,
    dtype: torch.dtype,
    device: torch.device,
    biased: bool,
    banded: bool,
) -> Tiles:
    """The running sum, rows x head size in fp32, stays in registers; `stages` tiles of keys and
    values in shared memory. Where queries are few a tile fits every device, and is the same on all
    of them, as the splits of the keys follow from it. `D` is the larger head size, a power of 2."""
    wide = dtype == torch.float32
    if Tq <= FEW_QUERIES:
        queries = power_of_2(Tq)
        heads = min(power_of_2(H // max(G, 1)), max(64 // queries, 1))
        queries = max(queries, 16 // heads)  # the matrix units take 16 rows at least
        keys = 64 // (2 if wide else 1) // (2 if D > 128 else 1)
        tile = Tiles(heads, queries, keys, 4, 2 if wide else 3)
    else:
        tile = tile_from(FORWARD, Tq, D, dtype, device)
    if biased and tile.heads == 1:  # a tile of the bias lies in each stage
        tile = tile._replace(queries=min(tile.queries, 64), stages=min(tile.stages, 2))
    if biased or not banded:  # a bias, and ranges of each row, take registers too
        tile = tile._replace(keys=min(tile.keys, 64))
    return tile


def tile_from(table: Table, Tq: int, D: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """What a table says of a device; no more queries than there are. `D` is as above."""
    large, small = table[dtype == torch.float32][min(max(D, 64), 256)]
    queries, keys, warps, stages = large if roomy(device) else small
    return Tiles(1, min(queries, max(16, power_of_2(Tq))), keys, warps, stages)


def roomy(device: torch.device) -> bool:
    return shared_memory(device) >= ROOMY


def turned(device: torch.device) -> bool:
    """Are tiles that add up over queries turned (backward.py)? It saves a way through shared memory
    where the matrix units take the left operand from registers and the right one from there: on
    capability 9.0, of 227 KB, and not on 8.x, where it would spill."""
    return shared_memory(device) >= TURNING


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have; the interpreter knows no bound."""
    if device.type != "cuda":
        return TURNING
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack the next name
    return properties.shared_memory_per_block_optin


def splits_of(rule: KernelArgs, sizes: Sizes, tile: Tiles) -> tuple[int, int, int]:
    """(how many splits of the keys, where the first begins, keys of each). What a band hides from
    all queries is in none."""
    Tq, Tk = sizes.Tq, sizes.Tk
    begin, end = 0, Tk
    if rule.lo is None:
        begin = min(max(-rule.before, 0), Tk) // tile.keys * tile.keys
        end = min(max(Tq + rule.after, begin), Tk)
    few = Tq <= FEW_QUERIES
    most = MOST_SPLITS if few else max(MOST_PROGRAMS // math.ceil(Tq / tile.queries), 1)
    chunk = max(LEAST_SPLIT, LEAST_OF_QUERY * tile.queries, math.ceil((end - begin) / most))
    chunk = math.ceil(chunk / tile.keys) * tile.keys
    return max(math.ceil((end - begin) / chunk), 1), begin, chunk


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    rule: KernelArgs,
    wanted: frozenset[str],
    groups: Groups | None = None,
    n_groups: int = 0,
    top: int = 0,
) -> tuple[Tensor | None, dict[str, Tensor], int]:
    """The output (None without values), and what was `wanted` of `RowSums`: `share` and `lse`
    (B, H, Tq), the others (splits, B, H, Tq, ...); and the number of splits."""
    q, k = with_rows(q), with_rows(k)
    v = None if v is None else with_rows(v)
    sizes = sizes_of(q, k)
    B, H, G, Tq, _ = sizes
    D, DV = q.shape[3], 1 if v is None else v.shape[3]
    block_d, block_dv = head_block(D), head_block(DV)
    block, biased, banded = max(block_d, block_dv), rule.bias is not None, rule.lo is None
    tile = forward_tiles(H, G, Tq, block, q.dtype, q.device, biased, banded)
    splits, begin, chunk = splits_of(rule, sizes, tile)
    top_block = max(2, power_of_2(top)) if top else 1
    group_block = power_of_2(n_groups)
    row, of_splits = (B, H, Tq), (splits, B, H, Tq)
    shapes = {
        "share": row, "lse": row, "masses": (*of_splits, group_block),
        "best": (*of_splits, top_block), "where": (*of_splits, top_block),
    }  # fmt: skip
    found = {
        name: q.new_empty(
            shapes.get(name, of_splits), dtype=torch.int32 if name == "where" else torch.float32
        )
        for name in wanted
    }
    out = None if v is None else q.new_empty(B, H, Tq, DV)
    if not B * H * Tq:
        return out, found, splits
    sums = RowSums(**found)
    where, merges = Out(whole=out), splits > 1 and out is not None
    if merges:
        numbers = splits * B * H * Tq * (DV + 2)
        where = Out(parts=q.new_empty(numbers, dtype=torch.float32))
    of_kernel = kernel_rule(rule)
    tiles, parts = math.ceil(Tq / tile.queries), math.ceil(H // G / tile.heads)
    with on_device(q):
        start(
            attend_tiles, tiles * splits * parts * G * B, q.get_device(),
            rows(q), rows(k), None if v is None else rows(v), where, sums, groups, of_kernel,
            sizes, tiles, splits, begin, chunk,
            D=D, DV=DV, BLOCK_D=block_d, BLOCK_DV=block_dv,
            HEADS=tile.heads, QUERIES=tile.queries, N=tile.keys,
            BAND=rule.lo is None, DROPS=rule.seed is not None, PRECISION=dot_precision(q.dtype),
            MOMENT="moment" in wanted, GROUPS=group_block, TOP=top_block, WITH_OUT=v is not None,
            warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
        if merges:
            start(
                merge_splits, B * H * Tq, q.get_device(),
                out, where.parts, sums, of_kernel, H, Tq, splits, B * H * Tq,
                DV=DV, BLOCK_DV=block_dv, SPLITS=power_of_2(splits),
            )  # fmt: skip
    return out, found, splits


def power_of_2(n: int) -> int:
    """The least that is not below n, 1 at least; Triton's own takes microseconds a call."""
    return 1 << max(n - 1, 0).bit_length()


def head_block(D: int) -> int:
    """What a head takes in a tile: the matrix units want a power of 2, 16 at least."""
    return max(16, power_of_2(D))


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products are exact in fp32 ("ieee"), unless torch was told that tf32 will do, by
    `torch.backends.cuda.matmul.fp32_precision` or one of the two older ways, which set it too."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    if dtype == torch.bfloat16 and interprets():
        return "widened"
    return "ieee"


def interprets() -> bool:
    """Does Triton run the kernels on a CPU? It reads this when it defines a kernel."""
    return bool(triton.knobs.runtime.interpret)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Kernels start on the current device, which may be another than the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
