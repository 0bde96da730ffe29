// The members of the structs in attention.h, by name and in order, from which Python packs them.
#pragma once

#include <type_traits>

#include "attention.h"

namespace clearhead {

struct Field {
  const char* name;
  const char* format;  // in the notation of Python's `struct` module
  size_t offset, size;
};

template <class T> constexpr const char* format_of() {
  if (std::is_same_v<T, double>) return "d";
  if (std::is_same_v<T, TensorView>) return "4q";
  if (std::is_same_v<T, MatrixView>) return "5q";
  if (std::is_same_v<T, Mask>) return "18q";
  static_assert(sizeof(T) % 8 == 0);
  return "q";  // a number or a pointer
}

// Whether these fields cover a struct of this size without gaps.
template <size_t n> constexpr bool cover(const Field (&fields)[n], size_t size) {
  size_t at = 0;
  for (const Field& f : fields) {
    if (f.offset != at) return false;
    at += f.size;
  }
  return at == size;
}

#define FIELD(x) {#x, format_of<decltype(S::x)>(), offsetof(S, x), sizeof(S::x)}
#define STRUCT(T, ...)                               \
  {                                                  \
    using S = T;                                     \
    static constexpr Field fields[] = {__VA_ARGS__}; \
    static_assert(cover(fields, sizeof(S)));         \
    visit(#T, fields);                               \
  }

// Calls `visit` with the name and the fields of every struct that Python packs.
template <class Visit> void for_each_struct(Visit visit) {
  STRUCT(Problem, FIELD(B), FIELD(H), FIELD(G), FIELD(Tq), FIELD(Tk), FIELD(D), FIELD(Dv),
         FIELD(dtype), FIELD(q), FIELD(k), FIELD(v), FIELD(out), FIELD(lse), FIELD(rounding),
         FIELD(scale), FIELD(softcap), FIELD(mask), FIELD(bias), FIELD(bias_dtype), FIELD(slopes),
         FIELD(slopes_shift), FIELD(sinks), FIELD(dropout), FIELD(seed), FIELD(row_stats))
  STRUCT(Mask, FIELD(before), FIELD(after), FIELD(ranges), FIELD(lo), FIELD(hi), FIELD(bits))
  STRUCT(RowStats, FIELD(max), FIELD(sum), FIELD(moment), FIELD(n_top), FIELD(top_offsets),
         FIELD(top_scores), FIELD(top_keys), FIELD(n_groups), FIELD(group_sums), FIELD(groups))
  STRUCT(Group, FIELD(mask), FIELD(factors), FIELD(query_ids), FIELD(key_ids))
  STRUCT(WeightSums, FIELD(max), FIELD(share), FIELD(received), FIELD(map_rows), FIELD(map_cols),
         FIELD(map), FIELD(map_factors), FIELD(exact_row), FIELD(exact))
  STRUCT(Gradients, FIELD(dout), FIELD(dlse), FIELD(dw_log_w), FIELD(dreceived), FIELD(delta),
         FIELD(dq), FIELD(key_splits), FIELD(dq_split_stride), FIELD(dk), FIELD(dv), FIELD(dbias),
         FIELD(of_these_keys))
}
#undef STRUCT
#undef FIELD

}  // namespace clearhead
