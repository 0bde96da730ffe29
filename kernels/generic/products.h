// The two matrix products of attention as register tiles, and the memory layout of their operands.
//
// Scores, Q K^T (`score_tile`). Queries are in groups [D][SCORE_ROWS], so that one step of a tile
// reads one cache line. Keys are in panels [D][PANEL], so that a vector holds one coordinate of W
// keys. Weighted sum, P V (`value_tile`). Values are in columns [key][up to VALUE_VECTORS vectors].
// Weights are as the softmax stores them, a row per query, or transposed, a row per key.
#pragma once

#include <utility>

#include "arithmetic.h"
#include "functions.h"

namespace clearhead::CLEARHEAD_LEVEL {

template <class T, int n> struct Table { T entry[n]; };

// Splits rows of `size` numbers into columns of up to VALUE_VECTORS vectors. Widths differ by one
// at
// most: 5 = 3 + 2. `start` is called for every tile, so it needs no division.
struct Columns {
  int64_t vectors, count, least,
      n_wider;  // a column has `least` vectors, the first `n_wider` one more
  explicit Columns(int64_t size)
      : vectors((size + W - 1) / W), count((vectors + VALUE_VECTORS - 1) / VALUE_VECTORS),
        least(count ? vectors / count : 0), n_wider(vectors - count * least) {}
  int start(int64_t j) const { return int(j * least + min(j, n_wider)); }
  int width(int64_t j) const { return int(least + (j < n_wider)); }
  int64_t stride() const { return vectors * W; }
};

template <class A> struct Products {
  using Unit = typename A::Unit;
  static constexpr int PER_UNIT = A::PER_UNIT;
  static constexpr bool ROWS_ARE_UNITS = sizeof(typename A::Element) == sizeof(Unit);  // float32
  static constexpr int PANEL = SCORE_VECTORS * W;
  static constexpr int KEY_BLOCK = 192;  // keys; their scores of a query block are 18 KB, in L1
  static constexpr int64_t CHAIN = A::CHAIN;          // steps of one sum
  static constexpr int SCORE_STRIDE = KEY_BLOCK + W;  // floats; not a power of two, for L1's sets
  static constexpr int PAIR_STRIDE = (KEY_BLOCK + 32) / PER_UNIT;  // units
  static constexpr int WEIGHT_STRIDE = PER_UNIT == 1 ? SCORE_STRIDE : PAIR_STRIDE;
  static_assert(KEY_BLOCK % PANEL == 0 && KEY_BLOCK % 2 == 0 && PANEL <= 64);
  static_assert(QUERY_BLOCK % SCORE_ROWS == 0 && QUERY_BLOCK % VALUE_ROWS == 0);

  // Computes sum[r][n], the sum over the steps of number (r, step) of `x` times vector n of row
  // `step` of `y`. The R x N sums stay in registers; a step needs R + N loads.
  template <int R, int N> [[gnu::always_inline]] static void multiply(const Unit* x, int64_t x_row,
                                                                      int64_t x_step, const Unit* y,
                                                                      int64_t y_step, int64_t steps,
                                                                      F (&sum)[R][N]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[r][n] = zero();
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; k++) {
      typename A::Vector row[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) row[n] = A::vector(y + k * y_step + n * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        auto one = A::broadcast(x[r * x_row + k * x_step]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[r][n] = A::mac(sum[r][n], one, row[n]);
      }
    }
  }

  // Computes the scores of R queries x N vectors of keys, which stay in registers over all of D. A
  // sum over more than CHAIN steps is split into shorter sums, which round less (fp32, D = 512:
  // half the error). If a panel is unmasked, the row maxima are computed from the registers.
  // UNPACKED: the queries are rows, `q_row` apart, and not a group.
  template <bool UNPACKED, int R, int N> static void score_tile(const Unit* q, int64_t q_row,
                                                                const Unit* k, int64_t steps,
                                                                float* s, F* lane_max) {
    constexpr int STEP = UNPACKED ? 1 : SCORE_ROWS;
    int64_t from = 0;
    do {  // runs at least once: without steps the sums are zeros
      F sum[R][N];
      multiply(q + from * STEP, UNPACKED ? q_row : 1, STEP, k + from * PANEL, PANEL,
               min(steps - from, CHAIN), sum);
      const bool last = steps - from <= CHAIN;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
          float* to = s + r * SCORE_STRIDE + n * W;
          if (from) sum[r][n] = add(load(to), sum[r][n]);
          store(to, sum[r][n]);
        }
        if (lane_max && last) {
          F t = sum[r][0];
#pragma GCC unroll 4
          for (int n = 1; n < N; n++) t = max(t, sum[r][n]);
          store((float*)(lane_max + r), max(load((const float*)(lane_max + r)), t));
        }
      }
      from += CHAIN;
    } while (from < steps);
  }
  using ScoreTile = void (*)(const Unit*, int64_t, const Unit*, int64_t, float*, F*);
  static ScoreTile score_tile_for(bool unpacked, int rows, int vectors) {
    constexpr auto table = []<bool UNPACKED, int... i>(std::integer_sequence<int, i...>) {
      return Table<ScoreTile, sizeof...(i)>{
          {score_tile<UNPACKED, i / SCORE_VECTORS + 1, i % SCORE_VECTORS + 1>...}};
    };
    constexpr auto all = std::make_integer_sequence<int, SCORE_ROWS * SCORE_VECTORS>();
    static constexpr auto packed_tiles = table.template operator()<false>(all);
    const int i = (rows - 1) * SCORE_VECTORS + vectors - 1;
    if constexpr (ROWS_ARE_UNITS) {
      static constexpr auto unpacked_tiles = table.template operator()<true>(all);
      if (unpacked) return unpacked_tiles.entry[i];
    }
    return packed_tiles.entry[i];
  }

  // Computes R queries x N vectors of the weighted sum, which stay in registers over the keys of
  // the block. At the end one FMA each rescales and adds the old sums. TRANSPOSED: R keys, summed
  // over queries; the weights of a pair of queries are where the scores of its first query were.
  template <bool TRANSPOSED, int R, int N>
  static void value_tile(const Unit* w, const Unit* v, int64_t steps, const float* rescale,
                         float* o, int64_t o_stride) {
    constexpr int ROW = TRANSPOSED ? 1 : WEIGHT_STRIDE;
    constexpr int STEP = TRANSPOSED ? PER_UNIT * SCORE_STRIDE : 1;
    F sum[R][N];
    multiply(w, ROW, STEP, v, N * W, steps, sum);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      F old = splat(rescale[r]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        float* to = o + r * o_stride + n * W;
        store(to, fma(load(to), old, sum[r][n]));
      }
    }
  }
  using ValueTile = void (*)(const Unit*, const Unit*, int64_t, const float*, float*, int64_t);
  template <bool TRANSPOSED = false> static ValueTile value_tile_for(int rows, int vectors) {
    static constexpr auto table = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<ValueTile, sizeof...(i)>{
          {value_tile<TRANSPOSED, i / VALUE_VECTORS + 1, i % VALUE_VECTORS + 1>...}};
    }(std::make_integer_sequence<int, VALUE_ROWS * VALUE_VECTORS>());
    return table.entry[(rows - 1) * VALUE_VECTORS + vectors - 1];
  }

  // Computes the same sums from float32 rows of values, `v_row` apart, adds the old ones if `adds`,
  // and multiplies by a factor.
  template <bool TRANSPOSED, int R, int N>
  static void row_tile(const Unit* w, const Unit* v, int64_t v_row, int64_t steps, bool adds,
                       float factor, float* o, int64_t o_stride) {
    F sum[R][N];
    multiply(w, TRANSPOSED ? 1 : SCORE_STRIDE, TRANSPOSED ? SCORE_STRIDE : 1, v, v_row, steps, sum);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        float* to = o + r * o_stride + n * W;
        if (adds) sum[r][n] = add(load(to), sum[r][n]);
        store(to, mul(sum[r][n], splat(factor)));
      }
  }
  using RowTile = void (*)(const Unit*, const Unit*, int64_t, int64_t, bool, float, float*,
                           int64_t);
  template <bool TRANSPOSED> static RowTile row_tile_for(int rows, int vectors) {
    static constexpr auto table = []<int... i>(std::integer_sequence<int, i...>) {
      return Table<RowTile, sizeof...(i)>{
          {row_tile<TRANSPOSED, i / VALUE_VECTORS + 1, i % VALUE_VECTORS + 1>...}};
    }(std::make_integer_sequence<int, VALUE_ROWS * VALUE_VECTORS>());
    return table.entry[(rows - 1) * VALUE_VECTORS + vectors - 1];
  }
};

}  // namespace clearhead::CLEARHEAD_LEVEL
