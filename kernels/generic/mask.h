// The mask as kernels read it: the key ranges of a query, and 64 keys at a time as bits.
#pragma once

#include "functions.h"

namespace clearhead::CLEARHEAD_LEVEL {

struct KeyRange {
  int64_t lo, hi;
  bool empty() const { return lo >= hi; }
  int64_t size() const { return hi - lo; }
  KeyRange intersect(const KeyRange& to) const { return {max(lo, to.lo), min(hi, to.hi)}; }
  // Extends this range to contain the other.
  void include(const KeyRange& other) {
    if (!other.empty()) *this = {min(lo, other.lo), max(hi, other.hi)};
  }
};
constexpr KeyRange NO_KEYS = {INT64_MAX, 0};  // the empty range, for a first `include`

class MaskView {
 public:
  explicit MaskView(const Problem& p) : MaskView(p.mask, p.Tk) {}
  MaskView(const Mask& mask, int64_t Tk) : m_(mask), Tk_(Tk) {}

  // Sets `hull` to the smallest range that contains every visible key of a query among `keys`, and
  // `core` to the longest range of these in which every key is visible.
  void hull_and_core(int64_t b, int64_t h, int64_t q, const KeyRange& keys, KeyRange* hull,
                     KeyRange* core) const {
    *hull = visible_hull(b, h, q, keys);
    *core = {0, 0};
    for (int64_t i = 0; i < range_count() && !m_.bits.data; i++) {
      KeyRange r = range(b, h, q, i).intersect(keys);
      if (r.hi - r.lo > core->hi - core->lo) *core = r;
    }
  }

  // Returns the smallest range that contains every visible key of a query among `keys`. Sets
  // `contiguous` to whether all keys in it are visible.
  KeyRange visible_hull(int64_t b, int64_t h, int64_t q, const KeyRange& keys,
                        bool* contiguous = nullptr) const {
    KeyRange seen = NO_KEYS;
    int64_t ranges = 0;
    for (int64_t i = 0; i < range_count(); i++) {
      KeyRange r = range(b, h, q, i).intersect(keys);
      if (m_.bits.data && !r.empty()) trim(bits(b, h, q), &r);
      if (r.empty()) continue;
      seen.include(r);
      ranges++;
    }
    if (contiguous) *contiguous = ranges <= 1 && !m_.bits.data;
    return seen;
  }

  // Returns the first key, from `key` on, in one of a query's ranges; Tk if there is none.
  int64_t next_visible(int64_t b, int64_t h, int64_t q, int64_t key) const {
    int64_t first = Tk_;
    for (int64_t i = 0; i < range_count(); i++) {
      KeyRange r = range(b, h, q, i);
      if (r.hi > max(r.lo, key)) first = min(first, max(r.lo, key));
    }
    return first;
  }

  // Returns whether the hull determines the mask: one range per query, and no bits.
  bool one_range() const { return range_count() == 1 && !m_.bits.data; }

  // Returns whether each query has one range, and all of a batch entry have the same bits.
  bool shares_bits() const {
    return range_count() == 1 && m_.bits.data && m_.bits.q == 0 && m_.bits.h == 0;
  }

  // Returns range i of a query.
  KeyRange range(int64_t b, int64_t h, int64_t q, int64_t i) const {
    KeyRange r = {q - m_.before, q + m_.after + 1};
    if (m_.lo.data) {
      r.lo = ((const int64_t*)m_.lo.data)[b * m_.lo.b + h * m_.lo.h + q * m_.lo.q + i * m_.lo.x];
      r.hi = ((const int64_t*)m_.hi.data)[b * m_.hi.b + h * m_.hi.h + q * m_.hi.q + i * m_.hi.x];
    }
    return r.intersect({0, Tk_});
  }

  // Returns whether query q has the range [q - before, q + after].
  bool is_band() const { return !m_.lo.data && !m_.bits.data; }
  // Sets `hull` to the keys that some of the queries from first to last see in a band, and `core`
  // to those that all see.
  void band_hull_and_core(int64_t first, int64_t last, KeyRange* hull, KeyRange* core) const {
    *hull = KeyRange{first - m_.before, last + m_.after + 1}.intersect({0, Tk_});
    *core = KeyRange{last - m_.before, first + m_.after + 1}.intersect({0, Tk_});
  }

  // Returns n <= 64 bits: bit i is set if the range contains key `key + i`.
  static uint64_t visible_bits(const KeyRange& r, int64_t key, int n) {
    int64_t lo = max<int64_t>(r.lo - key, 0), hi = min<int64_t>(r.hi - key, n);
    return lo < hi ? low_bits(int(hi)) & ~low_bits(int(lo)) : 0;
  }

  // Returns n <= 64 bits: bit i is set if key `key + i` is visible to the query.
  uint64_t visible_bits(int64_t b, int64_t h, int64_t q, int64_t key, int n) const {
    uint64_t seen = 0;
    for (int64_t i = 0; i < range_count(); i++) seen |= visible_bits(range(b, h, q, i), key, n);
    return m_.bits.data && seen ? seen & allowed_bits(b, h, q, key, n) : seen;
  }

  // Returns the bits of the mask alone, without its ranges.
  uint64_t allowed_bits(int64_t b, int64_t h, int64_t q, int64_t key, int n) const {
    const int64_t step = m_.bits.x;
    const uint8_t* x = bits(b, h, q) + key * step;
    uint64_t allowed = 0;
    int i = 0;
    if (step == 1)
      for (; i + 8 <= n; i += 8) allowed |= pack_nonzero(load8(x + i)) << i;
    for (; i < n; i++) allowed |= uint64_t(x[i * step] != 0) << i;
    return allowed;
  }

 private:
  static uint64_t low_bits(int n) { return n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; }
  const uint8_t* bits(int64_t b, int64_t h, int64_t q) const {
    const MatrixView& g = m_.bits;
    return (const uint8_t*)g.data + b * g.b + h * g.h + q * g.q;
  }
  static uint64_t load8(const uint8_t* x) {
    uint64_t bytes;
    __builtin_memcpy(&bytes, x, 8);
    return bytes;
  }
  // Shortens a range to the first and the last set bit.
  void trim(const uint8_t* x, KeyRange* r) const {
    const int64_t step = m_.bits.x;
    if (step == 1) {
      trim<64>(x, r);
      trim<8>(x, r);
    }
    while (r->lo < r->hi && !x[r->lo * step]) r->lo++;
    while (r->lo < r->hi && !x[(r->hi - 1) * step]) r->hi--;
  }
  // Shortens it by N keys at a time.
  template <int N> static void trim(const uint8_t* x, KeyRange* r) {
    auto empty = [x](int64_t from) {
      uint64_t any = 0;
      for (int i = 0; i < N; i += 8) any |= load8(x + from + i);
      return !any;
    };
    while (r->lo + N <= r->hi && empty(r->lo)) r->lo += N;
    while (r->lo + N <= r->hi && empty(r->hi - N)) r->hi -= N;
  }
  // Returns one bit for each byte that is not 0. The product moves the lowest bit of byte i to bit
  // 56 + i.
  static uint64_t pack_nonzero(uint64_t bytes) {
    uint64_t low = 0x7f7f7f7f7f7f7f7f,
             set = (((bytes & low) + low) | bytes) >> 7 & 0x0101010101010101;
    return set * 0x0102040810204080 >> 56;
  }
  int64_t range_count() const { return m_.lo.data ? m_.ranges : 1; }
  const Mask& m_;
  int64_t Tk_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
