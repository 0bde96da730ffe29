// Backward: gradients of the inputs from those of the output or of statistics of the weights.
//
// w are the weights, y the natural logits, and kept is 0 or 1 / (1 - p) (dropout). dO is the
// gradient of the output, and delta = dO . out - dlse of every query is what softmax subtracts from
// the gradient of each logit.
//
//     dV = (w kept)^T dO        dP = dO V^T        dY = w (kept dP - delta)        dbias = dY
//     dX = scale (1 - tanh^2) dY, with the slope of a soft cap        dK = dX^T Q        dQ = dX K
//
// For statistics dY = w (dreceived + dw_log_w ln w - delta), from the gradients of the sums of w
// and of w ln w. What softmax subtracts is part of the caller's dlse
// (core/engines/cpu/stats_backward.py).
//
// The gradient of sinks needs only delta and the log-sum-exp (core/engines/cpu/backward.py).
//
// A pair costs five products; forward needs two. Its weight is recomputed from the log-sum-exp, so
// nothing of the size Tq x Tk is stored. Source: Dao et al. 2022, "FlashAttention".
//
// Memory layout. A task has one head and a range of keys that no other task of that head has, so
// only one task writes a row of dK and dV. L2 holds a chunk of its queries in four layouts (q and
// dO, each as groups and as columns) and their dQ. L2 also holds a key block: panels of K and V,
// columns of K, and its dK and dV, 240 KB at D = 64. A query block and a key block yield two
// matrices in L1, w and dY. They are operands of three products: two transposed, summed over the
// queries, and one summed over the keys.
//
// Short heads. Packing costs more than it gains, so rows of q, k and dO are read where they are if
// they are float32 and whole vectors, and gradients are stored from registers. The two matrices of
// all queries are in L1 or L2.
//
// Precision. For bf16, if the processor has dot products of pairs, all five products are of pairs.
// Scores and dP are computed from the inputs. For the other three products w and dY are rounded to
// bf16, as forward and torch round the weights. The errors of dq, dk and dv are then smaller than
// torch's (bench/LOG.md, "all five in pairs"). Otherwise w and dY are float32.
//
// For values far from 0, dP and delta are large, but dP - delta is small. So delta is computed from
// the unrounded output, whose rounding error forward stores (`rounding`, like out). That output is
// divided by the sum of the weights after rounding, so that a common offset of all values cancels.
//
// The order of every sum depends only on the sizes, so the number of threads does not change a bit.
//
// NaN and infinity. A hidden cell is exactly 0 in w and dY, but 0 * NaN is NaN in the products. So
// in the columns of q and k, 0 replaces NaN and infinity; a row that sees one already has NaN in
// dY. dO is used unchanged, as in torch.
#pragma once

#include "block_scores.h"
#include "dropout.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class Backward : BlockScores<A> {
  using Base = BlockScores<A>;
  using typename Base::Row, typename Base::Unit, typename Base::E;
  using Base::KEY_BLOCK, Base::SCORE_STRIDE, Base::p_, Base::task_, Base::logits_, Base::n_rows_,
      Base::n_blocks_, Base::row_, Base::q_, Base::k_, Base::s_, Base::cap_slope_, Base::hull_,
      Base::key_block_, Base::lo_, Base::hi_, Base::begin_, Base::end_, Base::rows_of,
      Base::query_row, Base::key_row, Base::find_ranges, Base::pack_groups, Base::pack_panels,
      Base::any_query_sees_block, Base::sees_block, Base::scores, Base::value_scores,
      Base::value_tile_for, Base::visible_to, Base::PER_UNIT, Base::WEIGHT_STRIDE,
      Base::ROWS_ARE_UNITS, Base::SHORT, Base::unpacked_;
  // With 448 KB, D = 128 took 12 % longer (bench/LOG.md, 2026-11-21).
  static constexpr int64_t CHUNK_BYTES = 896 << 10;

 public:
  static int64_t rows(const Problem& p) {
    int64_t fit = CHUNK_BYTES / int64_t(sizeof(float)) / (3 * p.D + 2 * p.Dv + 1);
    fit = max<int64_t>(2 * QUERY_BLOCK,
                       min<int64_t>(fit, 16 * QUERY_BLOCK) / QUERY_BLOCK * QUERY_BLOCK);
    return min(fit, round_up(p.Tq, QUERY_BLOCK));
  }

  static size_t scratch(const Problem& p) {
    Arena arena(nullptr);
    Backward(p, {}, {}, arena, rows(p));
    return arena.used();
  }

  static void run(const Problem& p, const Gradients& g, const BackwardTask& task, char* scratch) {
    Arena arena(scratch);
    Backward(p, g, {task.b, task.head, 1, task.query, task.queries}, arena, task.queries)
        .compute(task);
  }

  // Writes the delta of a head's queries, which softmax subtracts from the gradients of the logits.
  static void deltas(const Problem& p, const Gradients& g, int64_t b, int64_t h) {
    for (int64_t q = 0; q < p.Tq; q++) {
      const E *dout = row_at<E>(g.dout, b, h, q), *out = row_at<E>(p.out, b, h, q);
      const E* rounding = p.rounding.data ? row_at<E>(p.rounding, b, h, q) : nullptr;
      F sum = zero();
      for (int64_t j = 0; j < p.Dv; j += W) {
        int n = in_vector(p.Dv - j);
        F grad = load_part(dout + j, n);
        sum = fma(grad, load_part(out + j, n), sum);
        if (rounding) sum = fma(grad, load_part(rounding + j, n), sum);
      }
      float dlse = g.dlse.data ? *row_at(g.dlse, b, h, q) : 0;
      *row_at(g.delta, b, h, q) = total(sum) - dlse;
    }
  }

  // Adds the gradients of the query heads of a key head, in order, and rounds them.
  static void sum_heads(const Problem& p, const Gradients& g, int64_t b, int64_t key_head) {
    auto sum_rows = [&](const TensorView& of_heads, const TensorView& to, int64_t size) {
      const int64_t shared = p.H / p.G;
      for (int64_t k = 0; k < p.Tk; k++)
        for (int64_t j = 0; j < size; j += W) {
          const int n = in_vector(size - j);
          F sum = zero();
          for (int64_t h = key_head * shared; h < (key_head + 1) * shared; h++)
            sum = add(sum, load_part(row_at(of_heads, b, h, k) + j, n));
          store_part(row_at<E>(to, b, key_head, k) + j, sum, n);
        }
    };
    sum_rows(g.head_dk, g.dk, p.D);
    sum_rows(g.head_dv, g.dv, p.Dv);
  }

 private:
  Backward(const Problem& p, const Gradients& g, const PrefillTask& task, Arena& arena,
           int64_t rows)
      : Base(p, task, arena, rows), g_(g), dropout_(p), keys_(p.D), values_(p.Dv) {
    int64_t all_rows = n_blocks_ * QUERY_BLOCK;
    const int64_t value_steps = Base::unit_count(p.Dv);
    dout_ = arena.allocate<Unit>(all_rows * value_steps);
    v_ = arena.allocate<Unit>(KEY_BLOCK * value_steps);
    q_columns_ = arena.allocate<Unit>(all_rows / PER_UNIT * keys_.stride());
    dout_columns_ = arena.allocate<Unit>(all_rows / PER_UNIT * values_.stride());
    k_columns_ = arena.allocate<Unit>(KEY_BLOCK / PER_UNIT * keys_.stride());
    no_row_ = arena.allocate<E>(max(p.D, p.Dv));
    dq_ = arena.allocate<float>(all_rows * keys_.stride());
    dk_ = arena.allocate<float>(KEY_BLOCK * keys_.stride());
    dv_ = arena.allocate<float>(KEY_BLOCK * values_.stride());
    dp_ = arena.allocate<float>(QUERY_BLOCK * SCORE_STRIDE);
    key_pairs_ = PER_UNIT == 1 ? (Unit*)dp_ : arena.allocate<Unit>(QUERY_BLOCK * WEIGHT_STRIDE);
    cap_slope_ = logits_.capped() ? arena.allocate<float>(QUERY_BLOCK * SCORE_STRIDE) : nullptr;
    for (float& x : ones_) x = 1;
    if (is_short()) {
      all_s_ = arena.allocate<float>(all_rows * SCORE_STRIDE);
      all_dp_ = arena.allocate<float>(all_rows * SCORE_STRIDE);
    }
  }

  void compute(const BackwardTask& task) {
    find_ranges({task.key, task.key_end});
    if constexpr (ROWS_ARE_UNITS)
      if (is_short() && g_.key_splits == 1 && task.queries == p_.Tq && compute_unpacked()) return;
    const bool first = task.query == 0;  // the first chunk of queries writes, and others add
    clear(dq_, n_rows_ * keys_.stride());
    if (!hull_.empty()) pack_queries();
    for (int64_t key = task.key; key < hull_.hi; key += KEY_BLOCK) {
      key_block_ = {key, min(key + KEY_BLOCK, hull_.hi)};
      if (key_block_.hi <= hull_.lo || !any_query_sees_block()) {
        if (first) clear_key_grads(key_block_);
        continue;
      }
      pack_keys();
      for (int64_t i = 0; i < n_blocks_; i++) {
        if (!sees_block(i)) continue;
        scores(i);
        value_products(i);
        logit_gradients(i);
        if constexpr (PER_UNIT == 2) round_to_pairs(i);
        accumulate_grads(i);
      }
      write_key_grads(first);
    }
    if (first) clear_key_grads({max(task.key, hull_.hi), task.key_end});
    write_query_grads(task.split);
  }

  // Whether packing q, dO and the rows of k would cost more than it gains.
  bool is_short() const {
    return ROWS_ARE_UNITS && max(p_.Tq, p_.Tk) <= SHORT && p_.D % W == 0 && p_.Dv % W == 0;
  }
  // Computes the gradients of a short head from the rows of q, k and dO where they are, and stores
  // them from registers; each sum has the order of the packed one. Returns false, without an
  // effect, if a row has NaN or infinity, which times the 0 of a hidden cell would be NaN.
  bool compute_unpacked() {
    const int64_t b = task_.b, h = task_.head, rows = n_rows_, keys = p_.Tk;
    const E *q = row_at<E>(p_.q, b, h, 0), *k = key_row(p_.k, 0);
    const E* dout = row_at<E>(g_.dout, b, h, 0);
    if (has_nonfinite(q, p_.q.t, rows, p_.D) || has_nonfinite(k, p_.k.t, keys, p_.D) ||
        has_nonfinite(dout, g_.dout.t, rows, p_.Dv))
      return false;
    unpacked_ = true;
    hull_ = key_block_ = {0, keys};
    pack_panels(p_.k, p_.D, k_);
    pack_panels(p_.v, p_.Dv, v_);
    for (int64_t i = 0; i < n_blocks_; i++) {
      s_ = all_s_ + i * QUERY_BLOCK * SCORE_STRIDE;
      dp_ = all_dp_ + i * QUERY_BLOCK * SCORE_STRIDE;
      sees_block(i);  // sets the ranges of the rows
      lo_ = 0, hi_ = int(keys);
      scores(i);
      for (int r = 0; r < rows_of(i); r += SCORE_ROWS)
        value_scores(i * QUERY_BLOCK + r, min(SCORE_ROWS, rows_of(i) - r), (const Unit*)dout, v_,
                     dp_ + r * SCORE_STRIDE, g_.dout.t);
      logit_gradients(i);
    }
    float* dk = row_at(g_.head_dk, b, h, 0);
    float* dv = row_at(g_.head_dv, b, h, 0);
    const float scale = float(p_.scale);
    for (int64_t key = 0; key < keys; key += VALUE_ROWS) {
      const int n = int(min<int64_t>(VALUE_ROWS, keys - key));
      KeyRange queries = {0, 0};  // those that see one of these keys
      for (int64_t r = 0; r < rows; r++)
        if (!row_[r].in_block.intersect({key, key + n}).empty())
          queries = {queries.empty() ? r : queries.lo, r + 1};
      int64_t r = queries.lo, end;
      do {  // sums over one query block at a time; without queries, stores zeros
        end = min(r / QUERY_BLOCK * QUERY_BLOCK + QUERY_BLOCK, queries.hi);
        const int64_t at = r * SCORE_STRIDE + key;
        const bool adds = r > queries.lo;
        multiply_unpacked<true>(n, all_s_ + at, values_, dout + r * g_.dout.t, g_.dout.t, end - r,
                                adds, 1, dv + key * p_.Dv, p_.Dv);
        multiply_unpacked<true>(n, all_dp_ + at, keys_, q + r * p_.q.t, p_.q.t, end - r, adds,
                                end == queries.hi ? scale : 1, dk + key * p_.D, p_.D);
        r = end;
      } while (r < queries.hi);
    }
    for (int64_t r = 0; r < rows; r += VALUE_ROWS) {
      const int n = int(min<int64_t>(VALUE_ROWS, rows - r));
      KeyRange seen = visible_to(r, n);
      if (seen.empty()) seen = {0, 0};
      multiply_unpacked<false>(n, all_dp_ + r * SCORE_STRIDE + seen.lo, keys_, k + seen.lo * p_.k.t,
                               p_.k.t, seen.size(), false, scale, row_at(g_.dq, b, h, r), g_.dq.t);
    }
    return true;
  }
  static bool has_nonfinite(const E* x, int64_t stride, int64_t rows, int64_t size) {
    F sum = zero();
    for (int64_t j = 0; j < size; j += W) {
      F column = zero();
      for (int64_t r = 0; r < rows; r++) column = A::nonfinite(column, load(x + r * stride + j));
      sum = add(sum, column);
    }
    return !(total(sum) == 0);
  }
  template <bool TRANSPOSED>
  static void multiply_unpacked(int n, const float* weights, const Columns& c, const E* from,
                                int64_t stride, int64_t steps, bool adds, float factor, float* to,
                                int64_t to_stride) {
    for (int64_t j = 0; j < c.count; j++)
      Base::template row_tile_for<TRANSPOSED>(n, c.width(j))(
          (const Unit*)weights, (const Unit*)from + c.start(j) * W, stride, steps, adds, factor,
          to + c.start(j) * W, to_stride);
  }

  // Pass 1: packs the chunk's queries and the gradients of their outputs; then the keys of a block.
  void pack_queries() {
    pack_groups(p_.q, p_.D, q_);
    pack_groups(g_.dout, p_.Dv, dout_);
    __builtin_memset(no_row_, 0, size_t(max(p_.D, p_.Dv)) * sizeof(E));
    // A fully masked query contributes 0, even if it contains NaN.
    auto row = [&](const TensorView& x, int64_t i) {
      return i >= n_rows_ ? nullptr : row_[i].hull.empty() ? no_row_ : query_row(x, row_[i]);
    };
    for (int64_t i = 0; i < n_rows_; i += PER_UNIT) {
      write_columns<true>(row(p_.q, i), row(p_.q, i + 1), p_.D, keys_, q_columns_,
                          n_blocks_ * QUERY_BLOCK, i);
      write_columns<false>(row(g_.dout, i), row(g_.dout, i + 1), p_.Dv, values_, dout_columns_,
                           n_blocks_ * QUERY_BLOCK, i);
    }
  }
  void pack_keys() {
    pack_panels(p_.k, p_.D, k_);
    pack_panels(p_.v, p_.Dv, v_);
    for (int64_t k = key_block_.lo; k < key_block_.hi; k += PER_UNIT)
      write_columns<true>(key_row(p_.k, k), k + 1 < key_block_.hi ? key_row(p_.k, k + 1) : nullptr,
                          p_.D, keys_, k_columns_, KEY_BLOCK, k - key_block_.lo);
    clear(dk_, key_block_.size() * keys_.stride());
    clear(dv_, key_block_.size() * values_.stride());
  }

  // Writes row i of `rows` into columns, or rows i and i + 1 as pairs (`odd` is null after the
  // last). CLEAN replaces NaN and infinity by 0.
  template <bool CLEAN> static void write_columns(const E* x, const E* odd, int64_t size,
                                                  const Columns& c, Unit* to, int64_t rows,
                                                  int64_t i) {
    for (int64_t j = 0; j < c.count; j++) {
      const int start = c.start(j), width = c.width(j);
      Unit* here = to + (start * rows + i * width) * (W / PER_UNIT);
      for (int n = 0; n < width; n++) {
        int64_t from = (start + n) * W;
        F y = A::load_values(x + from, odd ? odd + from : odd, in_vector(size - from));
        store((float*)here + n * W, CLEAN ? A::finite_or_zero(y) : y);
      }
    }
  }

  // Pass 3: computes dP = dO V^T.
  void value_products(int64_t i) {
    const int rows = rows_of(i);
    for (int r = 0; r < rows; r += SCORE_ROWS)
      value_scores(i * QUERY_BLOCK + r, min(SCORE_ROWS, rows - r), dout_, v_,
                   dp_ + r * SCORE_STRIDE);
  }

  // Pass 4: replaces the scores by weights, and dP by the gradients of the logits.
  void logit_gradients(int64_t i) {
    int rows = rows_of(i);
    const double logit_scale = logits_.logit_scale();
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * QUERY_BLOCK + r];
      // The log-sum-exp of few queries was summed in another order (decode.h), and for large scores
      // it can be far below the scores computed here. So `log2_weights` limits the result, as no
      // weight exceeds 1. At scores of 10^4 a float leaves half a digit of the weight, so lse is a
      // double: the nearest float is subtracted, and the residual is added.
      double lse = *row_at<double>(p_.lse, task_.b, x.h, x.q);
      if (lse == -INF) lse = 0;
      float from = Logits::clamp_finite(lse / logit_scale);
      F residual =
          splat(float((from * logit_scale - lse) / log_unit(float(from * logit_scale)) * LOG2E));
      F delta = splat(*row_at(g_.delta, task_.b, x.h, x.q));
      float *s = s_ + r * SCORE_STRIDE, *d = dp_ + r * SCORE_STRIDE;
      const Softmax softmax = {splat(logits_.log2_scale()), splat(from), residual};
      if (g_.dw_log_w.data || g_.dreceived.data) add_stat_grads(x, s, d, softmax);
      if (dropout_.active()) weights_and_gradients<true>(x, s, d, softmax, delta);
      else weights_and_gradients<false>(x, s, d, softmax, delta);
      if (g_.dbias.data) accumulate_bias_grad(x, d);
      if (cap_slope_)
        for (int k = begin_; k < end_; k += W) {
          // If no row of a tile sees a key, dY is 0 and the slope was not written.
          F y = load(d + k);
          store(d + k,
                select(equal(y, zero()), zero(), mul(y, load(cap_slope_ + r * SCORE_STRIDE + k))));
        }
    }
  }

  // Recomputes the base 2 logarithms of a row's weights from its scores.
  struct Softmax {
    F log2_scale, from, residual;
    F log2_weights(F scores) const {
      F above = fma(sub(scores, from), log2_scale, residual);
      return select(less(splat(1), above), splat(1), above);
    }
  };

  // Adds the gradients from statistics to dP of one row. The logarithm of a weight of 0 is replaced
  // by 0.
  void add_stat_grads(const Row& x, const float* s, float* d, const Softmax& softmax) const {
    F dw_log_w =
        splat(g_.dw_log_w.data ? *row_at(g_.dw_log_w, task_.b, x.h, x.q) / float(LOG2E) : 0);
    const float* received =
        g_.dreceived.data ? row_at(g_.dreceived, task_.b, x.h, key_block_.lo) : nullptr;
    for (int k = begin_; k < end_; k += W) {
      F above = softmax.log2_weights(load(s + k)), y = load(d + k);
      y = fma(dw_log_w, select(less(above, splat(-256)), zero(), above), y);
      if (received) y = add(y, load_part(received + k, in_vector(p_.Tk - key_block_.lo - k)));
      store(d + k, y);
    }
  }

  // Replaces a row's scores by its weights after dropout, and its dP by dY.
  template <bool DROPOUT> void weights_and_gradients(const Row& x, float* s, float* d,
                                                     const Softmax& softmax, F delta) const {
    uint32_t row_key = DROPOUT ? dropout_.row_key(task_.b, x.h, x.q) : 0;
#pragma GCC unroll 3
    for (int k = begin_; k < end_; k += W) {
      F y = load(s + k), above = softmax.log2_weights(y), dp = load(d + k);
      F w = exp2<5>(above), used = w;
      if constexpr (DROPOUT) {
        F keep_mask =
            mul(dropout_.keep_mask(row_key, key_block_.lo + k), splat(Dropout::keep_factor(p_)));
        dp = mul(dp, keep_mask), used = mul(w, keep_mask);
      }
      auto masked = equal(y, splat(-INF));
      store(d + k, select(masked, zero(), mul(w, sub(dp, delta))));
      store(s + k, select(masked, zero(), used));
    }
  }

  // Pass 4b: rounds the weights and dY to pairs of queries, which overwrite those of the first
  // query; and dY to pairs of keys.
  void round_to_pairs(int64_t i) {
    int rows = rows_of(i);
    for (int r = 0; r < rows; r += 2) {
      float *s = s_ + r * SCORE_STRIDE, *d = dp_ + r * SCORE_STRIDE;
      const bool odd = r + 1 < rows;
      auto *first = (typename A::Weight*)(key_pairs_ + r * WEIGHT_STRIDE),
           *second = (typename A::Weight*)(key_pairs_ + (r + 1) * WEIGHT_STRIDE);
      for (int k = begin_; k < end_; k += W) {
        F w = odd ? load(s + SCORE_STRIDE + k) : zero(), dy = load(d + k);
        F next_dy = odd ? load(d + SCORE_STRIDE + k) : zero();
        A::store_weights(first + k, dy);
        A::store_weights(second + k, next_dy);
        store(s + k, A::units_of(load(s + k), w));
        store(d + k, A::units_of(dy, next_dy));
      }
    }
  }

  void accumulate_bias_grad(const Row& x, const float* d) const {
    const MatrixView& g = g_.dbias;
    float* to = row_at<float>(g, task_.b, x.h, x.q);
    F sum = zero();
    for (int k = lo_ / W * W; k < hi_; k += W) {
      int n = in_vector(hi_ - k);
      F y = load_part(d + k, n);
      if (!g.x) sum = add(sum, y);
      else add_part(to + key_block_.lo + k, y, n);
    }
    if (!g.x) *to += total(sum);
  }

  // Pass 5: computes three products. In the transposed ones a row is a key, and sums are over
  // queries.
  void accumulate_grads(int64_t i) {
    int rows = rows_of(i);
    accumulate_transposed((const Unit*)s_, values_, dout_columns_, i, rows, dv_);
    accumulate_transposed((const Unit*)dp_, keys_, q_columns_, i, rows, dk_);
    for (int64_t j = 0; j < keys_.count; j++) {
      int width = keys_.width(j);
      for (int r = 0; r < rows; r += VALUE_ROWS) {
        int here = min(VALUE_ROWS, rows - r);
        KeyRange range = visible_to(i * QUERY_BLOCK + r, here);
        if (range.empty()) continue;
        int64_t from = range.lo / PER_UNIT, to = (range.hi + PER_UNIT - 1) / PER_UNIT;
        const Unit* keys =
            k_columns_ + (keys_.start(j) * (KEY_BLOCK / PER_UNIT) + from * width) * W;
        value_tile_for(here, width)(
            key_pairs_ + r * WEIGHT_STRIDE + from, keys, to - from, ones_,
            dq_ + (i * QUERY_BLOCK + r) * keys_.stride() + keys_.start(j) * W, keys_.stride());
      }
    }
  }
  void accumulate_transposed(const Unit* weights, const Columns& c, const Unit* from, int64_t i,
                             int rows, float* to) const {
    int64_t steps = (rows + PER_UNIT - 1) / PER_UNIT;
    for (int64_t j = 0; j < c.count; j++) {
      int width = c.width(j);
      const Unit* x = from + (c.start(j) * n_blocks_ + i * width) * (W * QUERY_BLOCK / PER_UNIT);
      for (int k = lo_; k < hi_; k += VALUE_ROWS) {
        int here = min(VALUE_ROWS, hi_ - k);
        Base::template value_tile_for<true>(here, width)(
            weights + k, x, steps, ones_, to + k * c.stride() + c.start(j) * W, c.stride());
      }
    }
  }

  void write_query_grads(int64_t split) const {
    F factor = splat(float(p_.scale));
    for (int64_t i = 0; i < n_rows_; i++) {
      int64_t at = split * g_.dq_split_stride + task_.b * g_.dq.b + row_[i].h * g_.dq.h +
                   row_[i].q * g_.dq.t;
      for (int64_t d = 0; d < p_.D; d += W) {
        F x = mul(load(dq_ + i * keys_.stride() + d), factor);
        int n = in_vector(p_.D - d);
        if (g_.key_splits == 1) store_part((E*)g_.dq.data + at + d, x, n);
        else store_part((float*)g_.dq.data + at + d, x, n);
      }
    }
  }
  void clear_key_grads(KeyRange keys) const {
    clear(row_at(g_.head_dk, task_.b, task_.head, keys.lo), keys.size() * p_.D);
    clear(row_at(g_.head_dv, task_.b, task_.head, keys.lo), keys.size() * p_.Dv);
  }
  void write_key_grads(bool first) const {
    for (int64_t k = 0; k < key_block_.size(); k++) {
      float* dk = row_at(g_.head_dk, task_.b, task_.head, key_block_.lo + k);
      float* dv = row_at(g_.head_dv, task_.b, task_.head, key_block_.lo + k);
      add_row(dk, dk_ + k * keys_.stride(), p_.D, float(p_.scale), first);
      add_row(dv, dv_ + k * values_.stride(), p_.Dv, 1, first);
    }
  }

  static void add_part(float* to, F x, int n) { store_part(to, add(load_part(to, n), x), n); }
  // Adds a row times a factor; for the first time, to 0.
  static void add_row(float* to, const float* x, int64_t size, float factor, bool first) {
    for (int64_t j = 0; j < size; j += W) {
      int n = in_vector(size - j);
      F before = first ? zero() : load_part(to + j, n);
      store_part(to + j, fma(load(x + j), splat(factor), before), n);
    }
  }

  const Gradients& g_;
  Dropout dropout_;
  Columns keys_, values_;
  Unit *dout_, *v_;  // as groups, as panels
  Unit *q_columns_, *dout_columns_, *k_columns_;
  E* no_row_;               // zeros
  float *dq_, *dk_, *dv_;   // dq_ of the chunk; the others of the key block
  float* dp_;               // dP, then dY
  Unit* key_pairs_;         // dY for the sums over keys; dp_ in float32
  float *all_s_, *all_dp_;  // of all queries of a short head
  float ones_[QUERY_BLOCK];
};

}  // namespace clearhead::CLEARHEAD_LEVEL
