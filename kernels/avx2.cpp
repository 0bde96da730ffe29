// Compiled with AVX2, FMA and F16C.
#define CLEARHEAD_LEVEL avx2
#include "simd/avx2.h"

#include "generic/level.h"

namespace clearhead {
constinit const Level AVX2_LEVEL = avx2::make_level("avx2", "8 lanes, fused multiply-add");
}
