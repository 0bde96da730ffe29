// The arithmetic of the two matrix products: float32, or pairs of bf16 summed in float32.
//
// Both products run over `units`. In float32 a unit is one number; in pairs it is two bf16 that
// lie side by side along the dimension that is summed over: two of D in the scores, two keys in
// the weighted sum. The register tiles are written once, for either.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

// E is the type in memory: float, bf16 or half. All are computed in float32.
template <class E> struct Singles {
  using Element = E;
  using Unit = float;
  using Vector = F;
  using Weight = float;                 // what a weight is stored as
  static constexpr int PER_UNIT = 1;
  static constexpr int EXP_DEGREE = 5;
  static Vector vector(const Unit* p) { return load(p); }
  static Vector broadcast(Unit x) { return all(x); }
  static Vector as_vector(F x) { return x; }
  static F mac(F sum, Vector a, Vector b) { return fma(a, b, sum); }
  static F whole(const E* p) { return load(p); }
  static F units(const E* p, int n) { return n >= W ? load(p) : load_part(p, n); }
  // n lanes of values: of one key, or of two that make pairs (`odd` is null past the last key).
  static F values(const E* x, const E*, int n) { return n == W ? load(x) : load_part(x, n); }
  // A total that stays 0 until a value is NaN or infinite, and is not 0 from then on.
  static F alarm(F so_far, F values) { return fma(values, zero(), so_far); }
  static void keep(Weight* p, F x) { store(p, x); }
  static Unit seen(Unit x, uint64_t bits) { return bits & 1 ? x : 0; }
};

#ifdef CLEARHEAD_HAS_PAIRS
struct Pairs {
  using Element = bf16;
  using Unit = uint32_t;
  using Vector = P;
  using Weight = uint16_t;
  static constexpr int PER_UNIT = 2;
  static constexpr int EXP_DEGREE = 4;
  static Vector vector(const Unit* p) { return load_pairs(p); }
  static Vector broadcast(Unit x) { return all_pairs(x); }
  static Vector as_vector(F x) { return as_pairs(x); }
  static F mac(F sum, Vector a, Vector b) { return dot(sum, a, b); }
  static F whole(const bf16* p) { return load((const float*)p); }
  static F units(const bf16* p, int n) { return load_raw(p, n < 2 * W ? n : 2 * W); }
  static F values(const bf16* even, const bf16* odd, int n) { return interleave(even, odd, n); }
  static F alarm(F so_far, F values) { return pick(special_pairs(values), all(1), so_far); }
  static void keep(Weight* p, F x) { store_narrow(p, x); }
  static Unit seen(Unit x, uint64_t bits) {
    return x & ((bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0));
  }
};
#endif

}  // namespace clearhead::CLEARHEAD_LEVEL
