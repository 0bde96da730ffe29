#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

namespace clearhead {
namespace {

// Two plain C symbols of torch's stable interface (torch/csrc/stable/c/shim.h, torch >= 2.10).
struct Pool {
  using Body = void (*)(int64_t, int64_t, void*);
  int32_t (*parallel_for)(int64_t, int64_t, int64_t, Body, void*) = nullptr;
  int32_t (*get_num_threads)(uint32_t*) = nullptr;
  explicit operator bool() const { return parallel_for && get_num_threads; }
};
Pool pool;  // set while the module is imported, before any call

// The pool's threads do not survive a fork, and a child process would wait for them forever. So a
// child computes on one thread, with the same bits.
bool forked = false;
const int fork_watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Work {
  void (*work)(void*);
  void* context;
};

}  // namespace

// Only a loaded library is used: loading one could create a second pool.
bool take_pool(const char* library) {
  void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (!loaded) return false;
  Pool found;
  found.parallel_for = (decltype(Pool::parallel_for))dlsym(loaded, "torch_parallel_for");
  found.get_num_threads = (decltype(Pool::get_num_threads))dlsym(loaded, "torch_get_num_threads");
  if (found) pool = found;
  return bool(found);
}

int64_t threads_available() {
  uint32_t n = 1;
  if (forked || !pool || pool.get_num_threads(&n) != 0) return 1;
  return n;
}

void on_threads(int64_t threads, void (*work)(void*), void* context) {
  if (threads > 1 && !forked && pool) {
    Work w = {work, context};
    auto body = [](int64_t, int64_t, void* x) {
      const Work& w = *(const Work*)x;
      w.work(w.context);
    };
    // There is one index per thread, and torch calls `body` for a range of indices. One run of
    // `work` per range suffices, since `work` takes tasks until none is left.
    if (pool.parallel_for(0, threads, 1, body, &w) == 0) return;
  }
  work(context);
}

}  // namespace clearhead
