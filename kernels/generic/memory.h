// Rows of tensors, prefetching, and the scratch memory of a task.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

// Returns the row of a tensor at (b, h, t).
template <class T = float> inline T* row_at(const TensorView& x, int64_t b, int64_t h, int64_t t) {
  return (T*)x.data + b * x.b + h * x.h + t * x.t;
}
template <class T> inline T* row_at(const MatrixView& x, int64_t b, int64_t h, int64_t q) {
  return (T*)x.data + b * x.b + h * x.h + q * x.q;
}

// Without numbers, `x` may be null, which memset does not allow.
inline void clear(float* x, int64_t n) {
  if (n) __builtin_memset(x, 0, size_t(n) * sizeof *x);
}

// Prefetches a line into L2. GCC removes calls of a const function that only prefetches. The empty
// `asm volatile` is an effect that GCC must keep (bench/LOG.md, 2026-11-21).
inline void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
  asm volatile("");
}

template <class E> inline void prefetch_row(const E* row, int64_t size) {
  for (int64_t at = 0; at < size; at += 64 / int64_t(sizeof(E))) prefetch(row + at);
}

// Prefetches the lines of a row that are in the first PAGE_START bytes of a page; most rows have
// none.
template <class E> inline void prefetch_page_start(const E* row, int64_t size) {
  constexpr uintptr_t PAGE = 4096, PAGE_START = 256;
  const uintptr_t past = uintptr_t(row) % PAGE, bytes = uintptr_t(size) * sizeof(E);
  if (past >= PAGE_START && past + bytes <= PAGE) return;
  for (uintptr_t at = 0; at < bytes; at += 64)
    if ((past + at) % PAGE < PAGE_START) prefetch((const char*)row + at);
}

// Allocates the arrays of a task from a block that the caller owns. Without a block it only counts
// the bytes.
class Arena {
 public:
  explicit Arena(char* block) : block_(block) {}
  template <class T> T* allocate(int64_t count) {
    size_t start = used_;
    used_ += (size_t(count) * sizeof(T) + 127) / 64 * 64;  // whole cache lines, with a spare one
    return block_ ? (T*)(block_ + start) : nullptr;
  }
  size_t used() const { return used_; }

 private:
  char* block_;
  size_t used_ = 0;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
