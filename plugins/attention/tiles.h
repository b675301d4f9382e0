// Tiles of queries against tiles of keys (FlashAttention, arXiv 2205.14135): keys are transposed once a tile and shared
// by all queries and heads of it, and neither all scores nor all keys are held at once.
#pragma once
#include "paged.h"
#include "softmax.h"
#include "tile.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t PANEL = TILE_COLUMNS;  // columns of a packed panel

// Sizes of a tile. Its rows are queries, the `group` heads of each together.
struct TileShape {
  int64_t group, key_dim, value_dim, rows, keys;
};

HT_INLINE int64_t value_padded(const TileShape& s) { return round_up(s.value_dim, PANEL); }
HT_INLINE int64_t key_numbers(const TileShape& s) { return round_up(s.keys, PANEL) * s.key_dim; }
HT_INLINE int64_t value_numbers(const TileShape& s) { return s.keys * value_padded(s); }
HT_INLINE int64_t widened_numbers(const TileShape& s) { return PANEL * round_up(most(s.key_dim, s.value_dim), LANES); }

HT_INLINE TileShape tile_shape(int64_t group, int64_t key_dim, int64_t value_dim) {
  const bool wide = key_dim + value_dim > 512;
  return {group, key_dim, value_dim, most(group, wide ? 48 : 96), wide ? 64 : 128};
}

// Working memory of a tile, in this thread's scratch.
struct TileMemory {
  float *q, *o, *scores, *keys, *values, *widened;  // o [rows, value_padded], scores [rows, keys]
  Running* running;                                 // [rows]
};

HT_INLINE int64_t tile_numbers(const TileShape& s) {
  const int64_t row = round_up(s.key_dim, LANES) + value_padded(s) + s.keys + 2;
  return s.rows * row + key_numbers(s) + value_numbers(s) + widened_numbers(s) + 128;
}

HT_INLINE TileMemory tile_memory(const TileShape& s, float* p) {
  TileMemory m;
  const auto take = [&](int64_t n) {
    float* at = p;
    p += round_up(n, 16);
    return at;
  };
  m.q = take(s.rows * round_up(s.key_dim, LANES));
  m.o = take(s.rows * value_padded(s));
  m.scores = take(s.rows * s.keys);
  m.keys = take(key_numbers(s));
  m.values = take(value_numbers(s));
  m.widened = take(widened_numbers(s));
  m.running = (Running*)take(s.rows * 2);
  return m;
}

// Rows of n <= PANEL cached vectors as float32, where they lie or widened.
HT_INLINE void widen_rows(const float** rows, float* wide, const char* const* at, int64_t format, int64_t n,
                          int64_t dim) {
  const int64_t padded = round_up(dim, LANES);
  for (int64_t i = 0; i < n; ++i) {
    rows[i] = format == F32 ? (const float*)at[i] : wide + i * padded;
    if (format != F32) widen(wide + i * padded, at[i], format, dim);
  }
}

// Vectors [n, dim] as panels [n / PANEL, dim, PANEL]; the last one is filled up with zeros.
static void pack_keys(float* panels, float* wide, const Pages& pages, int64_t from, int64_t n, int64_t offset,
                      int64_t dim) {
  const char* at[PANEL];
  const float* rows[PANEL];
  for (int64_t c = 0; c < n; c += PANEL, panels += dim * PANEL) {
    const int64_t count = least(PANEL, n - c);
    find_tokens(at, pages, from + c, count, offset);
    widen_rows(rows, wide, at, pages.format, count, dim);
    for (int64_t d = 0; d < dim; d += LANES) {
      const int64_t part = least(LANES, dim - d);
      for (int half = 0; half < 2; ++half) {
        vf v[LANES];
        for (int i = 0; i < LANES; ++i) {
          const int64_t key = half * LANES + i;
          v[i] = key >= count ? vf{} : part == LANES ? load(rows[key] + d) : load_part(rows[key] + d, part);
        }
        transpose_lanes(v);
        for (int i = 0; i < part; ++i) store(panels + (d + i) * PANEL + half * LANES, v[i]);
      }
    }
  }
}

// Vectors [n, dim] as panels [dim / PANEL, n, PANEL]; the last one is filled up with zeros.
static void pack_values(float* panels, float* wide, const Pages& pages, int64_t from, int64_t n, int64_t offset,
                        int64_t dim) {
  const char* at[PANEL];
  const float* rows[PANEL];
  for (int64_t c = 0; c < n; c += PANEL) {
    const int64_t count = least(PANEL, n - c);
    find_tokens(at, pages, from + c, count, offset);
    widen_rows(rows, wide, at, pages.format, count, dim);
    for (int64_t i = 0; i < count; ++i) {
      float* to = panels + (c + i) * PANEL;
      for (int64_t d = 0; d < dim; d += PANEL, to += n * PANEL)
        for (int half = 0; half < 2; ++half) {
          const int64_t left = dim - d - half * LANES;
          const float* x = rows[i] + d + half * LANES;
          store(to + half * LANES, left >= LANES ? load(x) : left > 0 ? load_part(x, left) : vf{});
        }
    }
  }
}

// What one tile of queries sees of keys: the queries' positions are first_query, ...; a window begins `window` before.
struct TileView {
  int64_t queries, first_query, window, begin, end;  // keys begin..end-1
  float softcap;
};

// m.q [queries * group, key_dim], scaled, against the keys; m.o and m.running begin from nothing. `pack(from, n)` gives
// the packed keys and values of n tokens in m.keys and m.values.
template <class Pack>
HT_INLINE void attend_tile(const TileShape& s, const TileMemory& m, const TileView& view, Pack pack) {
  constexpr int64_t BLOCK = 24;  // rows whose sums over values run over the same keys
  const int64_t rows = view.queries * s.group, padded = value_padded(s), lds = s.keys;
  for (int64_t i = 0; i < rows * padded; i += LANES) store(m.o + i, vf{});
  for (int64_t r = 0; r < rows; ++r) m.running[r] = {NOTHING, 0.f};
  const auto first_seen = [&](int64_t r) { return view.first_query + r / s.group - view.window + 1; };
  const auto last_seen = [&](int64_t r) { return view.first_query + r / s.group; };
  for (int64_t from = view.begin; from < view.end; from += s.keys) {
    const int64_t n = least(s.keys, view.end - from);
    pack(from, n);
    for (int64_t c = 0; c < n; c += PANEL) {
      // Only the rows that see one of these keys.
      const int64_t low = most(0, from + c - view.first_query) * s.group;
      const int64_t high = least(rows, (from + c + PANEL - 1 + view.window - view.first_query) * s.group);
      if (low < high)
        multiply_tiles(m.scores + low * lds + c, lds, {m.q + low * s.key_dim, s.key_dim, 1}, m.keys + c * s.key_dim,
                       PANEL, high - low, PANEL, s.key_dim);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = most(0, first_seen(r) - from), end = least(n, last_seen(r) + 1 - from);
      const float factor = soften(m.scores + r * lds, n, begin, end, view.softcap, m.running[r]);
      if (factor != 1.f) scale_row(m.o + r * padded, factor, padded);
    }
    for (int64_t r = 0; r < rows; r += BLOCK) {
      const int64_t count = least(BLOCK, rows - r);
      const int64_t begin = most(0, first_seen(r) - from), end = least(n, last_seen(r + count - 1) + 1 - from);
      if (begin >= end) continue;
      for (int64_t d = 0; d < padded; d += PANEL)
        multiply_tiles(m.o + r * padded + d, padded, {m.scores + r * lds + begin, lds, 1},
                       m.values + d * n + begin * PANEL, PANEL, count, PANEL, end - begin, true);
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
