// Products with matrices in panels (panel_layout.py): y [M, N] = x [M, K] W^T.
//
// Rows of x are packed chunk by chunk of K, and within a chunk in tiles of up to ROWS rows: [K][rows] float32, for
// integer weights blocks of K, each [rows] scales and [block / 2][rows] pairs of int16, so that products are exact in
// int32, or where x is rounded to bfloat16 and the machine multiplies that, [K / 2][rows] pairs of it. Every y is summed in the same order, whatever the other rows, the tile and the thread: within a block, then
// over the blocks of a chunk, then over chunks.
#pragma once
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int PANEL = 16, VECTORS = PANEL / LANES;
constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 3;  // of a tile: its sums fill the registers
constexpr int ROWS_BF16 = LANES == 8 ? 4 : ROWS;             // with more, bfloat16 takes too many registers
constexpr int64_t CHUNK = 256;                               // of K, in which sums begin anew; whole blocks
constexpr int64_t BLOCK = 128;                               // of K: integers with one scale for the whole of K

typedef int16_t vw __attribute__((vector_size(LANES * 4)));  // pairs

#if defined(__AVX512BF16__)
constexpr bool BF16_PAIRS = true;  // an instruction multiplies pairs of bfloat16 and adds both products
#else
constexpr bool BF16_PAIRS = false;
#endif

// A matrix [n, k] in panels.
struct Matrix {
  const char* data;
  int64_t format, n, k, group;
  const int64_t* tactics;  // for each range of rows
};

HT_INLINE bool is_bf16(int64_t format) { return format == PANEL_BF16 || format == PANEL_BF16_ROUNDED; }
HT_INLINE bool is_float(int64_t format) { return format == PANEL_F32 || is_bf16(format); }
HT_INLINE bool in_pairs(int64_t format) { return BF16_PAIRS && format == PANEL_BF16_ROUNDED; }
// Numbers of K that are read at once.
HT_INLINE int64_t step_of(int64_t format) {
  return format == PANEL_F32 ? 1 : is_bf16(format) ? 2 : format == PANEL_I8 ? 4 : 8;
}
HT_INLINE int64_t padded_k(const Matrix& w) {
  const int64_t step = w.group ? w.group : step_of(w.format);
  return (w.k + step - 1) / step * step;
}
HT_INLINE int64_t block_of(const Matrix& w) { return w.group ? w.group : BLOCK; }
HT_INLINE int64_t panels_of(const Matrix& w) { return (w.n + PANEL - 1) / PANEL; }
HT_INLINE int64_t panel_bytes(const Matrix& w) {
  const int64_t k = padded_k(w);
  if (is_float(w.format)) return k * PANEL * (w.format == PANEL_F32 ? 4 : 2);
  return k * PANEL / (w.format == PANEL_I8 ? 1 : 2) + 2 * PANEL * (w.group ? k / w.group : 1);
}
// Matrix e of several that follow each other.
HT_INLINE Matrix matrix_of(const Weight& w, int64_t e = 0) {
  Matrix m{static_cast<const char*>(w.data), w.format, w.dims[w.rank - 2], w.dims[w.rank - 1], w.group, w.tactics};
  m.data += e * panels_of(m) * panel_bytes(m);
  return m;
}

HT_INLINE const Tactic& tactic_of(const Matrix& w, int64_t rows) { return TACTICS[w.tactics[range_of(rows)]]; }

HT_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Numbers of 4 bytes that a packed row takes up to k, which is padded_k or the end of a chunk.
HT_INLINE int64_t packed_width(const Matrix& w, int64_t k) {
  if (is_float(w.format)) return in_pairs(w.format) ? k / 2 : k;
  return k / 2 + (k + block_of(w) - 1) / block_of(w);
}
HT_INLINE int64_t packed_width(const Matrix& w) { return packed_width(w, padded_k(w)); }
HT_INLINE int64_t tiles_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
HT_INLINE int64_t tile_begin(int64_t rows, int64_t tile) { return rows * tile / tiles_of(rows); }

}  // namespace HT_ISA
}  // namespace hybridtrt
