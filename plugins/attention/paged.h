// Token caches in pages: where tokens lie, and writing a step's tokens (plugins/paged.py).
#pragma once
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t EVERYTHING = int64_t(1) << 40;  // no window, no limit

// The cached tokens of one row.
struct Pages {
  char* pool;
  const int32_t* table;
  int64_t page_size, token_bytes, format;
};

HT_INLINE Pages pages_of(const Step& step, const Call& call, int64_t group, int64_t row) {
  const Cache& kv = call.caches[0];
  int64_t numbers = 1;
  for (int64_t i = 2; i < kv.rank; ++i) numbers *= kv.dims[i];
  const int32_t* table = step.block_tables[group] + row * step.table_widths[group];
  return {static_cast<char*>(kv.data), table, kv.dims[1], numbers * bytes_of(kv.format), kv.format};
}

HT_INLINE char* token_at(const Pages& pages, int64_t position) {
  const int64_t page = pages.table[position / pages.page_size];
  return pages.pool + (page * pages.page_size + position % pages.page_size) * pages.token_bytes;
}

// Where n tokens from position `from` on lie, each `offset` bytes further.
HT_INLINE void find_tokens(const char** at, const Pages& pages, int64_t from, int64_t n, int64_t offset) {
  int64_t page = from / pages.page_size, place = from % pages.page_size;
  for (int64_t i = 0; i < n; ++page, place = 0) {
    const char* p = pages.pool + (pages.table[page] * pages.page_size + place) * pages.token_bytes + offset;
    for (; place < pages.page_size && i < n; ++place, ++i, p += pages.token_bytes) at[i] = p;
  }
}

// The rows' pages get this step's tokens below `limit`: the numbers of `first`, then those of `second`.
static void store_tokens(const Step& step, const Call& call, Team& team, int64_t group, const Tensor& first,
                         const Tensor& second, int64_t limit) {
  const Range all = share(team, step.num_tokens);
  const int64_t n = width(first), m = width(second);
  for (int64_t t = all.begin; t < all.end; ++t) {
    const int64_t position = step.positions[t];
    if (position >= limit) continue;
    const Pages pages = pages_of(step, call, group, step.token_rows[t]);
    char* to = token_at(pages, position);
    narrow(to, floats(first, t), pages.format, n);
    narrow(to + n * bytes_of(pages.format), floats(second, t), pages.format, m);
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
