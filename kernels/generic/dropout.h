// Dropout: which weights survive, a hash of (seed, b, h, q, k) and of nothing else, so every engine and
// every tiling drops the same cells (src/clearhead/dropout.py says it in Python). 32-bit arithmetic;
// the finaliser is that of MurmurHash3 (Austin Appleby, public domain).
#pragma once

#include <math.h>

namespace clearhead::CLEARHEAD_LEVEL {

class Drops {
  typedef uint32_t Words __attribute__((vector_size(4 * W)));  // what F is made of, as whole numbers

 public:
  explicit Drops(const Problem& p)
      : p_(p),
        least_(rint(p.dropout * 0x1p32)) {}

  // What survivors are multiplied by: 1 / (1 - p).
  static float growth(const Problem& p) { return float(1 / most(1 - p.dropout, 1e-30)); }

  bool any() const { return p_.dropout > 0; }

  // What all keys of a query share.
  uint32_t row(int64_t b, int64_t h, int64_t q) const {
    uint32_t key = mix(mix(0u, uint32_t(p_.seed)), uint32_t(uint64_t(p_.seed) >> 32));
    return mix(mix(mix(key, uint32_t(b)), uint32_t(h)), uint32_t(q));
  }

  // Of the W keys from `key` on: 1 where the weight survives, 0 where it is dropped.
  F kept(uint32_t row, int64_t key) const {
    if (least_ >= 0x1p32) return zero();
    Words k = uint32_t(key) - Words{}, count;
    for (int i = 0; i < W; i++) count[i] = uint32_t(i);
    Words hash = mix(row - Words{}, k + count);
    return (F)((Words)all(1) & (Words)(hash >= uint32_t(least_)));
  }

 private:
  template <class T> static T mix(T key, T word) {
    T x = key ^ (word * 0x9E3779B1u + 0x7F4A7C15u);
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
  }

  const Problem& p_;
  double least_;  // the hash of a survivor is at least this
};

}  // namespace clearhead::CLEARHEAD_LEVEL
