// Decode: few queries. Keys and values are read once, in order, as they lie.
//
// What bounds it. A key and its value are (D + Dv) numbers from memory and, with R rows, the same
// count of multiply-adds times R: at 41 GB/s for two cores, 128 + 128 floats take 25 ns, in which
// one core does 3000 multiply-adds, 12 rows' worth. So nothing is packed, all rows of a key head
// (its query heads, and their few queries) share one read, and bytes per second is the measure.
//
// R rows x U keys make W dot products, which one tree of additions turns into one vector: lane
// r * U + u is row r and key u. Scores, maxima and weights stay in that order, so a vector of
// exponentials serves all rows at once.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

template <class A, int R> class Stream {
  using Unit = typename A::Unit;
  using E = typename A::Element;
  // The arithmetic of the weighted sum. One row stays with single values: the values of two keys read
  // side by side were 10 % slower from memory (bench/LOG.md, "two values at a time").
  using Mix = std::conditional_t<R == 1, Singles<E>, A>;
  using WeightUnit = typename Mix::Unit;
  static constexpr int PER = A::PER_UNIT, PER_WEIGHT = Mix::PER_UNIT;
  static constexpr int U = W / R;                       // keys per vector of scores
  static_assert(R <= W && W % R == 0 && U % PER_WEIGHT == 0);
  static constexpr int SIDE = R == 1 ? 1 : U;           // keys whose products run side by side
  static constexpr int BLOCK = 1024;                    // keys between two looks at the maximum
  static constexpr int EDGE = 64;                       // the same where not every row sees every key
  static constexpr int PIECE = 64 / sizeof(E);          // keys whose values stay in L1 over columns
  static constexpr int64_t LINE = 64 / sizeof(E);
  static constexpr int64_t AHEAD = 16384;               // bytes between asking for a row and its use
  static constexpr int64_t PAGE = 4096, OPENING = 256;  // bytes, of which the first are asked for
  // Vectors of values whose sums run side by side: as many as registers hold with a value each and a
  // weight. Few rows of float32 are bound by memory, which one pass over wide columns reads best
  // (bench/LOG.md, "columns that fit").
  static constexpr int COLUMNS = sizeof(E) == 4 && R <= 4 ? 8 : least(8, (REGISTERS - 1) / (R + 1));

 public:
  static size_t scratch(const Problem& p) {
    Cutter c(nullptr);
    Stream(p, {}, c);
    return c.used();
  }

  static void run(const Problem& p, const StreamTask& task, char* scratch) {
    Cutter c(scratch);
    Stream(p, task, c).walk();
  }

 private:
  Stream(const Problem& p, const StreamTask& task, Cutter& c)
      : p_(p), task_(task), sight_(p), logits_(p), heads_(p.H / p.G), n_(int(heads_ * p.Tq)) {
    d_vectors_ = (p.D + W * PER - 1) / (W * PER);
    v_vectors_ = (p.Dv + W - 1) / W;
    q_ = c.cut<Unit>(R * d_vectors_ * W);
    o_ = c.cut<float>(R * v_vectors_ * W);
    here_ = c.cut<float>(R * v_vectors_ * W);
    s_ = c.cut<float>(BLOCK * R);
    weights_ = PER_WEIGHT == 1 ? (WeightUnit*)s_ : c.cut<WeightUnit>(BLOCK * R / PER_WEIGHT);
  }

  int64_t head(int r) const { return task_.group * heads_ + r / p_.Tq; }
  int64_t query(int r) const { return r % p_.Tq; }
  const E* key_row(const Place& x, int64_t key) const {
    return place<E>(x, task_.b, task_.group, key);
  }

  // Memory is read as one sequence: the keys of a block, its values, the keys of the next block. Long
  // blocks let the processor's prefetchers keep to one stream, and rows are asked for 16 KB before their
  // use, so that memory and arithmetic run side by side (bench/LOG.md, "long blocks").
  void walk() {
    look();
    pack_queries();
    const int64_t rows_ahead = AHEAD / most<int64_t>(1, most(p_.D, p_.Dv) * int64_t(sizeof(E)));
    for (int64_t key = hull_.lo; key < hull_.hi; key = block_.hi) {
      full_ = core_.lo <= key && key < core_.hi;
      const int64_t end = full_ ? core_.hi : key < core_.lo ? core_.lo : hull_.hi;
      block_ = {key, least(key + (full_ ? BLOCK : EDGE), end)};
      count_ = int(block_.hi - block_.lo);
      same_ = int(most<int64_t>(0, count_ - rows_ahead) / PIECE * PIECE);
      if (!full_ && !any_row_sees()) continue;
      scores();
      softmax();
      weigh();
    }
    finish();
  }

  // Pass 0: what the rows see together, and what they all see.
  void look() {
    hull_ = NO_KEYS;
    core_ = {0, p_.Tk};
    for (int r = 0; r < n_; r++) {
      Run core;
      sight_.row(task_.b, head(r), query(r), {task_.key, task_.key_end}, &row_[r], &core);
      core_ = core_.cut(core);
      hull_.join(row_[r]);
    }
    core_ = core_.cut(hull_);
    const bool all = core_.lo == hull_.lo && core_.hi == hull_.hi;
    if (!all && core_.hi - core_.lo < EDGE) core_ = {hull_.hi, hull_.hi};  // not worth a block of its own
  }

  // Rows of several runs may see nothing of a block between two of them.
  bool any_row_sees() const {
    if (sight_.simple()) return true;
    for (int r = 0; r < n_; r++)
      if (!sight_.within(task_.b, head(r), query(r), block_).empty()) return true;
    return false;
  }

  // Pass 1: queries as whole vectors of units, padded with zeros in D and to R rows.
  void pack_queries() {
    for (int r = 0; r < R; r++) {
      Unit* to = q_ + r * d_vectors_ * W;
      const E* x = r < n_ ? place<E>(p_.q, task_.b, head(r), query(r)) : nullptr;
      for (int64_t d = 0; d < d_vectors_; d++) {
        int64_t at = d * W * PER;
        store((float*)to + d * W,
              x ? A::units(x + at, int(least<int64_t>(p_.D - at, W * PER))) : zero());
      }
    }
    for (int64_t i = 0; i < R * v_vectors_; i++) store(o_ + i * W, zero());
    max_ = all(NOTHING);
    sum_ = zero();
  }

  // Rows that will be read, asked for one by one.
  struct Ahead {
    const E* first;
    int64_t step, size, count;
    // One key wholly after another, without a gap: the processor's own prefetchers follow that by
    // themselves, but not into the next page. Asking for the first lines of each page is enough, and
    // asking for more is in their way (bench/LOG.md, "the first lines of a page").
    bool openings;

    void fetch(int64_t i, int64_t from, int64_t to) const {
      if (i >= count) return;
      const E* row = first + i * step;
      if (openings) {
        const int64_t past = uintptr_t(row) % PAGE, page = past < OPENING ? -past : PAGE - past;
        from = most(from, page / int64_t(sizeof(E)));
        to = least(to, (page + OPENING) / int64_t(sizeof(E)));
      }
      if (from < to) prefetch_row(row + from, to - from);
    }
  };

  // The rows to ask for while PIECE rows of the block, from its row k on, are computed with: of the same
  // matrix, or near the block's end of the next that is read, from its key `start` on.
  Ahead ahead(int k, const Place& same, int64_t same_size, const Place& next, int64_t next_size,
              int64_t start) const {
    const bool stay = k < same_;
    const Place& x = stay ? same : next;
    const int64_t size = stay ? same_size : next_size;
    const int64_t key = stay ? block_.hi + k - same_ : start + k - same_;
    const int64_t left = hull_.hi - key;
    return {left > 0 ? key_row(x, key) : nullptr, x.t, size, left, SIDE == 1 && x.t == size};
  }

  // Pass 2: scores of the block, SIDE keys by side. One row is bound by memory, and a key wholly after
  // another is one ascending stream, which the processor's prefetchers follow best. More rows are
  // bound by loads: side by side, a vector of queries in registers serves U keys (bench/LOG.md, "one
  // row after another" and "side by side").
  void scores() {
    const E* keys = key_row(p_.k, block_.lo);
    Ahead next{};
    for (int k = 0; k < count_; k += U) {
      if (k % PIECE == 0) next = ahead(k, p_.k, p_.D, p_.v, p_.Dv, block_.lo);
      F sum[W];
#pragma GCC unroll 1
      for (int u = 0; u < U; u += SIDE) some_keys(keys, k + u, sum + u, next);
      F s = totals(sum);
      if (!full_ || !logits_.plain() || k + U > count_) s = amend(s, block_.lo + k);
      store(s_ + k * R, s);
    }
  }

  void some_keys(const E* keys, int k, F* sum, const Ahead& next) const {
    const int64_t whole = p_.D / (W * PER);
    const int rest = int(p_.D - whole * W * PER);
    const E* key[SIDE];
    F part[R * SIDE];
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) {
      next.fetch(k % PIECE + i, 0, next.size);
      key[i] = keys + least(k + i, count_ - 1) * p_.k.t;  // past the end: masked below
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * SIDE; i++) part[i] = zero();
    for (int64_t d = 0; d < whole; d++) add_products(d, part, [&](int i) {
        return A::whole(key[i] + d * W * PER);
      });
    if (rest) add_products(whole, part, [&](int i) { return A::units(key[i] + whole * W * PER, rest); });
#pragma GCC unroll 16
    for (int i = 0; i < R * SIDE; i++) sum[i / SIDE * U + i % SIDE] = part[i];
  }
  // Vector d of every row times that of every key.
  template <class Load> void add_products(int64_t d, F* part, Load load_key) const {
    typename A::Vector y[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) y[r] = A::vector(q_ + (r * d_vectors_ + d) * W);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) {
      auto x = A::as_vector(load_key(i));
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) part[r * SIDE + i] = A::mac(part[r * SIDE + i], y[r], x);
    }
  }

  // What masks and biases do to one vector of scores: U keys of every row. Inlined, it would take registers
  // from the loop that calls it (measured: 1.04 to 1.08 of the time of 1024 keys).
  [[gnu::noinline]] F amend(F s, int64_t key) const {
    const int in = int(least<int64_t>(U, block_.hi - key));
    uint64_t seen = 0;
    for (int r = 0; r < least(R, n_); r++)
      seen |= (sight_.simple() ? Sight::word(row_[r], key, in)
                               : sight_.word(task_.b, head(r), query(r), key, in)) << r * U;
    if (!logits_.plain()) s = logits_of(s, key, in);
    return pick(lanes(seen, 0), s, all(NOTHING));
  }
  F logits_of(F s, int64_t key, int in) const {
    float lane[W];
    store(lane, s);
    for (int r = 0; r < least(R, n_); r++) {
      float some[W] = {};
      for (int u = 0; u < in; u++) some[u] = lane[r * U + u];
      store(some, logits_.apply(load(some), task_.b, head(r), query(r), key, in));
      for (int u = 0; u < in; u++) lane[r * U + u] = some[u];
    }
    return load(lane);
  }

  // Pass 3: softmax. Maxima are kept per row, repeated over its U lanes.
  void softmax() {
    F factor = all(logits_.factor()), t = all(NOTHING);
    for (int k = 0; k < count_; k += U) t = max(t, load(s_ + k * R));
    float lane[W];
    store(lane, t);
    for (int r = 0; r < R; r++) {
      float x = lane[r * U];
      for (int u = 1; u < U; u++) x = x > lane[r * U + u] ? x : lane[r * U + u];
      for (int u = 0; u < U; u++) lane[r * U + u] = x;
    }
    F after = max(max_, load(lane));
    F from = pick(same(after, all(NOTHING)), zero(), after);
    F shrink = exp2<5>(mul(sub(max_, from), factor)), sum = zero();
    max_ = after;
    for (int k = 0; k < count_; k += U) {
      F e = exp2<5>(mul(sub(load(s_ + k * R), from), factor));
      store(s_ + k * R, e);
      if constexpr (PER_WEIGHT > 1) Mix::keep((typename Mix::Weight*)weights_ + k * R, e);
      sum = add(sum, e);
    }
    sum_ = fma(sum_, shrink, sum);
    store(shrink_, shrink);
  }

  // Pass 4: weighted sum, piece by piece so that a value is read from memory once, then joined to
  // what came before. A block starts from 0, so a long row adds up in three chains, none of them long.
  void weigh() {
    for (int64_t i = 0; i < R * v_vectors_; i++) store(here_ + i * W, zero());
    for (int k = 0; k < count_; k += PIECE) {
      int n = least(PIECE, count_ - k);
      if (!full_)
        weigh_with_care(k, n);
      else
        for (int64_t j = 0; j < v_vectors_; j += COLUMNS)
          piece(j, int(least<int64_t>(COLUMNS, v_vectors_ - j)), k, n);
    }
    for (int r = 0; r < R; r++) {
      F old = all(shrink_[r * U]);
      for (int64_t j = 0; j < v_vectors_; j++) {
        int64_t at = (r * v_vectors_ + j) * W;
        store(o_ + at, fma(load(o_ + at), old, load(here_ + at)));
      }
    }
  }
  float weight(int r, int k) const { return s_[k / U * W + r * U + k % U]; }

  void piece(int64_t j, int width, int k, int n) {
    static constexpr auto pieces = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<void (Stream::*)(int64_t, int, int), sizeof...(i)>{{&Stream::columns<i + 1>...}};
    }(std::make_integer_sequence<int, COLUMNS>());
    (this->*pieces.entry[width - 1])(j, k, n);
  }
  template <int N> void columns(int64_t j, int k, int n) {
    int tail = int(p_.Dv - (j + N - 1) * W);
    F sum[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < N; c++) sum[r][c] = load(here_ + (r * v_vectors_ + j + c) * W);
    const E* x = key_row(p_.v, block_.lo + k) + j * W;
    // Of the rows ahead, the columns that are summed here.
    const Ahead next = ahead(k, p_.v, p_.Dv, p_.k, p_.D, block_.hi);
    const int64_t from = j * W, to = j + N < v_vectors_ ? least(from + N * W, next.size) : next.size;
    for (int i = k; i < k + n; i += PER_WEIGHT, x += PER_WEIGHT * p_.v.t) {
      const WeightUnit* w = weights_ + (i / U * W + i % U) / PER_WEIGHT;
      const E* odd = PER_WEIGHT > 1 && i + 1 < count_ ? x + p_.v.t : nullptr;
      for (int u = i; u < i + PER_WEIGHT; u++) next.fetch(u - k, from, to);
      typename Mix::Vector y[N];
#pragma GCC unroll 8
      for (int c = 0; c < N; c++)
        y[c] = Mix::as_vector(Mix::values(x + c * W, odd ? odd + c * W : odd,
                                      c + 1 < N || tail >= W ? W : tail));
      if (j == 0)  // the other columns of these rows: now, while the stream is here
        for (int64_t at = N * W; at < p_.Dv; at += LINE) {
          touch(x + at);
          if (odd) touch(odd + at);
        }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        auto a = Mix::broadcast(w[r * U / PER_WEIGHT]);
#pragma GCC unroll 8
        for (int c = 0; c < N; c++) sum[r][c] = Mix::mac(sum[r][c], a, y[c]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < N; c++) store(here_ + (r * v_vectors_ + j + c) * W, sum[r][c]);
  }

  // Some row may not look at some of these keys: every row takes only those it sees, because
  // 0 * NaN is NaN.
  void weigh_with_care(int k, int n) {
    for (int r = 0; r < n_; r++) {
      uint64_t seen = sight_.word(task_.b, head(r), query(r), block_.lo + k, n);
      for (int i = 0; i < n; i++) {
        if (!(seen >> i & 1)) continue;
        const E* x = key_row(p_.v, block_.lo + k + i);
        F a = all(weight(r, k + i));
        for (int64_t j = 0; j < v_vectors_; j++) {
          float* to = here_ + (r * v_vectors_ + j) * W;
          int part = int(least<int64_t>(W, p_.Dv - j * W));
          F y = part == W ? load(x + j * W) : load_part(x + j * W, part);
          store(to, fma(a, y, load(to)));
        }
      }
    }
  }

  // Pass 5: the only stretch writes its rows; one of many leaves (max, sum, out) for the merge.
  void finish() {
    float top_of[W], sum_of[W];
    store(top_of, max_);
    store(sum_of, sum_);
    for (int r = 0; r < n_; r++) {
      float sum = 0;
      for (int u = 0; u < U; u++) sum += sum_of[r * U + u];
      const float* o = o_ + r * v_vectors_ * W;
      if (!task_.state) {
        Ending end(p_, task_.b, head(r), top_of[r * U], sum, logits_.unit());
        end.write<E>(p_, task_.b, head(r), query(r), 0, o, p_.Dv);
        end.write_lse(p_, task_.b, head(r), query(r));
        continue;
      }
      float* state = task_.state + r * (p_.Dv + STATE_HEAD);
      state[0] = top_of[r * U];
      state[1] = sum;
      for (int64_t j = 0; j < p_.Dv; j++) state[STATE_HEAD + j] = o[j];
    }
  }

  const Problem& p_;
  StreamTask task_;
  Sight sight_;
  Logits logits_;
  int64_t heads_;
  int n_;
  int64_t d_vectors_, v_vectors_;
  Unit* q_;
  float *o_, *here_, *s_;   // here_: the weighted sum of this block alone
  WeightUnit* weights_;     // where the scores were; of pairs, rounded, in a place of their own
  Run row_[R];              // what each row sees, from end to end
  Run hull_, core_, block_;
  int count_, same_;        // keys of the block; while reading these, rows ahead are of the same matrix
  bool full_;
  F max_, sum_;
  alignas(64) float shrink_[W];
};

// Stretches of one key head, merged in order: the same order whoever computed them.
template <class E>
void merge_stretches(const Problem& p, int64_t b, int64_t group, int64_t stretches,
                     const float* states) {
  int64_t heads = p.H / p.G, rows = heads * p.Tq, row_size = p.Dv + STATE_HEAD;
  constexpr int64_t SLICE = 512;
  const Logits logits(p);
  for (int64_t r = 0; r < rows; r++) {
    int64_t h = group * heads + r / p.Tq, q = r % p.Tq;
    float max = NOTHING, sum = 0, share[MOST_STRETCHES];
    for (int64_t s = 0; s < stretches; s++) {
      float m = states[(s * rows + r) * row_size];
      if (m > max || m != m) max = m;
    }
    float base = max == NOTHING ? 0 : max;
    for (int64_t s = 0; s < stretches; s++) {
      const float* x = states + (s * rows + r) * row_size;
      share[s] = exp2_one((x[0] - base) * logits.factor());
      sum += x[1] * share[s];
    }
    Ending end(p, b, h, max, sum, logits.unit());
    for (int64_t j = 0; j < p.Dv; j += SLICE) {
      alignas(64) float o[SLICE + W] = {};
      int64_t n = least(SLICE, p.Dv - j);
      for (int64_t s = 0; s < stretches; s++) {
        const float* x = states + (s * rows + r) * row_size;
        for (int64_t i = 0; i < n; i++) o[i] += share[s] * x[STATE_HEAD + j + i];
      }
      end.write<E>(p, b, h, q, j, o, n);
    }
    end.write_lse(p, b, h, q);
  }
}

}  // namespace clearhead::CLEARHEAD_LEVEL
