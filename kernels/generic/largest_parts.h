// The largest parts of each query: its weights times the products of a vector of the query with the
// values of the keys. One sweep; passes 0 to 2 are those of block_scores.h.
//
// A pair costs D + Dv multiply-adds and one exponential, like forward. The second product is Q K^T
// with other operands: groups of the vectors, and panels of the values. The list of a row is
// relative to its running maximum, like its sum, so no earlier sweep is needed.
//
// A query that sees a part of NaN or infinity gets NaN as all its parts (engines/parts.py computes
// these again).
#pragma once

#include "block_scores.h"
#include "epilogue.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class PartLister : BlockScores<A> {
  using Base = BlockScores<A>;
  using typename Base::Row, typename Base::Unit;
  using Base::KEY_BLOCK, Base::PADDED_ROWS, Base::SCORE_STRIDE, Base::p_, Base::task_,
      Base::logits_, Base::n_rows_, Base::n_blocks_, Base::row_, Base::q_, Base::k_, Base::s_,
      Base::lane_max_, Base::hull_, Base::key_block_, Base::begin_, Base::end_, Base::rows_of,
      Base::find_ranges, Base::pack_groups, Base::pack_panels, Base::any_query_sees_block,
      Base::sees_block, Base::scores, Base::value_scores, Base::prefetch_next_block;

 public:
  static size_t scratch(const Problem& p, const LargestParts& parts, int64_t rows) {
    Arena arena(nullptr);
    PartLister(p, parts, {}, arena, rows);
    return arena.used();
  }

  static void run(const Problem& p, const LargestParts& parts, const PrefillTask& task,
                  char* scratch) {
    Arena arena(scratch);
    PartLister(p, parts, task, arena, task.heads * task.queries).compute();
  }

 private:
  PartLister(const Problem& p, const LargestParts& parts, const PrefillTask& task, Arena& arena,
             int64_t rows)
      : Base(p, task, arena, rows), parts_(parts), n_(parts.n) {
    const int64_t steps = Base::unit_count(p.Dv);
    directions_ = arena.allocate<Unit>(n_blocks_ * QUERY_BLOCK * steps);
    v_ = arena.allocate<Unit>(KEY_BLOCK * steps);
    products_ = arena.allocate<float>(SCORE_ROWS * SCORE_STRIDE);
    max_ = arena.allocate<float>(n_blocks_ * PADDED_ROWS);
    sum_ = arena.allocate<float>(n_blocks_ * PADDED_ROWS);
    largest_ = arena.allocate<float>(n_rows_ * n_);
    keys_ = arena.allocate<int64_t>(n_rows_ * n_);
  }

  void compute() {
    find_ranges({0, p_.Tk});
    pack_groups(p_.q, p_.D, q_);
    pack_groups(parts_.directions, p_.Dv, directions_);
    for (int64_t i = 0; i < n_blocks_ * PADDED_ROWS; i++) max_[i] = -INF, sum_[i] = 0;
    for (int64_t i = 0; i < n_rows_ * n_; i++) largest_[i] = 0, keys_[i] = -1;
    for (int64_t key = hull_.lo / KEY_BLOCK * KEY_BLOCK; key < hull_.hi; key += KEY_BLOCK) {
      key_block_ = {key, min(key + KEY_BLOCK, hull_.hi)};
      if (!any_query_sees_block()) continue;
      pack_panels(p_.k, p_.D, k_);
      pack_panels(p_.v, p_.Dv, v_);
      for (int64_t i = 0; i < n_blocks_; i++) {
        prefetch_next_block(i, true);
        if (!sees_block(i)) continue;
        scores(i);
        list_parts(i);
      }
    }
    for (int64_t i = 0; i < n_rows_; i++) write_row(i);
  }

  // Pass 3: computes the weights of a query block relative to the running maximum, their sums, and
  // their parts. The products of a tile of rows fit into L1 beside the scores of the block.
  void list_parts(int64_t i) {
    const int rows = rows_of(i), begin = begin_, end = end_;
    const F log2_scale = splat(logits_.log2_scale());
    float *row_max = max_ + i * PADDED_ROWS, *row_sum = sum_ + i * PADDED_ROWS;
    alignas(64) float base[PADDED_ROWS], rescale[PADDED_ROWS];
    for (int r = 0; r < rows; r += W) {
      F before = load(row_max + r), after = max(before, maxima(lane_max_ + r));
      F from = select(equal(after, splat(-INF)), zero(), after);
      store(row_max + r, after);
      store(base + r, from);
      store(rescale + r, exp2<5>(mul(sub(before, from), log2_scale)));
    }
    F sums[PADDED_ROWS];
    for (int r = 0; r < rows; r++) {
      if (r % SCORE_ROWS == 0)
        value_scores(i * QUERY_BLOCK + r, min(SCORE_ROWS, rows - r), directions_, v_, products_);
      float* s = s_ + r * SCORE_STRIDE;
      const float* product = products_ + r % SCORE_ROWS * SCORE_STRIDE;
      F from = splat(base[r]), sum = zero(), most = zero();
#pragma GCC unroll 3
      for (int k = begin; k < end; k += W) {
        F score = load(s + k), w = exp2<5>(mul(sub(score, from), log2_scale));
        sum = add(sum, w);
        // A masked key has the score -infinity, and perhaps NaN in its value.
        F part = select(equal(score, splat(-INF)), zero(), mul(w, load(product + k)));
        store(s + k, part);
        most = max_magnitude(abs(part), most);
      }
      sums[r] = fma(most, zero(), sum);  // NaN if a part is NaN or infinite
      update_list(i * QUERY_BLOCK + r, s, most, rescale[r]);
    }
    for (int r = 0; r < rows; r += W)  // lanes past the last row are undefined, and not read
      store(row_sum + r, fma(load(row_sum + r), load(rescale + r), totals(sums + r)));
  }

  // Updates the list of a row, the largest first, with the parts of a block, of which `most` has
  // the largest of each lane. Keys ascend; among equal parts the first is kept.
  void update_list(int64_t row, const float* parts, F most, float rescale) {
    float* largest = largest_ + row * n_;
    if (rescale != 1)
      for (int64_t j = 0; j < n_; j++) largest[j] *= rescale;
    float least = __builtin_fabsf(largest[n_ - 1]);
    if (!word(less(splat(least), most))) return;
    const float enters = least == 0 && n_ <= W ? below_largest(most) : 0;
    least = max(least, enters);
    for (int k = begin_; k < end_; k += W)
      for (uint64_t larger = word(less(splat(least), abs(load(parts + k)))); larger;
           larger &= larger - 1) {
        const int at = k + __builtin_ctzll(larger);
        if (!(__builtin_fabsf(parts[at]) > least)) continue;
        insert(row, parts[at], key_block_.lo + at);
        least = max(enters, __builtin_fabsf(largest[n_ - 1]));
      }
  }
  // Returns a number just below the n-th largest lane. At least n parts are larger, so in a row's
  // first block most others need not be inserted.
  float below_largest(F lanes) const {
    float x[W];
    store(x, lanes);
    for (int64_t j = 0;; j++) {
      int at = 0;
      for (int i = 1; i < W; i++) at = x[i] > x[at] ? i : at;
      if (x[at] == 0) return 0;
      if (j == n_ - 1) return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x[at]) - 1);
      x[at] = 0;
    }
  }
  // Inserts a part after those that are as large, and drops the last.
  void insert(int64_t row, float part, int64_t key) {
    float* largest = largest_ + row * n_;
    int64_t *keys = keys_ + row * n_, at = n_ - 1;
    for (; at > 0 && __builtin_fabsf(largest[at - 1]) < __builtin_fabsf(part); at--)
      largest[at] = largest[at - 1], keys[at] = keys[at - 1];
    largest[at] = part, keys[at] = key;
  }

  void write_row(int64_t i) const {
    const Row& r = row_[i];
    const int64_t at = i / QUERY_BLOCK * PADDED_ROWS + i % QUERY_BLOCK;
    const RowEpilogue end(p_, task_.b, r.h, max_[at], sum_[at], logits_.logit_scale());
    float* parts = row_at<float>(parts_.parts, task_.b, r.h, r.q);
    int64_t* keys = row_at<int64_t>(parts_.keys, task_.b, r.h, r.q);
    for (int64_t j = 0; j < n_; j++) {
      parts[j] = largest_[i * n_ + j] * end.scale();
      keys[j] = parts[j] == 0 ? -1 : keys_[i * n_ + j];
    }
  }

  const LargestParts& parts_;
  const int64_t n_;
  Unit *directions_, *v_;
  float *products_, *max_, *sum_;
  float* largest_;  // of each row, relative to its maximum
  int64_t* keys_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
