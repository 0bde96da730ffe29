#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <initializer_list>

namespace clearhead {
namespace {

// Three plain C symbols of torch's stable interface (torch/csrc/stable/c/shim.h, torch >= 2.10).
// They are looked up in the copy of libtorch_cpu that the process has loaded already: loading one
// ourselves could bring a second thread pool. Without them, work runs on the caller's thread.
struct Torch {
  using Body = void (*)(int64_t, int64_t, void*);
  int32_t (*parallel_for)(int64_t, int64_t, int64_t, Body, void*) = nullptr;
  int32_t (*get_num_threads)(uint32_t*) = nullptr;

  Torch() {
    for (const char* name : {"libtorch_cpu.so", "libtorch_cpu.dylib"}) {
      void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
      if (!library) continue;
      parallel_for = (decltype(parallel_for))dlsym(library, "torch_parallel_for");
      get_num_threads = (decltype(get_num_threads))dlsym(library, "torch_get_num_threads");
    }
  }
  bool found() const { return parallel_for && get_num_threads; }
};

const Torch& torch() {
  static const Torch found;
  return found;
}

// The pool's threads do not survive a fork, and a child that waited for them would wait for ever:
// from then on it computes on its one thread. The answer is the same bits.
bool forked = false;
const int fork_watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Work {
  void (*work)(void*);
  void* context;
};

}  // namespace

int64_t threads_available() {
  uint32_t n = 1;
  if (forked || !torch().found() || torch().get_num_threads(&n) != 0) return 1;
  return n;
}

void on_threads(int64_t threads, void (*work)(void*), void* context) {
  if (threads > 1 && !forked && torch().found()) {
    Work w = {work, context};
    auto body = [](int64_t, int64_t, void* x) {
      const Work& w = *(const Work*)x;
      w.work(w.context);
    };
    // One index per thread; torch hands a thread a range of them, and one run of `work` per range
    // is enough, since `work` takes tasks until none is left.
    if (torch().parallel_for(0, threads, 1, body, &w) == 0) return;
  }
  work(context);
}

}  // namespace clearhead
