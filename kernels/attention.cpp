// Checks the problem, chooses prefill or decode, splits the work into tasks, and runs them on
// threads.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <thread>
#include <utility>
#include <vector>

#include "processor.h"
#include "threads.h"

namespace clearhead {
namespace {

// The most rows per key head (its query heads times their queries) for decode, which does not pack
// keys. Time of decode divided by time of prefill (one core, D = 128, 2026-11-22):
//
//     rows      1     4     8
//     float32   0.48  0.65  0.82
//     bf16      0.56  0.64  0.84
//     float16   0.49  0.61  0.81
//
// With 12 rows it was 1.4 and more (bench/LOG.md, "where prefill begins").
constexpr int64_t DECODE_ROWS = 8;

// A decode splits the keys into at most MAX_KEY_SPLITS ranges of 1024 keys or more; the last has
// the rest. The number of threads has no influence, so the bits do not depend on it.
constexpr int64_t MIN_SPLIT = 1024, SPLIT_STEP = 128;

// A prefill task holds its queries and their output sums in two thirds of a 1 MB L2. More rows use
// each packed key more often. At D = 64, packing takes 4 % of the time with 384 rows and 3 % with
// 640; 1032 rows are another 0.5 to 1 % faster (bench/LOG.md, "rows of a task").
constexpr int64_t TASK_BYTES = 640 << 10, MAX_ROWS = 1024;

// With fewer rows, packing costs too much per use of a key.
constexpr int64_t WORTH_PACKING = 4 * QUERY_BLOCK;

// The scores that a task keeps for `WeightSums`, which fit into L2, unless WORTH_PACKING rows have
// more. From 0.5 to 8 MB, 1024 keys take the same time within 2 % (bench/LOG.md, 2026-11-30).
constexpr int64_t KEPT_BYTES = 1 << 20;

// With fewer multiply-adds, a second thread costs more than it gains.
constexpr double WORTH_A_THREAD = 1e6;

// The limit for the partial results of a decode; key heads beyond it are computed afterwards.
constexpr int64_t STATE_BYTES = 2 << 20;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Memory that a thread keeps between calls. It grows to the size of its largest task.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { free(block_); }
  char* reserve(size_t bytes) {
    if (bytes > size_ || !block_) {
      free(block_);
      size_ = (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096;
      block_ = (char*)aligned_alloc(64, size_);
      if (!block_) size_ = 0;
    }
    return block_;
  }
  void swap(Scratch& other) {
    std::swap(block_, other.block_);
    std::swap(size_, other.size_);
  }

 private:
  char* block_ = nullptr;
  size_t size_ = 0;
};
thread_local Scratch task_scratch, state_scratch;

// Takes a thread's scratch for the duration of a call. If a signal handler makes another call on
// the same thread meanwhile, that call gets an empty scratch, which is freed afterwards.
class BorrowedScratch : public Scratch {
 public:
  explicit BorrowedScratch(Scratch& owner) : owner_(owner) { swap(owner_); }
  ~BorrowedScratch() { swap(owner_); }

 private:
  Scratch& owner_;
};

// Task numbers, which threads take one by one.
struct Queue {
  int64_t count;
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<int64_t> next{0};
  std::atomic<Code> code{DONE};

  void stop(Code with) {
    code = with;
    next = count;
  }
  // Whether the call has been stopped. Long tasks check it too. The calling thread checks signals.
  bool stopped() {
    if (interrupted && code == DONE && std::this_thread::get_id() == caller && interrupted())
      stop(INTERRUPTED);
    return code != DONE;
  }
};

template <class Task> struct Job : Queue {
  const Task& task;
  size_t scratch;
  Job(const Task& task, int64_t count, size_t scratch)
      : Queue{count}, task(task), scratch(scratch) {}

  static void work(void* context) {
    Job& job = *(Job*)context;
    BorrowedScratch memory(task_scratch);
    char* block = memory.reserve(job.scratch);
    if (!block) return job.stop(NO_MEMORY);
    for (int64_t i;
         !job.stopped() && (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;)
      job.task(i, block, job);
  }
};

template <class Task>
Code run_tasks(int64_t threads, int64_t count, size_t scratch, const Task& task) {
  Job<Task> job(task, count, scratch);
  on_threads(std::min(threads, count), Job<Task>::work, &job);
  return job.code;
}

Code decode(const Problem& p, const Level& level, int64_t threads) {
  int64_t rows = p.H / p.G * p.Tq, heads = p.B * p.G;
  int64_t split_keys = std::max(MIN_SPLIT, round_up(ceil_div(p.Tk, MAX_KEY_SPLITS), SPLIT_STEP));
  int64_t splits = std::max<int64_t>(1, ceil_div(p.Tk, split_keys));
  size_t scratch = level.decode_scratch(p);
  int64_t state = splits > 1 ? rows * (p.Dv + STATE_HEADER) : 0;
  int64_t at_once = heads;
  float* states = nullptr;
  BorrowedScratch memory(state_scratch);
  if (state) {
    int64_t head_bytes = state * splits * int64_t(sizeof(float));
    at_once = std::min(heads, std::max<int64_t>(1, STATE_BYTES / head_bytes));
    states = (float*)memory.reserve(size_t(at_once * head_bytes));
    if (!states) return NO_MEMORY;
  }
  // If the heads of a key are adjacent in memory, (B, T, H, D), all heads read one split before the
  // next. Then the address of a page is translated once (bench/LOG.md, 2026-11-23).
  const bool side_by_side = p.k.t > p.k.h;
  for (int64_t first = 0; first < heads; first += at_once) {
    int64_t count = std::min(at_once, heads - first);
    auto decode_split = [&](int64_t i, char* block, Queue&) {
      int64_t at = side_by_side ? i % count : i / splits;
      int64_t split = side_by_side ? i / count : i % splits;
      int64_t head = first + at, key = split * split_keys;
      float* to = state ? states + (at * splits + split) * state : nullptr;
      level.decode(p,
                   {head / p.G, head % p.G, key, std::min(key + split_keys, p.Tk), to,
                    prefetches_within_pages()},
                   block);
    };
    auto merge = [&](int64_t i, char*, Queue&) {
      level.merge_splits(p, (first + i) / p.G, (first + i) % p.G, splits,
                         states + i * splits * state);
    };
    if (Code code = run_tasks(threads, count * splits, scratch, decode_split)) return code;
    if (!state) continue;
    if (Code code = run_tasks(threads, count, scratch, merge)) return code;
  }
  return DONE;
}

struct PrefillTasks {
  std::vector<PrefillTask> tasks;
  int64_t most_rows = 0;  // of a task
};

// Splits the queries of all heads into tasks.
PrefillTasks prefill_tasks(const Problem& p, int64_t threads) {
  int64_t shared = p.H / p.G;  // query heads of a key head, which use its packed keys together
  int64_t fit = TASK_BYTES / ((p.D + p.Dv + 32) * 4);
  fit = std::min(MAX_ROWS, std::max<int64_t>(2 * QUERY_BLOCK, fit));
  if (p.sums) fit = std::min(fit, std::max(WORTH_PACKING, KEPT_BYTES / (4 * p.Tk + 1)));
  int64_t left = p.B * p.H * p.Tq;
  // A row's result does not depend on the other rows of its task, so the split into tasks may
  // depend on the number of threads. A task takes half of the remaining rows per thread. So the
  // last tasks are small, and threads of unequal speed finish together (guided self-scheduling:
  // Polychronopoulos and Kuck, 1987).
  auto rows = [&] {
    if (threads == 1 || p.sums) return fit;  // sums are added task by task
    return std::min(fit, std::max(WORTH_PACKING, left / (2 * threads)));
  };
  PrefillTasks split;
  for (int64_t b = 0; b < p.B; b++)
    for (int64_t head = 0, heads; head < p.H; head += heads) {
      heads = std::max<int64_t>(1, rows() / std::min<int64_t>(p.Tq, 2 * QUERY_BLOCK));
      heads = std::min(shared - head % shared, heads);
      // The last queries come first: under a causal mask they have the most work.
      for (int64_t end = p.Tq, queries; end > 0; end -= queries) {
        int64_t tasks_left = ceil_div(end, std::max<int64_t>(1, rows() / heads));
        queries = std::min(end, round_up(ceil_div(end, tasks_left), QUERY_BLOCK));
        split.tasks.push_back({b, head, heads, end - queries, queries});
        split.most_rows = std::max(split.most_rows, heads * queries);
        left -= heads * queries;
      }
    }
  return split;
}

Code prefill(const Problem& p, const Level& level, int64_t threads) {
  const auto [tasks, rows] = prefill_tasks(p, threads);
  // Tasks of one head add to the same sums, in the order of the tasks, so that bits do not depend
  // on the threads.
  std::vector<std::atomic<bool>> added(p.sums ? tasks.size() : 0);
  auto task = [&, &tasks = tasks](int64_t i, char* block, Queue& queue) {
    const PrefillTask& t = tasks[size_t(i)];
    level.prefill(p, t, block);
    if (!p.sums) return;
    const PrefillTask* before = i ? &tasks[size_t(i - 1)] : nullptr;
    if (before && before->b == t.b && before->head == t.head)
      while (!added[size_t(i - 1)]) {
        if (queue.stopped()) return;
        std::this_thread::yield();
      }
    level.add_sums(p, t, block);
    added[size_t(i)] = true;
  };
  return run_tasks(threads, int64_t(tasks.size()), level.prefill_scratch(p, rows), task);
}

int64_t threads_for(const Problem& p) {
  return double(p.B) * p.H * p.Tq * p.Tk * (p.D + p.Dv) < WORTH_A_THREAD ? 1 : threads_available();
}

// Whether the rows of a key head are decoded, because they are too few for packing keys.
bool decodes(const Problem& p, const Level& level) {
  return p.H / p.G * p.Tq <= std::min(DECODE_ROWS, level.max_decode_rows) && !p.dropout;
}

// Recomputes the output and lse of decoded rows by prefill, into `memory`. Decode sums a score in
// another order than the backward pass, so the weights that the backward pass recomputes would not
// sum exactly to 1. Prefill has the order of the backward pass (bench/LOG.md, "gradients of few
// rows").
Code prefill_again(Problem& p, const Level& level, int64_t threads, Scratch& memory) {
  const int64_t rows = p.B * p.H * p.Tq, width = p.dtype == FLOAT32 ? 4 : 2;
  const int64_t sums = rows * int64_t(sizeof(double)), out = round_up(rows * p.Dv * width, 64);
  char* block = memory.reserve(size_t(sums + 2 * out));
  if (!block) return NO_MEMORY;
  auto view = [&](char* at, int64_t size) { return TensorView{at, p.H * size, size, size / p.Tq}; };
  p.lse = view(block, p.Tq);
  p.out = view(block + sums, p.Tq * p.Dv);
  if (p.rounding.data) p.rounding = view(block + sums + out, p.Tq * p.Dv);
  return prefill(p, level, threads);
}

Code check(const Problem& p) {
  for (int64_t size : {p.B, p.H, p.G, p.Tq, p.Tk, p.D, p.Dv})
    if (size < 0 || size > (int64_t(1) << 40)) return BAD_SIZES;
  if (p.H && (!p.G || p.H % p.G)) return BAD_GROUPS;
  if (p.dtype < 0 || p.dtype >= DTYPES || (p.stored && p.dtype != FLOAT32)) return BAD_DTYPE;
  if (p.bias.data && (p.bias_dtype < 0 || p.bias_dtype >= DTYPES)) return BAD_DTYPE;
  if (p.mask.lo.data && (!p.mask.hi.data || p.mask.ranges < 1)) return BAD_RANGES;
  return DONE;
}

}  // namespace

int64_t block_rows() { return level() ? std::min(DECODE_ROWS, level()->max_decode_rows) : 0; }

bool (*interrupted)() = nullptr;

Code attend(const Problem& given) {
  if (Code code = check(given)) return code;
  Problem p = given;
  if (!p.out.data) p.Dv = 0;  // so that no value is read, and no output written
  const Level* with = level();
  if (!with) return NO_LEVEL;
  if (!p.B || !p.H || !p.Tq) return DONE;
  int64_t threads = threads_for(p);
  if (!decodes(p, *with)) return p.stored ? BAD_SIZES : prefill(p, *with, threads);
  // Decode computes no statistics, so prefill computes them for these rows, without output.
  if (p.out.data || p.lse.data || p.float_lse.data)
    if (Code code = decode(p, *with, threads)) return code;
  if (!p.row_stats) return DONE;
  Problem stats_only = p;
  stats_only.out.data = stats_only.lse.data = stats_only.float_lse.data = nullptr;
  return prefill(stats_only, *with, threads);
}

Code largest_parts(const Problem& p, const LargestParts& parts) {
  if (Code code = check(p)) return code;
  const Level* with = level();
  if (!with) return NO_LEVEL;
  if (p.dtype != FLOAT32 || p.dropout) return BAD_DTYPE;
  if (parts.n < 1) return BAD_SIZES;
  if (!parts.directions.data || !parts.parts.data || !parts.keys.data) return BAD_TENSOR;
  if (!p.B || !p.H || !p.Tq) return DONE;
  int64_t threads = threads_for(p);
  const auto [tasks, rows] = prefill_tasks(p, threads);
  auto task = [&, &tasks = tasks](int64_t i, char* block, Queue&) {
    with->list_parts(p, parts, tasks[size_t(i)], block);
  };
  size_t scratch = with->largest_parts_scratch(p, parts, rows);
  return run_tasks(threads, int64_t(tasks.size()), scratch, task);
}

Code diverge(const Problem& p, const Divergence& divergence) {
  const Divergence& d = divergence;
  if (Code code = check(p)) return code;
  const Level* with = level();
  if (!with) return NO_LEVEL;
  if (p.dtype != FLOAT32 || p.dropout) return BAD_DTYPE;
  if (p.Dv && p.Dv != p.D) return BAD_SIZES;
  for (const Mask* mask : {&d.other, &d.exact})
    if (mask->lo.data && (!mask->hi.data || mask->ranges < 1)) return BAD_RANGES;
  if (!p.B || !p.H || !p.Tq) return DONE;
  for (const TensorView* to : {&d.kl, &d.reverse_kl, &d.mass, &d.lost, &d.largest})
    if (!to->data) return BAD_TENSOR;
  int64_t threads = threads_for(p);
  const auto [tasks, rows] = prefill_tasks(p, threads);
  auto task = [&, &tasks = tasks](int64_t i, char* block, Queue&) {
    with->diverge(p, d, tasks[size_t(i)], block);
  };
  size_t scratch = with->divergence_scratch(p, d, rows);
  return run_tasks(threads, int64_t(tasks.size()), scratch, task);
}

// A task has one head, or one key split of a head if there are few heads. If a broadcast bias gets
// gradients from several batches or heads, one task adds them in order.
Code backward(const Problem& forward, const Gradients& g) {
  Problem p = forward;
  if (Code code = check(p)) return code;
  const Level* with = level();
  if (!with) return NO_LEVEL;
  if (g.key_splits < 1) return BAD_SIZES;
  if (!p.B || !p.H || !p.Tq || !p.Tk) return DONE;
  int64_t threads = threads_for(p);
  BorrowedScratch memory(state_scratch);
  if (g.of_these_keys && decodes(p, *with))
    if (Code code = prefill_again(p, *with, threads, memory)) return code;
  // All key splits of a head need its deltas. Without splits, its task computes them.
  const bool split = g.key_splits > 1;
  auto delta = [&](int64_t i, char*, Queue&) { with->deltas(p, g, i / p.H, i % p.H); };
  if (Code code = run_tasks(threads, split ? p.B * p.H : 0, 0, delta)) return code;

  int64_t batches = g.dbias.data && !g.dbias.b ? 1 : p.B;
  int64_t heads = g.dbias.data && !g.dbias.h ? 1 : p.H;
  int64_t split_keys = round_up(ceil_div(p.Tk, g.key_splits), SPLIT_STEP);
  int64_t rows = with->backward_rows(p);
  auto task = [&](int64_t i, char* block, Queue& queue) {
    int64_t part = i % g.key_splits, head = i / g.key_splits % heads;
    int64_t batch = i / g.key_splits / heads;
    int64_t key = std::min(part * split_keys, p.Tk), key_end = std::min(key + split_keys, p.Tk);
    for (int64_t b = batch; b < p.B; b += batches)
      for (int64_t h = head; h < p.H; h += heads) {
        if (!split) with->deltas(p, g, b, h);
        for (int64_t q = 0; q < p.Tq && !queue.stopped(); q += rows)
          with->backward(p, g, {b, h, key, key_end, part, q, std::min(rows, p.Tq - q)}, block);
      }
  };
  size_t scratch = with->backward_scratch(p);
  if (Code code = run_tasks(threads, batches * heads * g.key_splits, scratch, task)) return code;
  if (g.dk.data == g.head_dk.data && g.dv.data == g.head_dv.data) return DONE;
  auto sum = [&](int64_t i, char*, Queue&) { with->sum_heads(p, g, i / p.G, i % p.G); };
  return run_tasks(threads, p.B * p.G, 0, sum);
}

const char* describe(int code) {
  switch (code) {
    case DONE: return "";
    case BAD_SIZES: return "a size is negative or too large";
    case BAD_GROUPS: return "H is not a multiple of G";
    case BAD_DTYPE: return "a dtype is none of float32, bfloat16, float16";
    case BAD_RANGES: return "lo and hi must come together, with one key range or more";
    case BAD_TENSOR: return "a tensor has another dtype, shape or device than the call needs";
    case NO_DATA: return "a tensor has no memory";
    case NO_MEMORY: return "no memory for the scratch of a task";
    case INTERRUPTED: return "the call was interrupted";
    case NO_LEVEL: return "CLEARHEAD_CPU names a level that this machine does not have";
    default: return "unknown";
  }
}

}  // namespace clearhead
