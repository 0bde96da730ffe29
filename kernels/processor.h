// Chooses the level of this machine: the widest that it supports, or the one in CLEARHEAD_CPU.
#pragma once

#include "attention.h"

namespace clearhead {

// The levels of this build from the narrowest to the widest, and whether this machine supports
// each.
struct Choice {
  const Level* level;
  bool present;
};
constexpr int LEVELS = 4;  // at most
int levels(Choice (&choices)[LEVELS]);

// The level in use. Null until one is chosen; a failed choice does not change it.
const Level* level();

// Chooses by name; an empty name means the widest supported. Returns false if the level is missing.
bool choose_level(const char* name);

// Whether this machine has AMX, which multiplies tiles of bf16 as matrices. No level uses it.
bool has_amx();

// Whether the processor's own prefetcher follows a stream of whole lines to the end of a page. Then
// prefetching every line is slower. This holds for Zen 4. Zen 3 and Zen 5 are faster with every
// line prefetched (bench/LOG.md, "the first lines of a page, again"). Others were not measured.
bool prefetches_within_pages();

}  // namespace clearhead
