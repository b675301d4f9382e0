// Products of small matrices in the cache, for chunks of a recurrence and tiles of attention. Packed weights have
// kernels of their own (plugins/linear).
#pragma once
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

// A as it lies or transposed: element (m, k) is data[m * row + k * column].
struct Left {
  const float* data;
  int64_t row, column;
};

template <int ROWS, int VECTORS>
HT_INLINE void tile_block(float* c, int64_t ldc, Left a, const float* b, int64_t ldb, int64_t k_count, int64_t last,
                          bool accumulate, float by) {
  vf sums[ROWS][VECTORS] = {};
  for (int64_t k = 0; k < k_count; ++k) {
    vf rows[VECTORS];
    for (int v = 0; v < VECTORS; ++v)
      rows[v] = v + 1 < VECTORS || last == LANES ? load(b + k * ldb + v * LANES)
                                                 : load_part(b + k * ldb + v * LANES, last);
    for (int m = 0; m < ROWS; ++m) {
      const vf x = splat(a.data[m * a.row + k * a.column]);
      for (int v = 0; v < VECTORS; ++v) sums[m][v] = fma(x, rows[v], sums[m][v]);
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int v = 0; v < VECTORS; ++v) {
      float* to = c + m * ldc + v * LANES;
      const int64_t n = v + 1 < VECTORS ? LANES : last;
      const vf y = sums[m][v] * by;
      store_part(to, accumulate ? y + load_part(to, n) : y, n);
    }
}

template <int VECTORS>
HT_INLINE void tile_columns(float* c, int64_t ldc, Left a, const float* b, int64_t ldb, int64_t m_count,
                            int64_t k_count, int64_t last, bool accumulate, float by) {
  int64_t m = 0;
  for (; m + 4 <= m_count; m += 4)
    tile_block<4, VECTORS>(c + m * ldc, ldc, {a.data + m * a.row, a.row, a.column}, b, ldb, k_count, last, accumulate, by);
  for (; m < m_count; ++m)
    tile_block<1, VECTORS>(c + m * ldc, ldc, {a.data + m * a.row, a.row, a.column}, b, ldb, k_count, last, accumulate, by);
}

// C [M, N] = by * A B, or with `accumulate` C += by * A B. B [K, N] has its rows ldb apart, C its rows ldc.
static void multiply_tiles(float* c, int64_t ldc, Left a, const float* b, int64_t ldb, int64_t m_count, int64_t n_count,
                           int64_t k_count, bool accumulate = false, float by = 1.f) {
  int64_t n = 0;
  for (; n + 2 * LANES <= n_count; n += 2 * LANES)
    tile_columns<2>(c + n, ldc, a, b + n, ldb, m_count, k_count, LANES, accumulate, by);
  for (; n < n_count; n += LANES)
    tile_columns<1>(c + n, ldc, a, b + n, ldb, m_count, k_count, n_count - n < LANES ? n_count - n : LANES, accumulate, by);
}

// B [N, K] as [K, N], rows ldt apart.
static void transpose(float* t, int64_t ldt, const float* b, int64_t ldb, int64_t n_count, int64_t k_count) {
  for (int64_t n0 = 0; n0 < n_count; n0 += 16)
    for (int64_t k = 0; k < k_count; ++k)
      for (int64_t n = n0; n < n0 + 16 && n < n_count; ++n) t[k * ldt + n] = b[n * ldb + k];
}

}  // namespace HT_ISA
}  // namespace hybridtrt
