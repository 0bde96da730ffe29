// Queries in bands against the keys in blocks, up to the scores: what the answer (prefill.h), the second
// sweep (weight_sums.h) and the way back (backward.h) have in common.
//
// A task has some queries of one or several heads that share a key head; they are its rows, BAND of
// them a band. It walks over blocks of BLOCK keys. A band takes a block where a row of it sees a key:
// its scores (18 KB) stay in L1.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

// Where a row of a tensor lies.
template <class T = float> inline T* place(const Place& x, int64_t b, int64_t h, int64_t t) {
  return (T*)x.data + b * x.b + h * x.h + t * x.t;
}
template <class T> inline T* place(const Grid& x, int64_t b, int64_t h, int64_t q) {
  return (T*)x.data + b * x.b + h * x.h + q * x.q;
}

template <class A> class Bands : protected Products<A> {
 protected:
  using Base = Products<A>;
  using typename Base::Unit;
  using Base::BLOCK, Base::PANEL, Base::PER, Base::S_STRIDE;
  using Base::score_tiles;
  using E = typename A::Element;
  static constexpr int BAND_PAD = (BAND + W - 1) / W * W;

  struct Row {
    int64_t h, q;
    Run hull, core;
    Run here;    // what it sees of a block (and beyond, if the mask is simple) lies in this run,
    bool whole;  // and it sees all of it
  };
  struct Band {
    Run hull, core;
    int64_t next;  // no row sees a key between the last block and this one
  };

  Bands(const Problem& p, const TileTask& task, Cutter& c, int64_t rows)
      : p_(p), task_(task), sight_(p), logits_(p), n_(rows) {
    bands_ = (n_ + BAND - 1) / BAND;
    steps_ = units(p.D);
    row_ = c.cut<Row>(n_);
    band_ = c.cut<Band>(bands_);
    q_ = c.cut<Unit>(bands_ * BAND * steps_);
    k_ = c.cut<Unit>(BLOCK * steps_);
    s_ = c.cut<float>(BAND * S_STRIDE);
  }

  static int64_t units(int64_t size) { return (size + PER - 1) / PER; }

  // Does this band see any key of the block? If so, lo_ to hi_ are what it sees.
  bool meets(int64_t i) {
    Run seen = band_[i].hull.cut(block_);
    if (seen.empty() || band_[i].next >= block_.hi) return false;
    if (!sight_.simple()) seen = look_closer(i);
    lo_ = int(seen.lo - block_.lo);
    hi_ = int(seen.hi - block_.lo);
    return !seen.empty();
  }
  // What every row of a band sees of the block, and all of them together; if that is nothing, where to
  // look again.
  Run look_closer(int64_t i) {
    Band& band = band_[i];
    Row *first = row_ + i * BAND, *end = row_ + least((i + 1) * BAND, n_);
    Run seen = NO_KEYS;
    for (Row* x = first; x < end; x++) {
      const Run part = x->hull.cut(block_);
      x->here = part.empty() ? part : sight_.within(task_.b, x->h, x->q, part, &x->whole);
      seen.join(x->here);
    }
    if (seen.empty()) {
      band.next = p_.Tk;
      for (Row* x = first; x < end; x++)
        band.next = least(band.next, sight_.next(task_.b, x->h, x->q, block_.hi));
    }
    return seen;
  }
  bool any_band_meets() {
    for (int64_t i = 0; i < bands_; i++)
      if (meets(i)) return true;
    return false;
  }

  // Pass 0: what every row sees of these keys, and what the bands and the task see together.
  void look(const Run& keys) {
    hull_ = NO_KEYS;
    for (int64_t i = 0; i < bands_; i++) band_[i] = {NO_KEYS, {0, p_.Tk}, 0};
    for (int64_t i = 0; i < n_; i++) {
      Row& r = row_[i];
      Band& band = band_[i / BAND];
      r.h = task_.head + i / task_.queries;
      r.q = task_.query + i % task_.queries;
      sight_.row(task_.b, r.h, r.q, keys, &r.hull, &r.core);
      r.here = r.hull;
      r.whole = sight_.simple();
      prefetch_row(at(p_.q, r), p_.D);
      band.core = band.core.cut(r.core);
      band.hull.join(r.hull);
      hull_.join(r.hull);
    }
  }

  // Where a row's part of a tensor over (b, h, q) lies, and a key's of one over (b, g, k).
  const E* at(const Place& x, const Row& r) const {
    return place<E>(x, task_.b, r.h, r.q);
  }
  const E* key_row(const Place& x, int64_t key) const {
    int64_t g = task_.head / (p_.H / p_.G);
    return place<E>(x, task_.b, g, key);
  }
  // Pass 1a: rows of queries (or of what comes back to them), as groups; a transposition makes W /
  // SCORE_ROWS of them. Past the last row it stands again, and is not read.
  void pack_groups(const Place& x, int64_t size, Unit* to_all) const {
    constexpr int SR = SCORE_ROWS, GROUPS = W / SR;
    static_assert(W % SR == 0);
    int64_t steps = units(size);
    for (int64_t first = 0; first < n_; first += W) {
      const E* row[W];
      for (int r = 0; r < W; r++) row[r] = at(x, row_[least(first + r, n_ - 1)]);
      int groups = int(least<int64_t>(GROUPS, (n_ - first + SR - 1) / SR));
      Unit* to = to_all + first * steps;
      for (int64_t d = 0; d < size; d += W * PER, to += W * SR) {
        int part = int(least<int64_t>(size - d, W * PER)), here = (part + PER - 1) / PER;
        F y[W];
        if (part == W * PER) {
#pragma GCC unroll 16
          for (int r = 0; r < W; r++) y[r] = A::whole(row[r] + d);
        } else {
          for (int r = 0; r < W; r++) y[r] = A::units(row[r] + d, part);
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

  // Pass 1b: the keys of a block (or their values), transposed: panels. Keys past the end are zeros.
  void pack_panels(const Place& x, int64_t size, Unit* to_all) const {
    int from = int(most<int64_t>(hull_.lo - block_.lo, 0)) / W * W;
    int count = int(block_.hi - block_.lo);
    int64_t step = x.t, steps = units(size);
    for (int k = from; k < count; k += W) {
      Unit* to = to_all + k / PANEL * (steps * PANEL) + k % PANEL;
      const E* key = key_row(x, block_.lo + k);
      int there = count - k;
      for (int64_t d = 0; d < size; d += W * PER, to += W * PANEL) {
        int part = int(least<int64_t>(size - d, W * PER));
        F y[W];
        if (there >= W && part == W * PER) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) y[i] = A::whole(key + d + i * step);
        } else {
          for (int i = 0; i < W; i++)
            y[i] = i < there ? A::units(key + d + i * step, part) : zero();
        }
        transpose(y);
        int here = int(least<int64_t>(W, steps - d / PER));
        if (here == W) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) store((float*)to + i * PANEL, y[i]);
        } else {
          for (int i = 0; i < here; i++) store((float*)to + i * PANEL, y[i]);
        }
      }
    }
  }

  // Pass 2: the scores of a band and a block (logits.h); -infinity where a row may not look. The maxima
  // of rows are left in the lanes of `tops_`.
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
      uint64_t word[BAND], all_see = ~uint64_t(0);
      if (!full)
        for (int r = 0; r < rows; r++) {
          const Row& x = row_[i * BAND + r];
          word[r] = x.whole ? Sight::word(x.here, key, seen)
                            : sight_.word(task_.b, x.h, x.q, key, seen);
          all_see &= word[r];
        }
      full = !(~all_see << (64 - width));
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
      float* bend = bend_ ? bend_ + (s - s_) + n : nullptr;
      F y = logits_.apply(load(s + n), task_.b, x.h, x.q, key + n, in, bend);
      y = pick(lanes(word, n), y, all(NOTHING));
      store(s + n, y);
      t = max(t, y);
    }
    *tops = t;
  }

  // The keys of this block that some of these rows see, counted from its start.
  Run seen_by(int64_t row, int n) const {
    Run all = NO_KEYS;
    for (int r = 0; r < n; r++) all.join(row_[row + r].here.cut(block_));
    return {all.lo - block_.lo, all.hi - block_.lo};
  }

  const Problem& p_;
  TileTask task_;
  Sight sight_;
  Logits logits_;
  int64_t n_, bands_, steps_;
  Row* row_;
  Band* band_;
  Unit *q_, *k_;
  float* s_;
  float* bend_ = nullptr;   // if set: what a soft cap leaves of a change of each score of `s_`
  Run hull_, block_;
  int lo_, hi_;             // the band's keys of this block, counted from its start
  int begin_, end_;         // the same in whole vectors
  F tops_[BAND_PAD];
};

}  // namespace clearhead::CLEARHEAD_LEVEL
