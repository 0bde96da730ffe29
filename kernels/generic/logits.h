// Computes scores from raw dot products: scale, soft cap, bias, ALiBi.
//
// A weight is 2^((score - maximum) * log2_scale). If only a scale applies, the score is the
// unmodified dot product, and the scale is part of log2_scale. Otherwise the score is the logit.
// The difference is computed first, so a large maximum is never rounded.
#pragma once

#include "dtype.h"
#include "functions.h"

namespace clearhead::CLEARHEAD_LEVEL {

class Logits {
 public:
  explicit Logits(const Problem& p)
      : p_(p), capped_(p.softcap > 0),
        // A scale that rounds to 0 is applied to the scores, because times the -inf of a fully
        // masked row it would be NaN.
        unmodified_(!capped_ && !p.bias.data && !p.slopes.data && p.scale > 1e-30),
        prescale_(splat(clamp_finite(capped_ ? p.scale / p.softcap : p.scale))),
        cap_(splat(float(p.softcap))) {}

  // Whether scores are the dot products themselves.
  bool unmodified() const { return unmodified_; }
  bool capped() const { return capped_; }
  // The factor from a difference of scores to a difference of logits in base 2.
  float log2_scale() const { return clamp_finite(logit_scale() * LOG2E); }
  // The factor from a score to a natural logit.
  double logit_scale() const { return unmodified_ ? p_.scale : 1; }

  // Applies scale, cap and biases to n lanes of dot products of query (b, h, q) and the keys from
  // `key` on. If `cap_slope` is not null and scores are capped, stores the cap's slope, 1 - tanh^2.
  F apply(F s, int64_t b, int64_t h, int64_t q, int64_t key, int n,
          float* cap_slope = nullptr) const {
    if (unmodified_) return s;
    s = mul(s, prescale_);
    if (capped_) {
      s = tanh(s);
      if (cap_slope) store(cap_slope, sub(splat(1), mul(s, s)));
      s = mul(s, cap_);
    }
    if (p_.bias.data) s = add(bias(b, h, q, key, n), s);
    if (p_.slopes.data) {
      F distance = abs(add(iota(), splat(float(key - q - p_.slopes_shift))));
      s = fma(distance, splat(-per_head(p_.slopes, b, h)), s);
    }
    return s;
  }

  // Returns the score of a product minus that of `product - difference`. A difference of two scores
  // would have the rounding of both. A bias cancels.
  F gap(F product, F difference) const {
    if (unmodified_) return difference;
    F gap = mul(difference, prescale_);
    if (!capped_) return gap;
    F x = mul(product, prescale_);
    return mul(mul(tanh(gap), sub(splat(1), mul(tanh(x), tanh(sub(x, gap))))), cap_);
  }

  // Returns the nearest finite float; NaN stays NaN.
  static float clamp_finite(double x) {
    return x != x ? float(x) : float(max(-0x1.fffffep127, min(0x1.fffffep127, x)));
  }

  static float per_head(const MatrixView& g, int64_t b, int64_t h) {
    return ((const float*)g.data)[b * g.b + h * g.h];
  }

 private:
  template <class E> static F load_row(const E* x, int64_t step, int n) {
    if (step == 1) return n >= W ? load(x) : load_part(x, n);
    E some[W] = {};
    for (int i = 0; i < n; i++) some[i] = x[i * step];
    return load(some);
  }
  F bias(int64_t b, int64_t h, int64_t q, int64_t key, int n) const {
    const MatrixView& g = p_.bias;
    int64_t at = b * g.b + h * g.h + q * g.q + key * g.x;
    return with_dtype(p_.bias_dtype,
                      [&]<class E>(E) { return load_row((const E*)g.data + at, g.x, n); });
  }

  const Problem& p_;
  bool capped_, unmodified_;
  F prescale_, cap_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
