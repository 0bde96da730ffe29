// Work on torch's own threads, without torch's headers and without a second OpenMP.
#pragma once

#include <cstdint>

namespace clearhead {

// Uses the thread pool of a library that the process has loaded, named by name or by path; false,
// and no change, if it is not loaded or has none. Without a pool, work runs on the caller's thread.
bool take_pool(const char* library);

// How many threads torch would use now (torch.set_num_threads); 1 without its pool.
int64_t threads_available();

// Runs `work(context)` once on each of up to `threads` threads at the same time, this one
// included, and returns when all are done. `work` itself has to take tasks until none is left.
void on_threads(int64_t threads, void (*work)(void*), void* context);

}  // namespace clearhead
