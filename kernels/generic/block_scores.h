// The scores of blocks of queries over blocks of keys: the common part of prefill.h,
// largest_parts.h, divergence.h and backward.h.
//
// The rows of a task are some queries of one head, or of several heads with the same key head. They
// are computed in blocks of QUERY_BLOCK rows and KEY_BLOCK keys. Pairs of blocks in which no row
// sees a key are skipped. The scores of a pair of blocks (18 KB) stay in L1.
#pragma once

#include "logits.h"
#include "mask.h"
#include "memory.h"
#include "products.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class BlockScores : protected Products<A> {
 protected:
  using Base = Products<A>;
  using typename Base::Unit;
  using Base::KEY_BLOCK, Base::PANEL, Base::PER_UNIT, Base::SCORE_STRIDE;
  using E = typename A::Element;
  static constexpr int PADDED_ROWS = (QUERY_BLOCK + W - 1) / W * W;
  // Up to so many keys, packing float32 rows costs more than it gains. Without it, forward and
  // backward take 0.84 of the time at 16 tokens, 0.9 at 64, 0.96 at 128 and 1.0 at 192
  // (bench/LOG.md, 2026-11-27).
  static constexpr int64_t SHORT = 128;

  struct Row {
    int64_t h, q;
    KeyRange hull, core;
    KeyRange in_block;  // contains the visible keys of the current key block
    bool contiguous;    // every key of `in_block` is visible
  };
  struct QueryBlock {
    KeyRange hull, core;
    int64_t next;  // no row sees a key after the current key block and before this one
  };

  BlockScores(const Problem& p, const PrefillTask& task, Arena& arena, int64_t rows)
      : p_(p), task_(task), mask_(p), logits_(p), n_rows_(rows) {
    n_blocks_ = (n_rows_ + QUERY_BLOCK - 1) / QUERY_BLOCK;
    steps_ = unit_count(p.D);
    row_ = arena.allocate<Row>(n_rows_);
    blocks_ = arena.allocate<QueryBlock>(n_blocks_);
    q_ = arena.allocate<Unit>(n_blocks_ * QUERY_BLOCK * steps_);
    k_ = arena.allocate<Unit>(KEY_BLOCK * steps_);
    s_ = arena.allocate<float>(QUERY_BLOCK * SCORE_STRIDE);
  }

  static int64_t unit_count(int64_t size) { return (size + PER_UNIT - 1) / PER_UNIT; }

  // Returns whether this query block sees a key of the key block. Sets lo_ and hi_ to those keys.
  bool sees_block(int64_t i) {
    KeyRange seen = blocks_[i].hull.intersect(key_block_);
    if (seen.empty() || blocks_[i].next >= key_block_.hi) return false;
    if (!mask_.one_range()) seen = find_block_ranges(i);
    lo_ = int(seen.lo - key_block_.lo);
    hi_ = int(seen.hi - key_block_.lo);
    return !seen.empty();
  }
  // Sets the range that each row of a query block sees of the key block, and returns the hull of
  // all ranges. If it is empty, sets the next key that a row sees.
  KeyRange find_block_ranges(int64_t i) {
    QueryBlock& block = blocks_[i];
    Row *first = row_ + i * QUERY_BLOCK, *end = row_ + min((i + 1) * QUERY_BLOCK, n_rows_);
    KeyRange seen = NO_KEYS;
    for (Row* x = first; x < end; x++) {
      const KeyRange part = x->hull.intersect(key_block_);
      x->in_block =
          part.empty() ? part : mask_.visible_hull(task_.b, x->h, x->q, part, &x->contiguous);
      seen.include(x->in_block);
    }
    if (seen.empty()) {
      block.next = p_.Tk;
      for (Row* x = first; x < end; x++)
        block.next = min(block.next, mask_.next_visible(task_.b, x->h, x->q, key_block_.hi));
    }
    return seen;
  }
  bool any_query_sees_block() {
    for (int64_t i = 0; i < n_blocks_; i++)
      if (sees_block(i)) return true;
    return false;
  }

  // Pass 0: finds the visible keys of every row, of every query block and of the task.
  void find_ranges(const KeyRange& keys) {
    hull_ = NO_KEYS;
    for (int64_t i = 0; i < n_blocks_; i++) blocks_[i] = {NO_KEYS, {0, p_.Tk}, 0};
    int64_t h = task_.head, q = task_.query;
    for (int64_t i = 0; i < n_rows_; i++, q++) {
      Row& r = row_[i];
      QueryBlock& block = blocks_[i / QUERY_BLOCK];
      if (q == task_.query + task_.queries) h++, q = task_.query;
      r.h = h, r.q = q;
      mask_.hull_and_core(task_.b, r.h, r.q, keys, &r.hull, &r.core);
      r.in_block = r.hull;
      r.contiguous = mask_.one_range();
      prefetch_row(query_row(p_.q, r), p_.D);
      block.core = block.core.intersect(r.core);
      block.hull.include(r.hull);
      hull_.include(r.hull);
    }
  }

  int rows_of(int64_t i) const { return int(min<int64_t>(QUERY_BLOCK, n_rows_ - i * QUERY_BLOCK)); }

  // Return the row of a tensor (b, h, q), and that of a tensor (b, g, k).
  const E* query_row(const TensorView& x, const Row& r) const {
    return row_at<E>(x, task_.b, r.h, r.q);
  }
  const E* key_row(const TensorView& x, int64_t key) const {
    int64_t g = task_.head / (p_.H / p_.G);
    return row_at<E>(x, task_.b, g, key);
  }

  // Each query block prefetches a part of the next block's keys and values into L2. Otherwise
  // packing would wait for L3 (bench/LOG.md, "packing waits").
  void prefetch_next_block(int64_t block, bool values) const {
    int64_t next = key_block_.lo / KEY_BLOCK * KEY_BLOCK + KEY_BLOCK;
    int64_t each = (KEY_BLOCK + n_blocks_ - 1) / n_blocks_;
    int64_t from = next + block * each, to = min(min(from + each, next + KEY_BLOCK), hull_.hi);
    for (int64_t key = from; key < to; key++) {
      prefetch_row(key_row(p_.k, key), p_.D);
      if (values) prefetch_row(key_row(p_.v, key), p_.Dv);
    }
  }

  // Pass 1a: packs rows of q (or of the gradient of the output) as groups. One transposition
  // produces W / SCORE_ROWS groups. The last group is padded with copies of the last row.
  void pack_groups(const TensorView& x, int64_t size, Unit* to_all) const {
    constexpr int SR = SCORE_ROWS, GROUPS = W / SR;
    static_assert(W % SR == 0);
    int64_t steps = unit_count(size);
    for (int64_t first = 0; first < n_rows_; first += W) {
      const E* row[W];
      for (int r = 0; r < W; r++) row[r] = query_row(x, row_[min(first + r, n_rows_ - 1)]);
      int groups = int(min<int64_t>(GROUPS, (n_rows_ - first + SR - 1) / SR));
      Unit* to = to_all + first * steps;
      for (int64_t d = 0; d < size; d += W * PER_UNIT, to += W * SR) {
        int part = int(min<int64_t>(size - d, W * PER_UNIT));
        int here = (part + PER_UNIT - 1) / PER_UNIT;
        F y[W];
        if (part == W * PER_UNIT) {
#pragma GCC unroll 16
          for (int r = 0; r < W; r++) y[r] = A::load_units(row[r] + d);
        } else {
          for (int r = 0; r < W; r++) y[r] = A::load_units(row[r] + d, part);
        }
        transpose(y);
        for (int i = 0; i < here; i++) {
          float step[W];
          store(step, y[i]);
          for (int g = 0; g < groups; g++)
            __builtin_memcpy(to + (g * steps + i) * SR, step + g * SR, SR * sizeof(float));
        }
      }
    }
  }

  // Pass 1b: packs the keys of a block (or their values) as panels, transposed; zeros past the end.
  void pack_panels(const TensorView& x, int64_t size, Unit* to_all) const {
    int from = int(max<int64_t>(hull_.lo - key_block_.lo, 0)) / W * W;
    int count = int(key_block_.size());
    int64_t step = x.t, steps = unit_count(size);
    for (int k = from; k < count; k += W) {
      Unit* to = to_all + k / PANEL * (steps * PANEL) + k % PANEL;
      const E* key = key_row(x, key_block_.lo + k);
      int there = count - k;
      for (int64_t d = 0; d < size; d += W * PER_UNIT, to += W * PANEL) {
        int part = int(min<int64_t>(size - d, W * PER_UNIT));
        F y[W];
        if (there >= W && part == W * PER_UNIT) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) y[i] = A::load_units(key + d + i * step);
        } else {
          for (int i = 0; i < W; i++)
            y[i] = i < there ? A::load_units(key + d + i * step, part) : zero();
        }
        transpose(y);
        int here = in_vector(steps - d / PER_UNIT);
        if (here == W) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) store((float*)to + i * PANEL, y[i]);
        } else {
          for (int i = 0; i < here; i++) store((float*)to + i * PANEL, y[i]);
        }
      }
    }
  }

  // Pass 2: computes the scores of a query block and a key block (logits.h), -infinity for masked
  // keys. Stores the maxima of each row in the lanes of `lane_max_`.
  void scores(int64_t i) {
    const QueryBlock& block = blocks_[i];
    int rows = rows_of(i);
    for (int r = 0; r < PADDED_ROWS; r++) lane_max_[r] = splat(-INF);
    begin_ = lo_ / W * W;
    end_ = int(round_up(hi_, W));
    for (int k = lo_ / PANEL * PANEL; k < end_; k += PANEL) {
      int64_t key = key_block_.lo + k;
      int width = int(min<int64_t>(PANEL, end_ - k)), seen = int(min<int64_t>(width, hi_ - k));
      bool full = block.core.lo <= key && block.core.hi >= key + width;
      uint64_t visible[QUERY_BLOCK], all_see = ~uint64_t(0);
      if (!full)
        for (int r = 0; r < rows; r++) {
          const Row& x = row_[i * QUERY_BLOCK + r];
          visible[r] = x.contiguous ? MaskView::visible_bits(x.in_block, key, seen)
                                    : mask_.visible_bits(task_.b, x.h, x.q, key, seen);
          all_see &= visible[r];
        }
      full = !(~all_see << (64 - width));
      for (int r = 0; r < rows; r += SCORE_ROWS) {
        int here = min(SCORE_ROWS, rows - r);
        float* s = s_ + r * SCORE_STRIDE + k;
        KeyRange part = {0, width};  // the part of the panel that some row sees, in whole vectors
        if (!full) {
          part = visible_vectors(visible + r, here, width);
          for (int x = 0; x < here; x++)
            for (int n = 0; n < width; n += W)
              if (n < part.lo || n >= part.hi) store(s + x * SCORE_STRIDE + n, splat(-INF));
          if (part.empty()) continue;
        }
        bool unmodified = full && logits_.unmodified();
        int from = int(part.lo), wide = int(part.size());
        const int64_t row = i * QUERY_BLOCK + r;
        const Unit* q = unpacked_ ? (const Unit*)query_row(p_.q, row_[row]) : q_ + row * steps_;
        Base::score_tile_for(unpacked_, here, wide / W)(q, p_.q.t, k_ + k * steps_ + from, steps_,
                                                        s + from,
                                                        unmodified ? lane_max_ + r : nullptr);
        if (unmodified) continue;
        for (int x = 0; x < here; x++)
          apply_mask_and_bias(row_[i * QUERY_BLOCK + r + x], key + from, wide,
                              full ? ~uint64_t(0) : visible[r + x] >> from,
                              s + x * SCORE_STRIDE + from, lane_max_ + r + x);
      }
    }
  }
  static KeyRange visible_vectors(const uint64_t* visible, int n, int width) {
    uint64_t any = 0;
    for (int i = 0; i < n; i++) any |= visible[i];
    if (!any) return {width, 0};
    return {__builtin_ctzll(any) / W * W, (63 - __builtin_clzll(any)) / W * W + W};
  }

  // Pass 2b: computes the products of vectors of a tile of rows, packed like queries, with the
  // values, packed like keys, over the keys that these rows see. `row` is a multiple of SCORE_ROWS.
  // With `unpacked_` the vectors are rows, `stride` apart.
  void value_scores(int64_t row, int rows, const Unit* vectors, const Unit* values, float* to,
                    int64_t stride = 0) const {
    const int64_t steps = unit_count(p_.Dv);
    KeyRange range = visible_to(row, rows);
    for (int64_t k = range.lo / W * W, next; k < range.hi; k = next) {
      int64_t panel = k / PANEL * PANEL;
      next = min(panel + PANEL, round_up(range.hi, W));
      Base::score_tile_for(unpacked_, rows, int(next - k) / W)(
          vectors + row * (unpacked_ ? stride : steps), stride,
          values + panel * steps + (k - panel), steps, to + k, nullptr);
    }
  }

  // Applies cap, bias and mask to a row of scores. The score of a hidden key becomes -infinity, so
  // a hidden key has no effect, even if it contains NaN.
  void apply_mask_and_bias(const Row& x, int64_t key, int width, uint64_t visible, float* s,
                           F* lane_max) {
    F t = *lane_max;
    if (logits_.unmodified()) {
      for (int n = 0; n < width; n += W) {
        F y = select(lanes(visible, n), load(s + n), splat(-INF));
        store(s + n, y);
        t = max(t, y);
      }
      *lane_max = t;
      return;
    }
    for (int n = 0; n < width; n += W) {
      int in = in_vector(p_.Tk - key - n);
      float* cap_slope = cap_slope_ ? cap_slope_ + (s - s_) + n : nullptr;
      if (raw_) store(raw_ + (s - s_) + n, load(s + n));
      F y = logits_.apply(load(s + n), task_.b, x.h, x.q, key + n, in, cap_slope);
      y = select(lanes(visible, n), y, splat(-INF));
      store(s + n, y);
      t = max(t, y);
    }
    *lane_max = t;
  }

  // Returns the keys of this block that some of these rows see, relative to its start.
  KeyRange visible_to(int64_t row, int n) const {
    KeyRange all = NO_KEYS;
    for (int r = 0; r < n; r++) all.include(row_[row + r].in_block.intersect(key_block_));
    return {all.lo - key_block_.lo, all.hi - key_block_.lo};
  }

  const Problem& p_;
  PrefillTask task_;
  MaskView mask_;
  Logits logits_;
  int64_t n_rows_, n_blocks_, steps_;
  Row* row_;
  QueryBlock* blocks_;
  Unit *q_, *k_;
  bool unpacked_ = false;  // whether q, float32 of one head, is read where it is
  float* s_;
  float* cap_slope_ = nullptr;  // if set, receives the slope of the cap, 1 - tanh^2, at every score
  float* raw_ = nullptr;        // if set, receives the products of which modified scores are made
  KeyRange hull_, key_block_;
  int lo_, hi_;      // the visible keys of the query block, relative to the key block's start
  int begin_, end_;  // the same, rounded to whole vectors
  F lane_max_[PADDED_ROWS];
};

}  // namespace clearhead::CLEARHEAD_LEVEL
