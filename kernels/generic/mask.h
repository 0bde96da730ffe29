// Who may see whom, asked by a kernel: runs of keys per query, and words of bits for the edges.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

struct Run {
  int64_t lo, hi;
  bool empty() const { return lo >= hi; }
  Run cut(const Run& to) const { return {most(lo, to.lo), least(hi, to.hi)}; }
  // Grows just so far that it holds the other, too.
  void join(const Run& other) {
    if (!other.empty()) *this = {least(lo, other.lo), most(hi, other.hi)};
  }
};
constexpr Run NO_KEYS = {INT64_MAX, 0};  // what joins begin with

class Sight {
 public:
  explicit Sight(const Problem& p) : Sight(p.mask, p.Tk) {}
  Sight(const Mask& mask, int64_t Tk) : m_(mask), Tk_(Tk) {}

  // The smallest run that holds all that a query sees of these keys, and the largest that it sees whole.
  void row(int64_t b, int64_t h, int64_t q, const Run& keys, Run* hull, Run* core) const {
    *hull = within(b, h, q, keys);
    *core = {0, 0};
    for (int64_t i = 0; i < count() && !m_.bits.data; i++) {
      Run r = run(b, h, q, i);
      if (r.hi - r.lo > core->hi - core->lo) *core = r;
    }
  }

  // The smallest run that holds all that a query sees of these keys, and whether it sees all of it.
  Run within(int64_t b, int64_t h, int64_t q, const Run& keys, bool* whole = nullptr) const {
    Run seen = NO_KEYS;
    int64_t runs = 0;
    for (int64_t i = 0; i < count(); i++) {
      Run r = run(b, h, q, i).cut(keys);
      if (m_.bits.data) trim(bits(b, h, q), &r);
      if (r.empty()) continue;
      seen.join(r);
      runs++;
    }
    if (whole) *whole = runs <= 1 && !m_.bits.data;
    return seen;
  }

  // The first key, from `key` on, of a query's runs; Tk if there is none.
  int64_t next(int64_t b, int64_t h, int64_t q, int64_t key) const {
    int64_t first = Tk_;
    for (int64_t i = 0; i < count(); i++) {
      Run r = run(b, h, q, i);
      if (r.hi > most(r.lo, key)) first = least(first, most(r.lo, key));
    }
    return first;
  }

  // True if a hull is all there is to know: one run per query, and no bits.
  bool simple() const { return count() == 1 && !m_.bits.data; }

  // The keys of a run among the n <= 64 from `key` on, a bit for each.
  static uint64_t word(const Run& r, int64_t key, int n) {
    int64_t lo = most<int64_t>(r.lo - key, 0), hi = least<int64_t>(r.hi - key, n);
    return lo < hi ? ones(int(hi)) & ~ones(int(lo)) : 0;
  }

  // Bit i says whether the query sees key `key + i`, for n <= 64 keys.
  uint64_t word(int64_t b, int64_t h, int64_t q, int64_t key, int n) const {
    uint64_t seen = 0;
    for (int64_t i = 0; i < count(); i++) seen |= word(run(b, h, q, i), key, n);
    if (!m_.bits.data || !seen) return seen;
    const int64_t step = m_.bits.x;
    const uint8_t* x = bits(b, h, q) + key * step;
    uint64_t allowed = 0;
    int i = 0;
    if (step == 1)
      for (; i + 8 <= n; i += 8) allowed |= gathered(eight(x + i)) << i;
    for (; i < n; i++) allowed |= uint64_t(x[i * step] != 0) << i;
    return seen & allowed;
  }

 private:
  static uint64_t ones(int n) { return n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; }
  const uint8_t* bits(int64_t b, int64_t h, int64_t q) const {
    const Grid& g = m_.bits;
    return (const uint8_t*)g.data + b * g.b + h * g.h + q * g.q;
  }
  static uint64_t eight(const uint8_t* x) {
    uint64_t bytes;
    __builtin_memcpy(&bytes, x, 8);
    return bytes;
  }
  // Cuts zeros off both ends of a run.
  void trim(const uint8_t* x, Run* r) const {
    const int64_t step = m_.bits.x;
    if (step == 1) {
      trim<64>(x, r);
      trim<8>(x, r);
    }
    while (r->lo < r->hi && !x[r->lo * step]) r->lo++;
    while (r->lo < r->hi && !x[(r->hi - 1) * step]) r->hi--;
  }
  // The same, N at a time.
  template <int N> static void trim(const uint8_t* x, Run* r) {
    auto empty = [x](int64_t from) {
      uint64_t any = 0;
      for (int i = 0; i < N; i += 8) any |= eight(x + from + i);
      return !any;
    };
    while (r->lo + N <= r->hi && empty(r->lo)) r->lo += N;
    while (r->lo + N <= r->hi && empty(r->hi - N)) r->hi -= N;
  }
  // A bit for each byte that is not 0: the multiplication moves the lowest bit of byte i to bit 56 + i.
  static uint64_t gathered(uint64_t bytes) {
    uint64_t low = 0x7f7f7f7f7f7f7f7f, set = (((bytes & low) + low) | bytes) >> 7 & 0x0101010101010101;
    return set * 0x0102040810204080 >> 56;
  }
  int64_t count() const { return m_.lo.data ? m_.runs : 1; }
  Run run(int64_t b, int64_t h, int64_t q, int64_t i) const {
    Run r = {q - m_.before, q + m_.after + 1};
    if (m_.lo.data) {
      r.lo = ((const int64_t*)m_.lo.data)[b * m_.lo.b + h * m_.lo.h + q * m_.lo.q + i * m_.lo.x];
      r.hi = ((const int64_t*)m_.hi.data)[b * m_.hi.b + h * m_.hi.h + q * m_.hi.q + i * m_.hi.x];
    }
    return r.cut({0, Tk_});
  }
  const Mask& m_;
  int64_t Tk_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
