// Finishes a row: adds the sink, divides by the sum, writes the output and the log-sum-exp.
#pragma once

#include <math.h>

#include "dropout.h"
#include "logits.h"
#include "memory.h"

namespace clearhead::CLEARHEAD_LEVEL {

class RowEpilogue {
 public:
  // `row_max` is the largest score (times `logit_scale` it is a logit), `sum` is relative to it.
  RowEpilogue(const Problem& p, int64_t b, int64_t h, float row_max, float sum, double logit_scale)
      : max_logit_(row_max * logit_scale) {
    const bool sees_nothing = sum == 0;
    float rescale = 1;
    if (p.sinks.data) {
      double sink = Logits::per_head(p.sinks, b, h);
      double above = max(max_logit_, sink), base = above == -INF ? 0 : above;
      rescale = exp2_one(float((max_logit_ - base) * LOG2E));
      sum = sum * rescale + exp2_one(float((sink - base) * LOG2E));
      max_logit_ = above;
    }
    // A fully masked query has output 0, and without a sink log-sum-exp -infinity.
    scale_ = sees_nothing || sum == 0 ? 0 : rescale / sum;
    if (p.dropout)
      scale_ *= Dropout::keep_factor(p);  // not in the weights, so that 1 stays 1 in bf16
    sum_ = sum;
  }

  // The factor of the weighted sums. Without dropout it is the weight at the maximum.
  float scale() const { return scale_; }
  // The natural logarithm of the sum, relative to `max_logit`, both with the sink.
  double log_sum() const { return log(double(sum_)); }
  double max_logit() const { return max_logit_; }
  bool is_empty() const { return sum_ == 0; }

  // Writes numbers `from` to `from + size` of a row of the output from their weighted sums `o`.
  // Writes the difference to o * unrounded_scale to `rounding`.
  template <class E> void write(const Problem& p, int64_t b, int64_t h, int64_t q, int64_t from,
                                const float* o, int64_t size, float unrounded_scale) const {
    E* out = row_at<E>(p.out, b, h, q) + from;
    E* rounding = p.rounding.data ? row_at<E>(p.rounding, b, h, q) + from : nullptr;
    const F scale = splat(scale_);
    for (int64_t j = 0; j < size; j += W) {
      int n = in_vector(size - j);
      F y = mul(load(o + j), scale);
      store_part(out + j, y, n);
      if (!rounding) continue;
      y = mul(load(o + j), splat(unrounded_scale));
      store_part(rounding + j, sub(y, load_part(out + j, n)), n);
    }
  }

  void write_lse(const Problem& p, int64_t b, int64_t h, int64_t q) const {
    if (!p.lse.data && !p.float_lse.data) return;
    double lse = max_logit_ + log(double(sum_)) * log_unit(float(max_logit_));
    if (sum_ == 0) lse = double(-INF);
    if (p.lse.data) *row_at<double>(p.lse, b, h, q) = lse;
    if (p.float_lse.data) *row_at(p.float_lse, b, h, q) = float(lse);
  }

 private:
  double max_logit_;
  float scale_, sum_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
