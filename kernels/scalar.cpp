// The level that every machine has.
#define CLEARHEAD_LEVEL scalar
#include "simd/scalar.h"

#include "generic/level.h"

namespace clearhead::CLEARHEAD_LEVEL { constexpr char NAME[] = "scalar"; }
CLEARHEAD_DEFINE_LEVEL(SCALAR_LEVEL, "four lanes of the platform's baseline")
