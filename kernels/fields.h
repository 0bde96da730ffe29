// The members of the structs in attention.h, by name and in order, for Python to pack them by.
#pragma once

#include <array>
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

// Do these fields cover a struct of this size, one after the other?
template <size_t n> constexpr bool cover(const std::array<Field, n>& fields, size_t size) {
  size_t at = 0;
  for (const Field& f : fields) {
    if (f.offset != at) return false;
    at += f.size;
  }
  return at == size;
}

template <class... F> constexpr auto list(F... fields) { return std::array{fields...}; }

#define FIELD(member) \
  Field { #member, format_of<decltype(S::member)>(), offsetof(S, member), sizeof(S::member) }

template <class T> constexpr auto FIELDS = nullptr;
template <> constexpr auto FIELDS<Mask> = [] {
  using S = Mask;
  return list(FIELD(before), FIELD(after), FIELD(ranges), FIELD(lo), FIELD(hi), FIELD(bits));
}();
template <> constexpr auto FIELDS<RowStats> = [] {
  using S = RowStats;
  return list(FIELD(max), FIELD(sum), FIELD(moment), FIELD(n_top), FIELD(top_scores),
              FIELD(top_keys), FIELD(n_groups), FIELD(group_sums), FIELD(group_masks));
}();
template <> constexpr auto FIELDS<WeightSums> = [] {
  using S = WeightSums;
  return list(FIELD(max), FIELD(share), FIELD(received), FIELD(map_rows), FIELD(map_cols),
              FIELD(map), FIELD(exact_row), FIELD(exact));
}();
template <> constexpr auto FIELDS<Gradients> = [] {
  using S = Gradients;
  return list(FIELD(dout), FIELD(dlse), FIELD(dw_log_w), FIELD(dreceived), FIELD(delta), FIELD(dq),
              FIELD(key_splits), FIELD(dq_split_stride), FIELD(dk), FIELD(dv), FIELD(dbias));
}();
template <> constexpr auto FIELDS<Problem> = [] {
  using S = Problem;
  return list(FIELD(B), FIELD(H), FIELD(G), FIELD(Tq), FIELD(Tk), FIELD(D), FIELD(Dv), FIELD(dtype),
              FIELD(q), FIELD(k), FIELD(v), FIELD(out), FIELD(lse), FIELD(rounding), FIELD(scale),
              FIELD(softcap), FIELD(mask), FIELD(bias), FIELD(bias_dtype), FIELD(slopes),
              FIELD(slopes_shift), FIELD(sinks), FIELD(dropout), FIELD(seed), FIELD(row_stats));
}();
#undef FIELD

// Calls `visit` with the name and the fields of every struct that Python packs.
template <class Visit> void for_each_struct(Visit visit) {
  auto one = [&]<class T>(const char* name, T*) {
    static_assert(cover(FIELDS<T>, sizeof(T)));
    visit(name, FIELDS<T>);
  };
  one("Problem", (Problem*)nullptr);
  one("Mask", (Mask*)nullptr);
  one("RowStats", (RowStats*)nullptr);
  one("WeightSums", (WeightSums*)nullptr);
  one("Gradients", (Gradients*)nullptr);
}

}  // namespace clearhead
