// Prefill: many queries over all keys, in register tiles.
//
// The limit of the speed. A (query, key) pair costs D + Dv multiply-adds and one exponential. With
// 16 lanes, two FMA pipes and D = Dv = 64, 16 pairs take 64 cycles of FMA and about 7 cycles of
// exponential (bench/LOG.md, "the exponential"). So at most 90 % of the FMA peak can be reached, if
// everything else overlaps with FMAs: 11 loads feed 24 FMAs, hundreds of queries use a packed key,
// and rescaling is part of the last step of the weighted sum.
//
// Memory layout. A task holds its packed queries, their output sums and their (max, sum), and loops
// over blocks of KEY_BLOCK keys. A key block is packed once. Keys are packed as panels [D][PANEL],
// so that a vector holds one coordinate of W keys; values as [key][Dv], padded. Then each query
// block computes its scores (18 KB, which stay in L1), softmax and weighted sum. With few keys, the
// float32 queries of one head are read where they are.
//
// Statistics. Those of a row are computed in the softmax pass. A moment takes one more FMA a
// vector. The largest scores are listed for W rows at once in a row's first block, and take one
// comparison a vector later, in blocks whose maximum may enter the list. Groups of keys are summed
// afterwards (group_sums.h). Statistics that need final weights (received, maps, exact rows) are
// added after the last key, from weights that a task keeps (weight_sums.h). The operations of the
// output are the same, hence its bits too.
//
// Bits. They do not depend on the other rows of a task. A row is summed over d, then over the keys
// of a block, then over blocks that start at multiples of KEY_BLOCK, always in this order. A block
// without a visible key multiplies by exp2(0) = 1 and adds 0.
#pragma once

#include <math.h>

#include "dropout.h"
#include "epilogue.h"
#include "weight_sums.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class Prefill : WeightSummer<A> {
  using Base = WeightSummer<A>;
  using typename Base::E, typename Base::Row, typename Base::Unit;
  using Base::KEY_BLOCK, Base::PER_UNIT, Base::PADDED_ROWS, Base::SCORE_STRIDE, Base::PAIR_STRIDE,
      Base::WEIGHT_STRIDE, Base::p_, Base::task_, Base::mask_, Base::logits_, Base::n_rows_,
      Base::n_blocks_, Base::row_, Base::blocks_, Base::q_, Base::k_, Base::s_, Base::lane_max_,
      Base::hull_, Base::key_block_, Base::begin_, Base::end_, Base::rows_of, Base::key_row,
      Base::find_ranges, Base::pack_groups, Base::pack_panels, Base::any_query_sees_block,
      Base::sees_block, Base::scores, Base::prefetch_next_block, Base::visible_to, Base::n_groups_,
      Base::weights_, Base::share_, Base::unpacked_, Base::SHORT, Base::start_groups,
      Base::add_to_groups, Base::write_group_sums, Base::use_tile, Base::keep_max,
      Base::add_weights;

 public:
  static size_t scratch(const Problem& p, int64_t rows) {
    Arena arena(nullptr);
    Prefill(p, {}, arena, rows);
    return arena.used();
  }

  static void run(const Problem& p, const PrefillTask& task, char* scratch) {
    Arena arena(scratch);
    Prefill(p, task, arena, task.heads * task.queries).compute();
  }

  // Adds the weights that `run` left in the scratch.
  static void add_sums(const Problem& p, const PrefillTask& task, char* scratch) {
    Arena arena(scratch);
    Prefill after(p, task, arena, task.heads * task.queries);
    after.find_ranges({0, p.Tk});
    after.add_weights(after.max_);
  }

 private:
  Prefill(const Problem& p, const PrefillTask& task, Arena& arena, int64_t rows)
      : Base(p, task, arena, rows), stats_(p.row_stats ? *p.row_stats : RowStats{}),
        has_moment_(stats_.moment.data || stats_.entropy.data), writes_out_(p.out.data),
        dropout_(p), columns_(p.Dv), o_stride_(columns_.stride()) {
    max_ = arena.allocate<float>(n_blocks_ * PADDED_ROWS);
    sum_ = arena.allocate<float>(n_blocks_ * PADDED_ROWS);
    sums_rounded_ = PER_UNIT == 2 && p.rounding.data && !dropout_.active();
    rounded_sum_ = sums_rounded_ ? arena.allocate<float>(n_blocks_ * PADDED_ROWS) : sum_;
    if (writes_out_) {
      o_ = arena.allocate<float>(n_blocks_ * QUERY_BLOCK * o_stride_);
      v_ = arena.allocate<Unit>(KEY_BLOCK / PER_UNIT * o_stride_);
      masked_v_ = arena.allocate<Unit>(KEY_BLOCK / PER_UNIT * o_stride_);
    }
    moment_ = arena.allocate<float>(has_moment_ ? n_blocks_ * PADDED_ROWS : 0);
    top_scores_ = arena.allocate<float>(n_rows_ * stats_.n_top);
    top_keys_ = arena.allocate<int64_t>(n_rows_ * stats_.n_top);
  }

  void compute() {
    find_ranges({0, p_.Tk});
    unpacked_ = Base::ROWS_ARE_UNITS && task_.heads == 1 && p_.Tk <= SHORT;
    if (!unpacked_) pack_groups(p_.q, p_.D, q_);
    initialize();
    for (int64_t key = hull_.lo / KEY_BLOCK * KEY_BLOCK; key < hull_.hi; key += KEY_BLOCK) {
      key_block_ = {key, min(key + KEY_BLOCK, hull_.hi)};
      if (!any_query_sees_block()) continue;
      pack_panels(p_.k, p_.D, k_);
      if (writes_out_) pack_values();
      for (int64_t i = 0; i < n_blocks_; i++) {
        prefetch_next_block(i, writes_out_);
        if (!sees_block(i)) continue;
        if (p_.sums) use_tile(i);
        scores(i);
        if (dropout_.active()) softmax<false, true, false>(i);
        else if (sums_rounded_)
          has_moment_ ? softmax<true, false, true>(i) : softmax<false, false, true>(i);
        else has_moment_ ? softmax<true, false, false>(i) : softmax<false, false, false>(i);
        if (writes_out_) weighted_sum(i);
      }
    }
    finish();
  }

  void initialize() {
    for (int64_t i = 0; i < n_blocks_ * PADDED_ROWS; i++)
      max_[i] = -INF, sum_[i] = rounded_sum_[i] = 0;
    if (writes_out_) clear(o_, n_rows_ * o_stride_);
    if (has_moment_)
      for (int64_t i = 0; i < n_blocks_ * PADDED_ROWS; i++) moment_[i] = 0;
    for (int64_t i = 0; i < n_rows_ * stats_.n_top; i++) top_scores_[i] = -INF, top_keys_[i] = -1;
    start_groups();
  }

  Unit* column(Unit* v, int64_t j) const {
    return v + columns_.start(j) * (W * KEY_BLOCK / PER_UNIT);
  }

  // Pass 1c: packs the values of a block, padded with zeros, and checks for NaN and infinity.
  void pack_values() {
    static constexpr auto packers = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<F (Prefill::*)(int), sizeof...(i)>{{&Prefill::pack_column<i + 1>...}};
    }(std::make_integer_sequence<int, VALUE_VECTORS>());
    F nonfinite = zero();
    for (int j = 0; j < columns_.count; j++)
      nonfinite = add(nonfinite, (this->*packers.entry[columns_.width(j) - 1])(j));
    nonfinite_ = !(total(nonfinite) == 0);
  }
  template <int N> F pack_column(int j) {
    int from = int(max<int64_t>(hull_.lo - key_block_.lo, 0)) / PER_UNIT;
    int count = int(key_block_.size());
    int64_t at = columns_.start(j) * W, step = p_.v.t;
    int tail = in_vector(p_.Dv - at - (N - 1) * W);
    const E* x = key_row(p_.v, key_block_.lo + from * PER_UNIT) + at;
    float* to = (float*)(column(v_, j) + from * N * W);
    F nonfinite[N];  // one for each vector: four short chains instead of one long
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) nonfinite[n] = zero();
    for (int k = from * PER_UNIT; k < count; k += PER_UNIT, x += PER_UNIT * step, to += N * W) {
      const E* odd = k + 1 < count ? x + step : nullptr;
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        F y = A::load_values(x + n * W, odd ? odd + n * W : nullptr, n + 1 < N ? W : tail);
        nonfinite[n] = A::nonfinite(nonfinite[n], y);
        store(to + n * W, y);
      }
    }
#pragma GCC unroll 4
    for (int n = 1; n < N; n++) nonfinite[0] = add(nonfinite[0], nonfinite[n]);
    return nonfinite[0];
  }

  // Pass 3: softmax of a query block's scores, relative to the running maximum.
  template <bool MOMENT, bool DROPOUT, bool ROUNDED> void softmax(int64_t i) {
    int rows = rows_of(i);
    float* row_max = max_ + i * PADDED_ROWS;
    float* row_sum = sum_ + i * PADDED_ROWS;
    F log2_scale = splat(logits_.log2_scale());
    const int begin = begin_, end = end_;
    alignas(64) float base[PADDED_ROWS];
    for (int r = 0; r < rows; r += W) {
      F before = load(row_max + r), after = max(before, maxima(lane_max_ + r));
      F from = select(equal(after, splat(-INF)), zero(), after);
      store(row_max + r, after);
      store(base + r, from);
      F shift = mul(sub(before, from), log2_scale);
      store(rescale_ + r, exp2<5>(shift));
      if constexpr (MOMENT) {  // converts the moment so far to the new maximum
        float* at = moment_ + i * PADDED_ROWS + r;
        shift = max(splat(MIN_POWER), shift);
        store(at, mul(load(rescale_ + r), fma(shift, load(row_sum + r), load(at))));
      }
    }
    if (stats_.n_top) update_tops(i);  // before weights overwrite the scores
    F sums[PADDED_ROWS], moments[PADDED_ROWS], rounded_sums[PADDED_ROWS];
    for (int r = 0; r < rows; r++) {
      const float* s = s_ + r * SCORE_STRIDE;
      auto* w = (typename A::Weight*)(weights_ + r * WEIGHT_STRIDE);
      F from = splat(base[r]), sum = zero(), moment = zero(), rounded_sum = zero();
      const Row& x = row_[i * QUERY_BLOCK + r];
      uint32_t row_key = DROPOUT ? dropout_.row_key(task_.b, x.h, x.q) : 0;
#pragma GCC unroll 3
      for (int k = begin; k < end; k += W) {
        F y = mul(sub(load(s + k), from), log2_scale), e = exp2<A::EXP_DEGREE>(y);
        A::store_weights(w + k,
                         DROPOUT ? mul(e, dropout_.keep_mask(row_key, key_block_.lo + k)) : e);
        sum = add(sum, e);
        if constexpr (ROUNDED) rounded_sum = add(rounded_sum, A::as_stored(e));
        if constexpr (MOMENT) moment = fma(e, max(splat(MIN_POWER), y), moment);
      }
      sums[r] = sum;
      moments[r] = moment;
      rounded_sums[r] = rounded_sum;
    }
    alignas(64) float row_total[PADDED_ROWS];
    for (int r = 0; r < rows; r += W) {  // lanes past the last row are undefined, and not read
      F of_rows = totals(sums + r);
      store(row_total + r, of_rows);
      store(row_sum + r, fma(load(row_sum + r), load(rescale_ + r), of_rows));
      if constexpr (ROUNDED) {
        float* at = rounded_sum_ + i * PADDED_ROWS + r;
        store(at, fma(load(at), load(rescale_ + r), totals(rounded_sums + r)));
      }
      if constexpr (MOMENT) {
        float* at = moment_ + i * PADDED_ROWS + r;
        store(at, add(load(at), totals(moments + r)));
      }
    }
    if (n_groups_) add_to_groups(i, base, rescale_, row_total);
    if (p_.sums) keep_max(i, row_max);
  }

  // Updates the lists of the n largest scores, in falling order, of a query block. Keys ascend;
  // among equal scores the first is kept.
  void update_tops(int64_t i) {
    for (int64_t row = i * QUERY_BLOCK, end = row + rows_of(i); row < end; row += W) {
      const int rows = int(min<int64_t>(W, end - row));
      bool empty = stats_.n_top <= MOST_IN_LANES;
      for (int r = 0; r < rows; r++) empty &= top_keys_[(row + r) * stats_.n_top] < 0;
      if (empty) (this->*begin_tops_of_size(stats_.n_top))(row, rows);
      else
        for (int r = 0; r < rows; r++) update_top(row + r);
    }
  }
  // Returns `begin_tops` for lists of this size: exactly up to 8, which are the usual ones.
  static auto begin_tops_of_size(int64_t n) {
    static constexpr auto functions = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<void (Prefill::*)(int64_t, int), sizeof...(i)>{{&Prefill::begin_tops<i + 1>...}};
    }(std::make_integer_sequence<int, 8>());
    return n <= 8 ? functions.entry[n - 1] : &Prefill::begin_tops<MOST_IN_LANES>;
  }
  // Lists the largest scores of rows that have none, with a row in each lane.
  template <int N> void begin_tops(int64_t row, int rows) {
    const int64_t n = stats_.n_top;
    F best[N], keys[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) best[j] = splat(-INF), keys[j] = splat(-1);
    for (int k = begin_; k < end_; k += W) {
      F y[W];
      for (int r = 0; r < W; r++) y[r] = top_scores_of(row + min(r, rows - 1), k);
      transpose(y);
      for (int x = 0; x < W; x++) {
        Lanes enters = less(best[N - 1], y[x]);
        if (!word(enters)) continue;
        const F key = splat(float(k + x));
#pragma GCC unroll 16
        for (int j = N - 1; j > 0; j--) {
          const Lanes above = less(best[j - 1], y[x]);
          best[j] = select(above, best[j - 1], select(enters, y[x], best[j]));
          keys[j] = select(above, keys[j - 1], select(enters, key, keys[j]));
          enters = above;
        }
        best[0] = select(enters, y[x], best[0]);
        keys[0] = select(enters, key, keys[0]);
      }
    }
    for (int64_t j = 0; j < n; j++) {
      float scores[W], at[W];
      store(scores, best[j]);
      store(at, keys[j]);
      for (int r = 0; r < rows; r++) {
        top_scores_[(row + r) * n + j] = scores[r];
        top_keys_[(row + r) * n + j] = at[r] < 0 ? -1 : key_block_.lo + int64_t(at[r]);
      }
    }
  }
  void update_top(int64_t row) {
    const int64_t n = stats_.n_top;
    float* best = top_scores_ + row * n;
    const float* s = s_ + row % QUERY_BLOCK * SCORE_STRIDE;
    F top = lane_max_[row % QUERY_BLOCK];
    if (stats_.top_offsets.data) {
      top = splat(-INF);
      for (int k = begin_; k < end_; k += W) {
        F y = top_scores_of(row, k);
        store(raised_ + k, y);
        top = max(y, top);
      }
      s = raised_;
    }
    if (!word(less(splat(best[n - 1]), top))) return;
    for (int k = begin_; k < end_; k += 64) {
      uint64_t larger = 0;
      for (int x = 0; x < min(64, end_ - k); x += W)
        larger |= word(less(splat(best[n - 1]), load(s + k + x))) << x;
      for (; larger; larger &= larger - 1) {
        int key = k + __builtin_ctzll(larger);
        if (s[key] > best[n - 1]) insert_top(row, s[key], key_block_.lo + key);
      }
    }
  }
  // Returns W scores of a row from key `k` of the block on, plus the offsets of the keys.
  F top_scores_of(int64_t row, int k) const {
    F y = load(s_ + row % QUERY_BLOCK * SCORE_STRIDE + k);
    if (!stats_.top_offsets.data) return y;
    int64_t key = key_block_.lo + k;
    const float* offsets = row_at(stats_.top_offsets, task_.b, row_[row].h, key);
    F offset = load_part(offsets, in_vector(p_.Tk - key));
    return select(equal(y, splat(-INF)), y, add(y, offset));  // also if the offset is NaN
  }
  // Inserts a score after those that are as large, and drops the last.
  void insert_top(int64_t row, float y, int64_t key) {
    const int64_t n = stats_.n_top;
    float* best = top_scores_ + row * n;
    int64_t *keys = top_keys_ + row * n, at = 0;
    for (int64_t end = n - 1; at < end;) {
      int64_t middle = (at + end) / 2;
      if (best[middle] < y) end = middle;
      else at = middle + 1;
    }
    const size_t moved = size_t(n - 1 - at);
    __builtin_memmove(best + at + 1, best + at, moved * sizeof *best);
    __builtin_memmove(keys + at + 1, keys + at, moved * sizeof *keys);
    best[at] = y, keys[at] = key;
  }

  // Pass 4: computes the weighted sum of the values.
  void weighted_sum(int64_t i) {
    int rows = rows_of(i);
    const KeyRange& core = blocks_[i].core;
    const bool full = core.lo <= key_block_.lo && core.hi >= key_block_.hi;
    if (nonfinite_ && !full) return weighted_sum_masked(i);
    for (int r = 0; r < rows; r += VALUE_ROWS) {
      int here = min(VALUE_ROWS, rows - r);
      KeyRange range =
          full ? KeyRange{0, key_block_.size()} : visible_to(i * QUERY_BLOCK + r, here);
      if (range.empty()) continue;
      int64_t from = range.lo / PER_UNIT, to = (range.hi + PER_UNIT - 1) / PER_UNIT;
      for (int64_t j = 0; j < columns_.count; j++) {
        int width = columns_.width(j);
        Base::value_tile_for(here, width)(
            weights_ + r * WEIGHT_STRIDE + from, column(v_, j) + from * width * W, to - from,
            rescale_ + r, o_ + (i * QUERY_BLOCK + r) * o_stride_ + columns_.start(j) * W,
            o_stride_);
      }
    }
  }

  // Handles a block with NaN or infinity in a value that is hidden from some row. Since 0 * NaN is
  // NaN, every row uses its own copy of the values, with zeros for hidden keys. This is slow and
  // rare.
  void weighted_sum_masked(int64_t i) {
    int rows = rows_of(i);
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * QUERY_BLOCK + r];
      KeyRange range = visible_to(i * QUERY_BLOCK + r, 1);
      if (range.empty()) continue;
      int64_t from = range.lo / PER_UNIT, to = (range.hi + PER_UNIT - 1) / PER_UNIT;
      for (int64_t u = from; u < to; u++) {
        uint64_t visible =
            mask_.visible_bits(task_.b, x.h, x.q, key_block_.lo + u * PER_UNIT,
                               int(min<int64_t>(PER_UNIT, p_.Tk - key_block_.lo - u * PER_UNIT)));
        for (int64_t j = 0; j < columns_.count; j++) {
          int64_t wide = columns_.width(j) * W;
          const Unit* v = column(v_, j) + u * wide;
          Unit* c = column(masked_v_, j) + u * wide;
          for (int64_t n = 0; n < wide; n++) c[n] = A::masked(v[n], visible);
        }
      }
      for (int64_t j = 0; j < columns_.count; j++)
        Base::value_tile_for(1, columns_.width(j))(
            weights_ + r * WEIGHT_STRIDE + from,
            column(masked_v_, j) + from * columns_.width(j) * W, to - from, rescale_ + r,
            o_ + (i * QUERY_BLOCK + r) * o_stride_ + columns_.start(j) * W, o_stride_);
    }
  }

  // Pass 5: adds sinks, divides by the sums, writes the rows.
  void finish() {
    for (int64_t i = 0; i < n_rows_; i++) {
      const Row& r = row_[i];
      int64_t at = i / QUERY_BLOCK * PADDED_ROWS + i % QUERY_BLOCK;
      RowEpilogue end(p_, task_.b, r.h, max_[at], sum_[at], logits_.logit_scale());
      if (writes_out_) {
        float unrounded_scale = end.scale();
        if (sums_rounded_) {
          RowEpilogue of_rounded(p_, task_.b, r.h, max_[at], rounded_sum_[at],
                                 logits_.logit_scale());
          unrounded_scale = of_rounded.scale();
        }
        end.write<E>(p_, task_.b, r.h, r.q, 0, o_ + i * o_stride_, p_.Dv, unrounded_scale);
      }
      end.write_lse(p_, task_.b, r.h, r.q);
      if (p_.row_stats) write_stats(r, i, at, end);
    }
    if (n_groups_)
      for (int64_t i = 0; i < n_blocks_; i++) write_group_sums(i);
  }

  void write_stats(const Row& r, int64_t row, int64_t at, const RowEpilogue& end) {
    const int64_t n = stats_.n_top;
    auto write = [&](const TensorView& to, float x) {
      if (to.data) *row_at(to, task_.b, r.h, r.q) = x;
    };
    // A vector maximum ignores NaN, but the sum does not.
    const bool has_nan = sum_[at] != sum_[at] && max_[at] < INF;
    const float top = has_nan ? sum_[at] : max_[at], share = end.scale();
    const double largest = top * logits_.logit_scale();
    write(stats_.max, top);
    write(stats_.sum, sum_[at]);
    write(stats_.largest, float(largest));
    if (stats_.moment.data) write(stats_.moment, moment_[at]);
    if (stats_.lse.data || stats_.entropy.data) {
      const double log_sum = end.log_sum();
      write(stats_.lse, end.is_empty() ? -INF : float(end.max_logit() + log_sum));
      const double gap = end.max_logit() - largest + log_sum;
      write(stats_.entropy, share == 0 ? 0 : entropy(at, share, gap));
    }
    const float base = top == -INF ? 0 : top;
    for (int64_t j = 0; j < n; j += W) {
      const float* best = top_scores_ + row * n + j;
      const int part = in_vector(n - j);
      F y = load_part(best, part);
      if (stats_.top_weights)
        y = mul(exp2<5>(mul(sub(y, splat(base)), splat(logits_.log2_scale()))), splat(share));
      store_part(row_at<float>(stats_.top_scores, task_.b, r.h, r.q) + j, y, part);
    }
    for (int64_t j = 0; j < n; j++)
      row_at<int64_t>(stats_.top_keys, task_.b, r.h, r.q)[j] = top_keys_[row * n + j];
    if (n_groups_ || p_.sums) share_[at] = share;
  }
  // Returns - sum of w ln w. With w = p * share and p = 2^y it is
  // share * (-ln(share) * sum of p - sum of p ln p), where `gap` is -ln(share).
  float entropy(int64_t at, double share, double gap) const {
    const double x = share * (gap * sum_[at] - moment_[at] / LOG2E);
    return x <= 0 ? 0 : float(x);  // rounding may yield -1e-8; NaN stays
  }

  // The most entries of a list that `begin_tops` holds in registers and L1.
  static constexpr int64_t MOST_IN_LANES = 16;

  RowStats stats_;
  bool has_moment_, writes_out_;
  Dropout dropout_;
  Columns columns_;
  int64_t o_stride_;
  float *max_, *sum_;  // of each row; a query block has PADDED_ROWS of them
  // The sum of the weights after rounding to pairs, for `rounding`; without pairs it is `sum_`.
  float* rounded_sum_;
  bool sums_rounded_;
  Unit *v_, *masked_v_;
  float* o_;
  bool nonfinite_;
  float *moment_, *top_scores_;
  int64_t* top_keys_;
  alignas(64) float rescale_[PADDED_ROWS];
  alignas(64) float raised_[KEY_BLOCK + W];  // scores plus top_offsets
};

}  // namespace clearhead::CLEARHEAD_LEVEL
