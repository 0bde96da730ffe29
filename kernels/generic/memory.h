// Where numbers lie: lines that are asked for ahead, and memory that is cut to size.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

// Asks for a line, into L2. GCC drops a const function that only prefetches, calls and all; an empty
// `asm volatile` is an effect that it has to keep (bench/LOG.md, "the prefetch that was not there").
inline void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
  asm volatile("");
}

template <class E> inline void prefetch_row(const E* row, int64_t size) {
  for (int64_t at = 0; at < size; at += 64 / int64_t(sizeof(E))) prefetch(row + at);
}

// Reads a byte for the sake of its line.
inline void touch(const void* p) { (void)*(const volatile char*)p; }

// Memory for one task, cut from a block that its caller owns; of no block, only how much it would be.
class Cutter {
 public:
  explicit Cutter(char* block) : block_(block) {}
  template <class T> T* cut(int64_t count) {
    size_t start = used_;
    used_ += (size_t(count) * sizeof(T) + 127) / 64 * 64;  // whole lines, and one to spare
    return block_ ? (T*)(block_ + start) : nullptr;
  }
  size_t used() const { return used_; }

 private:
  char* block_;
  size_t used_ = 0;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
