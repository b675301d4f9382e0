// Products with matrices in panels (packing.py): y [M, N] = x [M, K] W^T.
//
// Rows of x are packed into tiles of up to ROWS rows: [K][rows] float32, or for integer weights blocks of K, each
// [rows] scales and [block / 2][rows] pairs of int16, so that products are exact in int32. Every y is summed in the
// same order, whatever the other rows, the tile and the thread: within a block of K one after another, then over blocks.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int PANEL = 16, VECTORS = PANEL / LANES;
constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 3;  // of a tile: with VECTORS sums each they fill the registers
constexpr int64_t CHUNK = 256;                    // of K: floats are summed within one; a multiple of every block
constexpr int64_t BLOCK = 128;                    // of K: integers where a scale is for the whole of K
constexpr int64_t AHEAD = 2048;                   // bytes between what is read and what is prefetched
constexpr int64_t IN_CACHE = 256 * 1024;          // bytes of packed rows that are passed over for each panel

typedef int16_t vw __attribute__((vector_size(LANES * 4)));  // pairs

// A matrix [n, k] in panels.
struct Matrix {
  const char* data;
  int64_t format, n, k, group;
};

HT_INLINE bool is_float(int64_t format) { return format == PANEL_F32 || format == PANEL_BF16; }
HT_INLINE int64_t step_of(int64_t format) { return format == PANEL_F32 ? 1 : format == PANEL_BF16 ? 2 : format == PANEL_I8 ? 4 : 8; }
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
  Matrix m{static_cast<const char*>(w.data), w.format, w.dims[w.rank - 2], w.dims[w.rank - 1], w.group};
  m.data += e * panels_of(m) * panel_bytes(m);
  return m;
}

// Numbers of 4 bytes that a packed row takes.
HT_INLINE int64_t packed_width(const Matrix& w) {
  const int64_t k = padded_k(w), block = block_of(w);
  return is_float(w.format) ? k : k / 2 + (k + block - 1) / block;
}
HT_INLINE int64_t tiles_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
HT_INLINE int64_t tile_begin(int64_t rows, int64_t tile) { return rows * tile / tiles_of(rows); }

// n <= BLOCK numbers as int16 times the scale that is returned; numbers up to `padded` are 0. A number that is not finite
// makes the scale NaN.
HT_INLINE float quantise(int16_t* q, const float* x, int64_t n, int64_t padded) {
  vf top = {}, none = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf v = load_part(x + i, n - i < LANES ? n - i : LANES), a = (vf)((vu)v & 0x7fffffffu);
    top = vmax(top, a);
    none = fma(v, vf{}, none);
  }
  const float most = largest(top), by = most > 1e-30f ? 32767.f / most : 0.f;
  const vf magic = splat(12582912.f);
  for (int64_t i = 0; i < n; i += LANES) {
    const vf v = load_part(x + i, n - i < LANES ? n - i : LANES);
    const vf y = v * by + magic;
    const vi whole = (vi)y - (vi)magic;
    typedef int16_t half __attribute__((vector_size(LANES * 2)));
    const half h = __builtin_convertvector(whole, half);
    memcpy(q + i, &h, sizeof h);
  }
  for (int64_t i = n; i < padded; ++i) q[i] = 0;
  return (most > 1e-30f ? most * (1.f / 32767.f) : 0.f) + sum(none);
}

// Pack `rows` <= ROWS rows, row(i) being where row i lies.
template <class Row>
HT_INLINE void pack_tile(float* to, const Matrix& w, int64_t rows, Row row) {
  const int64_t k = padded_k(w);
  if (is_float(w.format)) {
    for (int64_t m = 0; m < rows; ++m) {
      const float* from = row(m);
      int64_t i = 0;
      for (; i < w.k; ++i) to[i * rows + m] = from[i];
      for (; i < k; ++i) to[i * rows + m] = 0;
    }
    return;
  }
  const int64_t block = block_of(w);
  for (int64_t begin = 0; begin < k; begin += block) {
    const int64_t padded = k - begin < block ? k - begin : block, left = w.k - begin;
    for (int64_t m = 0; m < rows; ++m) {
      int16_t q[BLOCK + 16];
      to[m] = quantise(q, row(m) + begin, left < padded ? left : padded, padded);
      for (int64_t i = 0; i < padded / 2; ++i) memcpy(to + rows * (1 + i) + m, q + 2 * i, 4);
    }
    to += rows * (1 + padded / 2);
  }
}

// sum + a0 b0 + a1 b1 of the pairs in each lane.
HT_INLINE vi add_products(vi sum, vw a, vw b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return sum + ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16) + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}

// A tile of rows times one panel over a part of K.
struct Part {
  const char* panel;
  const float* x;         // the tile, packed
  int64_t begin, end;     // of K; begin a multiple of CHUNK
  int64_t group, block, blocks;  // blocks: those before begin
  float* y;
  int64_t y_stride, columns;
  const float* bias;      // where this is the last part of K
};

template <int FORMAT, int COUNT>
struct Product;

template <int COUNT>
struct Product<PANEL_F32, COUNT> {
  HT_INLINE void run(const Part& p, vf (&y)[COUNT][VECTORS]) {
    for (int64_t chunk = p.begin; chunk < p.end; chunk += CHUNK) {
      const int64_t end = p.end - chunk < CHUNK ? p.end : chunk + CHUNK;
      vf sums[COUNT][VECTORS] = {};
      const float *w = reinterpret_cast<const float*>(p.panel) + chunk * PANEL, *x = p.x + chunk * COUNT;
      for (int64_t k = chunk; k < end; ++k, w += PANEL, x += COUNT) {
        __builtin_prefetch(reinterpret_cast<const char*>(w) + AHEAD);
        vf v[VECTORS];
        for (int i = 0; i < VECTORS; ++i) v[i] = load(w + i * LANES);
        for (int m = 0; m < COUNT; ++m)
          for (int i = 0; i < VECTORS; ++i) sums[m][i] = fma(v[i], splat(x[m]), sums[m][i]);
      }
      for (int m = 0; m < COUNT; ++m)
        for (int i = 0; i < VECTORS; ++i) y[m][i] += sums[m][i];
    }
  }
};

template <int COUNT>
struct Product<PANEL_BF16, COUNT> {
  HT_INLINE void run(const Part& p, vf (&y)[COUNT][VECTORS]) {
    for (int64_t chunk = p.begin; chunk < p.end; chunk += CHUNK) {
      const int64_t end = p.end - chunk < CHUNK ? p.end : chunk + CHUNK;
      vf sums[COUNT][VECTORS] = {};
      const float *w = reinterpret_cast<const float*>(p.panel) + chunk / 2 * PANEL, *x = p.x + chunk * COUNT;
      for (int64_t k = chunk; k < end; k += 2, w += PANEL, x += 2 * COUNT) {
        __builtin_prefetch(reinterpret_cast<const char*>(w) + AHEAD);
        vu pairs[VECTORS];
        for (int i = 0; i < VECTORS; ++i) pairs[i] = (vu)load(w + i * LANES);
        for (int m = 0; m < COUNT; ++m)
          for (int i = 0; i < VECTORS; ++i) sums[m][i] = fma((vf)(pairs[i] << 16), splat(x[m]), sums[m][i]);
        for (int m = 0; m < COUNT; ++m)
          for (int i = 0; i < VECTORS; ++i)
            sums[m][i] = fma((vf)(pairs[i] & 0xffff0000u), splat(x[COUNT + m]), sums[m][i]);
      }
      for (int m = 0; m < COUNT; ++m)
        for (int i = 0; i < VECTORS; ++i) y[m][i] += sums[m][i];
    }
  }
};

template <int BITS, int COUNT>
HT_INLINE void multiply_integers(const Part& p, vf (&y)[COUNT][VECTORS]) {
  constexpr int PAIRS = 16 / BITS;  // in a step
  const char* w = p.panel + p.begin * PANEL * BITS / 8 + (p.group ? p.blocks : 1) * 2 * PANEL;
  const char* scales = p.panel;
  const float* x = p.x + COUNT * (p.begin / 2 + p.blocks);
  for (int64_t begin = p.begin; begin < p.end; begin += p.block) {
    const int64_t steps = (p.end - begin < p.block ? p.end - begin : p.block) / (2 * PAIRS);
    if (p.group) scales = w, w += 2 * PANEL;
    const float* row_scales = x;
    x += COUNT;
    vi sums[COUNT][VECTORS] = {};
    for (int64_t i = 0; i < steps; ++i, w += 4 * PANEL, x += PAIRS * COUNT) {
      __builtin_prefetch(w + AHEAD);
      vw step[VECTORS];
      for (int v = 0; v < VECTORS; ++v) step[v] = (vw)load(reinterpret_cast<const float*>(w) + v * LANES);
      for (int j = 0; j < PAIRS; ++j) {
        vw pairs[VECTORS];
        for (int v = 0; v < VECTORS; ++v) pairs[v] = (vw)((vw)(step[v] << (16 - BITS * (j + 1))) >> (16 - BITS));
        for (int m = 0; m < COUNT; ++m)
          for (int v = 0; v < VECTORS; ++v)
            sums[m][v] = add_products(sums[m][v], pairs[v], (vw)splat(x[j * COUNT + m]));
      }
    }
    for (int v = 0; v < VECTORS; ++v) {
      const vf by = load_bf16(reinterpret_cast<const uint16_t*>(scales) + v * LANES);
      for (int m = 0; m < COUNT; ++m)
        y[m][v] = fma(__builtin_convertvector(sums[m][v], vf), by * row_scales[m], y[m][v]);
    }
  }
}
template <int COUNT>
struct Product<PANEL_I8, COUNT> {
  HT_INLINE void run(const Part& p, vf (&y)[COUNT][VECTORS]) { multiply_integers<8, COUNT>(p, y); }
};
template <int COUNT>
struct Product<PANEL_I4, COUNT> {
  HT_INLINE void run(const Part& p, vf (&y)[COUNT][VECTORS]) { multiply_integers<4, COUNT>(p, y); }
};

template <int FORMAT, int COUNT>
static void multiply_part(const Part& p) {
  vf y[COUNT][VECTORS] = {};
  const bool whole = p.columns == PANEL;
  int64_t valid[VECTORS];
  for (int i = 0; i < VECTORS; ++i) {
    const int64_t n = p.columns - i * LANES;
    valid[i] = n < 0 ? 0 : n < LANES ? n : LANES;
  }
  if (p.begin)
    for (int m = 0; m < COUNT; ++m)
      for (int i = 0; i < VECTORS; ++i) {
        const float* from = p.y + m * p.y_stride + i * LANES;
        y[m][i] = whole ? load(from) : load_part(from, valid[i]);
      }
  Product<FORMAT, COUNT>::run(p, y);
  for (int i = 0; i < VECTORS; ++i) {
    vf bias = {};
    if (p.bias) bias = load_part(p.bias + i * LANES, valid[i]);
    for (int m = 0; m < COUNT; ++m) {
      float* to = p.y + m * p.y_stride + i * LANES;
      if (p.bias) y[m][i] += bias;
      if (whole)
        store(to, y[m][i]);
      else
        store_part(to, y[m][i], valid[i]);
    }
  }
}

using PartKernel = void (*)(const Part&);

template <int FORMAT>
HT_INLINE PartKernel part_kernel(int64_t rows) {
  switch (rows) {
#define CASE(n) \
  case n: return multiply_part<FORMAT, n>;
    CASE(1) CASE(2) CASE(3)
#if defined(__AVX2__)
    CASE(4) CASE(5) CASE(6)
#endif
#if defined(__AVX512F__)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
  __builtin_unreachable();
}
HT_INLINE PartKernel part_kernel(int64_t format, int64_t rows) {
  switch (format) {
    case PANEL_F32: return part_kernel<PANEL_F32>(rows);
    case PANEL_BF16: return part_kernel<PANEL_BF16>(rows);
    case PANEL_I8: return part_kernel<PANEL_I8>(rows);
    default: return part_kernel<PANEL_I4>(rows);
  }
}

// The columns of these panels of y [rows, n], for packed rows.
static void multiply_panels(const Matrix& w, Range panels, const float* packed, int64_t rows, float* y,
                            int64_t y_stride, const float* bias) {
  const int64_t k = padded_k(w), x_width = packed_width(w), bytes = panel_bytes(w), tiles = tiles_of(rows);
  Part part{nullptr, nullptr, 0, 0, w.group, block_of(w), 0, nullptr, y_stride, 0, nullptr};
  const auto run = [&](int64_t panel, int64_t tile) {
    const int64_t first = tile_begin(rows, tile), count = tile_begin(rows, tile + 1) - first, n = panel * PANEL;
    part.panel = w.data + panel * bytes;
    part.x = packed + first * x_width;
    part.y = y + first * y_stride + n;
    part.columns = w.n - n < PANEL ? w.n - n : PANEL;
    part.bias = bias && part.end == k ? bias + n : nullptr;
    part_kernel(w.format, count)(part);
  };
  const auto part_of_k = [&](int64_t begin, int64_t most) {
    part.begin = begin;
    part.blocks = begin / part.block;
    part.end = k - begin < most ? k : begin + most;
  };
  if (tiles == 1) {
    part_of_k(0, k);
    for (int64_t p = panels.begin; p < panels.end; ++p) run(p, 0);
  } else if (rows * x_width * 4 <= IN_CACHE) {
    for (int64_t p = panels.begin; p < panels.end; ++p)
      for (int64_t begin = 0; begin < k; begin += CHUNK) {
        part_of_k(begin, CHUNK);
        for (int64_t tile = 0; tile < tiles; ++tile) run(p, tile);
      }
  } else {
    // Of a chunk of K as many rows as fit in the cache.
    const int64_t at_once = IN_CACHE / (CHUNK * 4) / ROWS;
    for (int64_t tile0 = 0; tile0 < tiles; tile0 += at_once)
      for (int64_t begin = 0; begin < k; begin += CHUNK) {
        part_of_k(begin, CHUNK);
        for (int64_t p = panels.begin; p < panels.end; ++p)
          for (int64_t tile = tile0; tile < tiles && tile < tile0 + at_once; ++tile) run(p, tile);
      }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
