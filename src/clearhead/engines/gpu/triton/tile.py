"""What all kernels do with a tile: load rows, turn products into logits, say which keys a query may
look at, drop cells.

A tile has M rows and N keys. A row is a query of a head: a tile holds one head's queries, or, where
queries are few (decode), those of several heads that read the same keys. Rows beyond the last
repeat the last one, so they need no bounds; they are never stored, or have weight 0.
Powers are of 2, because exp2 is one instruction and exp two. Where a product adds up over the rows
a tile is TURNED, (N, M): what it multiplies then comes from registers.
"""

import triton
import triton.language as tl


@triton.jit
def of_rows(x, TURNED: tl.constexpr):
    """What each row has, beside the cells of a tile."""
    return x[None, :] if TURNED else x[:, None]


@triton.jit
def of_keys(x, TURNED: tl.constexpr):
    """What each key has, beside the cells of a tile."""
    return x[:, None] if TURNED else x[None, :]


@triton.jit
def row_offsets(view, b, h, t):
    """Where the rows (b, h, t) of a `Rows` begin."""
    at = b.to(tl.int64) * view.b + h.to(tl.int64) * view.h + t.to(tl.int64) * view.t
    if view.even is not None:
        at = tl.multiple_of(at, 128 // view.at.dtype.element_ty.primitive_bitwidth)
    return at


@triton.jit
def line_offsets(view, b, h, q):
    """Where the lines (b, h, q, 0) of a `Cells` begin."""
    return b.to(tl.int64) * view.b + h.to(tl.int64) * view.h + q.to(tl.int64) * view.q


@triton.jit
def cell_offsets(view, b, h, q, k, TURNED: tl.constexpr):
    """Where the cells (b, h, q, k) of a `Cells` stand, (M, N)."""
    of_k = k.to(tl.int64) * view.k
    return of_rows(line_offsets(view, b, h, q), TURNED) + of_keys(of_k, TURNED)


@triton.jit
def load_rows(view, b, h, t, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D), 0 beyond D."""
    d = tl.arange(0, BLOCK_D)
    at = view.at + row_offsets(view, b, h, t)[:, None] + d[None, :]
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def load_keys(view, b, g, k, Tk, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND: tl.constexpr):
    """Rows of keys or values, (N, BLOCK_D); with `BOUND`, 0 beyond Tk."""
    d = tl.arange(0, BLOCK_D)
    at = view.at + row_offsets(view, b, g, k)[:, None] + d[None, :]
    if BOUND:
        return tl.load(at, mask=(k[:, None] < Tk) & (d[None, :] < D), other=0.0)
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in fp32; `acc` may be None. The interpreter multiplies no bf16: there, numbers
    are "widened" to fp32 first, in which products of bf16 are exact."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


# ---------------------------------------------------------------------------------------- the mask


@triton.jit
def key_range(rule, sizes, b, h, q, j, BAND: tl.constexpr):
    """The keys [lo, hi) of range j of each row."""
    if BAND:
        lo = tl.minimum(tl.maximum(q - rule.before, 0), sizes.Tk)
        hi = tl.minimum(tl.maximum(q + rule.after + 1, 0), sizes.Tk)
    else:
        lo = tl.load(rule.lo.at + line_offsets(rule.lo, b, h, q) + j * rule.lo.k).to(tl.int32)
        hi = tl.load(rule.hi.at + line_offsets(rule.hi, b, h, q) + j * rule.hi.k).to(tl.int32)
    return lo, hi


@triton.jit
def allowed_cells(rule, sizes, b, h, q, k, lo, hi, TURNED: tl.constexpr = False):
    """(M, N): which keys lie in the range [lo, hi) of their row, and have their bit set."""
    key = of_keys(k, TURNED)
    allowed = (key >= of_rows(lo, TURNED)) & (key < of_rows(hi, TURNED))
    if rule.bits is not None:
        at = rule.bits.at + cell_offsets(rule.bits, b, h, q, k, TURNED)
        allowed = allowed & (tl.load(at, mask=allowed, other=0) != 0)
    return allowed


# -------------------------------------------------------------------------------------- the logits


@triton.jit
def tanh(x):
    """Within two roundings: a series where 1 - exp would cancel, else (1 - e) / (1 + e)."""
    s = x * x
    series = 1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835))))
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(s < 0.0625, x * series, tl.where(x < 0, -far, far))


@triton.jit
def logits(products, rule, b, h, q, k, allowed, MASKED: tl.constexpr, TURNED: tl.constexpr = False):
    """The input of softmax in units of the rule, -inf where not allowed, and tanh of the soft cap
    (anything without one), whose slope the backward pass needs. `products` is q k, (M, N). No -inf
    stands in the bias: the checks made a mask of it (problem/check.py)."""
    x = products
    if rule.scale is not None:
        x = products * rule.scale
    t = x
    if rule.cap is not None:
        t = tanh(x)
        x = t * rule.cap
    if rule.bias is not None:
        at = rule.bias.at + cell_offsets(rule.bias, b, h, q, k, TURNED)
        if MASKED:  # what a masked cell holds is not read
            x += tl.load(at, mask=allowed, other=0.0).to(tl.float32)
        else:
            x += tl.load(at).to(tl.float32)
    if rule.slopes is not None:
        slope = tl.load(rule.slopes + h)
        distance = tl.abs(of_rows(q + rule.shift, TURNED) - of_keys(k, TURNED)).to(tl.float32)
        x -= of_rows(slope, TURNED) * distance
    if MASKED:
        x = tl.where(allowed, x, float("-inf"))
    return x, t


# ----------------------------------------------------------------------------------------- dropout


@triton.jit
def mix(key, word):
    """One round of the hash of problem/dropout.py, in 32 bits."""
    x = key ^ (word.to(tl.uint32) * 0x9E3779B1 + 0x7F4A7C15)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_hash(rule, b, h, q):
    """The hash of (seed, b, h, q) for each row, to which the key is mixed cell by cell."""
    seed = tl.load(rule.seed)
    key = mix(mix((q * 0).to(tl.uint32), seed), seed >> 32)
    return mix(mix(mix(key, b), h), q)


@triton.jit
def survivors(rule, hashes, k, TURNED: tl.constexpr = False):
    """(M, N): 1 / (1 - p) where the weight survives, 0 where it is dropped."""
    cell = mix(of_rows(hashes, TURNED), of_keys(k, TURNED))
    return tl.where(cell.to(tl.int64) >= rule.drop_below, rule.keep_factor, 0.0)


# ---------------------------------------------------------------------------- NaN behind the mask


@triton.jit
def finite(x):
    """Which numbers are neither NaN nor infinite; compared in fp32, as the interpreter needs."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def cleaned(x):
    """0 in place of NaN and infinity, whose product with a weight of 0 would be NaN."""
    return tl.where(finite(x), x, tl.zeros_like(x))


@triton.jit
def anchor(top):
    """What exponents are taken relative to: the largest logit, 0 where there is none."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def above(x, base, rule, TURNED: tl.constexpr = False):
    """x - base, (M, N), of logits in units of the rule as an exponent of 2. Of bare products in one
    instruction, rounded at the size of the difference but for what all cells of a row share; a bias
    may be as large as a float, and then only the difference is multiplied."""
    if rule.scale is None:
        return tl.fma(x, rule.unit, of_rows(-(base * rule.unit), TURNED))
    return (x - of_rows(base, TURNED)) * rule.unit
