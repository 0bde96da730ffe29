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
// its bits do. What needs finished weights (received, maps, exact rows) is the second sweep, `tally`:
// passes 0 to 2 again, and then sums of weights over queries, without an output.
//
// Why the bits do not depend on company. A row's sums run over d, then over the keys of a block,
// then over blocks on a grid that starts at key 0, always in the same order, whichever rows share
// its tile. A block without a visible key multiplies by exp2(0) = 1 and adds 0.
#pragma once

#include <utility>

namespace clearhead::CLEARHEAD_LEVEL {

template <class T, int n> struct Table { T entry[n]; };

template <class A> class Tile {
  using Unit = typename A::Unit;
  using E = typename A::Element;
  static constexpr int PER = A::PER_UNIT;
  static constexpr int PANEL = SCORE_VECTORS * W;
  static constexpr int BLOCK = 192;
  static constexpr int BAND = 24;
  static constexpr int S_STRIDE = BLOCK + W;            // floats; off a power of two, for L1's sets
  static constexpr int P_STRIDE = (BLOCK + 32) / PER;   // units
  static constexpr int BAND_PAD = (BAND + W - 1) / W * W;
  static constexpr int TALLY_ROWS = 16 * BAND;          // queries that a tally packs at once
  static_assert(BLOCK % PANEL == 0 && BLOCK % 2 == 0 && PANEL <= 64);
  static_assert(BAND % SCORE_ROWS == 0 && BAND % VALUE_ROWS == 0);

  struct Row {
    int64_t h, q;
    Run hull, core;
  };
  struct Band {
    Run hull, core;
  };

 public:
  static size_t scratch(const Problem& p, int64_t rows) {
    Tile t(p, {}, nullptr, rows);
    return t.size_;
  }

  static void run(const Problem& p, const TileTask& task, char* scratch) {
    Tile t(p, task, scratch, task.heads * task.queries);
    t.walk();
  }

  static size_t tally_scratch(const Problem& p) { return scratch(p, least<int64_t>(p.Tq, TALLY_ROWS)); }

  static void tally(const Problem& p, const Tally& wanted, const TallyTask& task, char* scratch) {
    for (int64_t query = 0; query < p.Tq; query += TALLY_ROWS) {
      int64_t queries = least<int64_t>(p.Tq - query, TALLY_ROWS);
      Tile t(p, {task.b, task.head, 1, query, queries}, scratch, queries);
      t.add_up(wanted, {task.key, task.key_end});
    }
  }

 private:
  Tile(const Problem& p, const TileTask& task, char* scratch, int64_t rows)
      : p_(p), task_(task), sight_(p), logits_(p), survey_(p.survey ? *p.survey : Survey{}),
        answers_(p.out.data), n_(rows) {
    bands_ = (n_ + BAND - 1) / BAND;
    steps_ = (p.D + PER - 1) / PER;
    vectors_ = (p.Dv + W - 1) / W;
    columns_ = (vectors_ + VALUE_VECTORS - 1) / VALUE_VECTORS;
    o_stride_ = vectors_ * W;
    Cutter c(scratch);
    row_ = c.cut<Row>(n_);
    band_ = c.cut<Band>(bands_);
    max_ = c.cut<float>(bands_ * BAND_PAD);
    sum_ = c.cut<float>(bands_ * BAND_PAD);
    q_ = c.cut<Unit>(bands_ * BAND * steps_);
    k_ = c.cut<Unit>(BLOCK * steps_);
    s_ = c.cut<float>(BAND * S_STRIDE);
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
    size_ = c.used(scratch);
  }

  void walk() {
    look();
    pack_queries();
    for (int64_t key = hull_.lo / BLOCK * BLOCK; key < hull_.hi; key += BLOCK) {
      if (!any_band_sees(key)) continue;
      block_ = {key, least(key + BLOCK, hull_.hi)};
      pack_keys();
      if (answers_) pack_values();
      for (int64_t i = 0; i < bands_; i++) {
        fetch_ahead(i);
        if (!meets(band_[i])) continue;
        scores(i);
        survey_.moment.data ? softmax<true>(i) : softmax<false>(i);
        if (answers_) weigh(i);
      }
    }
    finish();
  }

  // The second sweep over the keys of one stretch.
  void add_up(const Tally& wanted, Run keys) {
    if (!wanted.received.data && !wanted.map.data && !any_exact(wanted)) return;
    look();
    hull_ = {most(hull_.lo, keys.lo), least(hull_.hi, keys.hi)};
    pack_queries();
    for (int64_t key = keys.lo; key < hull_.hi; key += BLOCK) {
      if (key + BLOCK <= hull_.lo || !any_band_sees(key)) continue;
      block_ = {key, least(key + BLOCK, hull_.hi)};
      pack_keys();
      for (int k = 0; k < BLOCK; k += W) store(received_ + k, zero());
      for (int64_t i = 0; i < bands_; i++) {
        if (!meets(band_[i])) continue;
        scores(i);
        pool(wanted, i);
      }
      if (wanted.received.data) receive(wanted.received);
    }
  }

  // Does this band see any key of the block? If so, lo_ to hi_ are what it sees.
  bool meets(const Band& band) {
    lo_ = int(most(band.hull.lo, block_.lo) - block_.lo);
    hi_ = int(least(band.hull.hi, block_.hi) - block_.lo);
    return lo_ < hi_;
  }

  // Pass 0: what every row sees, and what the bands and the task see together.
  void look() {
    hull_ = {p_.Tk, 0};
    for (int64_t i = 0; i < bands_; i++) band_[i] = {{p_.Tk, 0}, {0, p_.Tk}};
    for (int64_t i = 0; i < n_; i++) {
      Row& r = row_[i];
      Band& band = band_[i / BAND];
      r.h = task_.head + i / task_.queries;
      r.q = task_.query + i % task_.queries;
      sight_.row(task_.b, r.h, r.q, &r.hull, &r.core);
      for (int64_t d = 0; d < p_.D; d += 64 / int64_t(sizeof(E))) soon(query(r) + d);
      band.core = {most(band.core.lo, r.core.lo), least(band.core.hi, r.core.hi)};
      if (r.hull.empty()) continue;
      band.hull = {least(band.hull.lo, r.hull.lo), most(band.hull.hi, r.hull.hi)};
      hull_ = {least(hull_.lo, band.hull.lo), most(hull_.hi, band.hull.hi)};
    }
  }

  bool any_band_sees(int64_t key) const {
    for (int64_t i = 0; i < bands_; i++)
      if (band_[i].hull.lo < key + BLOCK && band_[i].hull.hi > key) return true;
    return false;
  }

  const E* query(const Row& r) const {
    return (const E*)p_.q.data + task_.b * p_.q.b + r.h * p_.q.h + r.q * p_.q.t;
  }
  const E* key_row(const Place& x, int64_t key) const {
    int64_t g = task_.head / (p_.H / p_.G);
    return (const E*)x.data + task_.b * x.b + g * x.h + key * x.t;
  }

  // Pass 1a: queries, as groups [D][SCORE_ROWS], so that one step of a score tile reads one line.
  void pack_queries() {
    constexpr int SR = SCORE_ROWS;
    static_assert(SR <= W);
    for (int64_t g = 0; g < bands_ * BAND / SR && g * SR < n_; g++) {
      int rows = int(least<int64_t>(SR, n_ - g * SR));
      Unit* to = q_ + g * SR * steps_;
      for (int64_t d = 0; d < p_.D; d += W * PER, to += W * SR) {
        int part = int(least<int64_t>(p_.D - d, W * PER)), here = (part + PER - 1) / PER;
        F x[W];
        for (int r = 0; r < W; r++)
          x[r] = r < rows ? A::units(query(row_[g * SR + r]) + d, part) : zero();
        transpose(x);
        for (int i = 0; i < here; i++) store_part((float*)to + i * SR, x[i], SR);
      }
    }
    for (int64_t i = 0; i < bands_ * BAND_PAD; i++) max_[i] = NOTHING, sum_[i] = 0;
    if (answers_)
      for (int64_t i = 0; i < bands_ * BAND * vectors_; i++) store(o_ + i * W, zero());
    if (survey_.moment.data)
      for (int64_t i = 0; i < bands_ * BAND_PAD; i++) moment_[i] = 0;
    for (int64_t i = 0; i < n_ * survey_.best; i++) largest_[i] = NOTHING, where_[i] = -1;
    for (int64_t i = 0; i < n_ * survey_.groups; i++) masses_[i] = 0;
  }

  // Pass 1b: the keys of a block, turned: panels [D][PANEL]. Keys past the end are zeros.
  void pack_keys() {
    int from = int(most<int64_t>(hull_.lo - block_.lo, 0)) / W * W;
    int count = int(block_.hi - block_.lo);
    int64_t step = p_.k.t;
    for (int k = from; k < count; k += W) {
      Unit* to = k_ + k / PANEL * (steps_ * PANEL) + k % PANEL;
      const E* key = key_row(p_.k, block_.lo + k);
      int there = count - k;
      for (int64_t d = 0; d < p_.D; d += W * PER, to += W * PANEL) {
        int part = int(least<int64_t>(p_.D - d, W * PER));
        F x[W];
        if (there >= W && part == W * PER) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) x[i] = A::whole(key + d + i * step);
        } else {
          for (int i = 0; i < W; i++)
            x[i] = i < there ? A::units(key + d + i * step, part) : zero();
        }
        transpose(x);
        int here = int(least<int64_t>(W, steps_ - d / PER));
        if (here == W) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) store((float*)to + i * PANEL, x[i]);
        } else {
          for (int i = 0; i < here; i++) store((float*)to + i * PANEL, x[i]);
        }
      }
    }
  }

  // While a band computes, its share of the next block's keys and values comes into L2: packing
  // would otherwise wait for the L3 (measured: bench/LOG.md, "packing waits").
  void fetch_ahead(int64_t band) const {
    int64_t next = block_.lo / BLOCK * BLOCK + BLOCK;
    int64_t each = (BLOCK + bands_ - 1) / bands_;
    int64_t from = next + band * each, to = least(least(from + each, next + BLOCK), hull_.hi);
    constexpr int64_t LINE = 64 / sizeof(E);
    for (int64_t key = from; key < to; key++) {
      const E *k = key_row(p_.k, key), *v = key_row(p_.v, key);
      for (int64_t d = 0; d < p_.D; d += LINE) soon(k + d);
      for (int64_t d = 0; d < p_.Dv; d += LINE) soon(v + d);
    }
  }

  // The values lie in columns of up to VALUE_VECTORS vectors, as equal as can be: 5 = 3 + 2.
  int column_start(int64_t j) const { return int(j * vectors_ / columns_); }
  int column_width(int64_t j) const { return column_start(j + 1) - column_start(j); }
  Unit* column(Unit* v, int64_t j) const { return v + column_start(j) * (W * BLOCK / PER); }

  // Pass 1c: the values of a block, padded with zeros; and whether one of them is NaN or infinite.
  void pack_values() {
    static constexpr auto packers = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<F (Tile::*)(int), sizeof...(i)>{{&Tile::pack_column<i + 1>...}};
    }(std::make_integer_sequence<int, VALUE_VECTORS>());
    F alarm = zero();
    for (int j = 0; j < columns_; j++)
      alarm = add(alarm, (this->*packers.entry[column_width(j) - 1])(j));
    special_ = !(total(alarm) == 0);
  }
  template <int N> F pack_column(int j) {
    int from = int(most<int64_t>(hull_.lo - block_.lo, 0)) / PER;
    int count = int(block_.hi - block_.lo);
    int64_t at = column_start(j) * W, step = p_.v.t;
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

  // Pass 2: scores. R queries x N vectors of keys stay in registers over all of D. Of whole
  // panels the row maxima are taken before the sums leave their registers.
  template <int R, int N>
  static void score_tile(const Unit* q, const Unit* k, int64_t steps, float* s, F* tops) {
    F sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[r][n] = zero();
#pragma GCC unroll 2
    for (int64_t d = 0; d < steps; d++) {
      typename A::Vector key[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) key[n] = A::vector(k + d * PANEL + n * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        auto x = A::broadcast(q[d * SCORE_ROWS + r]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[r][n] = A::mac(sum[r][n], x, key[n]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) store(s + r * S_STRIDE + n * W, sum[r][n]);
      if (tops) {
        F t = sum[r][0];
#pragma GCC unroll 4
        for (int n = 1; n < N; n++) t = max(t, sum[r][n]);
        store((float*)(tops + r), max(load((const float*)(tops + r)), t));
      }
    }
  }
  using ScoreTile = void (*)(const Unit*, const Unit*, int64_t, float*, F*);
  static ScoreTile score_tiles(int rows, int vectors) {
    static constexpr auto table = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<ScoreTile, sizeof...(i)>{{score_tile<i / SCORE_VECTORS + 1, i % SCORE_VECTORS + 1>...}};
    }(std::make_integer_sequence<int, SCORE_ROWS * SCORE_VECTORS>());
    return table.entry[(rows - 1) * SCORE_VECTORS + vectors - 1];
  }

  void scores(int64_t i) {
    const Band& band = band_[i];
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    for (int r = 0; r < BAND_PAD; r++) tops_[r] = all(NOTHING);
    begin_ = lo_ / W * W;
    end_ = int(round_up(hi_, W));
    for (int k = lo_ / PANEL * PANEL; k < end_; k += PANEL) {
      int64_t key = block_.lo + k;
      int width = int(least<int64_t>(PANEL, end_ - k)), seen = int(least<int64_t>(width, hi_ - k));
      bool full = band.core.lo <= key && band.core.hi >= key + width;
      uint64_t word[BAND];
      if (!full)
        for (int r = 0; r < rows; r++) {
          const Row& x = row_[i * BAND + r];
          word[r] = sight_.simple() ? Sight::word(x.hull, key, seen)
                                    : sight_.word(task_.b, x.h, x.q, key, seen);
        }
      for (int r = 0; r < rows; r += SCORE_ROWS) {
        int here = least(SCORE_ROWS, rows - r);
        float* s = s_ + r * S_STRIDE + k;
        Run part = {0, width};  // of the panel, in whole vectors: what some of these rows see
        if (!full) {
          part = seen_in(word + r, here, width);
          for (int x = 0; x < here; x++)
            for (int n = 0; n < width; n += W)
              if (n < part.lo || n >= part.hi) store(s + x * S_STRIDE + n, all(NOTHING));
          if (part.empty()) continue;
        }
        bool as_is = full && logits_.plain();
        int from = int(part.lo), wide = int(part.hi - part.lo);
        score_tiles(here, wide / W)(q_ + (i * BAND + r) * steps_, k_ + k * steps_ + from, steps_,
                                    s + from, as_is ? tops_ + r : nullptr);
        if (as_is) continue;
        for (int x = 0; x < here; x++)
          amend(row_[i * BAND + r + x], key + from, wide, full ? ~uint64_t(0) : word[r + x] >> from,
                s + x * S_STRIDE + from, tops_ + r + x);
      }
    }
  }
  static Run seen_in(const uint64_t* word, int n, int width) {
    uint64_t any = 0;
    for (int i = 0; i < n; i++) any |= word[i];
    if (!any) return {width, 0};
    return {__builtin_ctzll(any) / W * W, (63 - __builtin_clzll(any)) / W * W + W};
  }

  // What masks and biases do to a row of scores. -infinity replaces; nothing is added to it, so
  // whatever stands in a masked key is gone.
  void amend(const Row& x, int64_t key, int width, uint64_t word, float* s, F* tops) {
    F t = *tops;
    if (logits_.plain()) {
      for (int n = 0; n < width; n += W) {
        F y = pick(lanes(word, n), load(s + n), all(NOTHING));
        store(s + n, y);
        t = max(t, y);
      }
      *tops = t;
      return;
    }
    for (int n = 0; n < width; n += W) {
      int in = int(least<int64_t>(W, p_.Tk - key - n));
      F y = logits_.turn(load(s + n), task_.b, x.h, x.q, key + n, in);
      y = pick(lanes(word, n), y, all(NOTHING));
      store(s + n, y);
      t = max(t, y);
    }
    *tops = t;
  }

  // Pass 3: softmax of a band's scores, against the running maximum. The state holds maxima in
  // base 2, already scaled; exp2(s * factor - max) is then one FMA and one exponential, and the
  // rounding of `max` is the same in numerator and denominator.
  template <bool MOMENT> void softmax(int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    float* max_here = max_ + i * BAND_PAD;
    float* sum_here = sum_ + i * BAND_PAD;
    F factor = all(logits_.factor());
    const int begin = begin_, end = end_;
    alignas(64) float minus[BAND_PAD], top[BAND_PAD];
    for (int r = 0; r < rows; r += W) {
      F before = load(max_here + r), here = mul(maxima(tops_ + r), factor);
      F after = max(before, here);
      F from = pick(same(after, all(NOTHING)), zero(), after);
      store(max_here + r, after);
      store(minus + r, sub(zero(), from));
      store(shrink_ + r, exp2<5>(sub(before, from)));
      store(top + r, here);
      if constexpr (MOMENT) {  // the old moment, from the new maximum
        float* at = moment_ + i * BAND_PAD + r;
        F shift = max(all(LEAST_POWER), sub(before, from));
        store(at, mul(load(shrink_ + r), fma(shift, load(sum_here + r), load(at))));
      }
    }
    F sums[BAND_PAD], moments[BAND_PAD];
    for (int r = 0; r < rows; r++) {
      const float* s = s_ + r * S_STRIDE;
      auto* w = (typename A::Weight*)(weights_ + r * (PER == 1 ? S_STRIDE : P_STRIDE));
      F from = all(minus[r]), sum = zero(), moment = zero();
      if (survey_.best) keep_largest(i * BAND + r, s, top[r], factor);
#pragma GCC unroll 3
      for (int k = begin; k < end; k += W) {
        F y = fma(load(s + k), factor, from), e = exp2<A::EXP_DEGREE>(y);
        A::keep(w + k, e);
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

  // The largest logits of a row so far, in falling order. Keys rise, so of equal ones the first stays.
  void keep_largest(int64_t row, const float* s, float top, F factor) {
    float* best = largest_ + row * survey_.best;
    int64_t *keys = where_ + row * survey_.best, last = survey_.best - 1;
    if (!(top > best[last])) return;
    float one = logits_.factor(), edge = best[last];
    // Most of a first block would enter and leave again. The n-th largest of its lanes' maxima is no
    // larger than its n-th largest logit, so what lies below never enters.
    if (keys[0] < 0 && last < W) edge = nextafterf(largest_lane(mul(tops_[row % BAND], factor), last), NOTHING);
    for (int k = begin_; k < end_; k += 64) {
      uint64_t larger = 0;
      for (int n = 0; n < least(64, end_ - k); n += W)
        larger |= word(less(all(most(edge, best[last])), mul(load(s + k + n), factor))) << n;
      for (; larger; larger &= larger - 1) {
        int key = k + __builtin_ctzll(larger);
        float y = s[key] * one;
        if (!(y > best[last])) continue;
        int64_t j = last;
        for (; j > 0 && y > best[j - 1]; j--) best[j] = best[j - 1], keys[j] = keys[j - 1];
        best[j] = y, keys[j] = block_.lo + key;
      }
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
      Run hull, core;
      group.row(task_.b, x.h, x.q, &hull, &core);
      int64_t lo = most(hull.lo, block_.lo + begin_), hi = least(hull.hi, block_.lo + end_);
      F sum = zero();
      for (int64_t k = (lo - block_.lo) / W * W; lo < hi && block_.lo + k < hi; k += W) {
        int64_t key = block_.lo + k;
        int in = int(least<int64_t>(W, p_.Tk - key));
        uint64_t held = group.simple() ? Sight::word(hull, key, in)
                                       : group.word(task_.b, x.h, x.q, key, in);
        F e;
        if constexpr (PER == 1) e = load(w + k);
        else e = exp2<5>(fma(load(s + k), factor, from));
        sum = add(sum, pick(lanes(held, 0), e, zero()));
      }
      float& mass = masses_[row * survey_.groups + g];
      mass = mass * shrink + total(sum);
    }
  }

  // Pass 4: weighted sum. R queries x N vectors of values stay in registers over the keys of the
  // block; the old sums are rescaled and added at the end, by one FMA each.
  template <int R, int N>
  static void value_tile(const Unit* w, const Unit* v, int64_t steps, const float* shrink, float* o,
                         int64_t o_stride) {
    constexpr int STRIDE = PER == 1 ? S_STRIDE : P_STRIDE;
    F sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[r][n] = zero();
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; k++) {
      typename A::Vector x[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) x[n] = A::vector(v + (k * N + n) * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        auto y = A::broadcast(w[r * STRIDE + k]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[r][n] = A::mac(sum[r][n], y, x[n]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      F old = all(shrink[r]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        float* to = o + r * o_stride + n * W;
        store(to, fma(load(to), old, sum[r][n]));
      }
    }
  }
  using ValueTile = void (*)(const Unit*, const Unit*, int64_t, const float*, float*, int64_t);
  static ValueTile value_tiles(int rows, int vectors) {
    static constexpr auto table = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<ValueTile, sizeof...(i)>{{value_tile<i / VALUE_VECTORS + 1, i % VALUE_VECTORS + 1>...}};
    }(std::make_integer_sequence<int, VALUE_ROWS * VALUE_VECTORS>());
    return table.entry[(rows - 1) * VALUE_VECTORS + vectors - 1];
  }

  void weigh(int64_t i) {
    constexpr int STRIDE = PER == 1 ? S_STRIDE : P_STRIDE;
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    const Run& core = band_[i].core;
    if (special_ && !(core.lo <= block_.lo && core.hi >= block_.hi)) return weigh_with_care(i);
    for (int64_t j = 0; j < columns_; j++) {
      int width = column_width(j);
      for (int r = 0; r < rows; r += VALUE_ROWS) {
        int here = least(VALUE_ROWS, rows - r);
        Run run = seen_by(i * BAND + r, here);
        if (run.empty()) continue;
        int64_t from = run.lo / PER, to = (run.hi + PER - 1) / PER;
        value_tiles(here, width)(weights_ + r * STRIDE + from,
                                   column(v_, j) + from * width * W, to - from, shrink_ + r,
                                   o_ + (i * BAND + r) * o_stride_ + column_start(j) * W, o_stride_);
      }
    }
  }

  // The keys of this block that some of these rows see.
  Run seen_by(int64_t row, int n) const {
    Run run = {BLOCK, 0};
    for (int r = 0; r < n; r++) {
      const Run& hull = row_[row + r].hull;
      int64_t lo = most<int64_t>(hull.lo - block_.lo, 0);
      int64_t hi = least(hull.hi, block_.hi) - block_.lo;
      if (lo < hi) run = {least(run.lo, lo), most(run.hi, hi)};
    }
    return run;
  }

  // The block holds a NaN or an infinity that some row may not see, and 0 * NaN is NaN: every row
  // gets its own copy of the values, zeros where it may not look. Slow and rare.
  void weigh_with_care(int64_t i) {
    constexpr int STRIDE = PER == 1 ? S_STRIDE : P_STRIDE;
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * BAND + r];
      Run run = seen_by(i * BAND + r, 1);
      if (run.empty()) continue;
      int64_t from = run.lo / PER, to = (run.hi + PER - 1) / PER;
      for (int64_t u = from; u < to; u++) {
        uint64_t seen = sight_.word(task_.b, x.h, x.q, block_.lo + u * PER,
                                    int(least<int64_t>(PER, p_.Tk - block_.lo - u * PER)));
        for (int64_t j = 0; j < columns_; j++) {
          int64_t wide = column_width(j) * W;
          const Unit* v = column(v_, j) + u * wide;
          Unit* c = column(clean_, j) + u * wide;
          for (int64_t n = 0; n < wide; n++) c[n] = A::seen(v[n], seen);
        }
      }
      for (int64_t j = 0; j < columns_; j++)
        value_tiles(1, column_width(j))(weights_ + r * STRIDE + from, column(clean_, j) + from * column_width(j) * W,
                                      to - from, shrink_ + r,
                                      o_ + (i * BAND + r) * o_stride_ + column_start(j) * W, o_stride_);
    }
  }

  // Pass 5: sinks join, sums divide, rows leave.
  void finish() {
    for (int64_t i = 0; i < n_; i++) {
      const Row& r = row_[i];
      int64_t at = i / BAND * BAND_PAD + i % BAND;
      Ending end(p_, task_.b, r.h, max_[at], sum_[at]);
      E* out = (E*)p_.out.data + task_.b * p_.out.b + r.h * p_.out.h + r.q * p_.out.t;
      if (answers_) end.write(out, o_ + i * o_stride_, p_.Dv);
      end.write_lse(p_, task_.b, r.h, r.q);
      if (p_.survey) leave(r, i, at);
    }
  }

  static float* place(const Place& x, int64_t b, int64_t h, int64_t t) {
    return (float*)x.data + b * x.b + h * x.h + t * x.t;
  }
  template <class T> static T* place(const Grid& x, int64_t b, int64_t h, int64_t q) {
    return (T*)x.data + b * x.b + h * x.h + q * x.q;
  }

  void leave(const Row& r, int64_t row, int64_t at) const {
    int64_t b = task_.b, best = survey_.best, groups = survey_.groups;
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

  // --------------------------------------------------------------------------- the second sweep

  bool any_exact(const Tally& t) const {
    for (int64_t q = task_.query; t.exact.data && q < task_.query + task_.queries; q++)
      if (t.slot[q] >= 0) return true;
    return false;
  }

  // The bin of a position, and where a bin begins.
  static int64_t bin(int64_t at, int64_t size, int64_t bins) { return ((at + 1) * bins - 1) / size; }
  static int64_t bin_start(int64_t bin, int64_t size, int64_t bins) { return bin * size / bins; }

  // Pass 3 of the second sweep: weights, summed over the queries of a band that share a bin.
  void pool(const Tally& t, int64_t i) {
    int rows = int(least<int64_t>(BAND, n_ - i * BAND));
    F factor = all(logits_.factor());
    float minus[BAND], share[BAND], *exact[BAND];
    for (int r = 0; r < rows; r++) {
      const Row& x = row_[i * BAND + r];
      float m = *place(t.max, task_.b, x.h, x.q);
      minus[r] = m == NOTHING ? 0 : -m;
      share[r] = *place(t.share, task_.b, x.h, x.q);
      bool kept = t.exact.data && t.slot[x.q] >= 0;
      exact[r] = kept ? place<float>(t.exact, task_.b, x.h, t.slot[x.q]) + block_.lo : nullptr;
    }
    for (int r = 0, end; r < rows; r = end) {
      int64_t q = row_[i * BAND + r].q, into = t.map.data ? bin(q, p_.Tq, t.rows) : 0;
      int64_t next = t.map.data ? bin_start(into + 1, p_.Tq, t.rows) : p_.Tq;
      end = int(least<int64_t>(rows, r + next - q));
      for (int k = begin_; k < end_; k += W) {
        F sum = zero();
        for (int x = r; x < end; x++) {
          F w = mul(exp2<5>(fma(load(s_ + x * S_STRIDE + k), factor, all(minus[x]))), all(share[x]));
          sum = add(sum, w);
          if (exact[x]) store_part(exact[x] + k, w, int(least<int64_t>(W, block_.hi - block_.lo - k)));
        }
        store(bin_sums_ + k, sum);
        store(received_ + k, add(load(received_ + k), sum));
      }
      if (t.map.data) fold_into_map(t, place<float>(t.map, task_.b, task_.head, into));
    }
  }

  // Sums of columns, added up bin by bin.
  void fold_into_map(const Tally& t, float* row) const {
    int64_t key = block_.lo + lo_, end = block_.lo + hi_;
    for (int64_t j = bin(key, p_.Tk, t.cols), next; key < end; j++, key = next) {
      next = least(end, bin_start(j + 1, p_.Tk, t.cols));
      F sum = zero();
      for (int64_t k = key; k < next; k += W)
        sum = add(sum, load_part(bin_sums_ + (k - block_.lo), int(least<int64_t>(W, next - k))));
      row[j] += total(sum);
    }
  }

  void receive(const Place& x) const {
    float* to = place(x, task_.b, task_.head, block_.lo);
    for (int64_t k = 0; k < block_.hi - block_.lo; k += W) {
      int n = int(least<int64_t>(W, block_.hi - block_.lo - k));
      store_part(to + k, add(load_part(to + k, n), load(received_ + k)), n);
    }
  }

  const Problem& p_;
  TileTask task_;
  Sight sight_;
  Logits logits_;
  Survey survey_;
  bool answers_;
  int64_t n_, bands_, steps_, vectors_, columns_, o_stride_;
  size_t size_;
  Row* row_;
  Band* band_;
  float *max_, *sum_;       // per row, BAND_PAD apart per band; maxima in base 2
  Unit *q_, *k_, *v_, *clean_;
  float *o_, *s_;
  Unit* weights_;           // in float32 they overwrite their scores
  Run hull_, block_;
  int lo_, hi_;             // the band's keys of this block, counted from its start
  int begin_, end_;         // the same in whole vectors
  bool special_;
  float *moment_, *largest_, *masses_;
  int64_t* where_;
  alignas(64) float shrink_[BAND_PAD];
  alignas(64) float bin_sums_[BLOCK + W], received_[BLOCK + W];  // of one bin of queries; of all of them
  F tops_[BAND_PAD];
};

}  // namespace clearhead::CLEARHEAD_LEVEL
