// Packed rows times panels of a matrix: which kernel, in which order.
#pragma once
#include "packed_rows.h"
#include "panel_kernels.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t WIDE = -1;  // beside the formats: integers that were widened
constexpr int64_t TILES = 64;   // most tiles whose sums are kept from chunk to chunk

template <int64_t FORMAT, bool STREAMED, int COUNT>
static void multiply_part(const Part& p) {
  vf sums[COUNT][VECTORS] = {};
  if constexpr (FORMAT == PANEL_F32) multiply_f32<STREAMED>(p, sums);
  if constexpr (FORMAT == PANEL_BF16) multiply_bf16<STREAMED>(p, sums);
#if defined(__AVX512BF16__)
  if constexpr (FORMAT == PANEL_BF16_ROUNDED) multiply_bf16_pairs<STREAMED>(p, sums);
#endif
  if constexpr (FORMAT == PANEL_I8) multiply_words<STREAMED, 8>(p, sums);
  if constexpr (FORMAT == PANEL_I4) multiply_words<STREAMED, 4>(p, sums);
  if constexpr (FORMAT == WIDE) multiply_wide<STREAMED>(p, sums);
  // Unrolled, or the compiler leaves all sums in memory.
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) {
    const int64_t left = p.columns - v * LANES, n = left < 0 ? 0 : lesser(left, LANES);
    vf bias = {};
    if (p.bias) bias = load_part(p.bias + v * LANES, n);
#pragma GCC unroll 16
    for (int m = 0; m < COUNT; ++m) {
      float* before = p.sums + (m * VECTORS + v) * LANES;
      vf y = sums[m][v];
      if (!p.first) y = load(before) + y;
      if (!p.y) {
        store(before, y);
        continue;
      }
      float* to = p.y + m * p.y_stride + v * LANES;
      if (p.bias) y += bias;
      if (n == LANES)
        store(to, y);
      else
        store_part(to, y, n);
    }
  }
}

using PartKernel = void (*)(const Part&);

template <int64_t FORMAT, bool STREAMED>
HT_INLINE PartKernel part_kernel(int64_t rows) {
  switch (rows) {
#define CASE(n) \
  case n: return multiply_part<FORMAT, STREAMED, n <= ROWS ? n : 1>;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
  __builtin_unreachable();
}
template <bool STREAMED>
HT_INLINE PartKernel part_kernel(int64_t format, int64_t rows) {
  switch (format) {
    case PANEL_F32: return part_kernel<PANEL_F32, STREAMED>(rows);
    case PANEL_BF16: return part_kernel<PANEL_BF16, STREAMED>(rows);
    case PANEL_BF16_ROUNDED: return part_kernel<BF16_PAIRS ? PANEL_BF16_ROUNDED : PANEL_BF16, STREAMED>(rows);
    case PANEL_I8: return part_kernel<PANEL_I8, STREAMED>(rows);
    case PANEL_I4: return part_kernel<PANEL_I4, STREAMED>(rows);
    default: return part_kernel<WIDE, STREAMED>(rows);
  }
}

// The columns of these panels of y [rows, n], for packed rows.
static void multiply_panels(const Matrix& w, Range panels, const float* packed, int64_t rows, float* y,
                            int64_t y_stride, const float* bias) {
  const Tactic& tactic = tactic_of(w, rows);
  const int64_t k = padded_k(w), bytes = panel_bytes(w), tiles = tiles_of(rows), chunk_width = packed_width(w, CHUNK);
  const bool integers = !is_float(w.format), streamed = tiles <= tactic.streamed;
  const bool bf16 = is_bf16(w.format) && !in_pairs(w.format);
  const bool many = bf16 ? (rows + tiles - 1) / tiles > ROWS_BF16 : integers;
  const bool widened = tiles > 1 && many && !tactic.as_stored;
  const int64_t format = !widened ? w.format : integers ? WIDE : PANEL_F32;
  const int64_t head = integers && !w.group ? 2 * PANEL : 0;  // scales of the whole of K
  Matrix chunk = w;
  chunk.k = CHUNK;
  const int64_t chunk_bytes = panel_bytes(chunk) - head;
  const int64_t steps = CHUNK / (format == WIDE ? 2 : step_of(format));
  Part part{};
  part.block = block_of(w);
  part.grouped = w.group;
  part.y_stride = y_stride;
  Wide wide;
  alignas(64) float sums[TILES * ROWS * PANEL];  // of the tiles that are passed over for a panel
  const int64_t at_once = lesser(tactic.in_cache / (packed_width(w) * 4 * ROWS) + 1, TILES);
  for (int64_t tile0 = 0; tile0 < tiles; tile0 += at_once) {
    const int64_t tile1 = lesser(tile0 + at_once, tiles), row0 = tile_begin(rows, tile0);
    // The chunk after this one is prefetched by the first tiles, each its share.
    const int64_t spread = lesser(tile1 - tile0, tactic.spread);
    const int64_t ahead = tile1 - tile0 == 1 ? tactic.ahead : chunk_bytes;
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      const int64_t n = p * PANEL;
      part.columns = lesser(PANEL, w.n - n);
      for (int64_t begin = 0; begin < k; begin += CHUNK) {
        const char* from = w.data + p * bytes + head + begin / CHUNK * chunk_bytes;
        const float* x = packed + begin / CHUNK * chunk_width * rows;
        part.k = lesser(CHUNK, k - begin);
        part.first = begin == 0;
        const bool last = begin + part.k == k;
        part.bias = bias && last ? bias + n : nullptr;
        part.w = from;
        part.scales = w.data + p * bytes;
        if (widened) {
          if (bf16) widen_bf16(wide, part);
          if (w.format == PANEL_I8) widen_words<8>(wide, part);
          if (w.format == PANEL_I4) widen_words<4>(wide, part);
          part.w = reinterpret_cast<const char*>(&wide);
        }
        const int64_t x_width = packed_width(w, part.k);
        for (int64_t tile = tile0; tile < tile1; ++tile) {
          const int64_t first = tile_begin(rows, tile), turn = tile - tile0;
          part.x = x + first * x_width;
          part.sums = sums + (first - row0) * PANEL;
          part.y = last ? y + first * y_stride + n : nullptr;
          part.next = from + (turn < spread ? ahead + turn * chunk_bytes / spread : 0);
          part.next_step = turn < spread ? lesser(chunk_bytes / (spread * steps), 4 * PANEL) : 0;
          const int64_t count = tile_begin(rows, tile + 1) - first;
          (streamed ? part_kernel<true>(format, count) : part_kernel<false>(format, count))(part);
        }
      }
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
