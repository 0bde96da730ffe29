// The Python module: its functions read packed structs and return a code. Also measures the peak
// rates for the benchmark.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <time.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "attention.h"
#include "fields.h"
#include "processor.h"
#include "tensors.h"
#include "threads.h"

namespace nb = nanobind;
using namespace clearhead;

namespace {

// Reads a struct that Python packed by its fields (fields.h).
template <class T> bool unpack(nb::bytes packed, T* into) {
  if (packed.size() != sizeof *into) return false;
  memcpy((void*)into, packed.data(), sizeof *into);
  return true;
}

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Checks for signals, at most ten times a second, because Python handles signals only between its
// own instructions.
constexpr double BETWEEN_CHECKS = 0.1;
thread_local double last_check;
bool signal_pending() {
  double now = seconds(CLOCK_MONOTONIC);
  if (now - last_check < BETWEEN_CHECKS) return false;
  last_check = now;
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Runs a call without the GIL. Raises MemoryError for a failed allocation and KeyboardInterrupt for
// Ctrl-C. Returns any other code, which is a bug in the Python code.
template <class Work> int run(Work work) {
  Code code;
  {
    nb::gil_scoped_release no_gil;
    last_check = seconds(CLOCK_MONOTONIC);
    code = work();
  }
  if (code == NO_MEMORY) throw std::bad_alloc();
  if (code == INTERRUPTED) throw nb::python_error();
  return code;
}

int attend_packed(nb::bytes problem) {
  Problem p;
  if (!unpack(problem, &p)) return -1;
  return run([&] { return attend(p); });
}

// The same, with statistics of the rows; `groups` is an array of packed Groups.
int attend_with_stats(nb::bytes problem, nb::bytes row_stats, nb::bytes groups) {
  Problem p;
  RowStats stats;
  if (!unpack(problem, &p) || !unpack(row_stats, &stats)) return -1;
  if (groups.size() != size_t(stats.n_groups) * sizeof(Group)) return -1;
  std::vector<Group> unpacked(size_t(stats.n_groups));
  if (stats.n_groups) memcpy((void*)unpacked.data(), groups.data(), groups.size());
  stats.groups = unpacked.data();
  p.row_stats = &stats;
  return run([&] { return attend(p); });
}

// The factor from the scores in RowStats to natural logits.
double logit_scale(nb::bytes problem) {
  Problem p;
  return level() && unpack(problem, &p) ? level()->logit_scale(p) : 0;
}

int sum_weights_packed(nb::bytes problem, nb::bytes weight_sums) {
  Problem p;
  WeightSums sums;
  if (!unpack(problem, &p) || !unpack(weight_sums, &sums)) return -1;
  return run([&] { return sum_weights(p, sums); });
}

int backward_packed(nb::bytes problem, nb::bytes gradients) {
  Problem p;
  Gradients g;
  if (!unpack(problem, &p) || !unpack(gradients, &g)) return -1;
  return run([&] { return backward(p, g); });
}

// torch's types and functions for reading a tensor, referenced from the import of the package on.
struct Torch {
  PyObject *tensor, *parameter;  // the types
  PyObject *is_neg, *is_grad_enabled, *is_cpu, *requires_grad;
} torch;

void take_tensors(nb::capsule exchange, nb::handle tensor, nb::handle parameter, nb::handle is_neg,
                  nb::handle is_grad_enabled) {
  torch = {tensor.inc_ref().ptr(),
           parameter.inc_ref().ptr(),
           is_neg.inc_ref().ptr(),
           is_grad_enabled.inc_ref().ptr(),
           PyUnicode_InternFromString("is_cpu"),
           PyUnicode_InternFromString("requires_grad")};
  take_exchange(exchange.data());
}

// Whether this is a torch.Tensor or Parameter, not a negative view, and without a gradient to
// record.
bool reads_as_it_is(nb::handle x, bool grad) {
  PyObject* type = (PyObject*)Py_TYPE(x.ptr());
  if (type != torch.tensor && type != torch.parameter) return false;
  if (nb::handle(torch.is_neg)(x).ptr() == Py_True) return false;
  return !grad || nb::getattr(x, torch.requires_grad).ptr() != Py_True;
}

// Returns bytes that determine a call of the core, except the addresses and strides of q, k and v;
// None if the core would read copies, or if a tensor needs a gradient. The call is a step of
// decoding (true) if a single query sees all keys, up to `last_key`; then the bytes do not contain
// the number of keys.
nb::object layouts(nb::handle q, nb::handle k, nb::handle v, int64_t last_key) {
  if (!torch.tensor) return nb::none();
  bool grad = nb::handle(torch.is_grad_enabled)().ptr() == Py_True;
  // For an unknown device DLPack raises an error, which takes milliseconds.
  if (nb::getattr(q, torch.is_cpu, nb::none()).ptr() != Py_True) return nb::none();
  Layout read[3] = {};
  int i = 0;
  for (nb::handle x : {q, k, v}) {
    Layout& layout = read[i++];
    void* data;
    if (!reads_as_it_is(x, grad) || !read_tensor(x.ptr(), &layout, &data)) return nb::none();
    if (!layout.contiguous_rows()) return nb::none();  // the core would read a copy
    memset(layout.strides, 0, sizeof layout.strides);
  }
  int64_t Tq = read[0].sizes[2], &Tk = read[1].sizes[2], &values = read[2].sizes[2];
  bool decodes = Tq == 1 && Tk - 1 <= last_key && values == Tk;
  if (decodes) Tk = values = 0;
  return nb::make_tuple(decodes, nb::bytes((const char*)read, sizeof read));
}

// Runs `attend` with the addresses, strides and number of keys of these tensors instead of the
// problem's; everything else is as for an earlier call with the same `layouts`.
int attend_tensors(nb::bytes problem, nb::handle q, nb::handle k, nb::handle v, nb::handle out) {
  Problem p;
  if (!unpack(problem, &p)) return -1;
  // A torch mode may have returned another output than was requested.
  auto view = [&](nb::handle x, TensorView* into, int64_t* length) {
    Layout layout;
    void* data;
    if (!read_tensor(x.ptr(), &layout, &data) || layout.dtype != p.dtype) return false;
    *into = layout.at(data);
    *length = layout.sizes[2];
    return true;
  };
  // k and v have the number of keys, q and out the number of queries.
  if (!view(q, &p.q, &p.Tq) || !view(k, &p.k, &p.Tk) || !view(v, &p.v, &p.Tk)) return -1;
  if (!view(out, &p.out, &p.Tq)) return -1;
  return run([&] { return attend(p); });
}

// Returns {struct: [(member, its format in Python's `struct` module), ...]}, in order.
nb::dict field_table() {
  nb::dict table;
  for_each_struct([&](const char* name, auto&& fields) {
    nb::list list;
    for (const Field& f : fields) list.append(nb::make_tuple(f.name, f.format));
    table[name] = list;
  });
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
  m.def("attend", &attend_packed);
  m.def("take_tensors", &take_tensors);
  m.def("layouts", &layouts, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg());
  m.def("attend_tensors", &attend_tensors);
  m.def("attend_with_stats", &attend_with_stats);
  m.def("logit_scale", &logit_scale);
  m.def("sum_weights", &sum_weights_packed);
  m.def("backward", &backward_packed);
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
