// The Python module: its functions read tensors (fields.h) and return a code. Also measures the
// peak rates for the benchmark.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <time.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <tuple>
#include <vector>

#include "attention.h"
#include "fields.h"
#include "processor.h"
#include "tensors.h"
#include "threads.h"

namespace nb = nanobind;
using namespace clearhead;

namespace {

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Checks for signals, at most ten times a second, because Python handles signals only between its
// own instructions. A coarse clock is read in a fifth of the time.
constexpr double BETWEEN_CHECKS = 0.1;
#ifdef CLOCK_MONOTONIC_COARSE
constexpr clockid_t CHECKS_CLOCK = CLOCK_MONOTONIC_COARSE;
#else
constexpr clockid_t CHECKS_CLOCK = CLOCK_MONOTONIC;
#endif
thread_local double last_check;
bool signal_pending() {
  double now = seconds(CHECKS_CLOCK);
  if (now - last_check < BETWEEN_CHECKS) return false;
  last_check = now;
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Reads the arguments of a call by `read`, and runs what that returns without the GIL. Raises
// MemoryError for a failed allocation and KeyboardInterrupt for Ctrl-C. Returns any other code:
// NO_DATA, or a bug in the Python code.
template <class Read> int call(Read read) {
  Code code;
  try {
    auto work = read();
    nb::gil_scoped_release no_gil;
    last_check = seconds(CHECKS_CLOCK);
    code = work();
  } catch (Code refused) {
    code = refused;
  }
  if (code == NO_MEMORY) throw std::bad_alloc();
  if (code == INTERRUPTED) throw nb::python_error();
  return code;
}

int attend_tensors(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                   nb::handle rounding, nb::handle args) {
  return call([&] {
    return [p = read_problem({q, k, v, out, lse, rounding}, args)] { return attend(p); };
  });
}

// The same for keys and values in blocks, tensors of bytes.
int attend_blocks(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                  const std::string& format, nb::handle args) {
  return call([&] {
    int64_t stored = 1;
    while (stored < STORED && format != STORED_NAMES[stored]) stored++;
    if (stored == STORED) throw BAD_DTYPE;
    Problem p = read_problem({q, k, v, out, lse, nb::none()}, args, Stored(stored));
    return [p] { return attend(p); };
  });
}

// torch's types and functions for reading and making tensors, referenced from the import of the
// package on.
struct Torch {
  PyObject *tensor, *parameter;
  PyObject *is_neg, *is_grad_enabled, *new_empty, *is_cpu, *requires_grad;
} torch;

// Returns whether this torch has the functions by which the core reads a tensor.
bool take_tensors(nb::handle tensor, nb::handle parameter, nb::handle is_neg,
                  nb::handle is_grad_enabled, nb::handle new_empty) {
  torch = {tensor.inc_ref().ptr(),
           parameter.inc_ref().ptr(),
           is_neg.inc_ref().ptr(),
           is_grad_enabled.inc_ref().ptr(),
           new_empty.inc_ref().ptr(),
           PyUnicode_InternFromString("is_cpu"),
           PyUnicode_InternFromString("requires_grad")};
  nb::object exchange = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
  return nb::isinstance<nb::capsule>(exchange) &&
         take_exchange(nb::cast<nb::capsule>(exchange).data());
}

// A new contiguous tensor, and the address of its numbers.
struct NewTensor {
  nb::object tensor = nb::none();
  void* data = nullptr;
};
NewTensor new_tensor(Element element, std::initializer_list<int64_t> sizes) {
  NewTensor x;
  x.tensor = nb::steal((PyObject*)make_tensor(element, sizes, &x.data));
  return x;
}
// A tensor like another one, whose memory torch allocates.
NewTensor new_like(nb::handle other, int64_t B, int64_t H, int64_t Tq, int64_t Dv) {
  NewTensor x;
  Tensor of_torch;
  x.tensor = nb::handle(torch.new_empty)(other, B, H, Tq, Dv);
  if (!read_tensor(x.tensor.ptr(), &of_torch)) throw BAD_TENSOR;
  x.data = of_torch.data;
  return x;
}

// Computes the output, if it is wanted, and statistics of the rows, and adds sums of weights to the
// tensors of `sums`, unless that is None. Bit i of `rows` requests member i of `RowStats`
// (fields.h). Returns `Computed`: `rows` has a tensor (B, H, Tq) or None for each member,
// `group_sums` a tensor (B, H, Tq) for each group. `n_top` is -1 without a list. Every tensor has
// memory of its own.
nb::tuple attend_with_stats(nb::handle q, nb::handle k, nb::handle v, bool output, nb::handle args,
                            int64_t rows, int64_t n_top, nb::handle top_offsets, bool top_weights,
                            nb::handle groups_of_statistics, nb::handle sums) {
  NewTensor out, top_scores, top_keys;
  nb::list of_rows, group_sums;
  std::vector<Group> groups;
  const int code = call([&] {
    Problem p = read_problem({q, k, v, nb::none(), nb::none(), nb::none()}, args);
    RowStats s{};
    if (output) {
      out = new_like(q, p.B, p.H, p.Tq, p.Dv);
      p.out = {out.data, p.H * p.Tq * p.Dv, p.Tq * p.Dv, p.Dv};
    }
    const auto float32 = Element(FLOAT32);
    const auto of_each_row = [&](void* to) { return TensorView{to, p.H * p.Tq, p.Tq, 1}; };
    TensorView* members[] = {&s.max, &s.sum, &s.moment, &s.largest, &s.lse, &s.entropy};
    for (TensorView* member : members) {
      NewTensor x;
      if (rows >> of_rows.size() & 1) {
        x = new_tensor(float32, {p.B, p.H, p.Tq});
        *member = of_each_row(x.data);
      }
      of_rows.append(x.tensor);
    }
    if (n_top >= 0) {
      top_scores = new_tensor(float32, {p.B, p.H, p.Tq, n_top});
      top_keys = new_tensor(INT64, {p.B, p.H, p.Tq, n_top});
      const auto view = [&](const NewTensor& x) {
        return MatrixView{x.data, p.H * p.Tq * n_top, p.Tq * n_top, n_top, 1};
      };
      s.n_top = n_top, s.top_scores = view(top_scores), s.top_keys = view(top_keys);
      s.top_weights = top_weights;
      s.top_offsets = Members(args, p).numbers(top_offsets, FLOAT32, p.Tk);
    }
    groups = read_groups(groups_of_statistics, p);
    for (Group& group : groups) {
      NewTensor x = new_tensor(float32, {p.B, p.H, p.Tq});
      group.sums = of_each_row(x.data);
      group_sums.append(x.tensor);
    }
    s.n_groups = int64_t(groups.size()), s.groups = groups.data();
    WeightSums to{};
    if (!sums.is_none()) to = read_weight_sums(sums, p);
    // Decode computes the log-sum-exp with the output, and no other statistic.
    const bool lse_alone = output && s.lse.data && !(rows & (rows - 1)) && n_top < 0 &&
                           groups.empty() && sums.is_none();
    if (lse_alone) p.float_lse = s.lse;
    return [p, s, to, lse_alone, sum = !sums.is_none()]() mutable {
      if (!lse_alone) p.row_stats = &s;
      if (sum) p.sums = &to;
      return attend(p);
    };
  });
  return nb::make_tuple(code, out.tensor, of_rows, top_scores.tensor, top_keys.tensor, group_sums);
}

// The factor from the scores in RowStats to natural logits; q, k and v do not matter.
double logit_scale(nb::handle q, nb::handle k, nb::handle v, nb::handle args) {
  double scale = 0;
  call([&] {
    return [&, p = read_problem({q, k, v, nb::none(), nb::none(), nb::none()}, args)] {
      if (level()) scale = level()->logit_scale(p);
      return DONE;
    };
  });
  return scale;
}

int largest_parts_of(nb::handle q, nb::handle k, nb::handle v, nb::handle args, nb::handle parts) {
  return call([&] {
    Problem p = read_problem({q, k, v, nb::none(), nb::none(), nb::none()}, args);
    return [p, l = read_largest_parts(parts, p)] { return largest_parts(p, l); };
  });
}

int diverge_tensors(nb::handle q, nb::handle k, nb::handle differences, nb::handle args,
                    nb::handle other, nb::handle exact, nb::handle numbers) {
  return call([&] {
    Problem p = read_problem({q, k, differences, nb::none(), nb::none(), nb::none()}, args);
    return [p, d = read_divergence(other, exact, numbers, p)] { return diverge(p, d); };
  });
}

int backward_tensors(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                     nb::handle rounding, nb::handle args, nb::handle gradients) {
  return call([&] {
    Problem p = read_problem({q, k, v, out, lse, rounding}, args);
    return [p, g = read_gradients(gradients, p)] { return backward(p, g); };
  });
}

// Whether this is a torch.Tensor or Parameter, and not a negative view.
bool reads_as_it_is(nb::handle x) {
  PyObject* type = (PyObject*)Py_TYPE(x.ptr());
  if (type != torch.tensor && type != torch.parameter) return false;
  return nb::handle(torch.is_neg)(x).ptr() != Py_True;
}

// Returns (B, H, G, Tq, Tk, D, Dv, dims, grad) of q, k and v, or None. They pass all checks of
// core/problem/check.py, and the core reads them as they are. With `grad`, autograd records the call,
// and they have four dimensions and one batch size.
nb::object sizes(nb::handle q, nb::handle k, nb::handle v) {
  const bool may_record = nb::handle(torch.is_grad_enabled)().ptr() == Py_True;
  bool grad = false;
  // For an unknown device DLPack raises an error, which takes milliseconds.
  if (nb::getattr(q, torch.is_cpu, nb::none()).ptr() != Py_True) return nb::none();
  Tensor read[3];
  int64_t B = 1, dims = 0;
  for (int i = 0; i < 3; i++) {
    Tensor& x = read[i];
    nb::handle from = i == 0 ? q : i == 1 ? k : v;
    if (!reads_as_it_is(from) || !read_tensor(from.ptr(), &x)) return nb::none();
    grad = grad || (may_record && nb::getattr(from, torch.requires_grad).ptr() == Py_True);
    if (!x.on_cpu || !x.data || x.element >= DTYPES || x.dims < 2) return nb::none();
    if (i == 0) dims = x.dims;
    if (x.dims != dims || x.element != read[0].element) return nb::none();
    x = x.as_4d();
    if (x.sizes[3] > 1 && x.strides[3] != 1) return nb::none();
    if (x.sizes[0] != 1 && B != 1 && x.sizes[0] != B) return nb::none();
    if (x.sizes[0] != 1) B = x.sizes[0];
  }
  auto [q_sizes, k_sizes, v_sizes] = std::tie(read[0].sizes, read[1].sizes, read[2].sizes);
  int64_t H = q_sizes[1], G = k_sizes[1], Tk = k_sizes[2];
  bool fit = q_sizes[3] == k_sizes[3] && v_sizes[1] == G && v_sizes[2] == Tk;
  if (!fit || !G || H % G) return nb::none();
  if (grad && (dims < 4 || q_sizes[0] != k_sizes[0] || q_sizes[0] != v_sizes[0])) return nb::none();
  return nb::make_tuple(B, H, G, q_sizes[2], Tk, q_sizes[3], v_sizes[3], dims, grad);
}

// Returns the members of the named tuples that the functions above read.
nb::dict field_table() {
  nb::dict table;
  for (const Fields& f : FIELDS) table[f.tuple] = f.members;
  return table;
}

nb::list dtype_list() {
  nb::list list;
  for (const char* name : DTYPE_NAMES) list.append(name);
  return list;
}

nb::list level_list() {
  Choice all[LEVELS];
  int n = levels(all);
  nb::list list;
  for (int i = 0; i < n; i++)
    list.append(nb::make_tuple(all[i].level->name, all[i].level->what, all[i].present));
  return list;
}

// The clock of the benchmark. With one thread it is processor time, which excludes other programs.
// With more it is the wall clock: a thread that waits for a processor leaves memory bandwidth to
// the others, so a sum of rates by processor time would be too high.
double seconds_now(int64_t threads) {
  return seconds(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC);
}

// Runs `body` on `threads` threads, each for `seconds`. Returns the sum of their counts per second.
template <class Body> double per_second(int64_t threads, double seconds, Body body) {
  if (!level()) return 0;
  struct Measurement {
    Body& body;
    double seconds;
    int64_t threads;
    std::atomic<double> rate{0};
    std::atomic<int64_t> number{0};
  } measurement{body, seconds, threads};
  auto run = [](void* context) {
    Measurement& m = *(Measurement*)context;
    int64_t number = m.number++;
    double start = seconds_now(m.threads);
    double count = 0, took;
    do {
      count += m.body(number);
      took = seconds_now(m.threads) - start;
    } while (took < m.seconds);
    double old = m.rate;
    while (!m.rate.compare_exchange_weak(old, old + count / took)) {}
  };
  nb::gil_scoped_release no_gil;
  on_threads(threads, run, &measurement);
  return measurement.rate;
}

double fma_ceiling(int64_t threads, double seconds) {
  return per_second(threads, seconds, [](int64_t) { return level()->fma_rounds(100000); });
}

double dot_ceiling(int64_t threads, double seconds) {
  if (!level() || !level()->dot_rounds) return 0;
  return per_second(threads, seconds, [](int64_t) { return level()->dot_rounds(100000); });
}

// Returns the bytes per second that `threads` threads read from the memory at `address`, each from
// its own part.
double read_ceiling(uintptr_t address, size_t bytes, int64_t threads, double seconds) {
  size_t part = bytes / size_t(threads) / 4096 * 4096;
  return per_second(threads, seconds, [=](int64_t number) {
    volatile double sum = level()->read((const char*)address + part * size_t(number), part);
    (void)sum;
    return double(part);
  });
}

}  // namespace

NB_MODULE(_kernels, m) {
  // With an unknown name there is no level: `attend` returns a code, and Python lists the names.
  const char* named = getenv("CLEARHEAD_CPU");
  choose_level(named ? named : "");
  interrupted = signal_pending;
  m.def("take_tensors", &take_tensors);
  m.def("sizes", &sizes, nb::arg().none(), nb::arg().none(), nb::arg().none());
  const auto optional = nb::arg().none();
  m.def("attend", &attend_tensors, nb::arg(), nb::arg(), nb::arg(), optional, optional, optional,
        nb::arg());
  m.def("attend_blocks", &attend_blocks, nb::arg(), nb::arg(), nb::arg(), nb::arg(), optional,
        nb::arg(), nb::arg());
  m.def("block_rows", &block_rows);
  m.def("attend_with_stats", &attend_with_stats, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), optional, nb::arg(), nb::arg(), optional);
  m.def("logit_scale", &logit_scale);
  m.def("largest_parts", &largest_parts_of);
  m.def("diverge", &diverge_tensors);
  m.def("backward", &backward_tensors, nb::arg(), nb::arg(), nb::arg(), optional, optional,
        optional, nb::arg(), nb::arg());
  m.attr("NO_DATA") = int(NO_DATA);
  m.def("describe", &describe);
  m.def("fields", &field_table);
  m.def("dtypes", &dtype_list);
  m.def("take_pool", &take_pool);
  m.def("threads_available", &threads_available);
  m.def("levels", &level_list);
  m.def("level", []() -> std::string { return level() ? level()->name : ""; });
  m.def("choose_level", &choose_level);
  m.def("has_amx", &has_amx);
  m.def("fma_ceiling", &fma_ceiling);
  m.def("dot_ceiling", &dot_ceiling);
  m.def("read_ceiling", &read_ceiling);
}
