// The question that crosses the boundary, and what one instruction-set level answers it with.
//
// Letters, as everywhere in clearhead: B batch, H query heads, G key/value heads (query head i
// reads key head i / (H / G)), Tq queries, Tk keys, D head size, Dv value size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace clearhead {

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// bfloat16 and float16 are only carried here; arithmetic is the levels' business.
struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

// Where a tensor lies. Strides are counted in elements; a stride of 0 repeats (broadcasts).
// `t` steps over queries or keys; the last dimension of q, k, v and out is contiguous.
struct Place { void* data; int64_t b, h, t; };

// A tensor over (b, h, q, x) where x is keys or runs. `data` is null where there is none.
struct Grid {
  const void* data;
  int64_t b, h, q, x;
};

// Who sees whom. A query sees a key if one of its runs [lo, hi) holds it and the bits agree.
// Without `lo`, query q sees the run [q - before, q + after].
struct Mask {
  int64_t before, after;
  int64_t runs;             // how many runs a query has in lo and hi
  Grid lo, hi;              // int64
  Grid bits;                // uint8, 0 or 1
};

// What the one sweep over the keys can tell about its rows besides their output: float32 over
// (b, h, q); `max` and `sum` always, the rest null where it is not wanted. With s the scores, of which
// `unit` makes natural logits, m their maximum and y = (s - m) unit / ln 2, a row leaves m, sum 2^y,
// and sum 2^y y.
struct Survey {
  Place max, sum, moment;
  int64_t best;             // how many of the largest scores are wanted
  Grid largest, where;      // (b, h, q, best): they, and their keys as int64; -inf and -1 past the last
  int64_t groups;
  Grid masses;              // (b, h, q, groups): sum 2^y over the keys that a group holds
  const Mask* group;
};

// What a second sweep adds up once the rows are known: w = 2^y share. Null where not wanted.
struct Tally {
  Place max, share;         // float32 (b, h, q)
  Place received;           // float32 (b, h, k): sum of w over the queries
  int64_t rows, cols;       // bins of the map; bin i of n holds the positions from floor(i T / n) on
  Grid map;                 // float32 (b, h, rows, cols): sum of w over the pairs of a bin
  const int64_t* slot;      // of every query: which row of `exact` its weights go to, or -1
  Grid exact;               // float32 (b, h, n, k)
};

// What comes back, and where the gradients go: zeros before, and float32 but for dq, which is like q
// where it has one part. dk and dv are those of one query head; what heads share a key head for is
// summed by the caller. Null is what was not used; where nothing comes back of the output, Dv is 0.
struct Gradient {
  Place dout;               // like out
  Place dlse;               // float32 (b, h, q), of the log-sum-exp
  Place dlog;               // float32 (b, h, q), of the sum over the keys of w ln w, each w by itself
  Place dreceived;          // float32 (b, h, k), of the sum over the queries of w, likewise
  Place delta;              // float32 (b, h, q), left here: dout . out - dlse
  Place dq;                 // (b, h, q) for each of `parts` stretches of keys, `dq_part` apart
  int64_t parts, dq_part;
  Place dk, dv;             // (b, h, k)
  Grid dbias;               // null if not wanted; a stride of 0 sums over that dimension
};

// One POD struct, every member 8 bytes wide, so that Python packs it with one `struct.pack`.
struct Problem {
  int64_t B, H, G, Tq, Tk, D, Dv;
  int64_t dtype;            // of q, k, v and out
  Place q, k, v, out;       // without `out` there is no answer, and v is not read (Dv may be 0)
  Place lse;                // float64 (b, h, q), see `log_unit`; null if not wanted
  Place rounding;           // like out: what rounding took from it; null if not wanted
  double scale;             // of Q K^T
  double softcap;           // cap * tanh(s / cap); 0 means none
  Mask mask;
  Grid bias;                // added to the capped scores
  int64_t bias_dtype;
  Grid slopes;              // float32, (b, h): adds -slope * |q + slopes_shift - k|
  int64_t slopes_shift;
  Grid sinks;               // float32, (b, h): a logit that takes weight and gives no value
  double dropout;           // the probability that a weight is dropped
  int64_t seed;
  const Survey* survey;     // null, or what else the sweep is to leave; not with dropout
};

constexpr int BAND = 24;      // queries that meet a block of keys together
constexpr int64_t MOST_STRETCHES = 32;  // of the keys of a decode

// Prefill: all keys against one block of queries of some heads that share a key head.
struct TileTask { int64_t b, head, heads, query, queries; };

// Decode: one stretch of keys against all the queries of one key head (split keys, as in Flash-Decoding).
// `state` is where the stretch leaves (max, sum, out) of every row, or null when the stretch is the only one.
constexpr int64_t STATE_HEAD = 2;  // numbers of a row before its out
struct StreamTask { int64_t b, group, key, key_end; float* state; };

// The second sweep: all queries of one head against one stretch of keys, which no other task has.
struct TallyTask { int64_t b, head, key, key_end; };

// The way back: some queries of one head against one stretch of keys, whose turn it is.
struct BackwardTask { int64_t b, head, key, key_end, part, query, queries; };

// What a level can do. Nothing here prints, throws, aborts or allocates; scratch is handed in.
struct Level {
  const char* name;
  const char* what;
  int64_t most_stream_rows;  // rows that one stream of keys can serve: a lane for each
  size_t (*tile_scratch)(const Problem&, int64_t rows);
  void (*tile)(const Problem&, const TileTask&, char* scratch);
  size_t (*stream_scratch)(const Problem&);
  void (*stream)(const Problem&, const StreamTask&, char* scratch);
  void (*merge)(const Problem&, int64_t b, int64_t group, int64_t stretches, const float* states);
  size_t (*tally_scratch)(const Problem&);
  void (*tally)(const Problem&, const Tally&, const TallyTask&, char* scratch);
  size_t (*backward_scratch)(const Problem&);
  int64_t (*backward_rows)(const Problem&);  // how many queries one call may have
  void (*deltas)(const Problem&, const Gradient&, int64_t b, int64_t h);
  void (*backward)(const Problem&, const Gradient&, const BackwardTask&, char* scratch);
  double (*unit)(const Problem&);         // what takes a score to a natural logit
  // The ceilings a share is a share of: FLOP of `rounds` rounds in registers, and a sum over memory.
  double (*fma_rounds)(int64_t rounds);
  double (*dot_rounds)(int64_t rounds);   // null where there is no bf16 dot product
  double (*read)(const char* bytes, size_t count);
};

extern const Level SCALAR_LEVEL;
#if defined(__x86_64__)
extern const Level AVX2_LEVEL, AVX512_LEVEL, AVX512BF16_LEVEL;
#elif defined(__aarch64__)
extern const Level NEON_LEVEL;
#endif

enum Code { DONE = 0, BAD_SIZES, BAD_GROUPS, BAD_DTYPE, BAD_RUNS, NO_MEMORY, NO_LEVEL, INTERRUPTED };

// Asked now and then by the thread that called: true ends the call early, with what it has. Null: never.
extern bool (*interrupted)();

// Answer the problem.
Code attend(const Problem& problem);
Code tally(const Problem& problem, const Tally& wanted);
Code backward(const Problem& problem, const Gradient& gradient);
const char* complaint(int code);  // what a code means, as a sentence

}  // namespace clearhead
