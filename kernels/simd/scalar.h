// The vocabulary without a particular instruction set: four lanes in vectors of the compiler, for
// the platform's baseline (SSE2 on x86-64, NEON on ARM). Other levels are compared with it.
#pragma once

#include <cstring>

#include "../attention.h"

namespace clearhead::CLEARHEAD_LEVEL {

typedef float F __attribute__((vector_size(16)));
typedef int32_t Lanes __attribute__((vector_size(16)));  // -1 or 0 in a lane
typedef uint32_t Words __attribute__((vector_size(16)));
constexpr int W = 4;

constexpr int REGISTERS = 16;  // of SSE2

// Register tiles: 4 x 2 sums leave room for the products.
constexpr int SCORE_ROWS = 4, SCORE_VECTORS = 2;
constexpr int VALUE_ROWS = 4, VALUE_VECTORS = 2;

inline F zero() { return F{0, 0, 0, 0}; }
inline F splat(float x) { return F{x, x, x, x}; }
inline F iota() { return F{0, 1, 2, 3}; }
inline Lanes lanes(uint64_t word, int from) {
  word >>= from;
  return -Lanes{int(word & 1), int(word >> 1 & 1), int(word >> 2 & 1), int(word >> 3 & 1)};
}
inline uint64_t word(Lanes m) {  // a bit for each lane
  return uint64_t((m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8));
}
inline F select(Lanes m, F yes, F no) { return m ? yes : no; }

inline float number(float x) { return x; }
inline float number(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline float number(half x) {
  // Moves the 15 bits of magnitude under the float's exponent. One multiplication corrects the bias
  // of the exponent, also for float16's subnormals. NaN and infinity are handled afterwards.
  uint32_t bits = uint32_t(x.bits & 0x7fff) << 13;
  float f;
  memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  memcpy(&bits, &f, 4);
  if ((x.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= uint32_t(x.bits & 0x8000) << 16;
  memcpy(&f, &bits, 4);
  return f;
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {
  uint32_t i;
  memcpy(&i, &x, 4);
  p->bits = x != x ? 0x7fc0 : uint16_t((i + 0x7fff + (i >> 16 & 1)) >> 16);
}
inline void put(half* p, float x) {
  uint32_t i;
  memcpy(&i, &x, 4);
  uint16_t sign = uint16_t(i >> 16 & 0x8000);
  i &= 0x7fffffff;
  if (i > 0x7f800000) {
    p->bits = uint16_t(sign | 0x7e00);
  } else if (i >= 0x47800000) {  // 65536 and more, or infinite
    p->bits = uint16_t(sign | 0x7c00);
  } else if (i < 0x38800000) {  // below 2^-14: let the float adder round to a multiple of 2^-24
    float f;
    memcpy(&f, &i, 4);
    f += 0.5f;
    memcpy(&i, &f, 4);
    p->bits = uint16_t(sign | (i - 0x3f000000));
  } else {
    i += 0xfff + (i >> 13 & 1);
    p->bits = uint16_t(sign | ((i - 0x38000000) >> 13));
  }
}

template <class E> inline F load(const E* p) {
  return F{number(p[0]), number(p[1]), number(p[2]), number(p[3])};
}
template <class E> inline F load_part(const E* p, int n) {
  float some[W] = {};
  for (int i = 0; i < n; i++) some[i] = number(p[i]);
  return load(some);
}
// For blocks of 8 and 4 bits: the float16 at `p` in every lane; W signed bytes; the lower or the
// upper 4 bits of W bytes, minus 8.
inline F splat_half(const void* p) {
  half x;
  memcpy(&x, p, sizeof x);
  return splat(number(x));
}
inline F of_bytes(const void* p) {
  auto* x = (const int8_t*)p;
  return F{float(x[0]), float(x[1]), float(x[2]), float(x[3])};
}
inline F of_nibbles(const void* p, bool upper) {
  F x;
  for (int i = 0; i < W; i++) x[i] = float((((const uint8_t*)p)[i] >> (upper ? 4 : 0) & 15) - 8);
  return x;
}
inline void store(float* p, F x) { memcpy(p, &x, sizeof x); }
template <class E> inline void store_part(E* p, F x, int n) {
  for (int i = 0; i < n; i++) put(p + i, x[i]);
}

inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F max(F a, F b) { return a > b ? a : b; }  // b if either is NaN
inline F abs(F a) { return (F)((Words)a & 0x7fffffffu); }
// Returns the larger of two numbers that are at least 0. As bits, NaN is above infinity.
inline F max_magnitude(F a, F b) { return (Lanes)a > (Lanes)b ? a : b; }
inline F sign_of(F magnitude, F sign) {
  return (F)((Words)magnitude | ((Words)sign & 0x80000000u));
}
inline Lanes less(F a, F b) { return a < b; }
inline Lanes equal(F a, F b) { return a == b; }
inline float total(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }

// Returns p * 2^n, with 2^n from its exponent bits; n = -127 yields 0.
constexpr float MIN_POWER = -127.0f;
// Splits x = n + rest with n whole and |rest| <= 1/2; -infinity becomes MIN_POWER. Below 2^22,
// adding 1.5 * 2^23 rounds to a whole number.
inline F split(F x, F* n) {
  const F shift = splat(0x1.8p23f);
  x = max(splat(MIN_POWER), x);
  *n = (x + shift) - shift;
  return x - *n;
}
inline F scale_by_power(F p, F n) {
  return p * (F)((__builtin_convertvector(n, Lanes) + 127) << 23);
}

inline void transpose(F (&x)[W]) {
  F y[W] = {x[0], x[1], x[2], x[3]};
  for (int i = 0; i < W; i++) x[i] = F{y[0][i], y[1][i], y[2][i], y[3][i]};
}
template <class Op> inline F fold(const F* x, Op op) {
  F y[W] = {x[0], x[1], x[2], x[3]};
  transpose(y);
  return op(op(y[0], y[2]), op(y[1], y[3]));
}

}  // namespace clearhead::CLEARHEAD_LEVEL
