// Products of a chunk's matrices with panels: a matrix [rows, n] cut into columns of PANEL numbers, each panel's
// [rows, PANEL] numbers together. Every sum runs over its terms in order whatever the tile it is part of, so that
// results do not depend on how a matrix is cut.
#pragma once
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int PANEL = 2 * LANES;
constexpr int TILE = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;  // rows whose sums the registers hold

HT_INLINE int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }
// Numbers between the rows of a matrix of n columns that is read by columns: not a power of 2, or its lines would
// meet in a few sets of the cache.
HT_INLINE int64_t padded(int64_t n) { return (n + 15) / 16 * 16 + 16; }

template <int R>
struct Rows {
  static constexpr int count = R;
};

// f(Rows<R>{}, m) for tiles of rows m..m+R-1 that together are rows 0..n-1.
template <class F>
HT_INLINE void for_tiles(int64_t n, F f) {
  int64_t m = 0;
  for (; m + TILE <= n; m += TILE) f(Rows<TILE>{}, m);
  if (TILE > 4)
    for (; m + 4 <= n; m += 4) f(Rows<4>{}, m);
  if (m + 2 <= n) {
    f(Rows<2>{}, m);
    m += 2;
  }
  if (m < n) f(Rows<1>{}, m);
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
    const vf first = load(b + k * PANEL), second = load(b + k * PANEL + LANES);
    for (int m = 0; m < R; ++m) {
      const vf x = splat(a[m * row + k * column]);
      sums.at[m][0] = fma(x, first, sums.at[m][0]);
      sums.at[m][1] = fma(x, second, sums.at[m][1]);
    }
  }
}

// Up to PANEL numbers, n of them from memory and the rest 0.
HT_INLINE void load_panel_row(vf (&y)[2], const float* p, int64_t n) {
  if (n >= PANEL) {
    y[0] = load(p);
    y[1] = load(p + LANES);
  } else {
    y[0] = load_part(p, n < LANES ? n : LANES);
    y[1] = n > LANES ? load_part(p + LANES, n - LANES) : vf{};
  }
}
HT_INLINE void store_panel_row(float* p, const vf (&y)[2], int64_t n) {
  if (n >= PANEL) {
    store(p, y[0]);
    store(p + LANES, y[1]);
  } else {
    store_part(p, y[0], n < LANES ? n : LANES);
    if (n > LANES) store_part(p + LANES, y[1], n - LANES);
  }
}

// 8 x 8 numbers, rows `from_row` apart, to columns.
HT_INLINE void transpose_8x8(float* to, int64_t to_row, const float* from, int64_t from_row) {
#if defined(__AVX2__)
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_row);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) to[j * to_row + i] = from[i * from_row + j];
#endif
}

// Rows [n, k_count] as the panels of their transpose [k_count, n]; the last panel's other columns are left as they are.
static void transpose_to_panels(float* panels, const float* rows, int64_t ld, int64_t n, int64_t k_count) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    float* to = panels + i / PANEL * k_count * PANEL + i % PANEL;
    int64_t k = 0;
    for (; k + 8 <= k_count; k += 8) transpose_8x8(to + k * PANEL, PANEL, rows + i * ld + k, ld);
    for (; k < k_count; ++k)
      for (int64_t r = 0; r < 8; ++r) to[k * PANEL + r] = rows[(i + r) * ld + k];
  }
  for (; i < n; ++i)
    for (int64_t k = 0; k < k_count; ++k) panels[(i / PANEL * k_count + k) * PANEL + i % PANEL] = rows[i * ld + k];
}

// The same the other way: panels of [k_count, n] to rows [n, k_count].
static void transpose_from_panels(float* rows, int64_t ld, const float* panels, int64_t n, int64_t k_count) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const float* from = panels + i / PANEL * k_count * PANEL + i % PANEL;
    int64_t k = 0;
    for (; k + 8 <= k_count; k += 8) transpose_8x8(rows + i * ld + k, ld, from + k * PANEL, PANEL);
    for (; k < k_count; ++k)
      for (int64_t r = 0; r < 8; ++r) rows[(i + r) * ld + k] = from[k * PANEL + r];
  }
  for (; i < n; ++i)
    for (int64_t k = 0; k < k_count; ++k) rows[i * ld + k] = panels[(i / PANEL * k_count + k) * PANEL + i % PANEL];
}

}  // namespace HT_ISA
}  // namespace hybridtrt
