// The largest parts of each query: its weights times the products of a vector of the query, its
// direction, with the values of the keys. One sweep; passes 0 to 2 are those of block_scores.h. The
// list of a row is relative to its running maximum, like its sum, so no earlier sweep is needed.
//
// The limit of the time. A pair costs D multiply-adds and one exponential, about half of forward. A
// part is at most its weight times the norms of the direction and the value. Only a key whose limit
// exceeds the least part of the list, a candidate, is multiplied by the direction, alone, in an
// order that does not depend on other keys. If a tile of rows had many candidates in the block
// before, its directions are first multiplied by all values, like Q K^T. Then the limits exceed the
// parts only by rounding, so there are few candidates, and a pair costs D + Dv multiply-adds, as in
// forward.
//
// A query that sees a limit of NaN or infinity gets NaN as all its parts (core/engines/parts.py computes
// these again).
#pragma once

#include <math.h>

#include "block_scores.h"
#include "epilogue.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class PartLister : BlockScores<A> {
  using Base = BlockScores<A>;
  using typename Base::Row, typename Base::Unit;
  using Base::KEY_BLOCK, Base::PADDED_ROWS, Base::SCORE_STRIDE, Base::p_, Base::task_,
      Base::logits_, Base::n_rows_, Base::n_blocks_, Base::row_, Base::q_, Base::k_, Base::s_,
      Base::lane_max_, Base::hull_, Base::key_block_, Base::begin_, Base::end_, Base::rows_of,
      Base::query_row, Base::key_row, Base::find_ranges, Base::pack_groups, Base::pack_panels,
      Base::any_query_sees_block, Base::sees_block, Base::scores, Base::value_scores,
      Base::prefetch_next_block;

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
  // A tile has many candidates if one key in MANY is one. A product takes two to four
  // times as long alone as in a tile (bench/LOG.md, 2026-11-26).
  static constexpr int MANY = 2;

  PartLister(const Problem& p, const LargestParts& parts, const PrefillTask& task, Arena& arena,
             int64_t rows)
      : Base(p, task, arena, rows), parts_(parts), n_(parts.n),
        rounding_(float(p.Dv + 8) * 0x1p-23f) {
    const int64_t steps = Base::unit_count(p.Dv);
    directions_ = arena.allocate<Unit>(n_blocks_ * QUERY_BLOCK * steps);
    v_ = arena.allocate<Unit>(KEY_BLOCK * steps);
    products_ = arena.allocate<float>(SCORE_ROWS * SCORE_STRIDE);
    direction_norms_ = arena.allocate<float>(n_rows_);
    value_norms_ = arena.allocate<float>(KEY_BLOCK);
    max_ = arena.allocate<float>(n_blocks_ * PADDED_ROWS);
    sum_ = arena.allocate<float>(n_blocks_ * PADDED_ROWS);
    largest_ = arena.allocate<float>(n_rows_ * n_);
    keys_ = arena.allocate<int64_t>(n_rows_ * n_);
    by_norms_ = arena.allocate<int>(n_blocks_ * TILES);
  }

  void compute() {
    find_ranges({0, p_.Tk});
    pack_groups(p_.q, p_.D, q_);
    pack_groups(parts_.directions, p_.Dv, directions_);
    for (int64_t i = 0; i < n_blocks_ * PADDED_ROWS; i++) max_[i] = -INF, sum_[i] = 0;
    for (int64_t i = 0; i < n_rows_ * n_; i++) largest_[i] = 0, keys_[i] = -1;
    for (int64_t i = 0; i < n_blocks_ * TILES; i++) by_norms_[i] = SCORE_ROWS * KEY_BLOCK;
    for (int64_t i = 0; i < n_rows_; i++)
      direction_norms_[i] = norm_of(direction(i)) * (1 + 4 * rounding_);
    for (int64_t key = hull_.lo / KEY_BLOCK * KEY_BLOCK; key < hull_.hi; key += KEY_BLOCK) {
      key_block_ = {key, min(key + KEY_BLOCK, hull_.hi)};
      if (!any_query_sees_block()) continue;
      pack_panels(p_.k, p_.D, k_);
      v_packed_ = false;
      values_ = key_row(p_.v, key);
      for (int64_t k = 0; k < KEY_BLOCK; k++)
        value_norms_[k] = key + k < key_block_.hi ? norm_of(values_ + k * p_.v.t) : 0;
      for (int64_t i = 0; i < n_blocks_; i++) {
        prefetch_next_block(i, true);
        if (!sees_block(i)) continue;
        scores(i);
        list_parts(i);
      }
    }
    for (int64_t i = 0; i < n_rows_; i++) write_row(i);
  }

  const float* direction(int64_t row) const { return query_row(parts_.directions, row_[row]); }
  // Multiplies two vectors, and sums in the lanes.
  F multiply(const float* x, const float* y) const {
    F sum = zero();
    int64_t d = 0;
    for (; d + W <= p_.Dv; d += W) sum = fma(load(x + d), load(y + d), sum);
    const int rest = int(p_.Dv - d);
    return rest ? fma(load_part(x + d, rest), load_part(y + d, rest), sum) : sum;
  }
  // Returns a number above 0 that is at least the norm, even if squares are too small for a float.
  float norm_of(const float* x) const {
    return sqrtf(total(multiply(x, x)) + float(p_.Dv + 1) * 0x1p-126f);
  }

  // Pass 3: computes the weights of a query block relative to the running maximum, and their sums,
  // and updates the lists.
  void list_parts(int64_t i) {
    const int rows = rows_of(i);
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
    for (int first = 0; first < rows; first += SCORE_ROWS) {
      const int here = min(SCORE_ROWS, rows - first);
      const int64_t row = i * QUERY_BLOCK + first;
      int& by_norms = by_norms_[row / SCORE_ROWS];
      const bool many = by_norms * MANY > here * (end_ - begin_);
      if (many) multiply_values(row, here);
      by_norms = 0;
      for (int r = first; r < first + here; r++) {
        const int64_t at = i * QUERY_BLOCK + r;
        rescale_list(at, rescale[r]);
        by_norms += many ? weigh<true>(at, base[r], log2_scale, sums[r])
                         : weigh<false>(at, base[r], log2_scale, sums[r]);
      }
      for (int64_t r = row; r < row + here; r++) insert_candidates(r);
    }
    for (int r = 0; r < rows; r += W)  // lanes past the last row are undefined, and not read
      store(row_sum + r, fma(load(row_sum + r), load(rescale + r), totals(sums + r)));
  }

  void multiply_values(int64_t row, int rows) {
    if (!v_packed_) pack_panels(p_.v, p_.Dv, v_);
    v_packed_ = true;
    value_scores(row, rows, directions_, v_, products_);
  }

  // Replaces the scores of a row by its weights, and finds its candidates, with MULTIPLIED by the
  // products of the tile. Returns how many there are by the norms alone.
  template <bool MULTIPLIED> int weigh(int64_t row, float base, F log2_scale, F& sum_of_lanes) {
    float* s = scores_of(row);
    const float* product = products_ + row % SCORE_ROWS * SCORE_STRIDE;
    const F from = splat(base), length = splat(direction_norms_[row]), rounding = splat(rounding_);
    const F least = splat(least_of(row));
    F sum = zero(), most = zero(), at_least = zero();
    int by_norms = 0;
    for (int at = begin_ / 64; at * 64 < end_; at++) {
      uint64_t bits = 0;
#pragma GCC unroll 3
      for (int k = max(at * 64, begin_); k < min(at * 64 + 64, end_); k += W) {
        F score = load(s + k), w = exp2<5>(mul(sub(score, from), log2_scale));
        sum = add(sum, w);
        store(s + k, w);
        // A masked key has the score -infinity, and perhaps NaN in its value.
        F norms = mul(length, load(value_norms_ + k));
        F limit = select(equal(score, splat(-INF)), zero(), mul(w, norms));
        most = max_magnitude(limit, most);
        uint64_t larger = word(less(least, limit));
        by_norms += __builtin_popcountll(larger);
        if constexpr (MULTIPLIED) {
          F size = abs(load(product + k));
          larger &= word(less(least, mul(w, fma(norms, rounding, size))));
          at_least = max(mul(w, sub(size, mul(norms, rounding))), at_least);
        }
        bits |= larger << (k - at * 64);
      }
      candidates_[row % SCORE_ROWS][at] = bits;
    }
    sum_of_lanes = fma(most, zero(), sum);  // NaN if a limit is NaN or infinite
    if (MULTIPLIED && least_of(row) == 0 && n_ <= W) reduce_candidates(row, at_least);
    return by_norms;
  }
  // Reduces the candidates of a row's first block to those that may be among its n largest parts.
  // `lanes` has a number in each lane that some part of the lane reaches.
  void reduce_candidates(int64_t row, F lanes) {
    const float *s = scores_of(row), *product = products_ + row % SCORE_ROWS * SCORE_STRIDE;
    const F least = splat(below_largest(lanes));
    const F rounding = splat(direction_norms_[row] * rounding_);
    for (int k = begin_; k < end_; k += W) {
      F size = fma(load(value_norms_ + k), rounding, abs(load(product + k)));
      uint64_t smaller = ~word(less(least, mul(load(s + k), size))) << (64 - W) >> (64 - W);
      candidates_[row % SCORE_ROWS][k / 64] &= ~(smaller << k % 64);
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

  // Inserts the parts of a row's candidates into its list, the largest first. Keys ascend; among
  // equal parts the first is kept.
  void insert_candidates(int64_t row) {
    static constexpr auto functions = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<void (PartLister::*)(int64_t), sizeof...(i)>{{&PartLister::insert_parts<i>...}};
    }(std::make_integer_sequence<int, MOST_VECTORS + 1>());
    uint64_t any = 0;
    for (int at = begin_ / 64; at * 64 < end_; at++) any |= candidates_[row % SCORE_ROWS][at];
    const bool in_registers = p_.Dv <= MOST_VECTORS * W && p_.Dv % W == 0;
    if (any) (this->*functions.entry[in_registers ? p_.Dv / W : 0])(row);
  }
  // With VECTORS, a direction has so many, and stays in registers.
  template <int VECTORS> void insert_parts(int64_t row) {
    const float *x = direction(row), *s = scores_of(row), *values = values_;
    const uint64_t* candidates = candidates_[row % SCORE_ROWS];
    const int64_t step = p_.v.t;
    F of_direction[VECTORS + 1];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) of_direction[i] = load(x + i * W);
    float least = least_of(row);
    for (int at = begin_ / 64; at * 64 < end_; at++)
      for (uint64_t left = candidates[at]; left; left &= left - 1) {
        const int k = at * 64 + __builtin_ctzll(left);
        const float* value = values + k * step;
        F product = zero();
        if constexpr (!VECTORS) product = multiply(x, value);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++)
          product = fma(of_direction[i], load(value + i * W), product);
        const float part = s[k] * total(product);
        if (!(__builtin_fabsf(part) > least)) continue;
        insert(row, part, key_block_.lo + k);
        least = least_of(row);
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
  void rescale_list(int64_t row, float factor) {
    if (factor != 1)
      for (int64_t j = 0; j < n_; j++) largest_[row * n_ + j] *= factor;
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

  float* scores_of(int64_t row) const { return s_ + row % QUERY_BLOCK * SCORE_STRIDE; }
  float least_of(int64_t row) const { return __builtin_fabsf(largest_[row * n_ + n_ - 1]); }

  static constexpr int WORDS = KEY_BLOCK / 64, TILES = QUERY_BLOCK / SCORE_ROWS;
  static constexpr int MOST_VECTORS = 8;
  static_assert(KEY_BLOCK % 64 == 0 && W <= 32);

  const LargestParts& parts_;
  const int64_t n_;
  const float rounding_;  // of a sum of Dv products in any order, relative to the norms
  Unit *directions_, *v_;
  const float* values_;  // of the key block
  bool v_packed_;        // whether `v_` has these
  float *products_, *direction_norms_, *value_norms_;
  float *max_, *sum_;
  float* largest_;  // of each row, relative to its maximum
  int64_t* keys_;
  int* by_norms_;  // of each tile: how many candidates the norms alone left in its last block
  uint64_t candidates_[SCORE_ROWS][WORDS];  // of a tile, as bits
};

}  // namespace clearhead::CLEARHEAD_LEVEL
