"""Launch the forward kernel: choose tiles and splits of the keys, and allocate buffers.

The sizes of tiles were timed on an H200. Those of other GPUs follow from the registers and shared
memory that the compiler reports (forward.py).
"""

import math
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...operators import KernelArgs
from ..interpreter import interprets
from ..replay import on_device
from .arguments import KernelRule, Rows, Sizes, described, kernel_rule, readable, rows, sizes_of
from .forward import PerKey, attend_tiles
from .row_results import Parts, RowResults, merge_splits
from .start import start

# A split has at least LEAST_SPLIT keys, and LEAST_OF_QUERY keys for each query of its tile. For a
# tile of one head, writing and reading the float32 results to be merged then takes at most a
# sixteenth of reading its keys and values. If heads share a tile, it takes that for each of them;
# 4096 keys of eight key heads yield a program for nearly each of the 132 processors of a large GPU.
#
# A row has at most MOST_SPLITS splits. If heads share no tile, a head has at most MOST_PROGRAMS
# programs, so that eight heads fill a large GPU. Splits do not depend on the batch, so
# an example has the same bits in any batch.
LEAST_SPLIT, LEAST_OF_QUERY, MOST_SPLITS, MOST_PROGRAMS = 256, 32, 64, 16
# Tiles by whether the dtype is float32, and by head size: queries, keys, warps and stages, and True
# if descriptors copy them (`described`). At 9.0 that takes fewer instructions and registers, but
# no tile has it, because it has not been timed (`python -m bench.tiles`).
#
# The first tile is for devices with LARGE_MEMORY bytes of shared memory (capability 8.0, 9.0,
# 10.0), the second for those with 99 KB (8.6, 8.9, 12.0). In float32 the first is for 9.0 and 10.0.
# The first for head sizes 64 and 128 is the fastest of 5 to 24 on an H200 (bench/LOG.md). The
# others were chosen by compiling: the largest tile that fits and spills few or no registers in its
# loops, as ptxas reports, and among several the one with the fewest instructions for a cell.
Table = dict[bool, dict[int, tuple[tuple[int, ...], tuple[int, ...]]]]
FORWARD: Table = {
    False: {
        64: ((128, 64, 4, 3), (128, 128, 8, 2)),
        128: ((128, 64, 8, 3), (128, 64, 8, 2)),
        256: ((64, 32, 8, 3), (64, 32, 8, 2)),
    },
    True: {
        64: ((128, 64, 8, 2), (64, 32, 8, 2)),
        128: ((32, 32, 4, 2), (32, 32, 8, 2)),
        256: ((16, 16, 4, 1), (16, 16, 4, 1)),
    },
}
# For masks that cut many of the tiles: bands of at most SHORT keys, and key ranges of each query.
# Small tiles have fewer masked cells, and two programs share a processor.
CUT: Table = {
    False: {
        64: ((64, 64, 4, 3), (64, 64, 4, 3)),
        128: ((64, 64, 4, 2), (64, 64, 4, 2)),
        256: FORWARD[False][256],
    },
    True: FORWARD[True],
}
# Without values, for statistics.
SWEEP: Table = {
    False: {**FORWARD[False], 128: ((64, 64, 4, 3), (64, 64, 4, 3))},
    True: FORWARD[True],
}
SHORT = 2048
LARGE_MEMORY, LARGEST_MEMORY = 160 * 1024, 200 * 1024
FEW_QUERIES = 16  # with at most so many, heads that read the same keys share a tile


class Tiles(NamedTuple):
    """The parameters of a launch. A tile has heads x queries rows and `keys` keys.

    `copied`: whether tiles that are read in a loop are copied by descriptors (`described`).
    """

    heads: int
    queries: int
    keys: int
    warps: int
    stages: int
    copied: bool = False

    def view(self, x: Tensor, length: int) -> Rows | TensorDescriptor:
        """Return the view of a tensor that is read in tiles of `length` rows."""
        return described(x, (length, head_block(x.shape[3]))) if self.copied else rows(x)


class Again(NamedTuple):
    """What the kernels compute again while the flag, (1,) on the device, is up: the rows that are
    not finite of an output, with their log-sum-exp, or of the gradients of q, k and v."""

    flag: Tensor
    first: Tensor
    second: Tensor | None
    third: Tensor | None = None


@lru_cache(maxsize=64)
def forward_tiles(
    H: int, G: int, Tq: int, D: int, dtype: torch.dtype, device: torch.device, biased: bool,
    cut: bool, values: bool,
) -> Tiles:  # fmt: skip
    """Choose the tile of the forward kernel.

    Registers hold the running sum, rows x head size in float32. Shared memory holds `stages` tiles
    of keys and values. With few queries, the tile fits every device and is the same on all, because
    the splits of the keys follow from it. `D` is the larger head size, a power of 2. `cut`: whether
    the mask cuts many tiles.
    """
    wide = dtype == torch.float32
    if Tq <= FEW_QUERIES:
        queries = power_of_2(Tq)
        heads = min(power_of_2(H // max(G, 1)), max(64 // queries, 1))
        queries = max(queries, 16 // heads)  # the matrix units need at least 16 rows
        keys = 64 // (2 if wide else 1) // (2 if D > 128 else 1)
        tile = Tiles(heads, queries, keys, 4, 2 if wide else 3)
    else:
        table = SWEEP if not values else CUT if cut else FORWARD
        tile = tile_from(table, Tq, D, dtype, device)
    if biased and tile.heads == 1:  # each stage holds a tile of the bias
        tile = tile._replace(queries=min(tile.queries, 64), stages=min(tile.stages, 2))
    if biased or cut:  # a bias, and ranges of each row, take registers too
        tile = tile._replace(keys=min(tile.keys, 64))
    return tile


def tile_from(table: Table, Tq: int, D: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the tile of a table for a device, with at most Tq queries, rounded up to a power of 2
    and to 16. `D` is the larger head size, a power of 2."""
    wide = dtype == torch.float32
    large, small = table[wide][min(max(D, 64), 256)]
    is_large = has_largest_memory(device) if wide else has_large_memory(device)
    queries, keys, warps, stages, *copied = large if is_large else small
    return Tiles(1, min(queries, max(16, power_of_2(Tq))), keys, warps, stages, any(copied))


def has_large_memory(device: torch.device) -> bool:
    return shared_memory(device) >= LARGE_MEMORY


def has_largest_memory(device: torch.device) -> bool:
    """Return whether a block may use the 227 KB of capability 9.0 and 10.0."""
    return shared_memory(device) >= LARGEST_MEMORY


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may use. The interpreter has no limit."""
    if device.type != "cuda":
        return LARGEST_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack the next name
    return properties.shared_memory_per_block_optin


def splits_of(rule: KernelArgs, sizes: Sizes, tile: Tiles) -> tuple[int, int, int]:
    """Return the number of splits of the keys, the first key, and the keys of each split. Keys that
    a band hides from all queries are in no split."""
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
    per_key: PerKey = PerKey(),  # noqa: B008 (it cannot be changed)
    n: int = 0,
    again: Again | None = None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Compute the output (None without values) and the `wanted` members of `RowResults`. `n` is the
    number of largest logits of a row, if they are wanted.

    A value of NaN must not reach the rows that do not see it. Kernels that see to this take longer
    for the tiles that a mask cuts. So they run first without it, and raise a flag if a result is
    not finite. With `again`, the kernels see to it, and write to its tensors, in one split, if its
    flag is up. A few queries are computed carefully at once, since their time is that of reading
    the keys.
    """
    q, k = readable(q), readable(k)
    v = None if v is None else readable(v)
    sizes = sizes_of(q, k)
    sweep = _sweep_of(q, v, rule, sizes, wanted, per_key, n, again is not None)
    if again is None:
        out, computed = _results(q, v, sweep, wanted, n)
    else:
        out, computed = again.first, {} if again.second is None else {"lse": again.second}
    if not sizes.B * sizes.H * sizes.Tq:
        return out, computed
    hides = v is not None and hides_keys(rule, sizes)
    flag = None if again is None else again.flag
    of_kernel = kernel_rule(rule)
    if again is not None or (hides and sizes.Tq <= FEW_QUERIES):
        of_kernel = of_kernel._replace(careful=1)
    elif hides:
        flag = q.new_zeros(1, dtype=torch.int32)
    _start_sweep(q, k, v, out, RowResults(**computed), per_key, of_kernel, sizes, sweep, n, flag)
    if again is None and out is not None and flag is not None:
        attend(q, k, v, rule, frozenset(), again=Again(flag, out, None))
    return out, computed


class Sweep(NamedTuple):
    """How a sweep over the keys is launched: its tiles, the splits of the keys, and the constants
    of the kernels."""

    tile: Tiles
    splits: int
    begin: int
    chunk: int
    groups: int
    moment: bool
    top: int  # places for the largest logits of a row, a power of 2; 1 if they are not wanted
    sizes: dict[str, int]  # of the heads, and the powers of 2 that hold them


def _sweep_of(
    q: Tensor, v: Tensor | None, rule: KernelArgs, sizes: Sizes, wanted: frozenset[str],
    per_key: PerKey, n: int, one_split: bool,
) -> Sweep:  # fmt: skip
    """Choose the tiles and the splits, and find out what is accumulated for `wanted`."""
    D, DV = q.shape[3], 1 if v is None else v.shape[3]
    heads = {"D": D, "DV": DV, "BLOCK_D": head_block(D), "BLOCK_DV": head_block(DV)}
    cut = rule.lo is not None or rule.before + rule.after < SHORT
    tile = forward_tiles(
        sizes.H, sizes.G, sizes.Tq, max(heads["BLOCK_D"], heads["BLOCK_DV"]), q.dtype, q.device,
        rule.bias is not None, cut, v is not None,
    )  # fmt: skip
    splits, begin, chunk = (1, 0, sizes.Tk) if one_split else splits_of(rule, sizes, tile)
    top = max(2, power_of_2(n)) if "keys" in wanted else 1
    groups = sum(len(x.groups) for x in per_key.grouped)
    if (top > 1 or groups > 1) and tile.heads == 1:  # they take registers
        tile = tile._replace(queries=min(tile.queries, 16 * tile.warps))
    return Sweep(
        tile, splits, begin, chunk,
        groups, moment=not wanted.isdisjoint(("moment", "entropy")), top=top, sizes=heads,
    )  # fmt: skip


def _results(
    q: Tensor, v: Tensor | None, sweep: Sweep, wanted: frozenset[str], n: int
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Allocate the output, and the results of rows."""
    rows = q.shape[:3]
    shapes = {
        "groups": (sweep.groups, *rows), "masses": (sweep.groups, *rows),
        "scores": (*rows, n), "weights": (*rows, n), "keys": (*rows, n),
    }  # fmt: skip
    computed = {
        name: q.new_empty(
            shapes.get(name, rows), dtype=torch.long if name == "keys" else torch.float32
        )
        for name in wanted
    }
    return None if v is None else q.new_empty(*rows, v.shape[3]), computed


def _parts(q: Tensor, sweep: Sweep) -> Parts:
    """Allocate what the splits leave to be merged."""
    if sweep.splits == 1:
        return Parts()
    shape = (sweep.splits, *q.shape[:3])
    numbers = math.prod(shape) * (sweep.sizes["DV"] + 2)
    new, best = partial(q.new_empty, dtype=torch.float32), (*shape, sweep.top)
    return Parts(
        outputs=new(numbers),
        moment=new(shape) if sweep.moment else None,
        groups=new((sweep.groups, *shape)) if sweep.groups else None,
        best=new(best) if sweep.top > 1 else None,
        where=q.new_empty(best, dtype=torch.int32) if sweep.top > 1 else None,
    )


def _start_sweep(
    q: Tensor, k: Tensor, v: Tensor | None, out: Tensor | None, results: RowResults,
    per_key: PerKey, rule: KernelRule, sizes: Sizes, sweep: Sweep, n: int, flag: Tensor | None,
) -> None:  # fmt: skip
    """Start the sweep, and if the keys are split, the kernel that merges the splits."""
    B, H, G, Tq, _ = sizes
    tile, splits = sweep.tile, sweep.splits
    tiles, shares = math.ceil(Tq / tile.queries), math.ceil(H // G / tile.heads)
    parts = _parts(q, sweep)
    of_rows = None if out is None else rows(out), results
    with on_device(q):
        start(
            attend_tiles, tiles * splits * shares * G * B, q.get_device(),
            rows(q), tile.view(k, tile.keys), None if v is None else tile.view(v, tile.keys),
            *(of_rows if splits == 1 else (None, RowResults())), parts, per_key, rule, sizes, flag,
            tiles, splits, sweep.begin, sweep.chunk, n,
            **sweep.sizes, HEADS=tile.heads, QUERIES=tile.queries, N=tile.keys,
            BAND=rule.lo is None, DROPS=rule.seed is not None, PRECISION=dot_precision(q.dtype),
            MOMENT=sweep.moment, TOP=sweep.top, WITH_OUT=v is not None,
            warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            start(
                merge_splits, B * H * Tq, q.get_device(),
                *of_rows, parts, rule, sizes, splits, n,
                DV=sweep.sizes["DV"], BLOCK_DV=sweep.sizes["BLOCK_DV"],
                SPLITS=power_of_2(splits), GROUPS=sweep.groups, TOP=sweep.top,
            )  # fmt: skip


def hides_keys(rule: KernelArgs, sizes: Sizes) -> bool:
    """Return whether some query may not see all keys."""
    if rule.lo is not None or rule.bits is not None:
        return True
    return rule.before < sizes.Tq - 1 or rule.after < sizes.Tk - 1


def power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least n and 1. Triton's own function takes
    microseconds a call."""
    return 1 << max(n - 1, 0).bit_length()


def head_block(D: int) -> int:
    """Return the head size in a tile: a power of 2, at least 16, as the matrix units require."""
    return max(16, power_of_2(D))


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of products.

    For float32 it is "tf32x3": each number is the sum of two of tf32, and three of their four
    products are added by the matrix units. On an H200 the output of 4096 tokens of 64 features then
    takes a quarter of the time, and is nearer to float64, than by fused multiply-adds. It is "tf32"
    if torch allows that: by `torch.backends.cuda.matmul.fp32_precision`, or two older settings,
    which change this one too. In the interpreter, bfloat16 is "widened".
    """
    if dtype == torch.bfloat16 and interprets():
        return "widened"
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
