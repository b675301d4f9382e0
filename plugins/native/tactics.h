// Ways to go about a product with panels, by its number of rows. A tactic says how, never what: all give the same bits.
#pragma once
#include <cstdint>

namespace hybridtrt {

constexpr int TACTIC_RANGES = 5;                                     // of rows; each may have a tactic of its own
constexpr int64_t LAST_ROWS[TACTIC_RANGES - 1] = {1, 6, 12, 48};     // of each range but the last
constexpr int64_t TYPICAL_ROWS[TACTIC_RANGES] = {1, 4, 8, 24, 192};  // what a range is measured with

static inline int range_of(int64_t rows) {
  int range = 0;
  while (range < TACTIC_RANGES - 1 && rows > LAST_ROWS[range]) ++range;
  return range;
}

struct Tactic {
  const char* name;
  int first, last;   // ranges for which it is worth trying
  int64_t ahead;     // bytes between what is read and what is prefetched, where there is one tile of rows
  int64_t streamed;  // up to so many tiles of rows weights are prefetched past the outer caches, where they would drive
                     // out what is read again: states, the code and the data between two steps
  bool as_stored;    // numbers of few bits are not widened first, with several tiles neither
  int64_t spread;    // most tiles that share the prefetch of the next chunk
  int64_t in_cache;  // bytes of packed rows that are passed over for each panel
};

constexpr int64_t ALL_TILES = INT64_MAX;

constexpr Tactic TACTICS[] = {
    {"default", 0, 4, 2048, 1, false, 8, 4 << 20},
    {"ahead 0", 0, 2, 0, 1, false, 8, 4 << 20},
    {"ahead 512", 0, 2, 512, 1, false, 8, 4 << 20},
    {"ahead 4096", 0, 2, 4096, 1, false, 8, 4 << 20},
    {"ahead 8192", 0, 2, 8192, 1, false, 8, 4 << 20},
    {"cached", 0, 2, 2048, 0, false, 8, 4 << 20},
    {"cached, ahead 512", 0, 2, 512, 0, false, 8, 4 << 20},
    {"cached, ahead 8192", 0, 2, 8192, 0, false, 8, 4 << 20},
    {"streamed", 3, 4, 2048, ALL_TILES, false, 8, 4 << 20},
    {"as stored", 2, 4, 2048, 1, true, 8, 4 << 20},
    {"spread 2", 2, 4, 2048, 1, false, 2, 4 << 20},
    {"in cache 1 MiB", 4, 4, 2048, 1, false, 8, 1 << 20},
    {"in cache 256 KiB", 4, 4, 2048, 1, false, 8, 1 << 18},
};
constexpr int64_t NUM_TACTICS = sizeof(TACTICS) / sizeof(TACTICS[0]);

}  // namespace hybridtrt
