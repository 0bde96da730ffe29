// The way back: from the gradient of the output, or of statistics of the weights, to those of q, k, v
// and the bias.
//
// With w the weights, y the logits in natural units, kept = 0 or 1 / (1 - p) (dropout), dO the gradient
// of the output and delta = dO . out - dlse of every query (what softmax takes from each of its logits):
//
//     dV = (w kept)^T dO        dP = dO V^T        dY = w (kept dP - delta)        dbias = dY
//     dX = scale (1 - tanh^2) dY, the bend of a soft cap        dK = dX^T Q        dQ = dX K
//
// Of statistics dY = w (dreceived + dlog ln w - delta): what their sums of w and of w ln w give to each
// weight; what softmax takes from them again is in the caller's dlse (engines/cpu/look_back.py).
//
// The gradient of sinks needs only delta and the log-sum-exp (engines/cpu/back.py).
//
// A pair costs five products where the answer costs two; its weight is formed again from the
// log-sum-exp, so nothing of the size Tq x Tk is kept. Source: Dao et al. 2022, "FlashAttention".
//
// What lies where. A task has one head and a stretch of keys that no other task of that head has, so
// dK and dV have one writer. Its queries come in chunks that stay in L2 in four shapes (q and dO,
// each as groups and as columns) beside their dQ; a block of keys lies there as panels of K and V,
// columns of K, and its dK and dV, 240 KB at D = 64. A band and a block leave two squares in L1, w and
// dY, which feed three products: two transposed, over the queries of the band, one over the keys.
//
// Scores and dP are products of what came as it is, of bf16 in pairs where the processor has them, as in
// the answer. What w and dY are multiplied with is float32, for bf16 too: dY spans more powers of two
// than eight bits of digits hold. So does dP - delta where values lie far from 0 and both are large;
// delta is therefore taken from the output before it was rounded, of which the forward pass keeps the
// rest (`rounding`, like out).
// The order of every sum depends on the sizes alone, so threads do not change a bit.
//
// NaN and infinity. A cell that may not look is exactly 0 in w and dY, but 0 * NaN is NaN in the
// products, so the columns of q and k hold 0 in their place: a row that does see one has a NaN in dY
// already. What comes back (dO) is taken as it is, as torch does.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class Backward : Bands<A> {
  using Base = Bands<A>;
  using typename Base::Row, typename Base::Unit, typename Base::E;
  using Wide = Products<Singles<E>>;  // of w and dY with what stands in columns
  using Base::BLOCK, Base::PANEL, Base::S_STRIDE;
  using Base::p_, Base::task_, Base::logits_, Base::n_, Base::bands_, Base::row_;
  using Base::q_, Base::k_, Base::s_, Base::bend_, Base::hull_, Base::block_, Base::lo_, Base::hi_;
  using Base::begin_, Base::end_;
  using Base::at, Base::key_row, Base::meets, Base::scores, Base::score_tiles, Base::seen_by;
  using Base::any_band_meets, Base::look, Base::pack_groups, Base::pack_panels;
  // Of 448 KB, D = 128 took 12 % longer (bench/LOG.md, "the way back").
  static constexpr int64_t CHUNK_BYTES = 896 << 10;

 public:
  static int64_t rows(const Problem& p) {
    int64_t fit = CHUNK_BYTES / int64_t(sizeof(float)) / (3 * p.D + 2 * p.Dv + 1);
    fit = most<int64_t>(2 * BAND, least<int64_t>(fit, 16 * BAND) / BAND * BAND);
    return least(fit, round_up(p.Tq, BAND));
  }

  static size_t scratch(const Problem& p) {
    Cutter c(nullptr);
    Backward(p, {}, {}, c, rows(p));
    return c.used();
  }

  static void run(const Problem& p, const Gradient& g, const BackwardTask& task, char* scratch) {
    Cutter c(scratch);
    Backward(p, g, {task.b, task.head, 1, task.query, task.queries}, c, task.queries).walk(task);
  }

  // What softmax takes away from the logits of a head's queries.
  static void deltas(const Problem& p, const Gradient& g, int64_t b, int64_t h) {
    for (int64_t q = 0; q < p.Tq; q++) {
      const E *dout = place<E>(g.dout, b, h, q), *out = place<E>(p.out, b, h, q);
      const E* rounding = p.rounding.data ? place<E>(p.rounding, b, h, q) : nullptr;
      F sum = zero();
      for (int64_t j = 0; j < p.Dv; j += W) {
        int n = int(least<int64_t>(W, p.Dv - j));
        F back = load_part(dout + j, n);
        sum = fma(back, load_part(out + j, n), sum);
        if (rounding) sum = fma(back, load_part(rounding + j, n), sum);
      }
      float taken = g.dlse.data ? *place(g.dlse, b, h, q) : 0;
      *place(g.delta, b, h, q) = total(sum) - taken;
    }
  }

 private:
  Backward(const Problem& p, const Gradient& g, const TileTask& task, Cutter& c, int64_t rows)
      : Base(p, task, c, rows), g_(g), drops_(p), keys_(p.D), values_(p.Dv) {
    int64_t all_rows = bands_ * BAND;
    value_steps_ = Base::units(p.Dv);
    dout_ = c.cut<Unit>(all_rows * value_steps_);
    v_ = c.cut<Unit>(BLOCK * value_steps_);
    q_columns_ = c.cut<float>(all_rows * keys_.stride());
    dout_columns_ = c.cut<float>(all_rows * values_.stride());
    k_columns_ = c.cut<float>(BLOCK * keys_.stride());
    dq_ = c.cut<float>(all_rows * keys_.stride());
    dk_ = c.cut<float>(BLOCK * keys_.stride());
    dv_ = c.cut<float>(BLOCK * values_.stride());
    d_ = c.cut<float>(BAND * S_STRIDE);
    bend_ = logits_.capped() ? c.cut<float>(BAND * S_STRIDE) : nullptr;
    for (float& x : ones_) x = 1;
  }

  void walk(const BackwardTask& task) {
    look({task.key, task.key_end});
    if (hull_.empty()) return;
    begin();
    for (int64_t key = task.key; key < hull_.hi; key += BLOCK) {
      block_ = {key, least(key + BLOCK, hull_.hi)};
      if (block_.hi <= hull_.lo || !any_band_meets()) continue;
      take_keys();
      for (int64_t i = 0; i < bands_; i++) {
        if (!meets(i)) continue;
        scores(i);
        value_scores(i);
        logit_gradients(i);
        hand_on(i);
      }
      leave_keys();
    }
    leave_queries(task.part);
  }

  // Pass 1: the chunk's queries and what comes back to them; then the keys of a block.
  void begin() {
    pack_groups(p_.q, p_.D, q_);
    pack_groups(g_.dout, p_.Dv, dout_);
    for (int64_t i = 0; i < n_; i++) {
      // What a query holds that sees nothing goes nowhere.
      bool blind = row_[i].hull.empty();
      lay(blind ? nullptr : at(p_.q, row_[i]), p_.D, keys_, q_columns_, bands_ * BAND, i, true);
      lay(blind ? nullptr : at(g_.dout, row_[i]), p_.Dv, values_, dout_columns_, bands_ * BAND, i, false);
    }
    for (int64_t i = 0; i < bands_ * BAND * keys_.stride(); i += W) store(dq_ + i, zero());
  }
  void take_keys() {
    pack_panels(p_.k, p_.D, k_);
    pack_panels(p_.v, p_.Dv, v_);
    for (int64_t k = 0; k < block_.hi - block_.lo; k++)
      lay(key_row(p_.k, block_.lo + k), p_.D, keys_, k_columns_, BLOCK, k, true);
    for (int64_t i = 0; i < BLOCK * keys_.stride(); i += W) store(dk_ + i, zero());
    for (int64_t i = 0; i < BLOCK * values_.stride(); i += W) store(dv_ + i, zero());
  }

  // Row i of `rows` into columns; zeros where there is no row, and for NaN and infinity if `clean`.
  static void lay(const E* x, int64_t size, const Columns& c, float* to, int64_t rows, int64_t i,
                  bool clean) {
    for (int64_t j = 0; j < c.count; j++) {
      float* here = to + c.start(j) * W * rows + i * c.width(j) * W;
      for (int n = 0; n < c.width(j); n++) {
        int64_t from = (c.start(j) + n) * W;
        F y = x ? load_part(x + from, int(least<int64_t>(W, size - from))) : zero();
        if (clean) y = pick(less(abs(y), all(-NOTHING)), y, zero());
        store(here + n * W, y);
      }
    }
  }

  // Pass 3: dP = dO V^T, over the keys that the rows of a tile see.
  void value_scores(int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    for (int r = 0; r < rows; r += SCORE_ROWS) {
      int here = least(SCORE_ROWS, rows - r);
      Run run = seen_by(i * BAND + r, here);
      if (run.empty()) continue;
      for (int64_t k = run.lo / W * W, next; k < run.hi; k = next) {
        int64_t panel = k / PANEL * PANEL;
        next = least(panel + PANEL, round_up(run.hi, W));
        score_tiles(here, int(next - k) / W)(dout_ + (i * BAND + r) * value_steps_,
                                             v_ + panel * value_steps_ + (k - panel), value_steps_,
                                             d_ + r * S_STRIDE + k, nullptr);
      }
    }
  }

  // Pass 4: weights over the scores, and the gradient of every logit over dP.
  void logit_gradients(int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    const float factor = logits_.factor();
    const double unit = logits_.unit();
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * BAND + r];
      // No weight is above 1, but few queries were answered from other sums (decode.h), and among large
      // scores their log-sum-exp can lie far below the scores as they are here: hence the bound below.
      // At scores of 10^4 a float has half a digit of the weight left, so lse is a double. Differences are
      // taken from the float nearest to it, and what that lacks is added.
      double lse = *place<double>(p_.lse, task_.b, x.h, x.q);
      if (lse == NOTHING) lse = 0;
      float from = Logits::finite(lse / unit);
      F lacks = all(float((from * unit - lse) / log_unit(float(from * unit)) * LOG2E));
      F delta = all(*place(g_.delta, task_.b, x.h, x.q));
      float *s = s_ + r * S_STRIDE, *d = d_ + r * S_STRIDE;
      if (g_.dlog.data || g_.dreceived.data) statistics(x, s, d, all(factor), all(from), lacks);
      if (drops_.any()) weights_and_gradients<true>(x, s, d, all(factor), all(from), lacks, delta);
      else weights_and_gradients<false>(x, s, d, all(factor), all(from), lacks, delta);
      if (g_.dbias.data) leave_bias(x, d);
      if (bend_)
        for (int k = begin_; k < end_; k += W) {
          F y = load(d + k);  // where no row of a tile looks, it is 0 and `bend_` was not written
          store(d + k, pick(same(y, zero()), zero(), mul(y, load(bend_ + r * S_STRIDE + k))));
        }
    }
  }

  // Base 2 logarithms of weights.
  static F powers(F y, F factor, F from, F lacks) {
    F above = fma(sub(y, from), factor, lacks);
    return pick(less(all(1), above), all(1), above);
  }

  // Of a row: what comes back to each weight, over dP. A weight of 0 has no logarithm, and needs none.
  void statistics(const Row& x, const float* s, float* d, F factor, F from, F lacks) const {
    F dlog = all(g_.dlog.data ? *place(g_.dlog, task_.b, x.h, x.q) / float(LOG2E) : 0);
    const float* received = g_.dreceived.data ? place(g_.dreceived, task_.b, x.h, block_.lo) : nullptr;
    for (int k = begin_; k < end_; k += W) {
      F above = powers(load(s + k), factor, from, lacks), y = load(d + k);
      y = fma(dlog, pick(less(above, all(-256)), zero(), above), y);
      if (received) y = add(y, load_part(received + k, int(least<int64_t>(W, p_.Tk - block_.lo - k))));
      store(d + k, y);
    }
  }

  // Of a row: its scores become the weights that were used, what comes back to them becomes dY.
  template <bool DROPS>
  void weights_and_gradients(const Row& x, float* s, float* d, F factor, F from, F lacks, F delta) const {
    uint32_t cells = DROPS ? drops_.row(task_.b, x.h, x.q) : 0;
#pragma GCC unroll 3
    for (int k = begin_; k < end_; k += W) {
      F y = load(s + k), above = powers(y, factor, from, lacks), dp = load(d + k);
      F w = exp2<5>(above), used = w;
      if constexpr (DROPS) {
        F kept = mul(drops_.kept(cells, block_.lo + k), all(Drops::growth(p_)));
        dp = mul(dp, kept), used = mul(w, kept);
      }
      auto hidden = same(y, all(NOTHING));
      store(d + k, pick(hidden, zero(), mul(w, sub(dp, delta))));
      store(s + k, pick(hidden, zero(), used));
    }
  }

  void leave_bias(const Row& x, const float* d) const {
    const Grid& g = g_.dbias;
    float* to = place<float>(g, task_.b, x.h, x.q);
    F sum = zero();
    for (int k = lo_ / W * W; k < hi_; k += W) {
      int n = int(least<int64_t>(W, hi_ - k));
      F y = load_part(d + k, n);
      if (!g.x) sum = add(sum, y);
      else add_part(to + block_.lo + k, y, n);
    }
    if (!g.x) *to += total(sum);
  }

  // Pass 5: three products. Turned, a row is a key and the sum runs over the queries of the band.
  void hand_on(int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    gather(s_, values_, dout_columns_, i, rows, dv_);
    gather(d_, keys_, q_columns_, i, rows, dk_);
    for (int64_t j = 0; j < keys_.count; j++) {
      int width = keys_.width(j);
      for (int r = 0; r < rows; r += VALUE_ROWS) {
        int here = least(VALUE_ROWS, rows - r);
        Run run = seen_by(i * BAND + r, here);
        if (run.empty()) continue;
        const float* keys = k_columns_ + (keys_.start(j) * BLOCK + run.lo * width) * W;
        Wide::value_tiles(here, width)(d_ + r * S_STRIDE + run.lo, keys, run.hi - run.lo, ones_,
                                       dq_ + (i * BAND + r) * keys_.stride() + keys_.start(j) * W,
                                       keys_.stride());
      }
    }
  }
  void gather(const float* weights, const Columns& c, const float* from, int64_t i, int rows,
              float* to) const {
    for (int64_t j = 0; j < c.count; j++) {
      int width = c.width(j);
      const float* x = from + (c.start(j) * bands_ + i * width) * (W * BAND);
      for (int k = lo_; k < hi_; k += VALUE_ROWS) {
        int here = least(VALUE_ROWS, hi_ - k);
        Wide::template value_tiles<true>(here, width)(weights + k, x, rows, ones_,
                                                      to + k * c.stride() + c.start(j) * W, c.stride());
      }
    }
  }

  void leave_queries(int64_t part) const {
    F times = all(float(p_.scale));
    for (int64_t i = 0; i < n_; i++) {
      int64_t where = part * g_.dq_part + task_.b * g_.dq.b + row_[i].h * g_.dq.h + row_[i].q * g_.dq.t;
      for (int64_t d = 0; d < p_.D; d += W) {
        F x = mul(load(dq_ + i * keys_.stride() + d), times);
        int n = int(least<int64_t>(W, p_.D - d));
        if (g_.parts == 1) store_part((E*)g_.dq.data + where + d, x, n);
        else store_part((float*)g_.dq.data + where + d, x, n);
      }
    }
  }
  void leave_keys() const {
    for (int64_t k = 0; k < block_.hi - block_.lo; k++) {
      float* dk = place(g_.dk, task_.b, task_.head, block_.lo + k);
      float* dv = place(g_.dv, task_.b, task_.head, block_.lo + k);
      add_row(dk, dk_ + k * keys_.stride(), p_.D, float(p_.scale));
      add_row(dv, dv_ + k * values_.stride(), p_.Dv, 1);
    }
  }

  static void add_part(float* to, F x, int n) { store_part(to, add(load_part(to, n), x), n); }
  static void add_row(float* to, const float* x, int64_t size, float times) {
    for (int64_t j = 0; j < size; j += W) {
      int n = int(least<int64_t>(W, size - j));
      store_part(to + j, fma(load(x + j), all(times), load_part(to + j, n)), n);
    }
  }

  const Gradient& g_;
  Drops drops_;
  Columns keys_, values_;
  int64_t value_steps_;
  Unit *dout_, *v_;                                // as groups, as panels
  float *q_columns_, *dout_columns_, *k_columns_;
  float *dq_, *dk_, *dv_;                          // of the chunk; of the block
  float* d_;                                       // dP, then dY
  float ones_[BAND];
};

}  // namespace clearhead::CLEARHEAD_LEVEL
