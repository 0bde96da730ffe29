// The vocabulary of NEON on 64-bit ARM, where every processor has it: 32 registers of 4 lanes.
#pragma once

#include <arm_neon.h>

#include "../attention.h"

namespace clearhead::CLEARHEAD_LEVEL {

using F = float32x4_t;
using Lanes = uint32x4_t;  // all ones or all zeros in a lane
constexpr int W = 4;

constexpr int REGISTERS = 32;

// Register tiles: 4 x 4 = 16 sums, which keep four pipes of latency 4 busy, 4 keys (or values) and
// 4 queries (or weights). With 6 x 4 sums, gcc 12 spills three.
constexpr int SCORE_ROWS = 4, SCORE_VECTORS = 4;
constexpr int VALUE_ROWS = 4, VALUE_VECTORS = 4;

inline F zero() { return vdupq_n_f32(0); }
inline F splat(float x) { return vdupq_n_f32(x); }
inline F iota() { return F{0, 1, 2, 3}; }

inline Lanes lanes(uint64_t word, int from) {
  return vtstq_u32(vdupq_n_u32(uint32_t(word >> from)), Lanes{1, 2, 4, 8});
}
inline uint64_t word(Lanes m) { return vaddvq_u32(vandq_u32(m, Lanes{1, 2, 4, 8})); }
inline F select(Lanes m, F yes, F no) { return vbslq_f32(m, yes, no); }

inline F widen(uint16x4_t h, bf16) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }
inline F widen(uint16x4_t h, half) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
inline F load(const float* p) { return vld1q_f32(p); }
template <class E> inline F load(const E* p) { return widen(vld1_u16(&p->bits), E()); }
template <class E> inline F load_part(const E* p, int n) {
  E some[W] = {};
  for (int i = 0; i < n; i++) some[i] = p[i];
  return load(some);
}

// For blocks of 8 and 4 bits: the float16 at `p` in every lane; W signed bytes; the lower or the
// upper 4 bits of W bytes, minus 8.
inline F splat_half(const void* p) {
  half x;
  __builtin_memcpy(&x, p, sizeof x);
  return widen(vdup_n_u16(x.bits), x);
}
inline uint8x8_t bytes4(const void* p) {
  uint32_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return vreinterpret_u8_u32(vdup_n_u32(x));
}
inline F of_bytes(const void* p) {
  int16x8_t x = vmovl_s8(vreinterpret_s8_u8(bytes4(p)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
}
inline F of_nibbles(const void* p, bool upper) {
  uint8x8_t x = upper ? vshr_n_u8(bytes4(p), 4) : vand_u8(bytes4(p), vdup_n_u8(15));
  return vsubq_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(x)))), vdupq_n_f32(8));
}

// Narrowing to bf16: round to nearest, ties to even; a NaN stays a (quiet) NaN.
inline uint16x4_t narrow(F x, bf16) {
  uint32x4_t i = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(i, 16), vdupq_n_u32(1));
  uint32x4_t r = vshrq_n_u32(vaddq_u32(i, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  return vmovn_u32(vbslq_u32(vceqq_f32(x, x), r, vdupq_n_u32(0x7fc0)));
}
inline uint16x4_t narrow(F x, half) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
inline void store(float* p, F x) { vst1q_f32(p, x); }
inline void store_part(float* p, F x, int n) {
  float some[W];
  store(some, x);
  for (int i = 0; i < n; i++) p[i] = some[i];
}
template <class E> inline void store_part(E* p, F x, int n) {
  E some[W];
  vst1_u16(&some[0].bits, narrow(x, E()));
  for (int i = 0; i < n; i++) p[i] = some[i];
}

inline F add(F a, F b) { return vaddq_f32(a, b); }
inline F sub(F a, F b) { return vsubq_f32(a, b); }
inline F mul(F a, F b) { return vmulq_f32(a, b); }
inline F div(F a, F b) { return vdivq_f32(a, b); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b if either is NaN
inline F abs(F a) { return vabsq_f32(a); }
// Returns the larger of two numbers that are at least 0; NaN is above infinity.
inline F max_magnitude(F a, F b) { return vmaxq_f32(a, b); }
inline F sign_of(F magnitude, F sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000), sign, magnitude);
}
inline Lanes less(F a, F b) { return vcltq_f32(a, b); }
inline Lanes equal(F a, F b) { return vceqq_f32(a, b); }
inline float total(F a) { return vaddvq_f32(a); }

// Returns p * 2^n, with 2^n from its exponent bits; n = -127 yields 0.
constexpr float MIN_POWER = -127.0f;
// Splits x = n + rest with n whole and |rest| <= 1/2; -infinity becomes MIN_POWER.
inline F split(F x, F* n) {
  x = max(splat(MIN_POWER), x);
  *n = vrndnq_f32(x);
  return sub(x, *n);
}
inline F scale_by_power(F p, F n) {
  int32x4_t e = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return mul(p, vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
}

// Returns the even (odd) numbers of the pairs of two vectors.
inline F pairs_1(F a, F b) {
  return vreinterpretq_f32_f64(vtrn1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
inline F pairs_2(F a, F b) {
  return vreinterpretq_f32_f64(vtrn2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
inline void transpose(F (&x)[W]) {
  F a = vtrn1q_f32(x[0], x[1]), b = vtrn2q_f32(x[0], x[1]);
  F c = vtrn1q_f32(x[2], x[3]), d = vtrn2q_f32(x[2], x[3]);
  x[0] = pairs_1(a, c), x[1] = pairs_1(b, d);
  x[2] = pairs_2(a, c), x[3] = pairs_2(b, d);
}

// Folds four vectors by `op` into one, whose lane i is the result of vector i. The tree of
// operations is the same for every lane.
template <class Op> inline F fold(const F* x, Op op) {
  F a = op(vuzp1q_f32(x[0], x[1]), vuzp2q_f32(x[0], x[1]));
  F b = op(vuzp1q_f32(x[2], x[3]), vuzp2q_f32(x[2], x[3]));
  return op(vuzp1q_f32(a, b), vuzp2q_f32(a, b));
}

}  // namespace clearhead::CLEARHEAD_LEVEL
