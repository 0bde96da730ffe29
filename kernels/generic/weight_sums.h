// Sums of the weights of rows over the queries (WeightSums), and the weights of some rows.
//
// A weight needs the sum of its row, which is known after the last key. Until then a task keeps the
// weights of each query block on each key block as the softmax left them, relative to the maximum
// so far, and this maximum. So Q K^T is computed once. The memory of a task is bounded by its
// number of rows (`prefill_tasks`).
#pragma once

#include "group_sums.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class WeightSummer : protected GroupSums<A> {
 protected:
  using Base = GroupSums<A>;
  using typename Base::Row;
  using Base::KEY_BLOCK, Base::PADDED_ROWS, Base::p_, Base::task_, Base::mask_, Base::logits_,
      Base::n_blocks_, Base::row_, Base::hull_, Base::key_block_,
      Base::lo_, Base::hi_, Base::begin_, Base::end_, Base::rows_of, Base::sees_block,
      Base::weights, Base::share_;

  WeightSummer(const Problem& p, const PrefillTask& task, Arena& arena, int64_t rows)
      : Base(p, task, arena, rows), sums_(p.sums ? *p.sums : WeightSums{}) {
    const int64_t tiles = p.sums ? n_blocks_ * ((p.Tk + KEY_BLOCK - 1) / KEY_BLOCK) : 0;
    tile_max_ = arena.allocate<float>(tiles * PADDED_ROWS);
    tiles_ = arena.allocate<float>(tiles * QUERY_BLOCK * KEY_BLOCK);
  }

  // Keeps the weights of a query block on a key block, exp2((s - base) * log2_scale). `max` has the
  // maxima so far.
  void keep_weights(int64_t i, const float* base, const float* max) {
    if (!is_summed(i)) return;
    for (int r = 0; r < PADDED_ROWS; r += W) store(tile_max(i) + r, load(max + r));
    for (int r = 0, rows = rows_of(i); r < rows; r++)
      for (int k = begin_; k < end_; k += W) store(tile(i, r) + k, weights(r, k, base[r]));
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
  // The weights of a row on the current key block, and the maxima of a query block after it.
  int64_t tile_of(int64_t i) const {
    return (key_block_.lo - hull_.lo / KEY_BLOCK * KEY_BLOCK) / KEY_BLOCK * n_blocks_ + i;
  }
  float* tile(int64_t i, int r) const {
    return tiles_ + (tile_of(i) * QUERY_BLOCK + r) * KEY_BLOCK;
  }
  float* tile_max(int64_t i) const { return tile_max_ + tile_of(i) * PADDED_ROWS; }

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
    alignas(64) float factor[PADDED_ROWS];
    for (int r = 0; r < rows; r += W) {
      const F top = load(max + r), from = select(equal(top, splat(-INF)), zero(), top);
      const F y = mul(sub(load(tile_max(i) + r), from), splat(logits_.log2_scale()));
      store(factor + r, mul(exp2<5>(y), load(share_ + i * PADDED_ROWS + r)));
    }
    for (int r = 0; r < rows; r++) {
      if (!(__builtin_fabsf(factor[r]) < INF)) factor[r] = write_nan(row[r], tile(i, r));
      float* to = exact(row[r]);
      for (int k = begin_; to && k < end_; k += W)
        store_part(to + key_block_.lo + k, mul(load(tile(i, r) + k), splat(factor[r])),
                   in_vector(key_block_.size() - k));
    }
    if (!sums_.received.data && !sums_.map.data) return;
    for (int r = 0, end; r < rows; r = end) {  // the rows of one head, in the same bin
      const int64_t h = row[r].h;
      const int64_t into = sums_.map.data ? bin(row[r].q, p_.Tq, sums_.map_rows) : 0;
      const int64_t next = sums_.map.data ? bin_start(into + 1, p_.Tq, sums_.map_rows) : p_.Tq;
      for (end = r + 1; end < rows && row[end].h == h && row[end].q < next;) end++;
      constexpr int STEP = VECTORS * W;
      for (int k = begin_ / STEP * STEP; k < end_; k += STEP)
        add_rows(tile(i, 0), factor, r, end, k);
      if (sums_.received.data) add_received(h);
      if (sums_.map.data) fold_into_map(h, row_at<float>(sums_.map, task_.b, h, into));
    }
  }
  // Replaces the weights of a row whose sum is NaN: a masked key adds 0.
  float write_nan(const Row& x, float* tile) const {
    for (int k = begin_; k < end_; k += W) {
      const int64_t key = key_block_.lo + k;
      const uint64_t seen =
          mask_.visible_bits(task_.b, x.h, x.q, key, in_vector(key_block_.hi - key));
      store(tile + k, select(lanes(seen, 0), splat(__builtin_nanf("")), zero()));
    }
    return 1;
  }

  // Sums VECTORS vectors of columns of a tile over rows.
  static constexpr int VECTORS = 4;
  static_assert(KEY_BLOCK % (VECTORS * W) == 0);
  void add_rows(const float* tile, const float* factor, int r, int end, int k) {
    F sum[VECTORS];
    for (int n = 0; n < VECTORS; n++) sum[n] = zero();
    for (; r < end; r++) {
      const F of_row = splat(factor[r]);
#pragma GCC unroll 4
      for (int n = 0; n < VECTORS; n++)
        sum[n] = fma(load(tile + r * KEY_BLOCK + k + n * W), of_row, sum[n]);
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
  float* tiles_;     // (key blocks, n_blocks_, QUERY_BLOCK, KEY_BLOCK)
  float* tile_max_;  // (key blocks, n_blocks_, PADDED_ROWS)
  alignas(64) float columns_[KEY_BLOCK + W];  // sums over rows
};

}  // namespace clearhead::CLEARHEAD_LEVEL
