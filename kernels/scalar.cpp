// The level that every machine supports.
#define CLEARHEAD_LEVEL scalar
#include "simd/scalar.h"

#include "generic/level.h"

namespace clearhead {
constinit const Level SCALAR_LEVEL =
    scalar::make_level("scalar", "four lanes of the platform's baseline");
}
