// AVX-512 with the dot product of bf16 pairs.
#define CLEARHEAD_LEVEL avx512bf16
#include "simd/avx512.h"

#include "generic/level.h"

namespace clearhead::CLEARHEAD_LEVEL { constexpr char NAME[] = "avx512bf16"; }
CLEARHEAD_DEFINE_LEVEL(AVX512BF16_LEVEL, "16 lanes, fused multiply-add, dot products of bf16 pairs")
