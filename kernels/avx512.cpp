// Compiled with AVX-512 F, BW, DQ and VL.
#define CLEARHEAD_LEVEL avx512
#include "simd/avx512.h"

#include "generic/level.h"

namespace clearhead {
constinit const Level AVX512_LEVEL = avx512::make_level("avx512", "16 lanes, fused multiply-add");
}
