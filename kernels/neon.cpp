// Needs no flags: NEON is in the baseline of 64-bit ARM.
#define CLEARHEAD_LEVEL neon
#include "simd/neon.h"

#include "generic/level.h"

namespace clearhead::CLEARHEAD_LEVEL { constexpr char NAME[] = "neon"; }
CLEARHEAD_DEFINE_LEVEL(NEON_LEVEL, "4 lanes in 32 registers, fused multiply-add")
