// The door from Python: bytes in, a number out; and the clock around the ceilings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <time.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "attention.h"
#include "cpu.h"
#include "threads.h"

namespace nb = nanobind;
using namespace clearhead;

namespace {

// One struct packed by Python; the layouts are in engines/cpu: call.py, look.py and back.py.
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

// Python sees signals only where it is asked: by a long call, now and then, but not more often than ten
// times a second.
constexpr double BETWEEN_LOOKS = 0.1;
thread_local double last_look;
bool signalled() {
  double now = seconds(CLOCK_MONOTONIC);
  if (now - last_look < BETWEEN_LOOKS) return false;
  last_look = now;
  nb::gil_scoped_acquire python;
  return PyErr_CheckSignals() != 0;
}

// Other Python threads run meanwhile. Memory that ran out is Python's MemoryError, Ctrl-C its
// KeyboardInterrupt; every other refusal is a mistake of ours.
template <class Work> int run(Work work) {
  Code code;
  {
    nb::gil_scoped_release others_may_run;
    last_look = seconds(CLOCK_MONOTONIC);
    code = work();
  }
  if (code == NO_MEMORY) throw std::bad_alloc();
  if (code == INTERRUPTED) throw nb::python_error();
  return code;
}

int attend_packed(nb::bytes packed) {
  Problem p;
  if (!unpack(packed, &p)) return -1;
  return run([&] { return attend(p); });
}

// The same, and what the rows leave beside their output; the groups of keys are masks, packed.
int survey_packed(nb::bytes packed, nb::bytes survey, nb::bytes groups) {
  Problem p;
  Survey s;
  if (!unpack(packed, &p) || !unpack(survey, &s)) return -1;
  std::vector<Mask> group(groups.size() / sizeof(Mask));
  if (groups.size() != size_t(s.groups) * sizeof(Mask)) return -1;
  if (s.groups) memcpy((void*)group.data(), groups.data(), groups.size());
  s.group = group.data();
  p.survey = &s;
  return run([&] { return attend(p); });
}

// What takes the scores of a question, as a survey leaves them, to natural logits.
double unit(nb::bytes packed) {
  Problem p;
  return level() && unpack(packed, &p) ? level()->unit(p) : 0;
}

int tally_packed(nb::bytes packed, nb::bytes wanted) {
  Problem p;
  Tally t;
  if (!unpack(packed, &p) || !unpack(wanted, &t)) return -1;
  return run([&] { return tally(p, t); });
}

int backward_packed(nb::bytes packed, nb::bytes gradient) {
  Problem p;
  Gradient g;
  if (!unpack(packed, &p) || !unpack(gradient, &g)) return -1;
  return run([&] { return backward(p, g); });
}

nb::list level_list() {
  Choice all[LEVELS];
  int n = levels(all);
  nb::list list;
  for (int i = 0; i < n; i++)
    list.append(nb::make_tuple(all[i].level->name, all[i].level->what, all[i].present));
  return list;
}

// The clock of clearhead.bench: with one thread its processor time, so that what other programs take
// meanwhile is not counted; with more the time on the wall, because a thread that waits its turn
// leaves its share of the memory to the others and the sum of their rates would be a fiction.
double seconds_now(int64_t threads) {
  return seconds(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC);
}

// Runs `body` on `threads` threads, each for `seconds`; the sum of what each counted, per second.
template <class Body> double per_second(int64_t threads, double seconds, Body body) {
  if (!level()) return 0;
  struct Race {
    Body& body;
    double seconds;
    int64_t threads;
    std::atomic<double> rate{0};
    std::atomic<int64_t> number{0};
  } race{body, seconds, threads};
  auto run = [](void* context) {
    Race& race = *(Race*)context;
    int64_t number = race.number++;
    double start = seconds_now(race.threads);
    double count = 0, took;
    do {
      count += race.body(number);
      took = seconds_now(race.threads) - start;
    } while (took < race.seconds);
    double old = race.rate;
    while (!race.rate.compare_exchange_weak(old, old + count / took)) {
    }
  };
  nb::gil_scoped_release others_may_run;
  on_threads(threads, run, &race);
  return race.rate;
}

double fma_ceiling(int64_t threads, double seconds) {
  return per_second(threads, seconds, [](int64_t) { return level()->fma_rounds(100000); });
}

double dot_ceiling(int64_t threads, double seconds) {
  if (!level() || !level()->dot_rounds) return 0;
  return per_second(threads, seconds, [](int64_t) { return level()->dot_rounds(100000); });
}

// Bytes per second that `threads` threads read from the memory at `address`, each its own part.
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
  // A false name leaves no level: `attend` then refuses, and Python says which names there are.
  const char* named = getenv("CLEARHEAD_CPU");
  choose_level(named ? named : "");
  interrupted = signalled;
  m.def("attend", &attend_packed);
  m.def("survey", &survey_packed);
  m.def("unit", &unit);
  m.def("tally", &tally_packed);
  m.def("backward", &backward_packed);
  m.def("complaint", &complaint);
  m.def("struct_sizes", [] {
    return nb::make_tuple(sizeof(Problem), sizeof(Survey), sizeof(Tally), sizeof(Mask),
                          sizeof(Gradient));
  });
  m.def("take_pool", &take_pool);
  m.def("threads_available", &threads_available);
  m.def("levels", &level_list);
  m.def("level", []() -> std::string { return level() ? level()->name : ""; });
  m.def("choose_level", &choose_level);
  m.def("matrix_tiles", &matrix_tiles);
  m.def("fma_ceiling", &fma_ceiling);
  m.def("dot_ceiling", &dot_ceiling);
  m.def("read_ceiling", &read_ceiling);
}
