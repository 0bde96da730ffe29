// The functions attention needs, out of a level's vocabulary: powers of 2, tanh, sums and maxima of rows.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

constexpr double LOG2E = 1.44269504088896341;
constexpr float NOTHING = -__builtin_inff();

// Every level has its own (so has attention.cpp), or the linker might keep the widest for all.
template <class T> constexpr T least(T a, T b) { return a < b ? a : b; }
template <class T> constexpr T most(T a, T b) { return a > b ? a : b; }
inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// 2^x for x <= 0 (and a little above): 2^round(x) * 2^rest with |rest| <= 1/2. The polynomials are
// 1 at 0 exactly, so a maximum that does not move rescales by exactly 1. Their relative errors,
// 9.1e-8 and 2.8e-6, are half a unit of float32 and far below one of bf16 (fitted by weighted
// least squares). -infinity gives exactly 0, NaN stays NaN.
template <int degree> inline F exp2(F x) {
  static_assert(degree == 4 || degree == 5);
  F n, r = split(x, &n), p;
  if constexpr (degree == 5) {
    p = fma(all(0x1.5bba14p-10f), r, all(0x1.3cea88p-7f));
    p = fma(p, r, all(0x1.c6b752p-5f));
    p = fma(p, r, all(0x1.ebf9bcp-3f));
    p = fma(p, r, all(0x1.62e42ap-1f));
  } else {
    p = fma(all(0x1.3a02ccp-7f), r, all(0x1.c9fc46p-5f));
    p = fma(p, r, all(0x1.ec0378p-3f));
    p = fma(p, r, all(0x1.62e12cp-1f));
  }
  return times_power(fma(p, r, all(1.0f)), n);
}

inline float exp2_one(float x) {
  float lane[W];
  store(lane, exp2<5>(all(x)));
  return lane[0];
}

// What the logarithm of a row's sum is counted in where it stands beside the row's maximum in one
// double. Beside 3e38, of which masks are made, it would be lost, and with it whether one key has the
// weight or a hundred; so from 2^32 on, where two logits differ by 256 or not at all, it is counted in
// 2^-32 of the maximum: still too small to change a float. Whoever takes a weight from it divides the
// difference by the same (backward.h; engines/cpu/back.py for sinks).
inline double log_unit(float max) {
  float far = __builtin_fabsf(max);
  return far >= 0x1p32f && far < -NOTHING ? __builtin_ldexp(1.0, __builtin_ilogbf(far) - 32) : 1.0;
}

// tanh: near 0 an odd polynomial (3.7e-8), else (1 - e) / (1 + e) with e = exp(-2 |x|), which
// would lose the digits of a small x.
inline F tanh(F x) {
  F y = abs(x), z = mul(x, x);
  F e = exp2<5>(mul(y, all(float(-2 * LOG2E))));
  F far = div(sub(all(1), e), add(all(1), e));
  F p = fma(all(0.016437576f), z, all(-0.0526718109f));
  p = fma(p, z, all(0.13320725f));
  p = fma(p, z, all(-0.333329466f));
  F near = fma(mul(p, z), y, y);
  return sign_of(pick(less(y, all(0.55f)), near, far), x);
}

// Lane i of the result belongs to vector i of W.
inline F totals(const F* x) {
  return fold(x, [](F a, F b) { return add(a, b); });
}
inline F maxima(const F* x) {
  return fold(x, [](F a, F b) { return max(a, b); });
}

}  // namespace clearhead::CLEARHEAD_LEVEL
