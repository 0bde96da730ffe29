// The vocabulary of AVX-512 (F, BW, DQ, VL): 32 registers of 16 lanes.
#pragma once

#include <immintrin.h>

#include "../attention.h"

namespace clearhead::CLEARHEAD_LEVEL {

using F = __m512;
using Lanes = __mmask16;
constexpr int W = 16;

constexpr int REGISTERS = 32;

// Register tiles. Scores: 8 queries x 3 vectors of keys = 24 sums, 3 keys,
// 1 query. Weighted sum: 6 queries x 4 vectors of values = 24 sums, 4 values, 1 weight.
constexpr int SCORE_ROWS = 8, SCORE_VECTORS = 3;
constexpr int VALUE_ROWS = 6, VALUE_VECTORS = 4;

inline F zero() { return _mm512_setzero_ps(); }
inline F splat(float x) { return _mm512_set1_ps(x); }
inline F iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

inline Lanes first(int n) { return Lanes((1u << n) - 1); }
inline Lanes lanes(uint64_t word, int from) { return Lanes(word >> from); }
inline uint64_t word(Lanes m) { return m; }
inline F select(Lanes m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }

// Widening: a bf16 is the upper half of a float32.
inline F widen(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline __m256i bytes32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const bf16* p) { return widen(bytes32(p)); }
inline F load(const half* p) { return _mm512_cvtph_ps(bytes32(p)); }
inline F load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline F load_part(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
inline F load_part(const half* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}

// For blocks of 8 and 4 bits: the float16 at `p` in every lane; W signed bytes; the lower or the
// upper 4 bits of W bytes, minus 8.
inline F splat_half(const void* p) {
  int16_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
}
inline F of_bytes(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline F of_nibbles(const void* p, bool upper) {
  const F table = _mm512_sub_ps(iota(), splat(8));  // its index is the lower 4 bits
  __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_permutexvar_ps(upper ? _mm512_srli_epi32(x, 4) : x, table);
}

// Narrowing to bf16: round to nearest, ties to even; a NaN stays a (quiet) NaN.
inline __m256i narrow(F x) {
  __m512i i = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(i, 16), _mm512_set1_epi32(1));
  __m512i r =
      _mm512_srli_epi32(_mm512_add_epi32(i, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  Lanes nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0)));
}
inline __m256i narrow_half(F x) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store_part(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline void store_part(bf16* p, F x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }
inline void store_part(half* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow_half(x));
}

inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }  // b if either is NaN
inline F abs(F a) { return _mm512_abs_ps(a); }
// Returns the larger of two numbers that are at least 0. As bits, NaN is above infinity.
inline F max_magnitude(F a, F b) {
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline F sign_of(F magnitude, F sign) {  // a magnitude with the sign of another number
  const __m512i top = _mm512_set1_epi32(int(0x80000000));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude),
                                             _mm512_and_si512(_mm512_castps_si512(sign), top)));
}
inline Lanes less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Lanes equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline float total(F a) { return _mm512_reduce_add_ps(a); }

// Returns p * 2^n for whole n. Below 2^-149 the product is 0, so `MIN_POWER` replaces -infinity,
// whose product with 0 would be NaN.
constexpr float MIN_POWER = -192.0f;
// Splits x = n + rest with n whole and |rest| <= 1/2; the rest of -infinity is 0.
inline F split(F x, F* n) {
  F rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  *n = _mm512_sub_ps(x, rest);
  return rest;
}
inline F scale_by_power(F p, F n) { return _mm512_scalef_ps(p, n); }

// Transposes 16 x 16 numbers: pairs, then quadruples, then whole lanes.
inline void transpose(F (&x)[W]) {
  F a[W], b[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    a[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      __m512d lo = _mm512_castps_pd(a[i + j]), hi = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    F p = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88),
      q = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd);
    F r = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
    F s = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xdd);
    x[j] = _mm512_shuffle_f32x4(p, r, 0x88);
    x[j + 4] = _mm512_shuffle_f32x4(q, s, 0x88);
    x[j + 8] = _mm512_shuffle_f32x4(p, r, 0xdd);
    x[j + 12] = _mm512_shuffle_f32x4(q, s, 0xdd);
  }
}

// Folds sixteen vectors by `op` into one, whose lane i is the result of vector i. The tree of
// operations is the same for every lane.
template <class Op> inline F fold(const F* x, Op op) {
  F a[8], b[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)  // vectors 2i and 2i + 1, in the even and the odd lanes
    a[i] =
        op(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d lo = _mm512_castps_pd(a[2 * i]), hi = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi)),
              _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi)));
  }
  F c = op(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  F d = op(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  return op(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}

#ifdef __AVX512BF16__
// Pairs of bf16: two products are added to every lane's sum, twice the work of a float32 FMA.
#define CLEARHEAD_HAS_PAIRS 1
using P = __m512bh;
inline P load_pairs(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline P as_pairs(F x) { return (P)_mm512_castps_si512(x); }
inline P all_pairs(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(int(pair)); }
inline F dot(F sum, P a, P b) { return _mm512_dpbf16_ps(sum, a, b); }
inline void store_narrow(uint16_t* p, F x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
}
inline F narrowed(F x) { return widen((__m256i)_mm512_cvtneps_pbh(x)); }
// Loads n 16-bit numbers as they are in memory into float lanes; the rest is 0.
inline F load_raw(const bf16* p, int n) {
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(uint32_t((uint64_t(1) << n) - 1), p));
}
// Combines two rows of n bf16 into n pairs: one in the upper half, one in the lower.
inline F interleave(const bf16* even, const bf16* odd, int n) {
  __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), even));
  __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(odd ? first(n) : 0, odd));
  return _mm512_castsi512_ps(_mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
}
// Rounds two vectors of floats to bf16, and combines their lanes to pairs.
inline F pairs_of(F even, F odd) {
  __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
  __m512i b = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
  return _mm512_castsi512_ps(_mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
}
inline __mmask32 nonfinite_halves(F x) {
  const __m512i e = _mm512_set1_epi32(0x7f807f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_castps_si512(x), e), e);
}
inline Lanes nonfinite_pairs(F x) {  // lane 0 if any half of any lane is NaN or infinite
  return Lanes(nonfinite_halves(x) != 0 ? 1 : 0);
}
inline F finite_pairs_or_zero(F x) {
  return _mm512_castsi512_ps(_mm512_maskz_mov_epi16(~nonfinite_halves(x), _mm512_castps_si512(x)));
}
#endif

}  // namespace clearhead::CLEARHEAD_LEVEL
