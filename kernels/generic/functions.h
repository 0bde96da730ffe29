// Functions from a level's vocabulary: exp2, tanh, sums and maxima of rows.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

constexpr double LOG2E = 1.44269504088896341;
constexpr float INF = __builtin_inff();

// Each level has its own min and max, because the linker might use the widest level's copies of
// std::min and std::max for all levels.
template <class T> constexpr T min(T a, T b) { return a < b ? a : b; }
template <class T> constexpr T max(T a, T b) { return a > b ? a : b; }
// Returns how many of n numbers fit into a vector.
inline int in_vector(int64_t n) { return int(min<int64_t>(W, n)); }
inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Computes 2^x for x <= 0 (and a little above) as 2^round(x) * 2^rest with |rest| <= 1/2. The
// polynomials are exactly 1 at 0, so an unchanged maximum rescales by exactly 1. They were fitted
// by weighted least squares. Their relative errors, 9.1e-8 and 2.8e-6, are half a unit of float32
// and far below a unit of bf16. -infinity yields exactly 0, NaN stays NaN.
template <int degree> inline F exp2(F x) {
  static_assert(degree == 4 || degree == 5);
  F n, r = split(x, &n), p;
  if constexpr (degree == 5) {
    p = fma(splat(0x1.5bba14p-10f), r, splat(0x1.3cea88p-7f));
    p = fma(p, r, splat(0x1.c6b752p-5f));
    p = fma(p, r, splat(0x1.ebf9bcp-3f));
    p = fma(p, r, splat(0x1.62e42ap-1f));
  } else {
    p = fma(splat(0x1.3a02ccp-7f), r, splat(0x1.c9fc46p-5f));
    p = fma(p, r, splat(0x1.ec0378p-3f));
    p = fma(p, r, splat(0x1.62e12cp-1f));
  }
  return scale_by_power(fma(p, r, splat(1.0f)), n);
}

inline float exp2_one(float x) {
  float lane[W];
  store(lane, exp2<5>(splat(x)));
  return lane[0];
}

// Returns the unit of log(sum) in the log-sum-exp of a row, which is stored in one double as
// max + log(sum) * log_unit(max). With a maximum like 3e38, as masks use, rounding would lose
// log(sum), and with it whether one key has the weight or a hundred. From 2^32 on, two logits
// differ by 256 or are equal. There log(sum) is stored in units of 2^-32 of the maximum, too small
// to change a float. Code that computes a weight divides the difference by the same unit
// (backward.h; core/engines/cpu/backward.py for sinks).
inline double log_unit(float max) {
  float far = __builtin_fabsf(max);
  return far >= 0x1p32f && far < INF ? __builtin_ldexp(1.0, __builtin_ilogbf(far) - 32) : 1.0;
}

// Computes tanh: near 0 by an odd polynomial (error 3.7e-8), else as (1 - e) / (1 + e) with
// e = exp(-2 |x|), which would lose the digits of a small x.
inline F tanh(F x) {
  F y = abs(x), z = mul(x, x);
  F e = exp2<5>(mul(y, splat(float(-2 * LOG2E))));
  F far = div(sub(splat(1), e), add(splat(1), e));
  F p = fma(splat(0.016437576f), z, splat(-0.0526718109f));
  p = fma(p, z, splat(0.13320725f));
  p = fma(p, z, splat(-0.333329466f));
  F near = fma(mul(p, z), y, y);
  return sign_of(select(less(y, splat(0.55f)), near, far), x);
}

// Return the sum (the maximum) of vector i in lane i, for W vectors.
inline F totals(const F* x) {
  return fold(x, [](F a, F b) { return add(a, b); });
}
inline F maxima(const F* x) {
  return fold(x, [](F a, F b) { return max(a, b); });
}

}  // namespace clearhead::CLEARHEAD_LEVEL
