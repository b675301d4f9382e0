// Products of small matrices in the cache, for chunks of a recurrence and tiles of attention. Packed weights have
// kernels of their own (plugins/linear).
#pragma once
#include "shuffle.h"
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

// A as it lies or transposed: element (m, k) is data[m * row + k * column].
struct Left {
  const float* data;
  int64_t row, column;
};

// The block of C that is held in registers.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6, TILE_COLUMNS = 2 * LANES;

// PART: only `last` columns of the last vector.
template <int ROWS, int VECTORS, bool PART>
static void tile_block(float* c, int64_t ldc, Left a, const float* b, int64_t ldb, int64_t k_count, int64_t last,
                       bool accumulate, float by) {
  vf sums[ROWS][VECTORS] = {};
#pragma GCC unroll 2
  for (int64_t k = 0; k < k_count; ++k) {
    vf row[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v)
      row[v] = PART && v + 1 == VECTORS ? load_part(b + v * LANES, last) : load(b + v * LANES);
    const float* x = a.data + k * a.column;
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const vf same = splat(x[m * a.row]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sums[m][v] = fma(same, row[v], sums[m][v]);
    }
    b += ldb;
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      float* to = c + m * ldc + v * LANES;
      const vf y = sums[m][v] * by;
      if (PART && v + 1 == VECTORS)
        store_part(to, accumulate ? y + load_part(to, last) : y, last);
      else
        store(to, accumulate ? y + load(to) : y);
    }
}

template <int VECTORS, bool PART>
HT_INLINE void tile_columns(float* c, int64_t ldc, Left a, const float* b, int64_t ldb, int64_t m_count,
                            int64_t k_count, int64_t last, bool accumulate, float by) {
  int64_t m = 0;
#define HT_ROWS(n)                                                                                                  \
  for (; m + n <= m_count; m += n)                                                                                  \
  tile_block<n, VECTORS, PART>(c + m * ldc, ldc, {a.data + m * a.row, a.row, a.column}, b, ldb, k_count, last, \
                               accumulate, by)
  HT_ROWS(TILE_ROWS);
  HT_ROWS(4);
  HT_ROWS(2);
  HT_ROWS(1);
#undef HT_ROWS
}

// C [M, N] = by * A B, or with `accumulate` C += by * A B. B [K, N] has its rows ldb apart, C its rows ldc. Each sum
// runs along K in the order of the numbers, whatever M and N are.
static void multiply_tiles(float* c, int64_t ldc, Left a, const float* b, int64_t ldb, int64_t m_count, int64_t n_count,
                           int64_t k_count, bool accumulate = false, float by = 1.f) {
  int64_t n = 0;
  for (; n + TILE_COLUMNS <= n_count; n += TILE_COLUMNS)
    tile_columns<2, false>(c + n, ldc, a, b + n, ldb, m_count, k_count, LANES, accumulate, by);
  if (n + LANES < n_count)
    tile_columns<2, true>(c + n, ldc, a, b + n, ldb, m_count, k_count, n_count - n - LANES, accumulate, by);
  else if (n + LANES == n_count)
    tile_columns<1, false>(c + n, ldc, a, b + n, ldb, m_count, k_count, LANES, accumulate, by);
  else if (n < n_count)
    tile_columns<1, true>(c + n, ldc, a, b + n, ldb, m_count, k_count, n_count - n, accumulate, by);
}

// out[i] = a . rows[i] over k_count numbers, for LANES rows.
HT_INLINE void dot_rows(float* out, const float* a, const float* const* rows, int64_t k_count) {
  vf sums[LANES] = {};
  int64_t k = 0;
  for (; k + LANES <= k_count; k += LANES) {
    const vf x = load(a + k);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) sums[i] = fma(x, load(rows[i] + k), sums[i]);
  }
  if (k < k_count) {
    const vf x = load_part(a + k, k_count - k);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) sums[i] = fma(x, load_part(rows[i] + k, k_count - k), sums[i]);
  }
  store(out, sum_each(sums));
}

// B [N, K] as [K, N], rows ldt apart.
static void transpose(float* t, int64_t ldt, const float* b, int64_t ldb, int64_t n_count, int64_t k_count) {
  for (int64_t n0 = 0; n0 < n_count; n0 += LANES) {
    const int64_t n = n_count - n0 < LANES ? n_count - n0 : LANES;
    for (int64_t k0 = 0; k0 < k_count; k0 += LANES) {
      const int64_t k = k_count - k0 < LANES ? k_count - k0 : LANES;
      if (n == LANES && k == LANES) {
        vf v[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) v[i] = load(b + (n0 + i) * ldb + k0);
        transpose_lanes(v);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) store(t + (k0 + i) * ldt + n0, v[i]);
      } else {
        for (int64_t j = k0; j < k0 + k; ++j)
          for (int64_t i = n0; i < n0 + n; ++i) t[j * ldt + i] = b[i * ldb + j];
      }
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
