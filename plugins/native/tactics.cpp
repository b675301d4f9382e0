// The table of tactics as Python reads it.
#include "tactics.h"

#include "isa.h"

namespace hybridtrt {

extern "C" {

// The name of tactic i, null beyond the last, and whether it is worth trying for a range of rows.
HT_API const char* ht_tactic(int64_t i) { return i < NUM_TACTICS ? TACTICS[i].name : nullptr; }
HT_API int ht_worth_trying(int64_t i, int64_t range) { return TACTICS[i].first <= range && range <= TACTICS[i].last; }
// The range of a number of rows, and the number that stands for a range.
HT_API int64_t ht_range_of(int64_t rows) { return range_of(rows); }
HT_API int64_t ht_typical_rows(int64_t range) { return TYPICAL_ROWS[range]; }
}

}  // namespace hybridtrt
