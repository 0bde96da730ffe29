// The arithmetic of the two matrix products: float32, or pairs of bf16 summed in float32.
//
// Both products sum over "units". In float32 a unit is one number. In pairs it is two bf16 that are
// adjacent in the dimension of the sum: two of D in the scores, two keys in the weighted sum. So
// the register tiles are written once for both.
#pragma once

#include "functions.h"

namespace clearhead::CLEARHEAD_LEVEL {

// E is the type in memory: float, bf16 or half. The arithmetic is in float32.
template <class E> struct Singles {
  using Element = E;
  using Unit = float;
  using Vector = F;
  using Weight = float;  // the type that a weight is stored as
  static constexpr int PER_UNIT = 1;
  static constexpr int64_t CHAIN = 192;  // products that are summed at once, for scores
  static constexpr int EXP_DEGREE = 5;
  static Vector vector(const Unit* p) { return load(p); }
  static Vector broadcast(Unit x) { return splat(x); }
  static Vector as_vector(F x) { return x; }
  static F mac(F sum, Vector a, Vector b) { return fma(a, b, sum); }
  static F load_units(const E* p) { return load(p); }
  static F load_units(const E* p, int n) { return n >= W ? load(p) : load_part(p, n); }
  // Loads n lanes of values of one key, or of two keys as pairs (`odd` is null after the last key).
  static F load_values(const E* x, const E*, int n) { return n == W ? load(x) : load_part(x, n); }
  // Updates a sum that is 0 until a value is NaN or infinite, and never 0 afterwards.
  static F nonfinite(F so_far, F values) { return fma(values, zero(), so_far); }
  static F finite_or_zero(F values) {
    return select(less(abs(values), splat(INF)), values, zero());
  }
  static void store_weights(Weight* p, F x) { store(p, x); }
  static F as_stored(F weights) { return weights; }
  static Unit masked(Unit x, uint64_t bits) { return bits & 1 ? x : 0; }
};

#ifdef CLEARHEAD_HAS_PAIRS
struct Pairs {
  using Element = bf16;
  using Unit = uint32_t;
  using Vector = P;
  using Weight = uint16_t;
  static constexpr int PER_UNIT = 2;
  static constexpr int64_t CHAIN = 1 << 30;
  static constexpr int EXP_DEGREE = 4;
  static Vector vector(const Unit* p) { return load_pairs(p); }
  static Vector broadcast(Unit x) { return all_pairs(x); }
  static Vector as_vector(F x) { return as_pairs(x); }
  static F mac(F sum, Vector a, Vector b) { return dot(sum, a, b); }
  static F load_units(const bf16* p) { return load((const float*)p); }
  static F load_units(const bf16* p, int n) { return load_raw(p, n < 2 * W ? n : 2 * W); }
  static F load_values(const bf16* even, const bf16* odd, int n) {
    return interleave(even, odd, n);
  }
  static F nonfinite(F so_far, F values) {
    return select(nonfinite_pairs(values), splat(1), so_far);
  }
  static F finite_or_zero(F values) { return finite_pairs_or_zero(values); }
  static void store_weights(Weight* p, F x) { store_narrow(p, x); }
  static F as_stored(F weights) { return narrowed(weights); }
  static F units_of(F even, F odd) { return pairs_of(even, odd); }
  static Unit masked(Unit x, uint64_t bits) {
    return x & ((bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0));
  }
};
#endif

// Values in float32, in the order of columns that loads fastest: VECTORS vectors for W * VECTORS
// numbers. Their sums have the same order until `put_in_order`.
template <class E> struct FastValues {
  static constexpr int VECTORS = 1;
  static void load_all(const E* p, int n, F* x) { *x = n == W ? load(p) : load_part(p, n); }
  static void put_in_order(float*) {}
};
#ifdef CLEARHEAD_HAS_EVEN_ODD
template <> struct FastValues<bf16> {
  static constexpr int VECTORS = 2;
  static void load_all(const bf16* p, int n, F* x) { load_even_odd(p, n, x, x + 1); }
  static void put_in_order(float* x) { store_interleaved(x, load(x), load(x + W)); }
};
#endif

// The arithmetic for tensors of E.
template <class E> struct ArithmeticFor { using Type = Singles<E>; };
#ifdef CLEARHEAD_HAS_PAIRS
template <> struct ArithmeticFor<bf16> { using Type = Pairs; };
#endif
template <class E> using ArithmeticOf = typename ArithmeticFor<E>::Type;

}  // namespace clearhead::CLEARHEAD_LEVEL
