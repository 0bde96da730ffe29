// Where numbers lie: lines that are asked for ahead, and memory that is cut to size.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

// Asks for a line, into L2. GCC drops a const function that only prefetches, calls and all; an empty
// `asm volatile` is an effect that it has to keep (bench/LOG.md, "the prefetch that was not there").
inline void soon(const void* p) {
  __builtin_prefetch(p, 0, 2);
  asm volatile("");
}

// Reads a byte for the sake of its line.
inline void touch(const void* p) { (void)*(const volatile char*)p; }

// Memory for one task, cut from a block that its caller owns.
class Cutter {
 public:
  explicit Cutter(char* block) : at_(block) {}
  template <class T> T* cut(int64_t count) {
    char* start = at_;
    at_ += (size_t(count) * sizeof(T) + 127) / 64 * 64;  // whole lines, and one to spare
    return (T*)start;
  }
  size_t used(const char* block) const { return size_t(at_ - block); }

 private:
  char* at_;
};

}  // namespace clearhead::CLEARHEAD_LEVEL
