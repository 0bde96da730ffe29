#include "processor.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace clearhead {
namespace {

std::atomic<const Level*> chosen{nullptr};

#if defined(__x86_64__)
struct Features {
  bool avx2 = false, avx512 = false, avx512bf16 = false, amx = false, zen4 = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
    bool fma = c >> 12 & 1, xsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
    if (!xsave || !avx) return;
    // The operating system must save wide registers too (XCR0).
    unsigned lo, hi;
    asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    bool ymm = (lo & 0x6) == 0x6, zmm = (lo & 0xe6) == 0xe6, tiles = (lo & 0x60000) == 0x60000;
    unsigned most_leaf;
    if (!__get_cpuid_count(7, 0, &most_leaf, &b, &c, &d)) return;
    avx2 = ymm && fma && f16c && (b >> 5 & 1);
    bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    avx512 = avx2 && zmm && f && dq && bw && vl;
    amx = tiles && (d >> 22 & 1) && (d >> 24 & 1);
    if (most_leaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d))
      avx512bf16 = avx512 && (a >> 5 & 1);
    zen4 = family == 25 && avx512;  // Zen 3 has the same family, without AVX-512
  }
};
const Features& features() {
  static const Features has;
  return has;
}
#endif

}  // namespace

int levels(Choice (&choices)[LEVELS]) {
  int n = 0;
  choices[n++] = {&SCALAR_LEVEL, true};
#if defined(__x86_64__)
  const Features& has = features();
  choices[n++] = {&AVX2_LEVEL, has.avx2};
  choices[n++] = {&AVX512_LEVEL, has.avx512};
  choices[n++] = {&AVX512BF16_LEVEL, has.avx512bf16};
#elif defined(__aarch64__)
  choices[n++] = {&NEON_LEVEL, true};
#endif
  return n;
}

const Level* level() { return chosen.load(std::memory_order_relaxed); }

bool choose_level(const char* name) {
  Choice all[LEVELS];
  int n = levels(all);
  for (int i = n - 1; i >= 0; i--)
    if (all[i].present && (!*name || !strcmp(name, all[i].level->name))) {
      chosen.store(all[i].level, std::memory_order_relaxed);
      return true;
    }
  return false;
}

bool has_amx() {
#if defined(__x86_64__)
  return features().amx;
#else
  return false;
#endif
}

bool prefetches_within_pages() {
#if defined(__x86_64__)
  return features().zen4;
#else
  return false;
#endif
}

}  // namespace clearhead
