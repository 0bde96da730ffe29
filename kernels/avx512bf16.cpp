// AVX-512 with the dot product of bf16 pairs.
#define CLEARHEAD_LEVEL avx512bf16
#include "simd/avx512.h"

#include "generic/level.h"

namespace clearhead {
constinit const Level AVX512BF16_LEVEL = avx512bf16::make_level(
    "avx512bf16", "16 lanes, fused multiply-add, dot products of bf16 pairs");
}
