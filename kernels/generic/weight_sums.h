// Sums of the weights of rows over the queries (WeightSums), and the weights of some rows.
//
// A weight needs the sum of its row, which is known after the last key. Until then the scores of
// each query block and key block stay in a tile of memory. In float32 the softmax replaces them
// there by weights relative to the maximum so far, and this maximum stays too. So Q K^T is computed
// once. The memory of a task is bounded by its number of rows (`prefill_tasks`).
#pragma once

#include "group_sums.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class WeightSummer : protected GroupSums<A> {
 protected:
  using Base = GroupSums<A>;
  using typename Base::Row, typename Base::Unit;
  using Base::KEY_BLOCK, Base::PER_UNIT, Base::PADDED_ROWS, Base::SCORE_STRIDE, Base::p_,
      Base::task_, Base::mask_, Base::logits_, Base::s_, Base::weights_, Base::n_blocks_,
      Base::row_, Base::hull_, Base::key_block_, Base::lo_, Base::hi_, Base::begin_, Base::end_,
      Base::rows_of, Base::sees_block, Base::weights, Base::share_;

  WeightSummer(const Problem& p, const PrefillTask& task, Arena& arena, int64_t rows)
      : Base(p, task, arena, rows), sums_(p.sums ? *p.sums : WeightSums{}), unkept_(s_) {
    const int64_t tiles = p.sums ? n_blocks_ * ((p.Tk + KEY_BLOCK - 1) / KEY_BLOCK) : 0;
    tile_max_ = arena.allocate<float>(tiles * PADDED_ROWS);
    tiles_ = arena.allocate<float>(tiles * QUERY_BLOCK * SCORE_STRIDE);
  }

  // Lets the next scores of a query block be written where they stay, if they are summed.
  void use_tile(int64_t i) {
    s_ = is_summed(i) ? tiles_ + tile(i) * QUERY_BLOCK * SCORE_STRIDE : unkept_;
    if constexpr (PER_UNIT == 1) weights_ = (Unit*)s_;
  }
  // Keeps the maxima of a query block after this key block.
  void keep_max(int64_t i, const float* max) {
    for (int r = 0; r < PADDED_ROWS; r += W) store(tile_max(i) + r, load(max + r));
  }

  // Adds the weights of all rows, of which `max` has the final maxima.
  void add_weights(const float* max) {
    for (int64_t key = hull_.lo / KEY_BLOCK * KEY_BLOCK; key < hull_.hi; key += KEY_BLOCK) {
      key_block_ = {key, min(key + KEY_BLOCK, hull_.hi)};
      for (int64_t i = 0; i < n_blocks_; i++)
        if (is_summed(i) && sees_block(i)) add_tile(i, max + i * PADDED_ROWS);
    }
  }

 private:
  // Return the index of the tile of a query block and the current key block, and its maxima.
  int64_t tile(int64_t i) const {
    return (key_block_.lo / KEY_BLOCK - hull_.lo / KEY_BLOCK) * n_blocks_ + i;
  }
  float* tile_max(int64_t i) const { return tile_max_ + tile(i) * PADDED_ROWS; }

  // Returns where the weights of a row are written; null if they are not requested.
  float* exact(const Row& x) const {
    if (!sums_.exact.data || sums_.exact_row[x.q] < 0) return nullptr;
    return row_at<float>(sums_.exact, task_.b, x.h, sums_.exact_row[x.q]);
  }
  bool is_summed(int64_t i) const {
    bool any = sums_.received.data || sums_.map.data;
    for (int r = 0; !any && r < rows_of(i); r++) any = exact(row_[i * QUERY_BLOCK + r]);
    return any;
  }

  // Return the bin of a position, and the first position of a bin.
  static int64_t bin(int64_t at, int64_t size, int64_t bins) {
    return ((at + 1) * bins - 1) / size;
  }
  static int64_t bin_start(int64_t bin, int64_t size, int64_t bins) { return bin * size / bins; }

  // Adds the weights of a query block on a key block.
  void add_tile(int64_t i, const float* max) {
    const int rows = rows_of(i);
    const Row* row = row_ + i * QUERY_BLOCK;
    begin_ = lo_ / W * W;
    end_ = int(round_up(hi_, W));
    use_tile(i);
    const auto base_of = [](F top) { return select(equal(top, splat(-INF)), zero(), top); };
    for (int r = 0; r < rows; r += W) {
      const F top = load(tile_max(i) + r);
      const F y = mul(sub(top, base_of(load(max + r))), splat(logits_.log2_scale()));
      store(base_ + r, base_of(top));
      store(factor_ + r, mul(exp2<5>(y), load(share_ + i * PADDED_ROWS + r)));
    }
    for (int r = 0; r < rows; r++) {
      if (!(__builtin_fabsf(factor_[r]) < INF)) write_nan(row[r], r);
      float* to = exact(row[r]);
      for (int k = begin_; to && k < end_; k += W)
        store_part(to + key_block_.lo + k, mul(weights(r, k, base_[r]), splat(factor_[r])),
                   in_vector(key_block_.size() - k));
    }
    if (!sums_.received.data && !sums_.map.data) return;
    for (int r = 0, end; r < rows; r = end) {  // the rows of one head, in the same bin
      const int64_t h = row[r].h;
      const int64_t into = sums_.map.data ? bin(row[r].q, p_.Tq, sums_.map_rows) : 0;
      const int64_t next = sums_.map.data ? bin_start(into + 1, p_.Tq, sums_.map_rows) : p_.Tq;
      for (end = r + 1; end < rows && row[end].h == h && row[end].q < next;) end++;
      constexpr int STEP = VECTORS * W;
      for (int k = begin_ / STEP * STEP; k < end_; k += STEP) add_rows(r, end, k);
      if (sums_.received.data) add_received(h);
      if (sums_.map.data) fold_into_map(h, row_at<float>(sums_.map, task_.b, h, into));
    }
  }
  // Replaces row r of the tile, whose sum is NaN. A masked key adds 0.
  void write_nan(const Row& x, int r) {
    const F masked = splat(PER_UNIT == 1 ? 0 : -INF);
    for (int k = begin_; k < end_; k += W) {
      const int64_t key = key_block_.lo + k;
      const uint64_t seen =
          mask_.visible_bits(task_.b, x.h, x.q, key, in_vector(key_block_.hi - key));
      store(s_ + r * SCORE_STRIDE + k, select(lanes(seen, 0), splat(__builtin_nanf("")), masked));
    }
    base_[r] = 0, factor_[r] = 1;
  }

  // Sums VECTORS vectors of columns over rows.
  static constexpr int VECTORS = 4;
  static_assert(KEY_BLOCK % (VECTORS * W) == 0);
  void add_rows(int r, int end, int k) {
    F sum[VECTORS];
    for (int n = 0; n < VECTORS; n++) sum[n] = zero();
    for (; r < end; r++) {
      const F of_row = splat(factor_[r]);
#pragma GCC unroll 4
      for (int n = 0; n < VECTORS; n++)
        sum[n] = fma(weights(r, k + n * W, base_[r]), of_row, sum[n]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < VECTORS; n++) store(columns_ + k + n * W, sum[n]);
  }

  // Returns the sums of n columns, multiplied by the factors of their keys.
  F times_factors(int64_t h, int64_t key, int n) const {
    F x = load_part(columns_ + (key - key_block_.lo), n);
    if (!sums_.map_factors.data) return x;
    F y = mul(x, load_part(row_at(sums_.map_factors, task_.b, h, key), n));
    return select(equal(x, zero()), zero(), y);  // a masked key adds 0, even if its factor is NaN
  }

  // Adds the sums of columns to their bins.
  void fold_into_map(int64_t h, float* row) const {
    int64_t key = key_block_.lo + lo_, end = key_block_.lo + hi_;
    for (int64_t j = bin(key, p_.Tk, sums_.map_cols), next; key < end; j++, key = next) {
      next = min(end, bin_start(j + 1, p_.Tk, sums_.map_cols));
      F sum = zero();
      for (int64_t k = key; k < next; k += W)
        sum = add(sum, times_factors(h, k, in_vector(next - k)));
      row[j] += total(sum);
    }
  }

  void add_received(int64_t h) const {
    float* to = row_at(sums_.received, task_.b, h, key_block_.lo);
    for (int k = begin_; k < end_; k += W) {
      const int n = in_vector(key_block_.size() - k);
      store_part(to + k, add(load_part(to + k, n), load(columns_ + k)), n);
    }
  }

  WeightSums sums_;
  float* unkept_;    // the scores of tiles that are not summed
  float* tiles_;     // (key blocks, n_blocks_, QUERY_BLOCK, SCORE_STRIDE)
  float* tile_max_;  // (key blocks, n_blocks_, PADDED_ROWS)
  alignas(64) float base_[PADDED_ROWS], factor_[PADDED_ROWS];  // of the rows of a tile
  alignas(64) float columns_[KEY_BLOCK + W];                   // sums over rows
};

}  // namespace clearhead::CLEARHEAD_LEVEL
