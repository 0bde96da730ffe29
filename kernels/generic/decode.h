// Decode: few queries. Keys and values are read once, in order, without packing.
//
// The limit of the speed. A key and its value are D + Dv numbers from memory, and R (D + Dv)
// multiply-adds for R rows. At 41 GB/s for two cores, 128 + 128 floats take 25 ns. In this time one
// core computes 3000 multiply-adds, enough for 12 rows. So memory bandwidth is the limit: nothing
// is packed, and all rows of a key head (its query heads, and their few queries) use one read.
//
// R rows x U keys are W dot products. One tree of additions reduces them to one vector, whose lane
// r * U + u belongs to row r and key u. Scores, maxima and weights have the same order, so one
// vector of exponentials is for all rows.
#pragma once

#include "arithmetic.h"
#include "blocks.h"
#include "epilogue.h"
#include "logits.h"
#include "mask.h"
#include "memory.h"
#include "products.h"

namespace clearhead::CLEARHEAD_LEVEL {

// Unrolled steps of the loop over D. With short vectors, the loop itself takes a tenth of the time.
constexpr bool SHORT = W < 16;
constexpr int D_UNROLL = SHORT ? 4 : 1;

// A is the arithmetic of the queries, and C the type of the stored keys and values.
template <class A, int R, class C = typename A::Element> class Decode {
  using Unit = typename A::Unit;
  using E = typename A::Element;
  static constexpr bool BLOCKED = Blocks<C>;
  using Raw = typename Rows<C>::Raw;  // what strides of keys and values count
  // The arithmetic of the weighted sum. One row uses single values, because reading the values of
  // two keys together was 10 % slower from memory (bench/LOG.md, "two values at a time").
  using Values = std::conditional_t<R == 1, Singles<E>, A>;
  using WeightUnit = typename Values::Unit;
  static constexpr int PER_UNIT = A::PER_UNIT, PER_WEIGHT = Values::PER_UNIT;
  static constexpr int U = W / R;  // keys per vector of scores
  static_assert(R <= W && W % R == 0 && U % PER_WEIGHT == 0);
  // Keys whose products are computed together. A key of one row is one chain of additions. With
  // short vectors its latency would limit 16-bit types, so there a step has two keys.
  static constexpr int KEYS_PER_STEP = R > 1 ? U : SHORT && sizeof(Raw) < 4 ? 2 : 1;
  static constexpr int KEY_BLOCK = 1024;  // keys between two updates of the maximum
  static constexpr int EDGE_BLOCK = 64;   // the same, if some row does not see every key
  // Keys whose values stay in L1 across columns. Short vectors take more passes over them, and each
  // pass has instructions of its own, so with several rows a piece is longer.
  static constexpr int PIECE = BLOCKED ? 64 : (SHORT && R > 1 ? 128 : 64) / sizeof(E);
  // The type of an index of keys that is divided by U. Unsigned division takes 5 instructions and
  // signed division 12, in a loop with 12 multiply-adds.
  using Index = std::conditional_t<R == 1, int, unsigned>;
  static constexpr int64_t AHEAD = 16384;  // bytes between the prefetch of a row and its use
  // Vectors of values that are summed together: as many as the registers hold, with one value for
  // each and a weight. With 32 registers, few rows of float32 are limited by memory, which is read
  // best in one pass over wide columns. With 16 registers they would be limited by sums that are
  // stored and loaded (bench/LOG.md, "columns that fit", "what AVX2 alone shows").
  static constexpr bool WIDE = REGISTERS >= 32 && sizeof(E) == 4 && R <= 4;
  // In float32 the sum of each piece starts from 0, so that no sum is long. In 16-bit types the
  // output's rounding exceeds that of 1024 additions, and the additional additions would cost time.
  static constexpr bool SHORT_SUMS = sizeof(E) == 4;
  static constexpr int FITTING = WIDE ? 8 : min(8, (REGISTERS - 1) / (R + 1));
  // A pass over blocks reads entire ones, if it can.
  static constexpr int COLUMNS =
      BLOCKED && FITTING > BLOCK_VECTORS ? FITTING / BLOCK_VECTORS * BLOCK_VECTORS : FITTING;
  // With 16 registers, the columns of one row take several passes, and the last one is narrow.
  // In 16 bits, the values of 8 keys are instead added to one column after another, so memory is
  // read nearly in ascending order, and a sum is loaded and stored once for 8 keys. That takes 0.80
  // to 0.97 of the time from memory with D = 128 (bench/LOG.md, "eight values at a time"). The
  // weights of several rows would not fit into the registers.
  static constexpr bool IN_ORDER = R == 1 && REGISTERS == 16 && sizeof(E) == 2;
  static constexpr int KEYS_IN_ORDER = 8;
  static constexpr int VECTORS = IN_ORDER ? FastValues<E>::VECTORS : 1;  // loaded together

 public:
  static size_t scratch(const Problem& p) {
    Arena arena(nullptr);
    Decode(p, {}, arena);
    return arena.used();
  }

  static void run(const Problem& p, const DecodeTask& task, char* scratch) {
    Arena arena(scratch);
    Decode(p, task, arena).compute();
  }

 private:
  Decode(const Problem& p, const DecodeTask& task, Arena& arena)
      : p_(p), task_(task), mask_(p), logits_(p), heads_(p.H / p.G), n_rows_(int(heads_ * p.Tq)) {
    d_vectors_ = (p.D + W * PER_UNIT - 1) / (W * PER_UNIT);
    v_vectors_ = (p.Dv + W * VECTORS - 1) / (W * VECTORS) * VECTORS;
    q_ = arena.allocate<Unit>(R * d_vectors_ * W);
    o_ = arena.allocate<float>(R * v_vectors_ * W);
    block_sum_ = arena.allocate<float>(R * v_vectors_ * W);
    s_ = arena.allocate<float>(KEY_BLOCK * R);
    weights_ =
        PER_WEIGHT == 1 ? (WeightUnit*)s_ : arena.allocate<WeightUnit>(KEY_BLOCK * R / PER_WEIGHT);
  }

  int64_t head(int r) const { return task_.key_head * heads_ + r / p_.Tq; }
  int64_t query(int r) const { return r % p_.Tq; }
  const Raw* key_row(const TensorView& x, int64_t key) const {
    return row_at<Raw>(x, task_.b, task_.key_head, key);
  }

  // Memory is read in sequence: the keys of a block, its values, the keys of the next block. With
  // long blocks the processor's prefetchers follow one stream. Rows are prefetched 16 KB before
  // their use, so that memory and arithmetic overlap (bench/LOG.md, "long blocks").
  void compute() {
    find_ranges();
    pack_queries();
    const int64_t row_bytes = Rows<C>::raw_size(max(p_.D, p_.Dv)) * int64_t(sizeof(Raw));
    const int64_t rows_ahead = AHEAD / max<int64_t>(1, row_bytes);
    for (int64_t key = hull_.lo; key < hull_.hi; key = key_block_.hi) {
      full_ = core_.lo <= key && key < core_.hi;
      const int64_t end = full_ ? core_.hi : key < core_.lo ? core_.lo : hull_.hi;
      key_block_ = {key, min(key + (full_ ? KEY_BLOCK : EDGE_BLOCK), end)};
      count_ = int(key_block_.size());
      same_until_ = int(max<int64_t>(0, count_ - rows_ahead) / PIECE * PIECE);
      if (!full_ && !any_row_sees()) continue;
      scores();
      softmax();
      weighted_sum();
    }
    finish();
  }

  // Pass 0: finds the keys that some row sees (hull), and those that all rows see (core).
  void find_ranges() {
    hull_ = NO_KEYS;
    core_ = {0, p_.Tk};
    for (int r = 0; r < n_rows_; r++) {
      KeyRange core;
      mask_.hull_and_core(task_.b, head(r), query(r), {task_.key, task_.key_end}, &hull_of_[r],
                          &core);
      core_ = core_.intersect(core);
      hull_.include(hull_of_[r]);
    }
    core_ = core_.intersect(hull_);
    const bool all = core_.lo == hull_.lo && core_.hi == hull_.hi;
    if (!all && core_.size() < EDGE_BLOCK) core_ = {hull_.hi, hull_.hi};  // too short for a block
  }

  // Whether some row sees a key of the block. None does between two ranges of the mask.
  bool any_row_sees() const {
    if (mask_.one_range()) return true;
    for (int r = 0; r < n_rows_; r++)
      if (!mask_.visible_hull(task_.b, head(r), query(r), key_block_).empty()) return true;
    return false;
  }

  // Pass 1: packs queries as vectors of units, padded with zeros in D and to R rows.
  void pack_queries() {
    for (int r = 0; r < R; r++) {
      Unit* to = q_ + r * d_vectors_ * W;
      const E* x = r < n_rows_ ? row_at<E>(p_.q, task_.b, head(r), query(r)) : nullptr;
      for (int64_t d = 0; d < d_vectors_; d++) {
        int64_t at = d * W * PER_UNIT;
        store((float*)to + d * W,
              x ? A::load_units(x + at, int(min<int64_t>(p_.D - at, W * PER_UNIT))) : zero());
      }
    }
    for (int64_t i = 0; i < R * v_vectors_; i++) store(o_ + i * W, zero());
    max_ = splat(-INF);
    sum_ = zero();
  }

  // The rows to prefetch next.
  struct UpcomingRows {
    const Raw* first;
    int64_t step, size, count;
    bool page_starts;

    void prefetch(int64_t i) const {
      if (i >= count) return;
      if (page_starts) prefetch_page_start(first + i * step, size);
      else prefetch_row(first + i * step, size);
    }
  };

  // Returns the rows to prefetch during the PIECE rows from row k of the block: rows of the same
  // matrix, or near the block's end rows of the matrix that is read next, from key `start`.
  UpcomingRows upcoming(int k, const TensorView& current, int64_t current_size,
                        const TensorView& next, int64_t next_size, int64_t start) const {
    const bool same_matrix = k < same_until_;
    const TensorView& x = same_matrix ? current : next;
    const int64_t size = Rows<C>::raw_size(same_matrix ? current_size : next_size);
    const int64_t key = same_matrix ? key_block_.hi + k - same_until_ : start + k - same_until_;
    const int64_t left = hull_.hi - key;
    const bool whole_lines = W == 16 && KEYS_PER_STEP == 1 && x.t == size;
    return {left > 0 ? key_row(x, key) : nullptr, x.t, size, left,
            whole_lines && task_.page_starts};
  }

  // Pass 2: computes the scores of the block, KEYS_PER_STEP keys together. One row is limited by
  // memory. Reading one key after another is one ascending stream, which the processor's
  // prefetchers follow best. More rows are limited by loads. With several keys together, a vector
  // of queries in registers is used for U keys (bench/LOG.md, "one row after another" and "side by
  // side").
  void scores() {
    const Raw* keys = key_row(p_.k, key_block_.lo);
    UpcomingRows next{};
    for (int k = 0; k < count_; k += U) {
      if (k % PIECE == 0) next = upcoming(k, p_.k, p_.D, p_.v, p_.Dv, key_block_.lo);
      F sum[W];
#pragma GCC unroll 1
      for (int u = 0; u < U; u += KEYS_PER_STEP) dot_products(keys, k + u, sum + u, next);
      F s = totals(sum);
      if (!full_ || !logits_.unmodified() || k + U > count_)
        s = apply_mask_and_bias(s, key_block_.lo + k);
      store(s_ + k * R, s);
    }
  }

  void dot_products(const Raw* keys, int k, F* sum, const UpcomingRows& next) const {
    const int64_t full_vectors = p_.D / (W * PER_UNIT);
    const int rest = int(p_.D - full_vectors * W * PER_UNIT);
    const Raw* key[KEYS_PER_STEP];
    F part[R * KEYS_PER_STEP];
#pragma GCC unroll 16
    for (int i = 0; i < KEYS_PER_STEP; i++) {
      next.prefetch(k % PIECE + i);
      key[i] = keys + min(k + i, count_ - 1) * p_.k.t;  // keys past the end are masked later
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * KEYS_PER_STEP; i++) part[i] = zero();
    if constexpr (BLOCKED) {
      add_blocks(part, key);
    } else {
#pragma GCC unroll D_UNROLL
      for (int64_t d = 0; d < full_vectors; d++)
        add_products(d, part, [&](int i) { return A::load_units(key[i] + d * W * PER_UNIT); });
      if (rest)
        add_products(full_vectors, part, [&](int i) {
          return A::load_units(key[i] + full_vectors * W * PER_UNIT, rest);
        });
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * KEYS_PER_STEP; i++)
      sum[i / KEYS_PER_STEP * U + i % KEYS_PER_STEP] = part[i];
  }
  void add_blocks(F* part, const Raw** key) const {
    const int64_t blocks = p_.D / BLOCK;
    for (int64_t n = 0; n < blocks; n++) {
      F scale[KEYS_PER_STEP];
#pragma GCC unroll 16
      for (int i = 0; i < KEYS_PER_STEP; i++) scale[i] = splat_half(key[i] + n * C::BYTES);
#pragma GCC unroll 8
      for (int v = 0; v < BLOCK_VECTORS; v++)
        add_products(n * BLOCK_VECTORS + v, part,
                     [&](int i) { return C::vector(key[i] + n * C::BYTES, v, scale[i]); });
    }
  }
  // Adds the products of vector d of every row and every key.
  template <class Load> void add_products(int64_t d, F* part, Load load_key) const {
    typename A::Vector y[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) y[r] = A::vector(q_ + (r * d_vectors_ + d) * W);
#pragma GCC unroll 16
    for (int i = 0; i < KEYS_PER_STEP; i++) {
      auto x = A::as_vector(load_key(i));
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        part[r * KEYS_PER_STEP + i] = A::mac(part[r * KEYS_PER_STEP + i], y[r], x);
    }
  }

  // Applies cap, bias and mask to one vector of scores: U keys of every row. If inlined, it would
  // take registers from the calling loop (measured: 1.04 to 1.08 of the time of 1024 keys).
  [[gnu::noinline]] F apply_mask_and_bias(F s, int64_t key) const {
    const int in = int(min<int64_t>(U, key_block_.hi - key));
    uint64_t visible = 0;
    for (int r = 0; r < min(R, n_rows_); r++)
      visible |= (mask_.one_range() ? MaskView::visible_bits(hull_of_[r], key, in)
                                    : mask_.visible_bits(task_.b, head(r), query(r), key, in))
                 << r * U;
    if (!logits_.unmodified()) s = logits_of(s, key, in);
    return select(lanes(visible, 0), s, splat(-INF));
  }
  F logits_of(F s, int64_t key, int in) const {
    float lane[W];
    store(lane, s);
    for (int r = 0; r < min(R, n_rows_); r++) {
      float some[W] = {};
      for (int u = 0; u < in; u++) some[u] = lane[r * U + u];
      store(some, logits_.apply(load(some), task_.b, head(r), query(r), key, in));
      for (int u = 0; u < in; u++) lane[r * U + u] = some[u];
    }
    return load(lane);
  }

  // Pass 3: computes the softmax. The maximum of a row is stored in each of its U lanes.
  void softmax() {
    F log2_scale = splat(logits_.log2_scale()), t = splat(-INF);
    for (int k = 0; k < count_; k += U) t = max(t, load(s_ + k * R));
    float lane[W];
    store(lane, t);
    for (int r = 0; r < R; r++) {
      float x = lane[r * U];
      for (int u = 1; u < U; u++) x = x > lane[r * U + u] ? x : lane[r * U + u];
      for (int u = 0; u < U; u++) lane[r * U + u] = x;
    }
    F after = max(max_, load(lane));
    F from = select(equal(after, splat(-INF)), zero(), after);
    F rescale = exp2<5>(mul(sub(max_, from), log2_scale)), sum = zero();
    max_ = after;
    for (int k = 0; k < count_; k += U) {
      F e = exp2<5>(mul(sub(load(s_ + k * R), from), log2_scale));
      store(s_ + k * R, e);
      if constexpr (PER_WEIGHT > 1)
        Values::store_weights((typename Values::Weight*)weights_ + k * R, e);
      sum = add(sum, e);
    }
    sum_ = fma(sum_, rescale, sum);
    store(rescale_, rescale);
  }

  // Pass 4: computes the weighted sum piece by piece, so that a value is read from memory once, and
  // adds it to that of the previous blocks. The sum of a block starts from 0, as does that of a
  // piece of float32, so a long row is summed in levels of short sums.
  void weighted_sum() {
    for (int64_t i = 0; i < R * v_vectors_; i++) store(block_sum_ + i * W, zero());
    for (int k = 0; k < count_; k += PIECE) {
      int n = min(PIECE, count_ - k);
      if (!full_) weighted_sum_masked(k, n);
      else if constexpr (IN_ORDER) weighted_sum_in_order(k, n);
      else
        for (int64_t j = 0; j < v_vectors_; j += COLUMNS)
          piece(j, int(min<int64_t>(COLUMNS, v_vectors_ - j)), k, n);
    }
    for (int r = 0; r < R; r++) {
      F old = splat(rescale_[r * U]);
      for (int64_t j = 0; j < v_vectors_; j++) {
        int64_t at = (r * v_vectors_ + j) * W;
        store(o_ + at, fma(load(o_ + at), old, load(block_sum_ + at)));
      }
    }
  }
  float weight(int r, int k) const { return s_[k / U * W + r * U + k % U]; }

  // FULL: the last column is full. With short vectors, testing that at every key takes 5 % of the
  // time.
  void piece(int64_t j, int width, int k, int n) {
    static constexpr auto in_full = [](int i) { return SHORT && i >= COLUMNS; };
    static constexpr auto pieces = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<void (Decode::*)(int64_t, int, int), sizeof...(i)>{
          {&Decode::columns<i % COLUMNS + 1, in_full(i)>...}};
    }(std::make_integer_sequence<int, 2 * COLUMNS>());
    const int first = SHORT && p_.Dv >= (j + width) * W ? COLUMNS : 0;
    const int entry = first + width - 1;
    (this->*pieces.entry[entry])(j, k, n);
  }
  template <int N, bool FULL> void columns(int64_t j, int k, int n) {
    int tail = int(p_.Dv - (j + N - 1) * W);
    if constexpr (FULL) tail = W;
    F sum[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < N; c++)
        sum[r][c] = SHORT_SUMS ? zero() : load(block_sum_ + (r * v_vectors_ + j + c) * W);
    const Raw* x = key_row(p_.v, key_block_.lo + k) + (BLOCKED ? 0 : j * W);
    // Every pass over the piece prefetches a part of the rows, so that memory is always busy.
    // Several rows are limited by arithmetic, and the time of a pass is proportional to its
    // columns. One row is limited by memory, and its passes prefetch equal parts.
    const UpcomingRows next = upcoming(k, p_.v, p_.Dv, p_.k, p_.D, key_block_.hi);
    constexpr int64_t SHARE = R == 1 ? COLUMNS : 1;
    const int64_t shares = (v_vectors_ + SHARE - 1) / SHARE;
    int64_t row = n * (j / SHARE) / shares;
    const int64_t rows_end = n * ((j + N + SHARE - 1) / SHARE) / shares;
    for (int i = k; i < k + n; i += PER_WEIGHT, x += PER_WEIGHT * p_.v.t) {
      const Index at = Index(i);
      const WeightUnit* w = weights_ + (at / U * W + at % U) / PER_WEIGHT;
      const Raw* odd = PER_WEIGHT > 1 && i + 1 < count_ ? x + p_.v.t : nullptr;
      for (int u = 0; u < PER_WEIGHT && row < rows_end; u++) next.prefetch(row++);
      typename Values::Vector y[N];
      if constexpr (BLOCKED) {
        Rows<C>::template load<N>(x, j, y);
      } else {
#pragma GCC unroll 8
        for (int c = 0; c < N; c++)
          y[c] = Values::as_vector(Values::load_values(x + c * W, odd ? odd + c * W : odd,
                                                       c + 1 < N || tail >= W ? W : tail));
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        auto a = Values::broadcast(w[r * U / PER_WEIGHT]);
#pragma GCC unroll 8
        for (int c = 0; c < N; c++) sum[r][c] = Values::mac(sum[r][c], a, y[c]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < N; c++) {
        float* to = block_sum_ + (r * v_vectors_ + j + c) * W;
        store(to, SHORT_SUMS ? add(load(to), sum[r][c]) : sum[r][c]);
      }
  }

  // Sums a piece with hidden keys: every row adds only the values that it sees, as 0 * NaN is NaN.
  void weighted_sum_masked(int k, int n) {
    for (int r = 0; r < n_rows_; r++) {
      uint64_t visible = mask_.visible_bits(task_.b, head(r), query(r), key_block_.lo + k, n);
      for (int i = 0; i < n; i++) {
        if (!(visible >> i & 1)) continue;
        if constexpr (IN_ORDER) {
          add_values<1>(k + i, {}, 0);
          continue;
        }
        const Raw* x = key_row(p_.v, key_block_.lo + k + i);
        F a = splat(weight(r, k + i));
        for (int64_t j = 0; j < v_vectors_; j++) {
          float* to = block_sum_ + (r * v_vectors_ + j) * W;
          F y;
          if constexpr (BLOCKED) {
            Rows<C>::template load<1>(x, j, &y);
          } else {
            int part = in_vector(p_.Dv - j * W);
            y = part == W ? load(x + j * W) : load_part(x + j * W, part);
          }
          store(to, fma(a, y, load(to)));
        }
      }
    }
  }

  void weighted_sum_in_order(int k, int n) {
    const UpcomingRows next = upcoming(k, p_.v, p_.Dv, p_.k, p_.D, key_block_.hi);
    int i = 0;
    for (; i + KEYS_IN_ORDER <= n; i += KEYS_IN_ORDER) add_values<KEYS_IN_ORDER>(k + i, next, i);
    for (; i < n; i++) add_values<1>(k + i, next, i);
  }
  // Adds KEYS values to the sums, and prefetches the upcoming rows from `row`, one after each
  // column: all of them at once took up to 1.1 of the time with D = 64.
  template <int KEYS>
  [[gnu::always_inline]] void add_values(int k, const UpcomingRows& next, int64_t row) {
    constexpr int STEP = VECTORS * W;
    const E* x[KEYS];
    F a[KEYS];
#pragma GCC unroll 16
    for (int u = 0; u < KEYS; u++) {
      x[u] = key_row(p_.v, key_block_.lo + k + u);
      a[u] = splat(weight(0, k + u));
    }
    auto add_columns = [&](int64_t j, int n) {
      F sum[VECTORS], y[VECTORS];
#pragma GCC unroll 2
      for (int c = 0; c < VECTORS; c++) sum[c] = load(block_sum_ + j + c * W);
#pragma GCC unroll 16
      for (int u = 0; u < KEYS; u++) {
        FastValues<E>::load_all(x[u] + j, n, y);
#pragma GCC unroll 2
        for (int c = 0; c < VECTORS; c++) sum[c] = fma(a[u], y[c], sum[c]);
      }
#pragma GCC unroll 2
      for (int c = 0; c < VECTORS; c++) store(block_sum_ + j + c * W, sum[c]);
    };
    const int64_t end = row + KEYS;
    int64_t j = 0;
    for (; j + STEP <= p_.Dv; j += STEP) {
      if (row < end) next.prefetch(row++);
      add_columns(j, STEP);
    }
    if (j < p_.Dv) add_columns(j, int(p_.Dv - j));
    while (row < end) next.prefetch(row++);
  }

  // Pass 5: writes the rows, or, if the keys are split, the state (max, sum, out) for the merge.
  void finish() {
    float max_of[W], sum_of[W];
    store(max_of, max_);
    store(sum_of, sum_);
    for (int r = 0; r < n_rows_; r++) {
      float sum = 0;
      for (int u = 0; u < U; u++) sum += sum_of[r * U + u];
      float* o = o_ + r * v_vectors_ * W;
      if constexpr (IN_ORDER)
        for (int64_t j = 0; j < v_vectors_; j += VECTORS) FastValues<E>::put_in_order(o + j * W);
      if (!task_.state) {
        RowEpilogue end(p_, task_.b, head(r), max_of[r * U], sum, logits_.logit_scale());
        end.write<E>(p_, task_.b, head(r), query(r), 0, o, p_.Dv, end.scale());
        end.write_lse(p_, task_.b, head(r), query(r));
        continue;
      }
      float* state = task_.state + r * (p_.Dv + STATE_HEADER);
      state[0] = max_of[r * U];
      state[1] = sum;
      for (int64_t j = 0; j < p_.Dv; j++) state[STATE_HEADER + j] = o[j];
    }
  }

  const Problem& p_;
  DecodeTask task_;
  MaskView mask_;
  Logits logits_;
  int64_t heads_;
  int n_rows_;
  int64_t d_vectors_, v_vectors_;
  Unit* q_;
  float *o_, *block_sum_, *s_;  // block_sum_: the weighted sum of this block only
  WeightUnit* weights_;         // they overwrite the scores; rounded pairs have their own memory
  KeyRange hull_of_[R];         // the visible keys of each row
  KeyRange hull_, core_, key_block_;
  int count_;       // keys of the block
  int same_until_;  // the first key whose upcoming rows are in the next matrix
  bool full_;
  F max_, sum_;
  alignas(64) float rescale_[W];
};

// Merges the splits of one key head in order, so that the threads have no influence.
template <class E> void merge_splits_of(const Problem& p, int64_t b, int64_t key_head,
                                        int64_t splits, const float* states) {
  int64_t heads = p.H / p.G, rows = heads * p.Tq, row_size = p.Dv + STATE_HEADER;
  constexpr int64_t SLICE = 512;
  const Logits logits(p);
  for (int64_t r = 0; r < rows; r++) {
    int64_t h = key_head * heads + r / p.Tq, q = r % p.Tq;
    float row_max = -INF, sum = 0, share[MAX_KEY_SPLITS];
    for (int64_t s = 0; s < splits; s++) {
      float m = states[(s * rows + r) * row_size];
      if (m > row_max || m != m) row_max = m;
    }
    float base = row_max == -INF ? 0 : row_max;
    for (int64_t s = 0; s < splits; s++) {
      const float* x = states + (s * rows + r) * row_size;
      share[s] = exp2_one((x[0] - base) * logits.log2_scale());
      sum += x[1] * share[s];
    }
    RowEpilogue end(p, b, h, row_max, sum, logits.logit_scale());
    for (int64_t j = 0; j < p.Dv; j += SLICE) {
      alignas(64) float o[SLICE + W] = {};
      int64_t n = min(SLICE, p.Dv - j);
      for (int64_t s = 0; s < splits; s++) {
        const float* x = states + (s * rows + r) * row_size;
        for (int64_t i = 0; i < n; i++) o[i] += share[s] * x[STATE_HEADER + j + i];
      }
      end.write<E>(p, b, h, q, j, o, n, end.scale());
    }
    end.write_lse(p, b, h, q);
  }
}

}  // namespace clearhead::CLEARHEAD_LEVEL
