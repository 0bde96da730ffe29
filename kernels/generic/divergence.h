// The divergence of each query's weights w from the weights w' on other keys. One sweep; passes 0
// to 2 are those of block_scores.h, and pass 2b multiplies the queries by the differences of the
// keys.
//
// Accuracy. With the logits x and y, KL(w || w') is the sum of w (x - y) plus log Z, where Z is the
// sum of w exp(y - x). Differences of logits, and of these two terms, would lose the digits of a
// small divergence. So the gap x - y is a product with the difference of the keys: its error is
// relative to the gap. And with u = gap - c, for any c,
//
//   KL(w || w') = sum of w (exp(-u) - 1 + u)           - (Z - 1 - log Z),
//   KL(w' || w) = sum of w (1 - (1 + u) exp(-u)) / Z   - (1 / Z - 1 + log Z).
//
// Every summand is at least 0, and comes from a series near 0. c is the maximum of x minus that of
// y. So w exp(-u) never overflows, and Z is near 1 if w and w' are alike: what is subtracted is
// small of second order.
//
// If the maxima change, the sums so far are those of a key with the weights a and a', and the gap
// d, in place of 1, 1 and 0 (`rebase`).
//
// The limit of the time. A pair costs 2 D multiply-adds, as in forward if Dv = D. Weights and
// summands take three to four times as long as the softmax of forward: the sweep takes 1.3 forwards
// (bench/LOG.md, 2026-11-30).
#pragma once

#include <math.h>

#include "block_scores.h"

namespace clearhead::CLEARHEAD_LEVEL {

// Sums of 16 products round less than sums of D: a divergence errs by 1e-5 of itself at logits of
// 95, and no longer of 65 (bench/LOG.md, 2026-11-30).
struct ShortChains : Singles<float> { static constexpr int64_t CHAIN = 16; };

class Comparer : BlockScores<ShortChains> {
 public:
  static size_t scratch(const Problem& p, const Divergence& d, int64_t rows) {
    Arena arena(nullptr);
    Comparer(p, d, {}, arena, rows);
    return arena.used();
  }

  static void run(const Problem& p, const Divergence& d, const PrefillTask& task, char* scratch) {
    Arena arena(scratch);
    Comparer(p, d, task, arena, task.heads * task.queries).compute();
  }

 private:
  // What is accumulated for a row: the largest x, y, and x of a lost key, which the other attention
  // does not see. Over the keys that both see, with p = exp(x - TOP): the sums of p, p exp(-u),
  // p u, p (exp(-u) - 1 + u) and p (1 - (1 + u) exp(-u)). Over the lost keys: exp(x - LOST_TOP).
  enum Number { TOP, OTHER_TOP, LOST_TOP, SUM, OTHER_SUM, GAP, KL, REVERSE, LOST, NUMBERS };
  static constexpr int SUMS = NUMBERS - SUM;

  Comparer(const Problem& p, const Divergence& d, const PrefillTask& task, Arena& arena,
           int64_t rows)
      : BlockScores(p, task, arena, rows), d_(d), other_(d.other, p.Tk), exact_(d.exact, p.Tk),
        differs_(__builtin_memcmp(&d.other, &p.mask, sizeof d.other) ||
                 d.exact.before + d.exact.after >= 0),
        log2_scale_(splat(logits_.log2_scale())),
        natural_scale_(splat(Logits::clamp_finite(logits_.logit_scale()))) {
    differences_ = arena.allocate<Unit>(KEY_BLOCK * unit_count(p.Dv));
    gaps_ = arena.allocate<float>(QUERY_BLOCK * SCORE_STRIDE);
    numbers_ = arena.allocate<float>(n_blocks_ * NUMBERS * PADDED_ROWS);
    if (logits_.capped()) raw_ = arena.allocate<float>(QUERY_BLOCK * SCORE_STRIDE);
  }

  void compute() {
    find_ranges({0, p_.Tk});
    pack_groups(p_.q, p_.D, q_);
    for (int64_t i = 0; i < n_rows_; i++) start(i);
    for (int64_t key = hull_.lo / KEY_BLOCK * KEY_BLOCK; key < hull_.hi; key += KEY_BLOCK) {
      key_block_ = {key, min(key + KEY_BLOCK, hull_.hi)};
      if (!any_query_sees_block()) continue;
      pack_panels(p_.k, p_.D, k_);
      pack_panels(p_.v, p_.Dv, differences_);
      for (int64_t i = 0; i < n_blocks_; i++) {
        prefetch_next_block(i, true);
        if (!sees_block(i)) continue;
        scores(i);
        multiply_differences(i);
        differs_ ? find_gaps<true>(i) : find_gaps<false>(i);
        add_block(i);
      }
    }
    for (int64_t i = 0; i < n_rows_; i++) write(i);
  }

  float* numbers(int64_t block, int number) const {
    return numbers_ + (block * NUMBERS + number) * PADDED_ROWS;
  }
  float& number(int64_t row, int number) const {
    return numbers(row / QUERY_BLOCK, number)[row % QUERY_BLOCK];
  }

  // A sink is a first key, with the same logit in both.
  void start(int64_t row) {
    for (int n = 0; n < NUMBERS; n++) number(row, n) = n < SUM ? -INF : 0;
    if (!p_.sinks.data) return;
    const float sink = Logits::per_head(p_.sinks, task_.b, row_[row].h);
    if (sink == -INF) return;
    number(row, TOP) = number(row, OTHER_TOP) = Logits::clamp_finite(sink / logits_.logit_scale());
    number(row, SUM) = number(row, OTHER_SUM) = 1;
  }

  // Pass 2b: multiplies the queries of a block by the differences of the keys.
  void multiply_differences(int64_t i) {
    for (int r = 0, rows = rows_of(i); r < rows; r += SCORE_ROWS)
      value_scores(i * QUERY_BLOCK + r, min(SCORE_ROWS, rows - r), q_, differences_,
                   gaps_ + r * SCORE_STRIDE);
  }

  // Pass 3: makes gaps of these products, infinity where the other attention does not see a key and
  // 0 where it reads the exact one, and updates the maxima and the sums relative to them.
  template <bool DIFFERS> void find_gaps(int64_t i) {
    const int rows = rows_of(i);
    F other_top[PADDED_ROWS], lost_top[PADDED_ROWS];
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * QUERY_BLOCK + r];
      const float *s = s_ + r * SCORE_STRIDE, *product = raw_ ? raw_ + r * SCORE_STRIDE : s;
      float* gaps = gaps_ + r * SCORE_STRIDE;
      F top = lane_max_[r], of_other = splat(-INF), of_lost = splat(-INF);
      if (DIFFERS) top = of_other;
      uint64_t seen = 0, exact = 0;
      for (int k = begin_; k < end_; k += W) {
        if (DIFFERS && (k == begin_ || k % 64 == 0)) {
          const int64_t key = key_block_.lo + k / 64 * 64;
          const int n = int(min<int64_t>(64, p_.Tk - key));
          seen = other_.visible_bits(task_.b, x.h, x.q, key, n);
          exact = exact_.visible_bits(task_.b, x.h, x.q, key, n);
        }
        const F score = load(s + k);
        F gap = logits_.gap(load(product + k), load(gaps + k));
        gap = select(equal(score, splat(-INF)), splat(INF), gap);
        if (DIFFERS) {
          const Lanes both = lanes(seen, k % 64);
          gap = select(both, select(lanes(exact, k % 64), zero(), gap), splat(INF));
          top = max(select(both, score, splat(-INF)), top);
          of_lost = max(select(both, splat(-INF), score), of_lost);
        }
        store(gaps + k, gap);
        of_other = max(sub(score, gap), of_other);
      }
      lane_max_[r] = top, other_top[r] = of_other, lost_top[r] = of_lost;
    }
    for (int r = 0; r < rows; r += W)
      rebase(i, r, maxima(lane_max_ + r), maxima(other_top + r), maxima(lost_top + r));
  }

  // Returns what a score is subtracted by: its maximum, or 0 if there is none.
  static F base(F top) { return select(equal(top, splat(-INF)), zero(), top); }
  F power(F x) const { return exp2<5>(mul(x, log2_scale_)); }

  // The summands of a key, where p is its weight before division, and `other` is p exp(-u).
  struct Terms { F other, pu, kl, reverse; };
  // Returns those with |u| <= 1, by a polynomial of (exp(-u) - 1 + u) / u^2, fitted by least
  // squares. Its relative error is 1.1e-7.
  static Terms near(F p, F u) {
    F y = fma(splat(0x1.a2c5dcp-16f), u, splat(-0x1.aa419cp-13f));
    y = fma(y, u, splat(0x1.6c272cp-10f));
    y = fma(y, u, splat(-0x1.10fce8p-7f));
    y = fma(y, u, splat(0x1.555504p-5f));
    y = fma(y, u, splat(-0x1.55557cp-3f));
    y = fma(y, u, splat(0.5f));
    const F pu = mul(p, u), puu = mul(pu, u), kl = mul(y, puu);
    return {add(p, sub(kl, pu)), pu, kl, sub(puu, fma(kl, u, kl))};
  }
  static Terms of_any(F p, F other, F u) {
    const F pu = mul(p, u), less_p = sub(other, p);
    const Terms x = near(p, u);
    const Lanes is_near = less(abs(u), splat(1));
    return {other, pu, select(is_near, x.kl, add(less_p, pu)),
            select(is_near, x.reverse, sub(zero(), fma(other, u, less_p)))};
  }

  // Makes the numbers of W rows relative to new maxima.
  void rebase(int64_t i, int r, F top, F other_top, F lost_top) {
    const auto of = [&](int number) { return numbers(i, number) + r; };
    const F before = load(of(TOP)), other_before = load(of(OTHER_TOP)), lost = load(of(LOST_TOP));
    top = max(before, top), other_top = max(other_before, other_top);
    lost_top = max(lost, lost_top);
    const F a = power(sub(before, base(top))), other = power(sub(other_before, base(other_top)));
    const F center = sub(base(before), base(other_before));
    const F d = mul(sub(center, sub(base(top), base(other_top))), natural_scale_);
    const Terms of_d = of_any(a, other, d);
    const F sum = load(of(SUM)), other_sum = load(of(OTHER_SUM)), gap = load(of(GAP));
    const F kl = load(of(KL)), reverse = load(of(REVERSE));
    store(of(TOP), top);
    store(of(OTHER_TOP), other_top);
    store(of(LOST_TOP), lost_top);
    store(of(SUM), mul(a, sum));
    store(of(OTHER_SUM), mul(other, other_sum));
    store(of(GAP), fma(of_d.pu, sum, mul(a, gap)));
    store(of(KL), fma(other, kl, fma(sub(of_d.pu, of_d.kl), gap, mul(of_d.kl, sum))));
    store(of(REVERSE),
          fma(other, reverse, fma(mul(other, d), sub(gap, kl), mul(of_d.reverse, sum))));
    store(of(LOST), mul(power(sub(lost, base(lost_top))), load(of(LOST))));
  }

  // Pass 4: adds the numbers of a block.
  void add_block(int64_t i) {
    const int rows = rows_of(i);
    F sums[SUMS][PADDED_ROWS];
    for (int r = 0; r < rows; r++) {
      const auto base_of = [&](int number) { return base(splat(numbers(i, number)[r])); };
      const F top = base_of(TOP), center = sub(top, base_of(OTHER_TOP)),
              lost_top = base_of(LOST_TOP);
      const float *s = s_ + r * SCORE_STRIDE, *gaps = gaps_ + r * SCORE_STRIDE;
      F sum = zero(), other_sum = zero(), gap = zero(), kl = zero(), reverse = zero();
      F lost_sum = zero();
      for (int k = begin_; k < end_; k += W) {
        const F score = load(s + k), x = load(gaps + k);
        const F y = mul(sub(score, top), log2_scale_);
        F p = exp2<5>(y), u = mul(sub(x, center), natural_scale_);
        Terms of_key;
        if (!word(less(splat(1), abs(u)))) {
          of_key = near(p, u);
        } else {
          const Lanes lost = equal(x, splat(INF));
          const F other = exp2<5>(sub(y, mul(sub(x, center), log2_scale_)));
          p = select(lost, zero(), p);
          of_key = of_any(p, other, select(lost, zero(), u));
          lost_sum = add(lost_sum, select(lost, power(sub(score, lost_top)), zero()));
        }
        sum = add(sum, p);
        other_sum = add(other_sum, of_key.other);
        gap = add(gap, of_key.pu);
        kl = add(kl, of_key.kl);
        reverse = add(reverse, of_key.reverse);
      }
      const F all[SUMS] = {sum, other_sum, gap, kl, reverse, lost_sum};
      for (int n = 0; n < SUMS; n++) sums[n][r] = all[n];
    }
    for (int r = 0; r < rows; r += W)  // lanes past the last row are undefined, and not read
      for (int n = 0; n < SUMS; n++) {
        float* to = numbers(i, SUM + n) + r;
        store(to, add(load(to), totals(sums[n] + r)));
      }
  }

  void write(int64_t row) const {
    const auto of = [&](int n) { return double(number(row, n)); };
    const double sum = of(SUM), other = of(OTHER_SUM), lost_sum = of(LOST);
    const double unit = logits_.logit_scale();
    // The logarithm of the lost weight divided by the rest, and of 1 plus this.
    const double ratio = log(lost_sum / sum) + (of(LOST_TOP) - of(TOP)) * unit;
    const double below = lost_sum == 0 ? 0 : ratio > 40 ? ratio : log1p(exp(ratio));
    const double mass = sum == 0 ? 0 : exp(-below);
    const double lost = lost_sum == 0 ? 0 : -expm1(-below) / lost_sum;
    // Z - 1, by its small parts if Z is near 1.
    const double z = fabs(other - sum) < sum / 2 ? (of(KL) - of(GAP)) / sum : other / sum - 1;
    const double kl = of(KL) / sum - z + log1p(z);
    const double reverse = of(REVERSE) / other + z / (1 + z) - log1p(z);
    const bool empty = sum == 0;
    put(d_.kl, row, lost > 0 ? double(INF) : empty ? 0 : kl < 0 ? 0 : kl);
    put(d_.reverse_kl, row, below + (empty ? 0 : reverse < 0 ? 0 : reverse));
    put(d_.mass, row, mass);
    put(d_.lost, row, lost);
    const double largest = max(of(TOP), of(LOST_TOP)) * unit, nan = sum + other + lost_sum;
    put(d_.largest, row, nan != nan ? nan : empty && lost_sum == 0 ? 0 : largest);
  }
  void put(const TensorView& to, int64_t row, double x) const {
    *row_at(to, task_.b, row_[row].h, row_[row].q) = float(x);
  }

  const Divergence& d_;
  MaskView other_, exact_;
  bool differs_;  // whether the other attention has other pairs, or reads exact keys in some
  F log2_scale_, natural_scale_;
  Unit* differences_;  // packed like keys
  float* gaps_;        // of a query block: products with the differences, then gaps of scores
  float* numbers_;     // (n_blocks_, NUMBERS, PADDED_ROWS)
};

}  // namespace clearhead::CLEARHEAD_LEVEL
