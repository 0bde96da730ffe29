// Prefill: many queries against the keys, in register tiles.
//
// What bounds it. A pair (query, key) costs D + Dv multiply-adds and one exponential. With 16
// lanes and two FMA pipes, D = Dv = 64 gives 64 cycles of FMA for 16 pairs and about 7 cycles of
// exponential (bench/LOG.md, "the exponential"), so 90 % of the FMA ceiling is the most there is at
// D = 64, and everything else must hide: loads behind FMAs (11 loads feed 24 FMAs), packing behind
// the hundreds of queries that use a packed key, rescaling inside the last step of the weighted sum.
//
// What lies where. A task holds its queries (packed), their output sums and their (max, sum); it
// walks over blocks of BLOCK keys. A block is packed once: keys as panels [D][PANEL], so that a
// vector holds one coordinate of W keys, values as [key][Dv], padded. A band of BAND queries then
// takes the block: scores (18 KB, stay in L1), softmax, weighted sum.
//
// What a survey adds. The statistics of a row ride in the softmax pass: a moment beside the sum (one FMA
// a vector), the largest logits before they turn into weights (a comparison a vector, in blocks whose
// maximum may enter the list), groups of keys after. The answer's own operations stay as they are, so
// its bits do. What needs finished weights (received, maps, exact rows) is the second sweep (weight_sums.h).
//
// Why the bits do not depend on company. A row's sums run over d, then over the keys of a block,
// then over blocks on a grid that starts at key 0, always in the same order, whichever rows share
// its tile. A block without a visible key multiplies by exp2(0) = 1 and adds 0.
#pragma once

#include <math.h>

namespace clearhead::CLEARHEAD_LEVEL {

template <class A> class Tile : Bands<A> {
  using Base = Bands<A>;
  using typename Base::E, typename Base::Row, typename Base::Unit;
  using Base::BAND_PAD, Base::BLOCK, Base::PER, Base::S_STRIDE, Base::P_STRIDE, Base::STRIDE;
  using Base::p_, Base::task_, Base::sight_, Base::logits_, Base::n_, Base::bands_, Base::row_;
  using Base::band_, Base::q_, Base::k_, Base::s_, Base::hull_, Base::block_;
  using Base::begin_, Base::end_, Base::tops_;
  using Base::key_row, Base::meets, Base::scores, Base::seen_by;
  using Base::any_band_meets, Base::look, Base::pack_groups, Base::pack_panels;

 public:
  static size_t scratch(const Problem& p, int64_t rows) {
    Cutter c(nullptr);
    Tile(p, {}, c, rows);
    return c.used();
  }

  static void run(const Problem& p, const TileTask& task, char* scratch) {
    Cutter c(scratch);
    Tile(p, task, c, task.heads * task.queries).walk();
  }

 private:
  Tile(const Problem& p, const TileTask& task, Cutter& c, int64_t rows)
      : Base(p, task, c, rows), survey_(p.survey ? *p.survey : Survey{}), answers_(p.out.data),
        drops_(p), columns_(p.Dv), o_stride_(columns_.stride()) {
    max_ = c.cut<float>(bands_ * BAND_PAD);
    sum_ = c.cut<float>(bands_ * BAND_PAD);
    weights_ = PER == 1 ? (Unit*)s_ : c.cut<Unit>(BAND * P_STRIDE);
    if (answers_) {
      o_ = c.cut<float>(bands_ * BAND * o_stride_);
      v_ = c.cut<Unit>(BLOCK / PER * o_stride_);
      clean_ = c.cut<Unit>(BLOCK / PER * o_stride_);
    }
    moment_ = c.cut<float>(survey_.moment.data ? bands_ * BAND_PAD : 0);
    largest_ = c.cut<float>(n_ * survey_.best);
    where_ = c.cut<int64_t>(n_ * survey_.best);
    masses_ = c.cut<float>(n_ * survey_.groups);
  }

  void walk() {
    look({0, p_.Tk});
    pack_groups(p_.q, p_.D, q_);
    begin();
    for (int64_t key = hull_.lo / BLOCK * BLOCK; key < hull_.hi; key += BLOCK) {
      block_ = {key, least(key + BLOCK, hull_.hi)};
      if (!any_band_meets()) continue;
      pack_panels(p_.k, p_.D, k_);
      if (answers_) pack_values();
      for (int64_t i = 0; i < bands_; i++) {
        fetch_ahead(i);
        if (!meets(i)) continue;
        scores(i);
        if (drops_.any()) softmax<false, true>(i);
        else survey_.moment.data ? softmax<true, false>(i) : softmax<false, false>(i);
        if (answers_) weigh(i);
      }
    }
    finish();
  }

  void begin() {
    for (int64_t i = 0; i < bands_ * BAND_PAD; i++) max_[i] = NOTHING, sum_[i] = 0;
    if (answers_)
      for (int64_t i = 0; i < bands_ * BAND * o_stride_; i += W) store(o_ + i, zero());
    if (survey_.moment.data)
      for (int64_t i = 0; i < bands_ * BAND_PAD; i++) moment_[i] = 0;
    for (int64_t i = 0; i < n_ * survey_.best; i++) largest_[i] = NOTHING, where_[i] = -1;
    for (int64_t i = 0; i < n_ * survey_.groups; i++) masses_[i] = 0;
  }

  // While a band computes, its share of the next block's keys and values, if they are read, comes into
  // L2: packing would otherwise wait for the L3 (measured: bench/LOG.md, "packing waits").
  void fetch_ahead(int64_t band) const {
    int64_t next = block_.lo / BLOCK * BLOCK + BLOCK;
    int64_t each = (BLOCK + bands_ - 1) / bands_;
    int64_t from = next + band * each, to = least(least(from + each, next + BLOCK), hull_.hi);
    for (int64_t key = from; key < to; key++) {
      prefetch_row(key_row(p_.k, key), p_.D);
      if (answers_) prefetch_row(key_row(p_.v, key), p_.Dv);
    }
  }

  Unit* column(Unit* v, int64_t j) const { return v + columns_.start(j) * (W * BLOCK / PER); }

  // Pass 1c: the values of a block, padded with zeros; and whether one of them is NaN or infinite.
  void pack_values() {
    static constexpr auto packers = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<F (Tile::*)(int), sizeof...(i)>{{&Tile::pack_column<i + 1>...}};
    }(std::make_integer_sequence<int, VALUE_VECTORS>());
    F alarm = zero();
    for (int j = 0; j < columns_.count; j++)
      alarm = add(alarm, (this->*packers.entry[columns_.width(j) - 1])(j));
    special_ = !(total(alarm) == 0);
  }
  template <int N> F pack_column(int j) {
    int from = int(most<int64_t>(hull_.lo - block_.lo, 0)) / PER;
    int count = int(block_.hi - block_.lo);
    int64_t at = columns_.start(j) * W, step = p_.v.t;
    int tail = int(least<int64_t>(W, p_.Dv - at - (N - 1) * W));
    const E* x = key_row(p_.v, block_.lo + from * PER) + at;
    float* to = (float*)(column(v_, j) + from * N * W);
    F alarm[N];  // one for each vector: four short chains instead of a long one
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) alarm[n] = zero();
    for (int k = from * PER; k < count; k += PER, x += PER * step, to += N * W) {
      const E* odd = k + 1 < count ? x + step : nullptr;
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        F y = A::values(x + n * W, odd ? odd + n * W : nullptr, n + 1 < N ? W : tail);
        alarm[n] = A::alarm(alarm[n], y);
        store(to + n * W, y);
      }
    }
#pragma GCC unroll 4
    for (int n = 1; n < N; n++) alarm[0] = add(alarm[0], alarm[n]);
    return alarm[0];
  }

  // Pass 3: softmax of a band's scores, against the running maximum.
  template <bool MOMENT, bool DROPS> void softmax(int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    float* max_here = max_ + i * BAND_PAD;
    float* sum_here = sum_ + i * BAND_PAD;
    F factor = all(logits_.factor());
    const int begin = begin_, end = end_;
    alignas(64) float base[BAND_PAD];
    for (int r = 0; r < rows; r += W) {
      F before = load(max_here + r), after = max(before, maxima(tops_ + r));
      F from = pick(same(after, all(NOTHING)), zero(), after);
      store(max_here + r, after);
      store(base + r, from);
      F shift = mul(sub(before, from), factor);
      store(shrink_ + r, exp2<5>(shift));
      if constexpr (MOMENT) {  // the old moment, from the new maximum
        float* at = moment_ + i * BAND_PAD + r;
        shift = max(all(LEAST_POWER), shift);
        store(at, mul(load(shrink_ + r), fma(shift, load(sum_here + r), load(at))));
      }
    }
    F sums[BAND_PAD], moments[BAND_PAD];
    for (int r = 0; r < rows; r++) {
      const float* s = s_ + r * S_STRIDE;
      auto* w = (typename A::Weight*)(weights_ + r * STRIDE);
      F from = all(base[r]), sum = zero(), moment = zero();
      if (survey_.best) keep_largest(i * BAND + r, s);
      const Row& x = row_[i * BAND + r];
      uint32_t cells = DROPS ? drops_.row(task_.b, x.h, x.q) : 0;
#pragma GCC unroll 3
      for (int k = begin; k < end; k += W) {
        F y = mul(sub(load(s + k), from), factor), e = exp2<A::EXP_DEGREE>(y);
        A::keep(w + k, DROPS ? mul(e, drops_.kept(cells, block_.lo + k)) : e);
        sum = add(sum, e);
        if constexpr (MOMENT) moment = fma(e, max(all(LEAST_POWER), y), moment);
      }
      sums[r] = sum;
      moments[r] = moment;
      if (survey_.groups) weigh_groups(i * BAND + r, s, w, factor, from, shrink_[r]);
    }
    for (int r = 0; r < rows; r += W) {  // lanes past the last row hold anything, and are not read
      store(sum_here + r, fma(load(sum_here + r), load(shrink_ + r), totals(sums + r)));
      if constexpr (MOMENT) {
        float* at = moment_ + i * BAND_PAD + r;
        store(at, add(load(at), totals(moments + r)));
      }
    }
  }

  // The n largest scores of a row so far: a heap, whose root leaves first. Keys rise, and of equal scores
  // the first stays.
  void keep_largest(int64_t row, const float* s) {
    const int64_t n_best = survey_.best;
    float *best = largest_ + row * n_best, edge = best[0];
    int64_t* keys = where_ + row * n_best;
    const F top = tops_[row % BAND];
    if (!word(less(all(edge), top))) return;
    // Most of a first block would enter and leave again. The n-th largest of its lanes' maxima is no
    // larger than its n-th largest score, so what lies below never enters.
    if (keys[0] < 0 && n_best <= W) edge = nextafterf(largest_lane(top, n_best - 1), NOTHING);
    for (int k = begin_; k < end_; k += 64) {
      uint64_t larger = 0;
      for (int n = 0; n < least(64, end_ - k); n += W)
        larger |= word(less(all(most(edge, best[0])), load(s + k + n))) << n;
      for (; larger; larger &= larger - 1) {
        int key = k + __builtin_ctzll(larger);
        if (s[key] > best[0]) sink(best, keys, n_best, s[key], block_.lo + key);
      }
    }
  }
  // Takes the place of the root of a heap of n, and sinks to where it belongs.
  static void sink(float* best, int64_t* keys, int64_t n, float y, int64_t key) {
    auto leaves_before = [](float a, int64_t i, float b, int64_t j) { return a < b || (a == b && i > j); };
    int64_t at = 0;
    for (int64_t next = 1; next < n; next = 2 * at + 1) {
      if (next + 1 < n && leaves_before(best[next + 1], keys[next + 1], best[next], keys[next])) next++;
      if (!leaves_before(best[next], keys[next], y, key)) break;
      best[at] = best[next], keys[at] = keys[next];
      at = next;
    }
    best[at] = y, keys[at] = key;
  }
  // From a heap to falling order.
  static void sort_heap(float* best, int64_t* keys, int64_t n) {
    while (n-- > 1) {
      float y = best[n];
      int64_t key = keys[n];
      best[n] = best[0], keys[n] = keys[0];
      sink(best, keys, n, y, key);
    }
  }

  // The lane that n others are at least as large as.
  static float largest_lane(F x, int64_t n) {
    float lane[W];
    store(lane, x);
    for (;; n--) {
      int at = 0;
      for (int i = 1; i < W; i++) at = lane[i] > lane[at] ? i : at;
      if (n == 0) return lane[at];
      lane[at] = NOTHING;
    }
  }

  // What a row puts on groups of keys. Pairs keep their weights rounded, so theirs are formed again.
  void weigh_groups(int64_t row, const float* s, const typename A::Weight* w, F factor, F from,
                    float shrink) {
    const Row& x = row_[row];
    for (int64_t g = 0; g < survey_.groups; g++) {
      Sight group(survey_.group[g], p_.Tk);
      Run hull = group.within(task_.b, x.h, x.q, {block_.lo + begin_, least(block_.lo + end_, p_.Tk)});
      F sum = zero();
      for (int64_t k = (hull.lo - block_.lo) / W * W; block_.lo + k < hull.hi; k += W) {
        int64_t key = block_.lo + k;
        int in = int(least<int64_t>(W, p_.Tk - key));
        uint64_t held = group.simple() ? Sight::word(hull, key, in)
                                       : group.word(task_.b, x.h, x.q, key, in);
        F e;
        if constexpr (PER == 1) e = load(w + k);
        else e = exp2<5>(mul(sub(load(s + k), from), factor));
        sum = add(sum, pick(lanes(held, 0), e, zero()));
      }
      float& mass = masses_[row * survey_.groups + g];
      mass = mass * shrink + total(sum);
    }
  }

  // Pass 4: weighted sum.
  void weigh(int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    const Run& core = band_[i].core;
    const bool full = core.lo <= block_.lo && core.hi >= block_.hi;
    if (special_ && !full) return weigh_with_care(i);
    for (int r = 0; r < rows; r += VALUE_ROWS) {
      int here = least(VALUE_ROWS, rows - r);
      Run run = full ? Run{0, block_.hi - block_.lo} : seen_by(i * BAND + r, here);
      if (run.empty()) continue;
      int64_t from = run.lo / PER, to = (run.hi + PER - 1) / PER;
      for (int64_t j = 0; j < columns_.count; j++) {
        int width = columns_.width(j);
        Base::value_tiles(here, width)(
            weights_ + r * STRIDE + from, column(v_, j) + from * width * W, to - from, shrink_ + r,
            o_ + (i * BAND + r) * o_stride_ + columns_.start(j) * W, o_stride_);
      }
    }
  }

  // The block holds a NaN or an infinity that some row may not see, and 0 * NaN is NaN: every row
  // gets its own copy of the values, zeros where it may not look. Slow and rare.
  void weigh_with_care(int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * BAND + r];
      Run run = seen_by(i * BAND + r, 1);
      if (run.empty()) continue;
      int64_t from = run.lo / PER, to = (run.hi + PER - 1) / PER;
      for (int64_t u = from; u < to; u++) {
        uint64_t seen = sight_.word(task_.b, x.h, x.q, block_.lo + u * PER,
                                    int(least<int64_t>(PER, p_.Tk - block_.lo - u * PER)));
        for (int64_t j = 0; j < columns_.count; j++) {
          int64_t wide = columns_.width(j) * W;
          const Unit* v = column(v_, j) + u * wide;
          Unit* c = column(clean_, j) + u * wide;
          for (int64_t n = 0; n < wide; n++) c[n] = A::seen(v[n], seen);
        }
      }
      for (int64_t j = 0; j < columns_.count; j++)
        Base::value_tiles(1, columns_.width(j))(
            weights_ + r * STRIDE + from, column(clean_, j) + from * columns_.width(j) * W, to - from,
            shrink_ + r, o_ + (i * BAND + r) * o_stride_ + columns_.start(j) * W, o_stride_);
    }
  }

  // Pass 5: sinks join, sums divide, rows leave.
  void finish() {
    for (int64_t i = 0; i < n_; i++) {
      const Row& r = row_[i];
      int64_t at = i / BAND * BAND_PAD + i % BAND;
      Ending end(p_, task_.b, r.h, max_[at], sum_[at], logits_.unit());
      if (answers_) end.write<E>(p_, task_.b, r.h, r.q, 0, o_ + i * o_stride_, p_.Dv);
      end.write_lse(p_, task_.b, r.h, r.q);
      if (p_.survey) leave(r, i, at);
    }
  }

  void leave(const Row& r, int64_t row, int64_t at) {
    int64_t b = task_.b, best = survey_.best, groups = survey_.groups;
    sort_heap(largest_ + row * best, where_ + row * best, best);
    // The maximum of vectors forgets a NaN, the sum does not.
    bool lost = sum_[at] != sum_[at] && max_[at] < -NOTHING;
    *place(survey_.max, b, r.h, r.q) = lost ? sum_[at] : max_[at];
    *place(survey_.sum, b, r.h, r.q) = sum_[at];
    if (survey_.moment.data) *place(survey_.moment, b, r.h, r.q) = moment_[at];
    for (int64_t j = 0; j < best; j++) {
      place<float>(survey_.largest, b, r.h, r.q)[j] = largest_[row * best + j];
      place<int64_t>(survey_.where, b, r.h, r.q)[j] = where_[row * best + j];
    }
    for (int64_t g = 0; g < groups; g++)
      place<float>(survey_.masses, b, r.h, r.q)[g] = masses_[row * groups + g];
  }

  Survey survey_;
  bool answers_;
  Drops drops_;
  Columns columns_;
  int64_t o_stride_;
  float *max_, *sum_;       // per row, BAND_PAD apart per band
  Unit *v_, *clean_;
  float* o_;
  Unit* weights_;           // in float32 they overwrite their scores
  bool special_;
  float *moment_, *largest_, *masses_;
  int64_t* where_;
  alignas(64) float shrink_[BAND_PAD];
};

}  // namespace clearhead::CLEARHEAD_LEVEL
