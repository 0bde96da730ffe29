// One level: the generic algorithms with the vocabulary (simd/*.h) that is included before this
// file.
//
// Every name is in the level's own namespace, and no function of the C++ library is called. So a
// function that other levels use cannot contain a wide instruction (checked by
// tests/core/engines/cpu/test_kernels.py).
#pragma once

#include "arithmetic.h"
#include "backward.h"
#include "ceilings.h"
#include "decode.h"
#include "divergence.h"
#include "dtype.h"
#include "largest_parts.h"
#include "logits.h"
#include "prefill.h"

namespace clearhead::CLEARHEAD_LEVEL {

// Calls `then` with the arithmetic for the dtype of q, k and v.
template <class Then>
[[gnu::always_inline]] inline auto with_arithmetic(const Problem& p, Then then) {
  return with_dtype(p.dtype, [&]<class E>(E) { return then(ArithmeticOf<E>()); });
}

// Calls `then` with the Decode for the number of rows, rounded up to a power of two.
template <class A, class C, class Then> auto with_rows(const Problem& p, Then then) {
  const int64_t rows = p.H / p.G * p.Tq;
  if constexpr (W >= 8)
    if (rows > 4) return then.template operator()<Decode<A, 8, C>>();
  if (rows > 2) return then.template operator()<Decode<A, 4, C>>();
  if (rows > 1) return then.template operator()<Decode<A, 2, C>>();
  return then.template operator()<Decode<A, 1, C>>();
}
// Calls `then` with the Decode for the types of the queries and of the stored keys.
template <class Then> auto with_decode(const Problem& p, Then then) {
  if (p.stored == STORED_Q8_0) return with_rows<Singles<float>, Q8_0>(p, then);
  if (p.stored == STORED_Q4_0) return with_rows<Singles<float>, Q4_0>(p, then);
  return with_arithmetic(p, [&]<class A>(A) { return with_rows<A, typename A::Element>(p, then); });
}

inline size_t prefill_scratch(const Problem& p, int64_t rows) {
  return with_arithmetic(p, [&]<class A>(A) { return Prefill<A>::scratch(p, rows); });
}
inline void prefill(const Problem& p, const PrefillTask& task, char* scratch) {
  with_arithmetic(p, [&]<class A>(A) { Prefill<A>::run(p, task, scratch); });
}
inline void add_sums(const Problem& p, const PrefillTask& task, char* scratch) {
  with_arithmetic(p, [&]<class A>(A) { Prefill<A>::add_sums(p, task, scratch); });
}
inline size_t decode_scratch(const Problem& p) {
  return with_decode(p, [&]<class D>() { return D::scratch(p); });
}
inline void decode(const Problem& p, const DecodeTask& task, char* scratch) {
  with_decode(p, [&]<class D>() { D::run(p, task, scratch); });
}
inline void merge_splits(const Problem& p, int64_t b, int64_t key_head, int64_t splits,
                         const float* states) {
  with_dtype(p.dtype, [&]<class E>(E) { merge_splits_of<E>(p, b, key_head, splits, states); });
}

inline double logit_scale(const Problem& p) { return Logits(p).logit_scale(); }

// In float32 only: pairs of bf16 would round the vectors.
using FloatParts = PartLister<ArithmeticOf<float>>;

inline size_t backward_scratch(const Problem& p) {
  return with_arithmetic(p, [&]<class A>(A) { return Backward<A>::scratch(p); });
}
inline int64_t backward_rows(const Problem& p) {
  return with_arithmetic(p, [&]<class A>(A) { return Backward<A>::rows(p); });
}
inline void deltas(const Problem& p, const Gradients& g, int64_t b, int64_t h) {
  with_arithmetic(p, [&]<class A>(A) { Backward<A>::deltas(p, g, b, h); });
}
inline void sum_heads(const Problem& p, const Gradients& g, int64_t b, int64_t key_head) {
  with_arithmetic(p, [&]<class A>(A) { Backward<A>::sum_heads(p, g, b, key_head); });
}
inline void backward(const Problem& p, const Gradients& g, const BackwardTask& task,
                     char* scratch) {
  with_arithmetic(p, [&]<class A>(A) { Backward<A>::run(p, g, task, scratch); });
}

#ifndef CLEARHEAD_HAS_PAIRS
constexpr double (*dot_rounds)(int64_t) = nullptr;
#endif

constexpr Level make_level(const char* name, const char* what) {
  return {.name = name,
          .what = what,
          .max_decode_rows = min(W, 8),
          .prefill_scratch = prefill_scratch,
          .prefill = prefill,
          .add_sums = add_sums,
          .decode_scratch = decode_scratch,
          .decode = decode,
          .merge_splits = merge_splits,
          .largest_parts_scratch = FloatParts::scratch,
          .list_parts = FloatParts::run,
          .divergence_scratch = Comparer::scratch,
          .diverge = Comparer::run,
          .backward_scratch = backward_scratch,
          .backward_rows = backward_rows,
          .deltas = deltas,
          .backward = backward,
          .sum_heads = sum_heads,
          .logit_scale = logit_scale,
          .fma_rounds = fma_rounds,
          .dot_rounds = dot_rounds,
          .read = read_sum};
}

}  // namespace clearhead::CLEARHEAD_LEVEL
