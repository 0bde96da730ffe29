// Which level this machine runs: the widest it has, or the one that CLEARHEAD_CPU names.
#pragma once

#include "attention.h"

namespace clearhead {

// Levels of this build from the narrowest to the widest, and whether this machine has each.
struct Choice {
  const Level* level;
  bool present;
};
constexpr int LEVELS = 4;  // at most
int levels(Choice (&choices)[LEVELS]);

// The level in force. Null until one is chosen; a choice that failed leaves the one before.
const Level* level();

// Chooses by name; an empty name means the widest present. False if there is no such level here.
bool choose_level(const char* name);

// Does this machine have AMX, tiles of bf16 that it multiplies as matrices? No level uses them.
bool has_amx();

// Does the processor's own prefetcher carry one stream, read a whole line at a time, to the end of a
// page of memory, so that asking for every line would only get in its way? So does Zen 4; Zen 3 and
// Zen 5 want every line (bench/LOG.md, "the first lines of a page, again"). Others were not measured.
bool prefetches_within_pages();

}  // namespace clearhead
