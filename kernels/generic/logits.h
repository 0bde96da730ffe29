// From raw dot products to scores: scale, soft cap, bias, distance, mask.
//
// A weight is 2^((score - maximum) * factor). With a plain scale a score is the dot product as it is and
// the scale stands in the factor, else it is the logit. The difference is taken first, so a maximum is
// never rounded, however large it is.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

class Logits {
 public:
  explicit Logits(const Problem& p)
      : p_(p),
        capped_(p.softcap > 0),
        // A scale that rounds to 0 would turn the -inf of an unseen row into NaN: not folded then.
        plain_(!capped_ && !p.bias.data && !p.slopes.data && p.scale > 1e-30),
        first_(all(finite(capped_ ? p.scale / p.softcap : p.scale))),
        cap_(all(float(p.softcap))) {}

  // True if dot products are scores as they are.
  bool plain() const { return plain_; }
  bool capped() const { return capped_; }
  // What takes a difference of scores to one of logits in base 2.
  float factor() const { return finite(unit() * LOG2E); }
  // What takes a score to a natural logit.
  double unit() const { return plain_ ? p_.scale : 1; }

  // n lanes of scores of query (b, h, q) with keys from `key` on, before the mask. Where `bend` is
  // given and scores are capped, it gets what the cap leaves of a small change, 1 - tanh^2.
  F apply(F s, int64_t b, int64_t h, int64_t q, int64_t key, int n, float* bend = nullptr) const {
    if (plain_) return s;
    s = mul(s, first_);
    if (capped_) {
      s = tanh(s);
      if (bend) store(bend, sub(all(1), mul(s, s)));
      s = mul(s, cap_);
    }
    if (p_.bias.data) s = add(bias(b, h, q, key, n), s);
    if (p_.slopes.data) {
      F away = abs(add(count_up(), all(float(key - q - p_.slopes_shift))));
      s = fma(away, all(-at(p_.slopes, b, h)), s);
    }
    return s;
  }

  // The nearest number of a float; NaN stays.
  static float finite(double x) {
    return x != x ? float(x) : float(most(-0x1.fffffep127, least(0x1.fffffep127, x)));
  }

  static float at(const Grid& g, int64_t b, int64_t h) {
    return ((const float*)g.data)[b * g.b + h * g.h];
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
