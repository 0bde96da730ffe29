// How a row ends: its sink joins, its sum divides, its output and log-sum-exp are written.
#pragma once

#include <math.h>

namespace clearhead::CLEARHEAD_LEVEL {

class Ending {
 public:
  // `max` in base 2 and scaled, `sum` relative to it.
  Ending(const Problem& p, int64_t b, int64_t h, float max, float sum) {
    float shrink = 1;
    if (p.sinks.data) {
      float sink = LOG2E * Logits::at(p.sinks, b, h);
      float above = most(max, sink), base = above == NOTHING ? 0 : above;
      shrink = exp2_one(max - base);
      sum = sum * shrink + exp2_one(sink - base);
      max = above;
    }
    // A query that saw nothing gives 0 and -infinity.
    times_ = sum == 0 ? 0 : shrink / sum;
    max_ = max, sum_ = sum;
  }

  template <class E> void write(E* out, const float* o, int64_t Dv) const {
    for (int64_t j = 0; j < Dv; j += W)
      store_part(out + j, mul(load(o + j), all(times_)), int(least<int64_t>(W, Dv - j)));
  }

  void write_lse(const Problem& p, int64_t b, int64_t h, int64_t q) const {
    if (!p.lse.data) return;
    double lse = sum_ == 0 ? double(NOTHING) : max_ * LN2 + log(double(sum_));
    ((double*)p.lse.data)[b * p.lse.b + h * p.lse.h + q * p.lse.t] = lse;
  }

 private:
  float times_, max_, sum_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
