// The structs that cross the boundary from Python, and what one instruction-set level implements.
//
// Letters, as everywhere in clearhead: B batch, H query heads, G key/value heads (query head i
// reads key head i / (H / G)), Tq queries, Tk keys, D head size, Dv value size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace clearhead {

// The element types of q, k, v, out and bias. bf16 and half only hold the bits here; the levels
// know how to load and store them (generic/dtype.h maps a Dtype to its C++ type).
enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16, DTYPES };
constexpr const char* DTYPE_NAMES[DTYPES] = {"float32", "bfloat16", "float16"};
struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

// All structs below consist of members of 8 bytes, so that Python packs each with `struct.pack`.
// fields.h lists their members in order and tells Python.

// A tensor (b, h, t, ...) whose last dimension is contiguous; t counts queries or keys. Strides
// are in elements; a stride of 0 broadcasts. `data` is null where a tensor is optional and absent.
struct TensorView {
  void* data;
  int64_t b, h, t;
};

// A tensor (b, h, q, x) with any stride; x counts keys, or whatever the member says.
struct MatrixView {
  const void* data;
  int64_t b, h, q, x;
};

// A query may attend to a key that lies in one of its key ranges [lo, hi) and whose bit is set.
// Without `lo`, query q has the one range [q - before, q + after].
struct Mask {
  int64_t before, after;
  int64_t ranges;     // how many ranges lo and hi hold for each query
  MatrixView lo, hi;  // int64
  MatrixView bits;    // uint8, 0 or 1
};

// A group of keys, whose weights are summed. With `factors`, float32 (b, h, k), the weight of a key is
// multiplied by its number.
struct Group { Mask mask; TensorView factors; };

// Statistics of every row (query) that the forward sweep over the keys can leave beside the output:
// float32 (b, h, q); `max` and `sum` always, the others where their `data` is not null.
// With s the raw scores, m their maximum and y = (s - m) * logit_scale / ln 2 (Level::logit_scale):
struct RowStats {
  TensorView max, sum, moment;      // m, sum of 2^y, sum of 2^y y
  int64_t n_top;                    // how many of the largest scores to keep
  TensorView top_offsets;           // float32 (b, h, k): added to the scores first, or null
  MatrixView top_scores, top_keys;  // (b, h, q, n_top), keys int64; unused entries are -inf and -1
  int64_t n_groups;
  MatrixView group_sums;  // (b, h, q, n_groups): sum of 2^y * factor over the keys of a group
  const Group* groups;
};

// Sums of finished weights w = 2^y * share, added up by a second sweep. Optional ones may be null.
struct WeightSums {
  TensorView max, share;       // float32 (b, h, q), from RowStats
  TensorView received;         // float32 (b, h, k): sum of w over the queries
  int64_t map_rows, map_cols;  // bin i of n holds the positions from floor(i T / n) on
  MatrixView map;              // float32 (b, h, map_rows, map_cols): sum of w over a bin's pairs
  TensorView map_factors;      // float32 (b, h, k): what w is multiplied by in `map`, or null
  const int64_t* exact_row;    // for each query, the row of `exact` for its weights, or -1
  MatrixView exact;            // float32 (b, h, n, k)
};

// Gradients of the outputs, which are given, and of the inputs, which are added to: buffers of
// zeros, float32 except that dq has the dtype of q where `key_splits` is 1. dk and dv are per query
// head; the caller sums the heads that share a key head. An output that was not used has null data;
// without a gradient of `out`, Dv is 0.
struct Gradients {
  TensorView dout;       // like out
  TensorView dlse;       // float32 (b, h, q), of the log-sum-exp
  TensorView dw_log_w;   // float32 (b, h, q), of sum of w ln w over the keys, as a sum over each w
  TensorView dreceived;  // float32 (b, h, k), of sum of w over the queries, likewise
  TensorView delta;      // float32 (b, h, q), written here: dout . out - dlse
  TensorView dq;         // (b, h, q), one for each of `key_splits`, `dq_split_stride` apart
  int64_t key_splits, dq_split_stride;
  TensorView dk, dv;      // (b, h, k)
  MatrixView dbias;       // null if not needed; a stride of 0 sums over that dimension
  int64_t of_these_keys;  // 1: out and lse are `attend`'s of these keys; 0: of more keys, maybe
};

struct Problem {
  int64_t B, H, G, Tq, Tk, D, Dv;
  int64_t dtype;            // of q, k, v and out
  TensorView q, k, v, out;  // without `out` only statistics: v is not read, and Dv may be 0
  TensorView lse;           // float64 (b, h, q), see `log_unit`; null if not needed
  TensorView rounding;      // like out: the output minus its rounded value; null if not needed
  double scale;             // of Q K^T
  double softcap;           // cap * tanh(s / cap); 0 means none
  Mask mask;
  MatrixView bias;  // added to the capped scores
  int64_t bias_dtype;
  MatrixView slopes;  // float32 (b, h): ALiBi, adds -slope * |q + slopes_shift - k|
  int64_t slopes_shift;
  MatrixView sinks;  // float32 (b, h): a logit that takes weight and gives no value
  double dropout;    // the probability that a weight is dropped
  int64_t seed;
  const RowStats* row_stats;  // null, or statistics to compute as well; not with dropout
};

constexpr int QUERY_BLOCK = 24;  // queries that are computed together against a block of keys
constexpr int64_t MAX_KEY_SPLITS = 32;  // of one decode

// Prefill: a range of queries, of some heads that share a key head, against all keys.
struct PrefillTask { int64_t b, head, heads, query, queries; };

// Decode: one split of the keys against all queries of one key head (split-KV, Flash-Decoding).
// `state` receives (max, sum, out) of every row, or is null when there is only one split.
constexpr int64_t STATE_HEADER = 2;  // numbers of a row before its out
struct DecodeTask {
  int64_t b, key_head, key, key_end;
  float* state;
  bool page_starts;  // prefetches_within_pages()
};

// Weight sums: all queries of one head against a range of keys that no other task has.
struct WeightSumsTask { int64_t b, head, key, key_end; };

// Backward: some queries of one head against one split of the keys.
struct BackwardTask { int64_t b, head, key, key_end, split, query, queries; };

// The functions of one level. None prints, throws, aborts or allocates; scratch is passed in.
struct Level {
  const char* name;
  const char* what;
  int64_t max_decode_rows;  // rows that one decode task can have: a lane for each
  size_t (*prefill_scratch)(const Problem&, int64_t rows);
  void (*prefill)(const Problem&, const PrefillTask&, char* scratch);
  size_t (*decode_scratch)(const Problem&);
  void (*decode)(const Problem&, const DecodeTask&, char* scratch);
  void (*merge_splits)(const Problem&, int64_t b, int64_t key_head, int64_t splits,
                       const float* states);
  size_t (*weight_sums_scratch)(const Problem&);
  void (*sum_weights)(const Problem&, const WeightSums&, const WeightSumsTask&, char* scratch);
  size_t (*backward_scratch)(const Problem&);
  int64_t (*backward_rows)(const Problem&);  // how many queries one task may have
  void (*deltas)(const Problem&, const Gradients&, int64_t b, int64_t h);
  void (*backward)(const Problem&, const Gradients&, const BackwardTask&, char* scratch);
  double (*logit_scale)(const Problem&);  // what turns a raw score into a natural logit
  // For the benchmark's peak rates: FLOP in `rounds` rounds on registers, and a sum over memory.
  double (*fma_rounds)(int64_t rounds);
  double (*dot_rounds)(int64_t rounds);  // null where there is no bf16 dot product
  double (*read)(const char* bytes, size_t count);
};

extern const Level SCALAR_LEVEL;
#if defined(__x86_64__)
extern const Level AVX2_LEVEL, AVX512_LEVEL, AVX512BF16_LEVEL;
#elif defined(__aarch64__)
extern const Level NEON_LEVEL;
#endif

enum Code { DONE, BAD_SIZES, BAD_GROUPS, BAD_DTYPE, BAD_RANGES, NO_MEMORY, NO_LEVEL, INTERRUPTED };

// The calling thread calls this now and then while it works; true ends the call early, with the
// results incomplete. Null if there is nothing to check.
extern bool (*interrupted)();

Code attend(const Problem& problem);
Code sum_weights(const Problem& problem, const WeightSums& sums);
Code backward(const Problem& problem, const Gradients& gradients);
const char* describe(int code);  // what a code means, as a sentence

}  // namespace clearhead
