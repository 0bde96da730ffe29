// The structs that Python passes to the core, and the functions of one instruction-set level.
//
// Letters, as everywhere in clearhead: B batch, H query heads, G key/value heads (query head i
// reads key head i / (H / G)), Tq queries, Tk keys, D head size, Dv value size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace clearhead {

// The element types of q, k, v, out and bias. bf16 and half only hold bits here; the levels load
// and store them (generic/dtype.h maps a Dtype to its C++ type).
enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16, DTYPES };
constexpr const char* DTYPE_NAMES[DTYPES] = {"float32", "bfloat16", "float16"};
// How keys and values are stored: in the dtype of q, or, with float32 q, in blocks of ggml
// (generic/blocks.h). Strides of blocks are in bytes.
enum Stored : int64_t { STORED_AS_QUERIES, STORED_Q8_0, STORED_Q4_0, STORED };
constexpr const char* STORED_NAMES[STORED] = {"", "q8_0", "q4_0"};
constexpr int64_t BLOCK_NUMBERS = 32, BLOCK_BYTES[STORED] = {0, 34, 18};
struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

// A tensor (b, h, t, ...) whose last dimension is contiguous; t counts queries or keys. Strides are
// in elements; a stride of 0 broadcasts. `data` is null if an optional tensor is absent.
struct TensorView {
  void* data;
  int64_t b, h, t;
};

// A tensor (b, h, q, x) with any stride; x counts keys, or what the member's comment names.
struct MatrixView {
  const void* data;
  int64_t b, h, q, x;
};

// A query may attend to a key that is in one of its key ranges [lo, hi) and whose bit is set.
// Without `lo`, query q has the single range [q - before, q + after].
struct Mask {
  int64_t before, after;
  int64_t ranges;     // the number of ranges of each query in lo and hi
  MatrixView lo, hi;  // int64
  MatrixView bits;    // uint8, 0 or 1
};

// A group of keys whose weights are summed: those in `mask`, and with ids only the keys whose id
// equals that of the query. With `factors`, each weight is multiplied by the factor of its key.
struct Group {
  Mask mask;
  TensorView query_ids;  // float32 (b, h, q), whole numbers, or null
  TensorView key_ids;    // float32 (b, h, k), or null
  TensorView factors;    // float32 (b, h, k), or null
  TensorView sums;       // float32 (b, h, q), contiguous queries: receives the sums
  bool of_weights;       // the sums are of weights, and otherwise of 2^y (RowStats)
};

// Statistics of every row (query) that the forward sweep can compute in addition to the output,
// float32 (b, h, q). Each is computed if `data` is not null. s are the raw scores, m is their
// maximum, y = (s - m) * logit_scale / ln 2 (Level::logit_scale).
struct RowStats {
  TensorView max, sum, moment;       // accumulators that merge: m, sum of 2^y, sum of 2^y y
  TensorView largest, lse, entropy;  // finished, in nats, with the sink in lse and weights
  int64_t n_top;                     // how many of the largest scores to keep
  TensorView top_offsets;            // float32 (b, h, k): added to the scores first, or null
  MatrixView top_scores, top_keys;   // (b, h, q, n_top), keys int64; unused entries are -inf and -1
  bool top_weights;  // top_scores receives weights (times 2^offset) instead of scores
  int64_t n_groups;
  const Group* groups;
};

// Sums of weights w, to which a sweep adds. Each output may be null.
struct WeightSums {
  TensorView received;         // float32 (b, h, k): sum of w over the queries
  int64_t map_rows, map_cols;  // bin i of n starts at position floor(i T / n)
  MatrixView map;              // float32 (b, h, map_rows, map_cols): sum of w over a bin's pairs
  TensorView map_factors;      // float32 (b, h, k): what w is multiplied by in `map`, or null
  const int64_t* exact_row;    // for each query, the row of `exact` for its weights, or -1
  MatrixView exact;            // float32 (b, h, n, k)
};

// The n largest parts of every query by absolute value, the largest first, and their keys, float32
// and int64 (b, h, q, n); 0 and -1 if there are fewer. A part is the weight of a key times the
// product of its value and the query's direction.
struct LargestParts {
  TensorView directions;  // (b, h, q), with Dv numbers
  int64_t n;
  MatrixView parts, keys;
};

// Numbers that compare the weights of each query with those of another attention, float32
// (b, h, q). It reads the keys k' = k - v: the values of the problem are differences of keys, with
// Dv = D, or have no numbers if the keys are the same.
struct Divergence {
  Mask other;  // the keys that the other attention sees, among those of the problem
  Mask exact;  // and those that it reads as they are, of which the difference does not count
  TensorView kl, reverse_kl, mass, lost;
  TensorView largest;  // the largest logit; NaN if a number is NaN
};

// Gradients of the outputs, and of the inputs. The gradient of an unused output has null data.
// Without a gradient of `out`, Dv is 0. Those of the inputs are written; only dbias is added, to a
// buffer of zeros. dq has the dtype of q if `key_splits` is 1, and is float32 otherwise, when the
// caller adds the splits. `head_dk` and `head_dv` are contiguous float32 for each query head. dk
// and dv, in the dtype of q, are their sums over the query heads of a key head. They may be the
// same memory.
struct Gradients {
  TensorView dout;       // like out
  TensorView dlse;       // float32 (b, h, q): of the log-sum-exp;
  TensorView dw_log_w;   // float32 (b, h, q): of the sum of w ln w over the keys;
  TensorView dreceived;  // float32 (b, h, k): of the sum of w over the queries.
  TensorView delta;      // float32 (b, h, q), written here: dout . out - dlse
  TensorView dq;         // (b, h, q), for each of `key_splits`, `dq_split_stride` apart
  int64_t key_splits, dq_split_stride;
  TensorView head_dk, head_dv;  // (b, h, k)
  TensorView dk, dv;            // (b, g, k)
  MatrixView dbias;             // null if not needed; a stride of 0 sums over its dimension
  int64_t of_these_keys;  // 1: `attend` computed out and lse from these keys; 0: maybe from more
};

struct Problem {
  int64_t B, H, G, Tq, Tk, D, Dv;
  int64_t dtype;            // of q, k, v and out
  int64_t stored;           // a Stored: of k and v
  TensorView q, k, v, out;  // without `out` only statistics: v is not read, and Dv may be 0
  TensorView lse;           // float64 (b, h, q), see `log_unit`; null if not needed
  TensorView float_lse;     // the same, rounded to float32; null if not needed
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
  const WeightSums* sums;     // null, or with row_stats, the sums to add weights to
};

constexpr int QUERY_BLOCK = 24;         // queries that are computed together over a block of keys
constexpr int64_t MAX_KEY_SPLITS = 32;  // in one decode

// Prefill, largest parts or divergence: a range of queries of some heads with the same key head, over all keys.
struct PrefillTask { int64_t b, head, heads, query, queries; };

// Decode: all queries of one key head over one split of the keys (split-KV, Flash-Decoding).
// `state` receives (max, sum, out) of every row; it is null if there is only one split.
constexpr int64_t STATE_HEADER = 2;  // numbers of a row before `out`
struct DecodeTask {
  int64_t b, key_head, key, key_end;
  float* state;
  bool page_starts;  // prefetches_within_pages()
};

// Backward: some queries of one head over one split of the keys.
struct BackwardTask { int64_t b, head, key, key_end, split, query, queries; };

// The functions of one level. They do not print, throw, abort or allocate; the caller passes
// scratch memory.
struct Level {
  const char* name;
  const char* what;
  int64_t max_decode_rows;  // the most rows of a decode task: a lane for each
  size_t (*prefill_scratch)(const Problem&, int64_t rows);
  void (*prefill)(const Problem&, const PrefillTask&, char* scratch);
  // Adds to Problem::sums after a prefill, of which the scratch has the weights.
  void (*add_sums)(const Problem&, const PrefillTask&, char* scratch);
  size_t (*decode_scratch)(const Problem&);
  void (*decode)(const Problem&, const DecodeTask&, char* scratch);
  void (*merge_splits)(const Problem&, int64_t b, int64_t key_head, int64_t splits,
                       const float* states);
  size_t (*largest_parts_scratch)(const Problem&, const LargestParts&, int64_t rows);
  void (*list_parts)(const Problem&, const LargestParts&, const PrefillTask&, char* scratch);
  size_t (*divergence_scratch)(const Problem&, const Divergence&, int64_t rows);
  void (*diverge)(const Problem&, const Divergence&, const PrefillTask&, char* scratch);
  size_t (*backward_scratch)(const Problem&);
  int64_t (*backward_rows)(const Problem&);  // the most queries of a backward task
  void (*deltas)(const Problem&, const Gradients&, int64_t b, int64_t h);
  void (*backward)(const Problem&, const Gradients&, const BackwardTask&, char* scratch);
  void (*sum_heads)(const Problem&, const Gradients&, int64_t b, int64_t key_head);
  double (*logit_scale)(const Problem&);  // the factor from a raw score to a natural logit
  // For the benchmark's peak rates: the FLOP of `rounds` rounds in registers, and a sum over
  // memory.
  double (*fma_rounds)(int64_t rounds);
  double (*dot_rounds)(int64_t rounds);  // null without a bf16 dot product
  double (*read)(const char* bytes, size_t count);
};

extern const Level SCALAR_LEVEL;
#if defined(__x86_64__)
extern const Level AVX2_LEVEL, AVX512_LEVEL, AVX512BF16_LEVEL;
#elif defined(__aarch64__)
extern const Level NEON_LEVEL;
#endif

enum Code {
  DONE,
  BAD_SIZES,
  BAD_GROUPS,
  BAD_DTYPE,
  BAD_RANGES,
  BAD_TENSOR,
  NO_DATA,
  NO_MEMORY,
  NO_LEVEL,
  INTERRUPTED
};

// The calling thread calls this regularly while it works. If it returns true, the call ends early,
// with incomplete results. Null if there is nothing to check.
extern bool (*interrupted)();

Code attend(const Problem& problem);
int64_t block_rows();  // the most rows of a key head for `attend` with keys in blocks
Code largest_parts(const Problem& problem, const LargestParts& parts);  // float32
Code diverge(const Problem& problem, const Divergence& divergence);     // float32
Code backward(const Problem& problem, const Gradients& gradients);
const char* describe(int code);  // the meaning of a code

}  // namespace clearhead
