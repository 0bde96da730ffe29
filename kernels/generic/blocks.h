// Keys and values that a cache stores in blocks of ggml: 32 numbers of a vector, in 8 or 4 bits
// each, and a float16 that multiplies them. They are converted to float32 in registers.
#pragma once

#include "arithmetic.h"
#include "memory.h"

namespace clearhead::CLEARHEAD_LEVEL {

constexpr int BLOCK = BLOCK_NUMBERS, BLOCK_VECTORS = BLOCK / W;

struct Q8_0 {
  static constexpr int64_t BYTES = BLOCK_BYTES[STORED_Q8_0];
  static F vector(const uint8_t* block, int i, F scale) {
    return mul(of_bytes(block + sizeof(half) + i * W), scale);
  }
};
// Number i of the first 16 is in the lower half of byte i, and number 16 + i in its upper half.
struct Q4_0 {
  static constexpr int64_t BYTES = BLOCK_BYTES[STORED_Q4_0];
  static F vector(const uint8_t* block, int i, F scale) {
    const uint8_t* bytes = block + sizeof(half) + i * W % 16;
    return mul(of_nibbles(bytes, i * W >= 16), scale);
  }
};
template <class C>
concept Blocks = requires { C::BYTES; };

// How Decode reads rows of keys and values of the type C. `Raw` is what their strides count.
template <class C> struct Rows {
  using Raw = C;
  static int64_t raw_size(int64_t size) { return size; }
};
template <Blocks C> struct Rows<C> {
  using Raw = uint8_t;
  static int64_t raw_size(int64_t size) { return size / BLOCK * C::BYTES; }
  // Loads N vectors of a row from vector `from` on. N vectors that are entire blocks begin with one.
  template <int N> static void load(const uint8_t* row, int64_t from, F* x) {
    constexpr bool ENTIRE = N % BLOCK_VECTORS == 0;
    const uint8_t* first = row + from / BLOCK_VECTORS * C::BYTES;
    const int before = ENTIRE ? 0 : int(from % BLOCK_VECTORS);
    F scale = zero();
#pragma GCC unroll 8
    for (int c = 0; c < N; c++) {
      const int i = (before + c) % BLOCK_VECTORS;
      const uint8_t* block = first + (before + c) / BLOCK_VECTORS * C::BYTES;
      if (!ENTIRE || i == 0) scale = splat_half(block);
      x[c] = C::vector(block, i, scale);
    }
  }
};

}  // namespace clearhead::CLEARHEAD_LEVEL
