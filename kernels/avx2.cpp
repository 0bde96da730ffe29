// Compiled with AVX2, FMA and F16C.
#define CLEARHEAD_LEVEL avx2
#include "simd/avx2.h"

#include "generic/level.h"

namespace clearhead::CLEARHEAD_LEVEL { constexpr char NAME[] = "avx2"; }
CLEARHEAD_DEFINE_LEVEL(AVX2_LEVEL, "8 lanes, fused multiply-add")
