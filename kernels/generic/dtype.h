// The one place that turns a Dtype into a type: calls `then` with a value of it. Inlined, because a
// bias asks for every vector.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

template <class Then> [[gnu::always_inline]] inline auto with_dtype(int64_t dtype, Then then) {
  if (dtype == BFLOAT16) return then(bf16());
  if (dtype == FLOAT16) return then(half());
  return then(float());
}

}  // namespace clearhead::CLEARHEAD_LEVEL
