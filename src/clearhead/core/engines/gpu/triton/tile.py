"""Operations of all kernels on a tile: loads, logits, masks and dropout.

A tile has M rows and N keys. A row is a query of a head. A tile holds the queries of one head, or,
if there are few queries (decode), those of several heads that read the same keys. Rows beyond the
last repeat the last one, so that loads need no bounds; they are never stored, or have weight 0.
Powers are of 2, because exp2 is one instruction and exp is two. If a product sums over the rows,
the tile may be TRANSPOSED, (N, M): as the left operand it then comes from registers.
"""

import triton
import triton.language as tl


@triton.jit
def of_rows(x, TRANSPOSED: tl.constexpr):
    """Broadcast a value of each row to the cells of a tile."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def of_keys(x, TRANSPOSED: tl.constexpr):
    """Broadcast a value of each key to the cells of a tile."""
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def row_offsets(view, b, h, t):
    """Return the offsets of the rows (b, h, t) of a `Rows`."""
    at = b.to(tl.int64) * view.b + h.to(tl.int64) * view.h + t.to(tl.int64) * view.t
    if view.even is not None:
        at = tl.multiple_of(at, 128 // view.at.dtype.element_ty.primitive_bitwidth)
    return at


@triton.jit
def line_offsets(view, b, h, q):
    """Return the offsets of the lines (b, h, q, 0) of a `Cells`."""
    return b.to(tl.int64) * view.b + h.to(tl.int64) * view.h + q.to(tl.int64) * view.q


@triton.jit
def cell_offsets(view, b, h, q, k, TRANSPOSED: tl.constexpr):
    """Return the offsets of the cells (b, h, q, k) of a `Cells`, (M, N)."""
    of_k = k.to(tl.int64) * view.k
    return of_rows(line_offsets(view, b, h, q), TRANSPOSED) + of_keys(of_k, TRANSPOSED)


@triton.jit
def load_rows(view, b, h, t, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows, (rows, BLOCK_D), with 0 beyond D."""
    d = tl.arange(0, BLOCK_D)
    at = view.at + row_offsets(view, b, h, t)[:, None] + d[None, :]
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def load_tile(view, b, h, begin, row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the rows begin + row of head h, (rows, BLOCK_D), with 0 beyond D."""
    at = tile_addresses(view, b, h, begin, row, BLOCK_D)
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=tl.arange(0, BLOCK_D)[None, :] < D, other=0.0)


@triton.jit
def tile_addresses(view, b, h, begin, row, BLOCK_D: tl.constexpr):
    """Return the addresses of the rows begin + row of head h of a `Rows`, (rows, BLOCK_D).

    Offsets within the tile have 32 bits (`readable`). In 64 bits, each takes more instructions and
    registers.
    """
    first = view.at + row_offsets(view, b, h, begin + h * 0)  # `begin` may be a number of Python
    at = row * view.t
    if view.even is not None:
        at = tl.multiple_of(at, 128 // view.at.dtype.element_ty.primitive_bitwidth)
    return first + (at[:, None] + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def load_keys(
    view, b, g, begin, Tk,
    N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Load N rows of keys or values from `begin`, (N, BLOCK_D); with `BOUND`, or by a descriptor,
    rows beyond Tk are 0."""
    row = tl.arange(0, N)
    if isinstance(view, tl.tensor_descriptor):
        return load_described(view, b, g, begin)
    elif BOUND:
        inside = (begin + row < Tk)[:, None] & (tl.arange(0, BLOCK_D)[None, :] < D)
        return tl.load(tile_addresses(view, b, g, begin, row, BLOCK_D), mask=inside, other=0.0)
    else:
        return load_tile(view, b, g, begin, row, D, BLOCK_D)


@triton.jit
def load_queries(
    view, b, h, begin, Tq,
    M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Load M rows of head h from `begin`, (M, BLOCK_D). With `BOUND`, rows beyond the last repeat
    it, or are 0 by a descriptor."""
    row = tl.arange(0, M)
    if isinstance(view, tl.tensor_descriptor):
        return load_described(view, b, h, begin)
    elif BOUND:
        return load_tile(view, b, h, begin, tl.minimum(row, Tq - 1 - begin), D, BLOCK_D)
    else:
        return load_tile(view, b, h, begin, row, D, BLOCK_D)


@triton.jit
def load_described(view, b, h, begin):
    """Load the rows from `begin` by a descriptor (arguments.py); beyond the last they are 0."""
    return tl.reshape(view.load([b, h, begin, 0]), view.block_shape[2:])


@triton.jit
def store_rows(view, b, h, t, x, real, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store rows, (rows, BLOCK_D), of which those that are not `real`, and columns beyond D, are
    left out."""
    d = tl.arange(0, BLOCK_D)
    at = view.at + row_offsets(view, b, h, t)[:, None] + d[None, :]
    tl.store(at, x.to(view.at.dtype.element_ty), mask=real[:, None] & (d[None, :] < D))


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """Compute acc + a @ b in float32; `acc` may be None. The interpreter cannot multiply bfloat16:
    there, numbers are "widened" to float32 first, in which products of bfloat16 are exact."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


# ---------------------------------------------------------------------------------------- the mask


@triton.jit
def key_range(rule, sizes, b, h, q, j, BAND: tl.constexpr):
    """Return the keys [lo, hi) of range j of each row."""
    if BAND:
        lo = tl.minimum(tl.maximum(q - rule.before, 0), sizes.Tk)
        hi = tl.minimum(tl.maximum(q + rule.after + 1, 0), sizes.Tk)
    else:
        lo = tl.load(rule.lo.at + line_offsets(rule.lo, b, h, q) + j * rule.lo.k).to(tl.int32)
        hi = tl.load(rule.hi.at + line_offsets(rule.hi, b, h, q) + j * rule.hi.k).to(tl.int32)
    return lo, hi


@triton.jit
def parts_of(rule, lo, hi, start, stop, N: tl.constexpr):
    """Split the tiles from `start` to `stop` where all rows see all N keys, which need no mask, and
    return the four bounds of the three parts."""
    full_start = tl.maximum(tl.minimum((tl.max(lo) + N - 1) // N * N, stop), start)
    full_stop = tl.maximum(tl.minimum(tl.min(hi), stop) // N * N, full_start)
    if rule.bits is not None:
        full_stop = full_start
    return start, full_start, full_stop, stop


@triton.jit
def allowed_cells(rule, sizes, b, h, q, k, lo, hi, TRANSPOSED: tl.constexpr = False):
    """Return which keys are in the range [lo, hi) of their row and have their bit set, (M, N)."""
    key = of_keys(k, TRANSPOSED)
    allowed = (key >= of_rows(lo, TRANSPOSED)) & (key < of_rows(hi, TRANSPOSED))
    if rule.bits is not None:
        at = rule.bits.at + cell_offsets(rule.bits, b, h, q, k, TRANSPOSED)
        allowed = allowed & (tl.load(at, mask=allowed, other=0) != 0)
    return allowed


# -------------------------------------------------------------------------------------- the logits


@triton.jit
def tanh(x):
    """Compute tanh with an error of at most two roundings: by a series if 1 - exp would cancel,
    else as (1 - e) / (1 + e)."""
    s = x * x
    series = 1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835))))
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(s < 0.0625, x * series, tl.where(x < 0, -far, far))


@triton.jit
def logits(
    products, rule, b, h, q, k, allowed, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr = False
):
    """Compute the logits in units of the rule, -inf where not allowed, and the tanh of the soft
    cap, whose slope the backward pass needs.

    `products` is q k, (M, N). The tanh has no meaning without a soft cap. The bias contains no
    -inf: the checks convert it to a mask (core/problem/check.py).
    """
    x = products
    if rule.scale is not None:
        x = products * rule.scale
    t = x
    if rule.cap is not None:
        t = tanh(x)
        x = t * rule.cap
    if rule.bias is not None:
        at = rule.bias.at + cell_offsets(rule.bias, b, h, q, k, TRANSPOSED)
        if MASKED:  # masked cells are not read
            x += tl.load(at, mask=allowed, other=0.0).to(tl.float32)
        else:
            x += tl.load(at).to(tl.float32)
    if rule.slopes is not None:
        slope = tl.load(rule.slopes + h)
        distance = tl.abs(of_rows(q + rule.shift, TRANSPOSED) - of_keys(k, TRANSPOSED)).to(
            tl.float32
        )
        x -= of_rows(slope, TRANSPOSED) * distance
    if MASKED:
        x = tl.where(allowed, x, float("-inf"))
    return x, t


# ----------------------------------------------------------------------------------------- dropout


@triton.jit
def mix(key, word):
    """Compute one round of the hash of core/problem/dropout.py, in 32 bits."""
    x = key ^ (word.to(tl.uint32) * 0x9E3779B1 + 0x7F4A7C15)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_hash(rule, b, h, q):
    """Compute the hash of (seed, b, h, q) for each row; `survivors` mixes the keys into it."""
    seed = tl.load(rule.seed)
    key = mix(mix((q * 0).to(tl.uint32), seed), seed >> 32)
    return mix(mix(mix(key, b), h), q)


@triton.jit
def survivors(rule, hashes, k, TRANSPOSED: tl.constexpr = False):
    """Return 1 / (1 - p) for each weight that is kept and 0 for each that is dropped, (M, N)."""
    cell = mix(of_rows(hashes, TRANSPOSED), of_keys(k, TRANSPOSED))
    return tl.where(cell.to(tl.int64) >= rule.drop_below, rule.keep_factor, 0.0)


# ------------------------------------------------------------------------------------- masked NaN


@triton.jit
def finite(x):
    """Return which numbers are finite; compared in float32, as the interpreter requires."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def is_nonfinite(x):
    """Return whether (rows, D) has a number that is not finite. It reduces all cells at once,
    because Triton 3.7 cannot compile a reduction of row maxima for capability 10.0."""
    return tl.max(tl.where(finite(x), 0, 1)) > 0


@triton.jit
def nonfinite_rows(x):
    """Return which rows of (rows, D) have a number that is not finite."""
    return tl.max(tl.where(finite(x), 0, 1), 1) > 0


@triton.jit
def cleaned(x):
    """Replace NaN and infinity by 0, since their product with a weight of 0 would be NaN."""
    return tl.where(finite(x), x, tl.zeros_like(x))


@triton.jit
def anchor(top):
    """Return the number that is subtracted in exponents: the largest logit, or 0 if it is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def above(x, base, rule, TRANSPOSED: tl.constexpr = False):
    """Return x - base as an exponent of 2, (M, N), for logits in units of the rule.

    The difference is multiplied, in two instructions. One instruction, x unit - (base unit), rounds
    the product of the base: at logits of 1e9 by 64, so that all powers of a row are 0 or infinite.
    """
    return (x - of_rows(base, TRANSPOSED)) * rule.unit
