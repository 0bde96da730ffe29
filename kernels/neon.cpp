// Needs no flags: NEON is in the baseline of 64-bit ARM.
#define CLEARHEAD_LEVEL neon
#include "simd/neon.h"

#include "generic/level.h"

namespace clearhead {
constinit const Level NEON_LEVEL =
    neon::make_level("neon", "4 lanes in 32 registers, fused multiply-add");
}
