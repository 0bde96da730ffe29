// Checks the question, chooses a regime, cuts the work into tasks and hands them to threads.
#include "attention.h"

#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <thread>
#include <utility>
#include <vector>

#include "cpu.h"
#include "threads.h"

namespace clearhead {
namespace {

// Up to this many rows per key head (its query heads times their queries) keys are streamed as
// they lie; from there on packing pays. Time of streaming over time of tiles, one core, D = 128, at 1, 4
// and 8 rows: float32 0.48, 0.65, 0.82, bf16 0.56, 0.64, 0.84, float16 0.49, 0.61, 0.81 (2026-11-22);
// 12 rows took 1.4 and more (bench/LOG.md, "where prefill begins").
constexpr int64_t STREAM_ROWS = 8;

// A long row of keys is cut into at most 32 stretches of 1024 keys or more (the last has what is left),
// whatever the number of threads, so that the bits do not depend on it.
constexpr int64_t LEAST_STRETCH = 1024, STRETCH_STEP = 128;

// A prefill task keeps its queries and their output sums in two thirds of a 1 MB L2; more rows use a
// packed key more often: 384 left 4 % to packing at D = 64, 640 leave 3 %, and with 1032 the whole is
// another 0.5 to 1 % faster (bench/LOG.md, "rows of a task").
constexpr int64_t TASK_BYTES = 640 << 10, MOST_ROWS = 1024;

// With fewer rows than this a key is packed for too little.
constexpr int64_t WORTH_PACKING = 4 * BAND;

// The second sweep packs so many keys for all the queries of a head.
constexpr int64_t TALLY_KEYS = 768;

// Below this many multiply-adds a second thread costs more than it brings.
constexpr double WORTH_A_THREAD = 1e6;

// Partial results of a decode that are kept at once; groups of heads beyond it wait.
constexpr int64_t STATE_BYTES = 2 << 20;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Memory that a thread keeps between calls; it grows to the largest task the thread has met.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { free(block_); }
  char* reach(size_t bytes) {
    if (bytes > size_ || !block_) {
      free(block_);
      size_ = (most(int64_t(bytes), 1) + 4095) / 4096 * 4096;
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

// A thread's memory for as long as a call needs it. A signal handler may call again meanwhile, on the
// same thread: it finds none, and what it leaves is let go.
class Borrowed : public Scratch {
 public:
  explicit Borrowed(Scratch& from) : from_(from) { swap(from_); }
  ~Borrowed() { swap(from_); }

 private:
  Scratch& from_;
};

// Numbers that any number of threads take one by one.
struct Queue {
  int64_t count;
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<int64_t> next{0};
  std::atomic<Code> code{DONE};

  void end(Code with) {
    code = with;
    next = count;
  }
  // Is it to end early? The thread that called asks whether somebody interrupts; long tasks ask too.
  bool ended() {
    if (interrupted && code == DONE && std::this_thread::get_id() == caller && interrupted())
      end(INTERRUPTED);
    return code != DONE;
  }
};

template <class Task> struct Job : Queue {
  const Task& task;
  size_t scratch;
  Job(const Task& task, int64_t count, size_t scratch) : Queue{count}, task(task), scratch(scratch) {}

  static void work(void* context) {
    Job& job = *(Job*)context;
    Borrowed memory(task_scratch);
    char* block = memory.reach(job.scratch);
    if (!block) return job.end(NO_MEMORY);
    for (int64_t i; !job.ended() && (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;)
      job.task(i, block, job);
  }
};

template <class Task> Code share_out(int64_t threads, int64_t count, size_t scratch, const Task& task) {
  Job<Task> job(task, count, scratch);
  on_threads(least(threads, count), Job<Task>::work, &job);
  return job.code;
}

Code decode(const Problem& p, const Level& level, int64_t threads) {
  int64_t rows = p.H / p.G * p.Tq, heads = p.B * p.G;
  int64_t stretch = most(LEAST_STRETCH, round_up(ceil_div(p.Tk, MOST_STRETCHES), STRETCH_STEP));
  int64_t stretches = most(1, ceil_div(p.Tk, stretch));
  size_t scratch = level.stream_scratch(p);
  int64_t state = stretches > 1 ? rows * (p.Dv + STATE_HEAD) : 0;
  int64_t at_once = heads;
  float* states = nullptr;
  Borrowed memory(state_scratch);
  if (state) {
    at_once = least(heads, most(1, STATE_BYTES / (state * stretches * int64_t(sizeof(float)))));
    states = (float*)memory.reach(size_t(at_once * stretches * state) * sizeof(float));
    if (!states) return NO_MEMORY;
  }
  for (int64_t first = 0; first < heads; first += at_once) {
    int64_t count = least(at_once, heads - first);
    auto stream = [&](int64_t i, char* block, Queue&) {
      int64_t head = first + i / stretches, key = i % stretches * stretch;
      float* to = state ? states + i * state : nullptr;
      level.stream(p, {head / p.G, head % p.G, key, least(key + stretch, p.Tk), to}, block);
    };
    auto merge = [&](int64_t i, char*, Queue&) {
      level.merge(p, (first + i) / p.G, (first + i) % p.G, stretches, states + i * stretches * state);
    };
    if (Code code = share_out(threads, count * stretches, scratch, stream)) return code;
    if (!state) continue;
    if (Code code = share_out(threads, count, scratch, merge)) return code;
  }
  return DONE;
}

Code prefill(const Problem& p, const Level& level, int64_t threads) {
  int64_t shared = p.H / p.G;  // query heads that share a key head, hence its packed keys
  int64_t fit = least(MOST_ROWS, most(2 * BAND, TASK_BYTES / ((p.D + p.Dv + 32) * 4)));
  int64_t left = p.B * p.H * p.Tq, largest = 0;
  // Rows do not depend on each other's company, so the cut may depend on the number of threads. A task
  // takes half of one thread's share of what is left, so the last ones are small and threads of unequal
  // speed end together (guided self-scheduling: Polychronopoulos and Kuck, 1987).
  auto rows = [&] {
    return threads == 1 ? fit : least(fit, most(WORTH_PACKING, left / (2 * threads)));
  };
  std::vector<TileTask> tasks;
  for (int64_t b = 0; b < p.B; b++)
    for (int64_t head = 0, heads; head < p.H; head += heads) {
      heads = least(shared - head % shared, most(1, rows() / least(p.Tq, 2 * BAND)));
      // Under a causal mask the last queries have the most to do: they go first.
      for (int64_t end = p.Tq, queries; end > 0; end -= queries) {
        int64_t tasks_left = ceil_div(end, most(1, rows() / heads));
        queries = least(end, round_up(ceil_div(end, tasks_left), BAND));
        tasks.push_back({b, head, heads, end - queries, queries});
        largest = most(largest, heads * queries);
        left -= heads * queries;
      }
    }
  auto tile = [&](int64_t i, char* block, Queue&) { level.tile(p, tasks[size_t(i)], block); };
  return share_out(threads, int64_t(tasks.size()), level.tile_scratch(p, largest), tile);
}

int64_t threads_for(const Problem& p) {
  return double(p.B) * p.H * p.Tq * p.Tk * (p.D + p.Dv) < WORTH_A_THREAD ? 1 : threads_available();
}

Code check(const Problem& p) {
  for (int64_t size : {p.B, p.H, p.G, p.Tq, p.Tk, p.D, p.Dv})
    if (size < 0 || size > (int64_t(1) << 40)) return BAD_SIZES;
  if (p.H && (!p.G || p.H % p.G)) return BAD_GROUPS;
  if (p.dtype < FLOAT32 || p.dtype > FLOAT16) return BAD_DTYPE;
  if (p.bias.data && (p.bias_dtype < FLOAT32 || p.bias_dtype > FLOAT16)) return BAD_DTYPE;
  if (p.mask.lo.data && (!p.mask.hi.data || p.mask.runs < 1)) return BAD_RUNS;
  return DONE;
}

}  // namespace

bool (*interrupted)() = nullptr;

Code attend(const Problem& p) {
  if (Code code = check(p)) return code;
  const Level* with = level();
  if (!with) return NO_LEVEL;
  if (!p.B || !p.H || !p.Tq) return DONE;
  int64_t threads = threads_for(p);
  bool few = p.H / p.G * p.Tq <= least(STREAM_ROWS, with->most_stream_rows) && !p.dropout;
  if (!few) return prefill(p, *with, threads);
  // A stream keeps no survey: its few rows pass through tiles a second time, without an answer.
  if (p.out.data || p.lse.data)
    if (Code code = decode(p, *with, threads)) return code;
  if (!p.survey) return DONE;
  Problem again = p;
  again.out.data = again.lse.data = nullptr;
  return prefill(again, *with, threads);
}

// Stretches of keys, each with all the queries of a head, so that no two tasks add to one number and
// the order of the additions is always that of the queries. A map's stretch holds whole bins.
Code tally(const Problem& p, const Tally& t) {
  if (Code code = check(p)) return code;
  const Level* with = level();
  if (!with) return NO_LEVEL;
  if (t.map.data && (t.rows < 1 || t.cols < 1)) return BAD_SIZES;
  if (!p.B || !p.H || !p.Tq || !p.Tk) return DONE;
  int64_t stretches = ceil_div(p.Tk, TALLY_KEYS);
  auto start = [&](int64_t i) {
    int64_t key = least(i * TALLY_KEYS, p.Tk);
    if (!t.map.data || key == p.Tk) return key;
    return ((key + 1) * t.cols - 1) / p.Tk * p.Tk / t.cols;
  };
  auto add_up = [&](int64_t i, char* block, Queue&) {
    int64_t stretch = i % stretches, h = i / stretches % p.H, b = i / stretches / p.H;
    with->tally(p, t, {b, h, start(stretch), start(stretch + 1)}, block);
  };
  size_t scratch = with->tally_scratch(p);
  return share_out(threads_for(p), p.B * p.H * stretches, scratch, add_up);
}

// A head is a task, or each of its stretches of keys, where heads are few. What a broadcast bias gets
// from several batches or heads is added up by one task, in their order.
Code backward(const Problem& p, const Gradient& g) {
  if (Code code = check(p)) return code;
  const Level* with = level();
  if (!with) return NO_LEVEL;
  if (g.parts < 1) return BAD_SIZES;
  if (!p.B || !p.H || !p.Tq || !p.Tk) return DONE;
  int64_t threads = threads_for(p);
  auto delta = [&](int64_t i, char*, Queue&) { with->deltas(p, g, i / p.H, i % p.H); };
  if (Code code = share_out(threads, p.B * p.H, 0, delta)) return code;

  int64_t batches = g.dbias.data && !g.dbias.b ? 1 : p.B, heads = g.dbias.data && !g.dbias.h ? 1 : p.H;
  int64_t stretch = round_up(ceil_div(p.Tk, g.parts), STRETCH_STEP);
  int64_t chunk = with->backward_rows(p);
  auto back = [&](int64_t i, char* block, Queue& queue) {
    int64_t part = i % g.parts, head = i / g.parts % heads, batch = i / g.parts / heads;
    int64_t key = least(part * stretch, p.Tk), key_end = least(key + stretch, p.Tk);
    for (int64_t b = batch; b < p.B; b += batches)
      for (int64_t h = head; h < p.H; h += heads)
        for (int64_t q = 0; q < p.Tq && !queue.ended(); q += chunk)
          with->backward(p, g, {b, h, key, key_end, part, q, least(chunk, p.Tq - q)}, block);
  };
  size_t scratch = with->backward_scratch(p);
  return share_out(threads, batches * heads * g.parts, scratch, back);
}

const char* complaint(int code) {
  switch (code) {
    case DONE: return "";
    case BAD_SIZES: return "a size is negative or absurd";
    case BAD_GROUPS: return "H is not a multiple of G";
    case BAD_DTYPE: return "a dtype is none of float32, bfloat16, float16";
    case BAD_RUNS: return "lo and hi must come together, with one run or more";
    case NO_MEMORY: return "no memory for the scratch of a task";
    case INTERRUPTED: return "the call was interrupted";
    case NO_LEVEL: return "CLEARHEAD_CPU names a level that this machine does not have";
    default: return "unknown";
  }
}

}  // namespace clearhead
