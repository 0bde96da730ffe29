// Dropout: a hash of (seed, b, h, q, k) decides whether a weight is kept, so every engine and every
// tiling drops the same weights (src/clearhead/core/problem/dropout.py is the Python version). The
// arithmetic is 32-bit; the finaliser is MurmurHash3's (Austin Appleby, public domain).
#pragma once

#include <math.h>

#include "functions.h"

namespace clearhead::CLEARHEAD_LEVEL {

class Dropout {
  typedef uint32_t Words __attribute__((vector_size(4 * W)));  // the bits of an F, as integers

 public:
  explicit Dropout(const Problem& p) : p_(p), threshold_(rint(p.dropout * 0x1p32)) {}

  // The factor of weights that are kept: 1 / (1 - p).
  static float keep_factor(const Problem& p) { return float(1 / max(1 - p.dropout, 1e-30)); }

  bool active() const { return p_.dropout > 0; }

  // The part of the hash that is the same for all keys of a query.
  uint32_t row_key(int64_t b, int64_t h, int64_t q) const {
    uint32_t key = mix(mix(0u, uint32_t(p_.seed)), uint32_t(uint64_t(p_.seed) >> 32));
    return mix(mix(mix(key, uint32_t(b)), uint32_t(h)), uint32_t(q));
  }

  // Returns 1 for each weight that is kept and 0 for each that is dropped, of W keys from `key` on.
  F keep_mask(uint32_t row_key, int64_t key) const {
    if (threshold_ >= 0x1p32) return zero();
    Words k = uint32_t(key) - Words{}, count;
    for (int i = 0; i < W; i++) count[i] = uint32_t(i);
    Words hash = mix(row_key - Words{}, k + count);
    return (F)((Words)splat(1) & (Words)(hash >= uint32_t(threshold_)));
  }

 private:
  template <class T> static T mix(T key, T word) {
    T x = key ^ (word * 0x9E3779B1u + 0x7F4A7C15u);
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
  }

  const Problem& p_;
  double threshold_;  // a weight is kept if its hash is at least this
};

}  // namespace clearhead::CLEARHEAD_LEVEL
