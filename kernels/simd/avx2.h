// The vocabulary of AVX2 with FMA and F16C: 16 registers of 8 lanes.
#pragma once

#include <immintrin.h>

#include "../attention.h"

namespace clearhead::CLEARHEAD_LEVEL {

using F = __m256;
using Lanes = __m256;  // all ones or all zeros in a lane
constexpr int W = 8;

constexpr int REGISTERS = 16;

// Register tiles: 4 x 3 = 12 sums, 3 keys (or values), 1 query (or weight).
constexpr int SCORE_ROWS = 4, SCORE_VECTORS = 3;
constexpr int VALUE_ROWS = 4, VALUE_VECTORS = 3;

inline F zero() { return _mm256_setzero_ps(); }
inline F splat(float x) { return _mm256_set1_ps(x); }
inline F iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

inline __m256i first_words(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Lanes lanes(uint64_t word, int from) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i set = _mm256_and_si256(_mm256_set1_epi32(int(word >> from)), bit);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit));
}
inline uint64_t word(Lanes m) { return uint64_t(_mm256_movemask_ps(m)); }
inline F select(Lanes m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }

inline F widen(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline __m128i bytes16(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
// Loads the first n of 8 numbers of 16 bits without reading past them; AVX2 has no masked load for
// them.
inline __m128i few(const void* p, int n) {
  if (n == W) return bytes16(p);
  alignas(16) uint16_t x[8] = {};
  for (int i = 0; i < n; i++) x[i] = ((const uint16_t*)p)[i];
  return _mm_load_si128((const __m128i*)x);
}
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load(const bf16* p) { return widen(bytes16(p)); }
inline F load(const half* p) { return _mm256_cvtph_ps(bytes16(p)); }
inline F load_part(const float* p, int n) { return _mm256_maskload_ps(p, first_words(n)); }
inline F load_part(const bf16* p, int n) { return widen(few(p, n)); }
inline F load_part(const half* p, int n) { return _mm256_cvtph_ps(few(p, n)); }

// For blocks of 8 and 4 bits: the float16 at `p` in every lane; W signed bytes; the lower or the
// upper 4 bits of W bytes, minus 8.
inline F splat_half(const void* p) {
  int16_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return _mm256_cvtph_ps(_mm_set1_epi16(bits));
}
inline F of_bytes(const void* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F of_nibbles(const void* p, bool upper) {
  __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  x = upper ? _mm256_srli_epi32(x, 4) : _mm256_and_si256(x, _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(x, _mm256_set1_epi32(8)));
}

// Loads the first n of 16 bf16 as words of two. A shift keeps the even numbers and a mask the odd
// ones: 3 instructions for 16 numbers, where widening takes 4.
#define CLEARHEAD_HAS_EVEN_ODD 1
inline void load_even_odd(const bf16* p, int n, F* even, F* odd) {
  __m256i x;
  if (n >= 2 * W) {
    x = _mm256_loadu_si256((const __m256i*)p);
  } else {
    x = _mm256_maskload_epi32((const int*)p, first_words(n / 2));
    __m256i last = _mm256_andnot_si256(first_words(n / 2), first_words((n + 1) / 2));
    if (n % 2) x = _mm256_or_si256(x, _mm256_and_si256(last, _mm256_set1_epi32(p[n - 1].bits)));
  }
  *even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  *odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))));
}
// Stores two vectors as one sequence of numbers.
inline void store_interleaved(float* p, F even, F odd) {
  F a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(a, b, 0x20));
  _mm256_storeu_ps(p + W, _mm256_permute2f128_ps(a, b, 0x31));
}

inline __m128i narrow(F x) {
  __m256i i = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(i, 16), _mm256_set1_epi32(1));
  __m256i r =
      _mm256_srli_epi32(_mm256_add_epi32(i, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
inline void store_few(void* p, __m128i h, int n) {
  if (n == W) return _mm_storeu_si128((__m128i*)p, h);
  alignas(16) uint16_t x[8];
  _mm_store_si128((__m128i*)x, h);
  for (int i = 0; i < n; i++) ((uint16_t*)p)[i] = x[i];
}
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
// A masked store is microcode on Zen 2 and 3: with 32 keys, storing the output took a fifth of a
// call.
inline void store_part(float* p, F x, int n) {
  if (n == W) store(p, x);
  else _mm256_maskstore_ps(p, first_words(n), x);
}
inline void store_part(bf16* p, F x, int n) { store_few(p, narrow(x), n); }
inline void store_part(half* p, F x, int n) {
  store_few(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
}

inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }  // b if either is NaN
inline F abs(F a) { return _mm256_andnot_ps(splat(-0.0f), a); }
// Returns the larger of two numbers that are at least 0. As bits, NaN is above infinity.
inline F max_magnitude(F a, F b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline F sign_of(F magnitude, F sign) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(splat(-0.0f), sign));
}
inline Lanes less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Lanes equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline float total(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// Returns p * 2^n, with 2^n from its exponent bits; n = -127 yields 0.
constexpr float MIN_POWER = -127.0f;
// Splits x = n + rest with n whole and |rest| <= 1/2; -infinity becomes MIN_POWER.
inline F split(F x, F* n) {
  x = max(splat(MIN_POWER), x);
  *n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return sub(x, *n);
}
inline F scale_by_power(F p, F n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}

inline void transpose(F (&x)[W]) {
  F a[W], b[W];
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 2) {
    a[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < W; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    x[j] = _mm256_permute2f128_ps(b[j], b[j + 4], 0x20);
    x[j + 4] = _mm256_permute2f128_ps(b[j], b[j + 4], 0x31);
  }
}

template <class Op> inline F fold(const F* x, Op op) {
  F a[4], b[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    a[i] =
        op(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    b[i] = op(_mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
              _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
  return op(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
}

}  // namespace clearhead::CLEARHEAD_LEVEL
