// From raw dot products to logits in base 2: scale, soft cap, bias, distance, mask.
//
// Only tiles that need it come here: with a plain scale and every key in sight, the scale is folded
// into the exponential and a score is read once (tile.h, pass 3).
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

// Beyond this a finite bias or sink stays finite in base 2 too. The largest and lowest numbers of a float
// are what some masks are made of, and a query all of whose keys were so low would be blind.
constexpr float FARTHEST = 0x1p126f;
// A cap this large bends nothing, and in base 2 it would be infinite.
constexpr double NO_CAP = 0x1p100;

class Logits {
 public:
  explicit Logits(const Problem& p)
      : p_(p),
        capped_(p.softcap > 0 && p.softcap < NO_CAP),
        // A scale that rounds to 0 would turn the -inf of an unseen row into NaN: not folded then.
        plain_(!capped_ && !p.bias.data && !p.slopes.data && p.scale > 1e-30),
        first_(all(float(capped_ ? p.scale / p.softcap : p.scale * double(LOG2E)))),
        cap_(all(float(p.softcap * double(LOG2E)))) {}

  // True if raw scores, times `factor()`, are logits already.
  bool plain() const { return plain_; }
  bool capped() const { return capped_; }
  float factor() const { return plain_ ? float(p_.scale * double(LOG2E)) : 1.0f; }

  // n lanes of scores of query (b, h, q) with keys from `key` on, before the mask. Where `bend` is
  // given and scores are capped, it gets what the cap leaves of a small change, 1 - tanh^2.
  F turn(F s, int64_t b, int64_t h, int64_t q, int64_t key, int n, float* bend = nullptr) const {
    if (plain_) return s;
    s = mul(s, first_);
    if (capped_) {
      s = tanh(s);
      if (bend) store(bend, sub(all(1), mul(s, s)));
      s = mul(s, cap_);
    }
    if (p_.bias.data) s = fma(bounded(bias(b, h, q, key, n)), all(LOG2E), s);
    if (p_.slopes.data) {
      F away = abs(add(count_up(), all(float(key - q - p_.slopes_shift))));
      s = fma(away, all(-LOG2E * at(p_.slopes, b, h)), s);
    }
    return s;
  }

  static float at(const Grid& g, int64_t b, int64_t h) {
    return ((const float*)g.data)[b * g.b + h * g.h];
  }

  // x, not farther from 0 than FARTHEST if it is finite; infinities and NaN stay.
  static F bounded(F x) {
    F near = pick(less(all(FARTHEST), abs(x)), sign_of(all(FARTHEST), x), x);
    return pick(less(abs(x), all(-NOTHING)), near, x);
  }
  static float bounded(float x) {
    return __builtin_isfinite(x) ? most(-FARTHEST, least(FARTHEST, x)) : x;
  }

 private:
  template <class E> static F row(const E* x, int64_t step, int n) {
    if (step == 1) return n >= W ? load(x) : load_part(x, n);
    E some[W] = {};
    for (int i = 0; i < n; i++) some[i] = x[i * step];
    return load(some);
  }
  F bias(int64_t b, int64_t h, int64_t q, int64_t key, int n) const {
    const Grid& g = p_.bias;
    int64_t at = b * g.b + h * g.h + q * g.q + key * g.x;
    if (p_.bias_dtype == BFLOAT16) return row((const bf16*)g.data + at, g.x, n);
    if (p_.bias_dtype == FLOAT16) return row((const half*)g.data + at, g.x, n);
    return row((const float*)g.data + at, g.x, n);
  }

  const Problem& p_;
  bool capped_, plain_;
  F first_, cap_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
