// How a row ends: its sink joins, its sum divides, its output and log-sum-exp are written.
#pragma once

#include <math.h>

namespace clearhead::CLEARHEAD_LEVEL {

class Ending {
 public:
  // `max` is the largest score, in units of `unit` logits, and `sum` relative to it.
  Ending(const Problem& p, int64_t b, int64_t h, float max, float sum, double unit) : top_(max * unit) {
    const bool blind = sum == 0;
    float shrink = 1;
    if (p.sinks.data) {
      double sink = Logits::at(p.sinks, b, h);
      double above = most(top_, sink), base = above == NOTHING ? 0 : above;
      shrink = exp2_one(float((top_ - base) * LOG2E));
      sum = sum * shrink + exp2_one(float((sink - base) * LOG2E));
      top_ = above;
    }
    // A query that saw nothing gives 0, and -infinity if there is no sink.
    times_ = blind || sum == 0 ? 0 : shrink / sum;
    if (p.dropout) times_ *= Drops::growth(p);  // here, so that a weight of 1 is 1 in bf16 too
    sum_ = sum;
  }

  // Numbers `from` to `from + size` of a row of the output, out of their sums.
  template <class E>
  void write(const Problem& p, int64_t b, int64_t h, int64_t q, int64_t from, const float* o,
             int64_t size) const {
    E* out = place<E>(p.out, b, h, q) + from;
    E* rounding = p.rounding.data ? place<E>(p.rounding, b, h, q) + from : nullptr;
    for (int64_t j = 0; j < size; j += W) {
      int n = int(least<int64_t>(W, size - j));
      F y = mul(load(o + j), all(times_));
      store_part(out + j, y, n);
      if (rounding) store_part(rounding + j, sub(y, load_part(out + j, n)), n);
    }
  }

  void write_lse(const Problem& p, int64_t b, int64_t h, int64_t q) const {
    if (!p.lse.data) return;
    double lse = top_ + log(double(sum_)) * log_unit(float(top_));
    *place<double>(p.lse, b, h, q) = sum_ == 0 ? double(NOTHING) : lse;
  }

 private:
  double top_;  // the largest logit
  float times_, sum_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
