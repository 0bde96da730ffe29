// Runs work on torch's threads, without torch's headers and without a second OpenMP.
#pragma once

#include <cstdint>

namespace clearhead {

// Uses the thread pool of a loaded library, given by name or path. Returns false, and changes
// nothing, if the library is not loaded or has no pool. Without a pool, work runs on the caller's
// thread.
bool take_pool(const char* library);

// The number of threads that torch uses now (torch.set_num_threads); 1 without its pool.
int64_t threads_available();

// Runs `work(context)` once on each of up to `threads` threads at the same time, including the
// caller's, and returns when all are done. `work` must take tasks until none is left.
void on_threads(int64_t threads, void (*work)(void*), void* context);

}  // namespace clearhead
