// Compiled with AVX-512 F, BW, DQ and VL.
#define CLEARHEAD_LEVEL avx512
#include "simd/avx512.h"

#include "generic/level.h"

namespace clearhead::CLEARHEAD_LEVEL { constexpr char NAME[] = "avx512"; }
CLEARHEAD_DEFINE_LEVEL(AVX512_LEVEL, "16 lanes, fused multiply-add")
