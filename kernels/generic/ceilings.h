// Measures the peak rates of the processor with the level's own instructions, so that a fraction of
// the peak means the same on every processor.
#pragma once

namespace clearhead::CLEARHEAD_LEVEL {

// Twelve chains of multiply-adds fill two pipes of latency 4, and fit into 16 registers.
constexpr int CHAINS = 12;

inline double fma_rounds(int64_t rounds) {
  F x[CHAINS], a = splat(0.999999f), b = splat(1e-7f);
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; i++) x[i] = splat(float(i));
  for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) x[i] = fma(x[i], a, b);
  F t = zero();
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; i++) t = add(t, x[i]);
  return total(t) == 1.5f ? 0 : double(rounds) * CHAINS * W * 2;  // comparing keeps the sums alive
}

#ifdef CLEARHEAD_HAS_PAIRS
inline double dot_rounds(int64_t rounds) {
  F x[CHAINS];
  P a = all_pairs(0x3f803f80), b = all_pairs(0x33803380);
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; i++) x[i] = splat(float(i));
  for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) x[i] = dot(x[i], a, b);
  F t = zero();
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; i++) t = add(t, x[i]);
  return total(t) == 1.5f ? 0 : double(rounds) * CHAINS * W * 4;  // likewise
}
#endif

inline double read_sum(const char* bytes, size_t count) {
  F x[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) x[i] = zero();
  for (size_t at = 0; at + 8 * sizeof(F) <= count; at += 8 * sizeof(F))
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) x[i] = add(x[i], load((const float*)(bytes + at) + i * W));
  F t = zero();
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) t = add(t, x[i]);
  return total(t);
}

}  // namespace clearhead::CLEARHEAD_LEVEL
