// Products of a chunk's matrices with panels: a matrix [rows, n] cut into columns of TILE_COLUMNS numbers, the
// [rows, TILE_COLUMNS] numbers of each panel together. Every sum runs over its terms in order whatever the tile it is
// part of, so that results do not depend on how a matrix is cut.
#pragma once
#include "tile.h"

namespace hybridtrt {
namespace HT_ISA {

HT_INLINE int64_t panels_of(int64_t n) { return (n + TILE_COLUMNS - 1) / TILE_COLUMNS; }
// Numbers between the rows of a matrix of n columns that is read by columns: not a power of 2, or its lines would
// meet in a few sets of the cache.
HT_INLINE int64_t padded(int64_t n) { return (n + 15) / 16 * 16 + 16; }

template <int R>
struct Rows {
  static constexpr int count = R;
};

// f(Rows<R>{}, m) for tiles of rows m..m+R-1 that together are rows 0..n-1. Less than four rows keep the machine
// waiting for its sums, so the last ones are divided evenly.
template <class F>
HT_INLINE void for_tiles(int64_t n, F f) {
  int64_t m = 0;
  for (; n - m >= TILE_ROWS + 4 || n - m == TILE_ROWS; m += TILE_ROWS) f(Rows<TILE_ROWS>{}, m);
  for (; n - m >= 7 || n - m == 4; m += 4) f(Rows<4>{}, m);
  if (n - m == 5) return f(Rows<5>{}, m);
  for (; n - m >= 3; m += 3) f(Rows<3>{}, m);
  if (n - m == 2) return f(Rows<2>{}, m);
  if (n - m == 1) f(Rows<1>{}, m);
}
#define HT_TILES(tile, m) [&](auto tile, int64_t m) __attribute__((always_inline))

// The sums of R rows of a panel.
template <int R>
struct Sums {
  vf at[R][2];
};

// sums += A B: A(m, k) is a[m * row + k * column], B a panel of `depth` rows.
template <int R>
HT_INLINE void add_product(Sums<R>& sums, const float* a, int64_t row, int64_t column, const float* b, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k) {
    const vf first = load(b + k * TILE_COLUMNS), second = load(b + k * TILE_COLUMNS + LANES);
    for (int m = 0; m < R; ++m) {
      const vf x = splat(a[m * row + k * column]);
      sums.at[m][0] = fma(x, first, sums.at[m][0]);
      sums.at[m][1] = fma(x, second, sums.at[m][1]);
    }
  }
}

// Up to TILE_COLUMNS numbers, n of them from memory and the rest 0.
HT_INLINE void load_panel_row(vf (&y)[2], const float* p, int64_t n) {
  if (n >= TILE_COLUMNS) {
    y[0] = load(p);
    y[1] = load(p + LANES);
  } else {
    y[0] = load_part(p, n < LANES ? n : LANES);
    y[1] = n > LANES ? load_part(p + LANES, n - LANES) : vf{};
  }
}
HT_INLINE void store_panel_row(float* p, const vf (&y)[2], int64_t n) {
  if (n >= TILE_COLUMNS) {
    store(p, y[0]);
    store(p + LANES, y[1]);
  } else {
    store_part(p, y[0], n < LANES ? n : LANES);
    if (n > LANES) store_part(p + LANES, y[1], n - LANES);
  }
}

// Rows [n, k_count] as the panels of their transpose [k_count, n]; the last panel's other columns are left as they are.
static void transpose_to_panels(float* panels, const float* rows, int64_t ld, int64_t n, int64_t k_count) {
  for (int64_t i = 0; i < n; i += TILE_COLUMNS)
    transpose(panels + i * k_count, TILE_COLUMNS, rows + i * ld, ld, n - i < TILE_COLUMNS ? n - i : TILE_COLUMNS,
              k_count);
}

// The same the other way: panels of [k_count, n] to rows [n, k_count].
static void transpose_from_panels(float* rows, int64_t ld, const float* panels, int64_t n, int64_t k_count) {
  for (int64_t i = 0; i < n; i += TILE_COLUMNS)
    transpose(rows + i * ld, ld, panels + i * k_count, TILE_COLUMNS, k_count,
              n - i < TILE_COLUMNS ? n - i : TILE_COLUMNS);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
