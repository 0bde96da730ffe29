// The second sweep: sums of weights over the queries, from every row's maximum and normalization
// (`share`) of a first sweep. Passes 0 to 2 are those of block_scores.h; there is no output.
#pragma once

#include "block_scores.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class WeightSummer : BlockScores<A> {
  using Base = BlockScores<A>;
  using typename Base::Row;
  using Base::KEY_BLOCK, Base::SCORE_STRIDE, Base::p_, Base::task_, Base::logits_, Base::n_rows_,
      Base::n_blocks_, Base::row_, Base::q_, Base::k_, Base::s_, Base::hull_, Base::key_block_,
      Base::lo_, Base::hi_, Base::begin_, Base::end_, Base::rows_of, Base::find_ranges,
      Base::pack_groups, Base::pack_panels, Base::any_query_sees_block, Base::sees_block,
      Base::scores;
  static constexpr int ROWS = 16 * QUERY_BLOCK;  // queries that are packed at once

 public:
  static size_t scratch(const Problem& p) {
    Arena arena(nullptr);
    WeightSummer(p, {}, arena, min<int64_t>(p.Tq, ROWS));
    return arena.used();
  }

  static void run(const Problem& p, const WeightSums& sums, const WeightSumsTask& task,
                  char* scratch) {
    for (int64_t query = 0; query < p.Tq; query += ROWS) {
      int64_t queries = min<int64_t>(p.Tq - query, ROWS);
      Arena arena(scratch);
      WeightSummer chunk(p, {task.b, task.head, 1, query, queries}, arena, queries);
      chunk.compute(sums, {task.key, task.key_end});
    }
  }

 private:
  WeightSummer(const Problem& p, const PrefillTask& task, Arena& arena, int64_t rows)
      : Base(p, task, arena, rows) {}

  void compute(const WeightSums& sums, KeyRange keys) {
    if (!sums.received.data && !sums.map.data && !any_exact(sums)) return;
    find_ranges(keys);
    pack_groups(p_.q, p_.D, q_);
    for (int64_t key = keys.lo; key < hull_.hi; key += KEY_BLOCK) {
      key_block_ = {key, min(key + KEY_BLOCK, hull_.hi)};
      if (key_block_.hi <= hull_.lo || !any_query_sees_block()) continue;
      pack_panels(p_.k, p_.D, k_);
      for (int k = 0; k < KEY_BLOCK; k += W) store(received_ + k, zero());
      for (int64_t i = 0; i < n_blocks_; i++) {
        if (!sees_block(i)) continue;
        scores(i);
        sum_block(sums, i);
      }
      if (sums.received.data) add_received(sums.received);
    }
  }

  bool any_exact(const WeightSums& sums) const {
    for (int64_t q = task_.query; sums.exact.data && q < task_.query + task_.queries; q++)
      if (sums.exact_row[q] >= 0) return true;
    return false;
  }

  // Return the bin of a position, and the first position of a bin.
  static int64_t bin(int64_t at, int64_t size, int64_t bins) {
    return ((at + 1) * bins - 1) / size;
  }
  static int64_t bin_start(int64_t bin, int64_t size, int64_t bins) { return bin * size / bins; }

  // Pass 3: computes weights, and sums them over the queries of a block in the same bin.
  void sum_block(const WeightSums& sums, int64_t i) {
    int rows = rows_of(i);
    F log2_scale = splat(logits_.log2_scale());
    float from[QUERY_BLOCK], share[QUERY_BLOCK], *exact[QUERY_BLOCK];
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * QUERY_BLOCK + r];
      float m = *row_at(sums.max, task_.b, x.h, x.q);
      from[r] = m == -INF ? 0 : m;
      share[r] = *row_at(sums.share, task_.b, x.h, x.q);
      bool is_kept = sums.exact.data && sums.exact_row[x.q] >= 0;
      exact[r] = is_kept
                     ? row_at<float>(sums.exact, task_.b, x.h, sums.exact_row[x.q]) + key_block_.lo
                     : nullptr;
    }
    for (int r = 0, end; r < rows; r = end) {
      int64_t q = row_[i * QUERY_BLOCK + r].q,
              into = sums.map.data ? bin(q, p_.Tq, sums.map_rows) : 0;
      int64_t next = sums.map.data ? bin_start(into + 1, p_.Tq, sums.map_rows) : p_.Tq;
      end = int(min<int64_t>(rows, r + next - q));
      for (int k = begin_; k < end_; k += W) {
        F sum = zero();
        for (int x = r; x < end; x++) {
          F y = load(s_ + x * SCORE_STRIDE + k);
          F w = mul(exp2<5>(mul(sub(y, splat(from[x])), log2_scale)), splat(share[x]));
          w = select(equal(y, splat(-INF)), zero(), w);  // also in a row with NaN
          sum = add(sum, w);
          if (exact[x]) store_part(exact[x] + k, w, in_vector(key_block_.size() - k));
        }
        store(bin_sums_ + k, sum);
        store(received_ + k, add(load(received_ + k), sum));
      }
      if (sums.map.data) fold_into_map(sums, row_at<float>(sums.map, task_.b, task_.head, into));
    }
  }

  // Returns the sums of n columns, multiplied by the factors of their keys.
  F times_factors(const TensorView& factors, int64_t key, int n) const {
    F x = load_part(bin_sums_ + (key - key_block_.lo), n);
    if (!factors.data) return x;
    F y = mul(x, load_part(row_at(factors, task_.b, task_.head, key), n));
    return select(equal(x, zero()), zero(), y);  // a masked key adds 0, even if its factor is NaN
  }

  // Adds the sums of columns to their bins.
  void fold_into_map(const WeightSums& sums, float* row) const {
    int64_t key = key_block_.lo + lo_, end = key_block_.lo + hi_;
    for (int64_t j = bin(key, p_.Tk, sums.map_cols), next; key < end; j++, key = next) {
      next = min(end, bin_start(j + 1, p_.Tk, sums.map_cols));
      F sum = zero();
      for (int64_t k = key; k < next; k += W)
        sum = add(sum, times_factors(sums.map_factors, k, in_vector(next - k)));
      row[j] += total(sum);
    }
  }

  void add_received(const TensorView& x) const {
    float* to = row_at(x, task_.b, task_.head, key_block_.lo);
    for (int64_t k = 0; k < key_block_.size(); k += W) {
      int n = in_vector(key_block_.size() - k);
      store_part(to + k, add(load_part(to + k, n), load(received_ + k)), n);
    }
  }

  alignas(64) float bin_sums_[KEY_BLOCK + W];  // of one bin of queries
  alignas(64) float received_[KEY_BLOCK + W];  // of all queries
};

}  // namespace clearhead::CLEARHEAD_LEVEL
