// One level: the generic algorithms over the vocabulary that was included before this file.
//
// Every name lives in the level's own namespace and no function of the C++ library is called, so
// no wide instruction can end up in a function that other levels share (tests/engines/cpu/test_kernels.py
// holds this).
#pragma once

// Each builds on those before it.
#include "functions.h"
#include "memory.h"
#include "mask.h"
#include "arithmetic.h"
#include "logits.h"
#include "dropout.h"
#include "products.h"
#include "bands.h"
#include "epilogue.h"
#include "prefill.h"
#include "weight_sums.h"
#include "backward.h"
#include "decode.h"
#include "ceilings.h"

namespace clearhead::CLEARHEAD_LEVEL {

// What the tensors hold, and the arithmetic for it, as a template argument of `then`.
template <class Then> auto with_element(const Problem& p, Then then) {
  if (p.dtype == BFLOAT16) return then(bf16());
  if (p.dtype == FLOAT16) return then(half());
  return then(float());
}
template <class Then> auto with_arithmetic(const Problem& p, Then then) {
#ifdef CLEARHEAD_HAS_PAIRS
  if (p.dtype == BFLOAT16) return then(Pairs());
#endif
  return with_element(p, [&]<class E>(E) { return then(Singles<E>()); });
}

// Rows of a stream are padded to a power of two.
template <class A, class Then> auto with_rows(const Problem& p, Then then) {
  const int64_t rows = p.H / p.G * p.Tq;
  if constexpr (W >= 8)
    if (rows > 4) return then.template operator()<Stream<A, 8>>();
  if (rows > 2) return then.template operator()<Stream<A, 4>>();
  if (rows > 1) return then.template operator()<Stream<A, 2>>();
  return then.template operator()<Stream<A, 1>>();
}

inline size_t tile_scratch(const Problem& p, int64_t rows) {
  return with_arithmetic(p, [&]<class A>(A) { return Tile<A>::scratch(p, rows); });
}
inline void tile(const Problem& p, const TileTask& task, char* scratch) {
  with_arithmetic(p, [&]<class A>(A) { Tile<A>::run(p, task, scratch); });
}
inline size_t stream_scratch(const Problem& p) {
  return with_arithmetic(p, [&]<class A>(A) {
    return with_rows<A>(p, [&]<class S>() { return S::scratch(p); });
  });
}
inline void stream(const Problem& p, const StreamTask& task, char* scratch) {
  with_arithmetic(p, [&]<class A>(A) {
    with_rows<A>(p, [&]<class S>() { S::run(p, task, scratch); });
  });
}
inline void merge(const Problem& p, int64_t b, int64_t group, int64_t stretches,
                  const float* states) {
  with_element(p, [&]<class E>(E) { merge_stretches<E>(p, b, group, stretches, states); });
}

inline double unit(const Problem& p) { return Logits(p).unit(); }

inline size_t tally_scratch(const Problem& p) {
  return with_arithmetic(p, [&]<class A>(A) { return Tallying<A>::scratch(p); });
}
inline void tally(const Problem& p, const Tally& wanted, const TallyTask& task, char* scratch) {
  with_arithmetic(p, [&]<class A>(A) { Tallying<A>::run(p, wanted, task, scratch); });
}

inline size_t backward_scratch(const Problem& p) {
  return with_arithmetic(p, [&]<class A>(A) { return Backward<A>::scratch(p); });
}
inline int64_t backward_rows(const Problem& p) {
  return with_arithmetic(p, [&]<class A>(A) { return Backward<A>::rows(p); });
}
inline void deltas(const Problem& p, const Gradient& g, int64_t b, int64_t h) {
  with_arithmetic(p, [&]<class A>(A) { Backward<A>::deltas(p, g, b, h); });
}
inline void backward(const Problem& p, const Gradient& g, const BackwardTask& task, char* scratch) {
  with_arithmetic(p, [&]<class A>(A) { Backward<A>::run(p, g, task, scratch); });
}

#ifndef CLEARHEAD_HAS_PAIRS
constexpr double (*dot_rounds)(int64_t) = nullptr;
#endif

}  // namespace clearhead::CLEARHEAD_LEVEL

#define CLEARHEAD_DEFINE_LEVEL(SYMBOL, WHAT)                             \
  namespace clearhead {                                                  \
  extern const Level SYMBOL;                                             \
  const Level SYMBOL = {                                                 \
      .name = CLEARHEAD_LEVEL::NAME,                                     \
      .what = WHAT,                                                      \
      .most_stream_rows = CLEARHEAD_LEVEL::least(CLEARHEAD_LEVEL::W, 8), \
      .tile_scratch = CLEARHEAD_LEVEL::tile_scratch,                     \
      .tile = CLEARHEAD_LEVEL::tile,                                     \
      .stream_scratch = CLEARHEAD_LEVEL::stream_scratch,                 \
      .stream = CLEARHEAD_LEVEL::stream,                                 \
      .merge = CLEARHEAD_LEVEL::merge,                                   \
      .tally_scratch = CLEARHEAD_LEVEL::tally_scratch,                   \
      .tally = CLEARHEAD_LEVEL::tally,                                   \
      .backward_scratch = CLEARHEAD_LEVEL::backward_scratch,             \
      .backward_rows = CLEARHEAD_LEVEL::backward_rows,                   \
      .deltas = CLEARHEAD_LEVEL::deltas,                                 \
      .backward = CLEARHEAD_LEVEL::backward,                             \
      .unit = CLEARHEAD_LEVEL::unit,                                     \
      .fma_rounds = CLEARHEAD_LEVEL::fma_rounds,                         \
      .dot_rounds = CLEARHEAD_LEVEL::dot_rounds,                         \
      .read = CLEARHEAD_LEVEL::read_sum,                                 \
  };                                                                     \
  }
