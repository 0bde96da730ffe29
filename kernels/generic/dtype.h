// Calls `then` with a value of the C++ type of a Dtype. It is inlined, because a bias calls it for
// every vector.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

template <class Then> [[gnu::always_inline]] inline auto with_dtype(int64_t dtype, Then then) {
  if (dtype == BFLOAT16) return then(bf16());
  if (dtype == FLOAT16) return then(half());
  return then(float());
}

}  // namespace clearhead::CLEARHEAD_LEVEL
