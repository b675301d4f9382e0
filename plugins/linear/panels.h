// Products with matrices in panels (packing.py): y [M, N] = x [M, K] W^T.
//
// Rows of x are packed chunk by chunk of K, and within a chunk in tiles of up to ROWS rows: [K][rows] float32, or for
// integer weights blocks of K, each [rows] scales and [block / 2][rows] pairs of int16, so that products are exact in
// int32. Every y is summed in the same order, whatever the other rows, the tile and the thread: within a block, then
// over the blocks of a chunk, then over chunks.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int PANEL = 16, VECTORS = PANEL / LANES;
constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 3;  // of a tile: its sums fill the registers
constexpr int ROWS_BF16 = LANES == 8 ? 4 : ROWS;             // with more, bfloat16 takes too many registers
constexpr int64_t CHUNK = 256;                               // of K, in which sums begin anew; whole blocks
constexpr int64_t BLOCK = 128;                               // of K: integers with one scale for the whole of K
constexpr int64_t AHEAD = 2048;                              // bytes between what is read and what is prefetched
constexpr int64_t IN_CACHE = 4 << 20;                        // bytes of packed rows that are passed over for each panel

typedef int16_t vw __attribute__((vector_size(LANES * 4)));  // pairs

// A matrix [n, k] in panels.
struct Matrix {
  const char* data;
  int64_t format, n, k, group;
};

HT_INLINE bool is_float(int64_t format) { return format == PANEL_F32 || format == PANEL_BF16; }
// Numbers of K that are read at once.
HT_INLINE int64_t step_of(int64_t format) {
  return format == PANEL_F32 ? 1 : format == PANEL_BF16 ? 2 : format == PANEL_I8 ? 4 : 8;
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
  Matrix m{static_cast<const char*>(w.data), w.format, w.dims[w.rank - 2], w.dims[w.rank - 1], w.group};
  m.data += e * panels_of(m) * panel_bytes(m);
  return m;
}

HT_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Numbers of 4 bytes that a packed row takes up to k, which is padded_k or the end of a chunk.
HT_INLINE int64_t packed_width(const Matrix& w, int64_t k) {
  return is_float(w.format) ? k : k / 2 + (k + block_of(w) - 1) / block_of(w);
}
HT_INLINE int64_t packed_width(const Matrix& w) { return packed_width(w, padded_k(w)); }
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

// Pack tile `tile` of `rows` rows to its places in `to`; row(i) is where row i lies.
template <class Row>
HT_INLINE void pack_tile(float* to, const Matrix& w, int64_t rows, int64_t tile, Row row) {
  const int64_t k = padded_k(w), block = block_of(w), width = packed_width(w, CHUNK);
  const int64_t first = tile_begin(rows, tile), count = tile_begin(rows, tile + 1) - first;
  for (int64_t begin = 0; begin < k; begin += CHUNK, to += rows * width) {
    const int64_t end = lesser(begin + CHUNK, k), filled = lesser(end, w.k);
    float* at = to + first * (end - begin < CHUNK ? packed_width(w, end - begin) : width);
    if (is_float(w.format)) {
      for (int64_t m = 0; m < count; ++m) {
        const float* from = row(first + m);
        for (int64_t i = begin; i < filled; ++i) at[(i - begin) * count + m] = from[i];
        for (int64_t i = filled; i < end; ++i) at[(i - begin) * count + m] = 0;
      }
      continue;
    }
    for (int64_t b = begin; b < end; b += block) {
      const int64_t padded = lesser(block, end - b), n = filled < b ? 0 : lesser(padded, filled - b);
      for (int64_t m = 0; m < count; ++m) {
        int16_t q[BLOCK + 16];
        at[m] = quantise(q, row(first + m) + b, n, padded);
        for (int64_t i = 0; i < padded / 2; ++i) memcpy(at + count * (1 + i) + m, q + 2 * i, 4);
      }
      at += count * (1 + padded / 2);
    }
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

// Keeps the compiler from loading from here before what comes before: too many loads ahead and registers are short.
template <class T>
HT_INLINE void not_before(const T*& p) {
  asm volatile("" : "+r"(p));
}

// A tile of rows times a chunk of one panel.
struct Part {
  const char* w;       // the chunk; of integers its numbers
  const char* scales;  // of integers: those of the first block, where the group is the whole of K
  const char* next;    // what is read after the chunk, to be prefetched
  int64_t next_step;   // bytes of it with each step
  const float* x;      // the tile, packed
  int64_t k, block, grouped;
  float* y;
  int64_t y_stride, columns;
  bool first;          // y is set, not added to
  const float* bias;   // with the last chunk
};

template <int COUNT>
HT_INLINE void multiply_f32(const Part& p, vf (&sums)[COUNT][VECTORS]) {
  const float *w = reinterpret_cast<const float*>(p.w), *x = p.x;
  const char* next = p.next;
  for (int64_t k = 0; k < p.k; ++k, w += PANEL, x += COUNT, next += p.next_step) {
    __builtin_prefetch(next);
    vf v[VECTORS];
    for (int i = 0; i < VECTORS; ++i) v[i] = load(w + i * LANES);
    for (int m = 0; m < COUNT; ++m)
      for (int i = 0; i < VECTORS; ++i) sums[m][i] = fma(v[i], splat(x[m]), sums[m][i]);
  }
}

template <int COUNT>
HT_INLINE void multiply_bf16(const Part& p, vf (&sums)[COUNT][VECTORS]) {
  const float *w = reinterpret_cast<const float*>(p.w), *x = p.x;
  const char* next = p.next;
  for (int64_t k = 0; k < p.k; k += 2, w += PANEL, x += 2 * COUNT, next += p.next_step) {
    __builtin_prefetch(next);
    vf even[VECTORS], odd[VECTORS];
    for (int i = 0; i < VECTORS; ++i) even[i] = (vf)((vu)load(w + i * LANES) << 16);
    for (int m = 0; m < COUNT; ++m)
      for (int i = 0; i < VECTORS; ++i) sums[m][i] = fma(even[i], splat(x[m]), sums[m][i]);
    not_before(x);
    not_before(w);
    for (int i = 0; i < VECTORS; ++i) odd[i] = (vf)((vu)load(w + i * LANES) & 0xffff0000u);
    for (int m = 0; m < COUNT; ++m)
      for (int i = 0; i < VECTORS; ++i) sums[m][i] = fma(odd[i], splat(x[COUNT + m]), sums[m][i]);
  }
}

// Pair j of the words that are read in a step.
template <int BITS>
HT_INLINE vw pairs_of(vw words, int j) {
  return (vw)((vw)(words << (16 - BITS * (j + 1))) >> (16 - BITS));
}
HT_INLINE vw load_words(const char* p) { return (vw)load(reinterpret_cast<const float*>(p)); }
HT_INLINE vf load_scales(const char* p, int v) { return load_bf16(reinterpret_cast<const uint16_t*>(p) + v * LANES); }

// With few rows: each word is read once.
template <int BITS, int COUNT>
HT_INLINE void multiply_words(const Part& p, vf (&y)[COUNT][VECTORS]) {
  constexpr int PAIRS = 16 / BITS;  // in a step
  const char *w = p.w, *next = p.next, *scales = p.scales;
  const float* x = p.x;
  for (int64_t begin = 0; begin < p.k; begin += p.block) {
    const int64_t steps = lesser(p.block, p.k - begin) / (2 * PAIRS);
    if (p.grouped) scales = w, w += 2 * PANEL;
    const float* row_scales = x;
    x += COUNT;
    vi sums[COUNT][VECTORS] = {};
    for (int64_t i = 0; i < steps; ++i, w += 4 * PANEL, next += p.next_step, x += PAIRS * COUNT) {
      __builtin_prefetch(next);
      vw words[VECTORS];
      for (int v = 0; v < VECTORS; ++v) words[v] = load_words(w + v * LANES * 4);
      for (int j = 0; j < PAIRS; ++j)
        for (int m = 0; m < COUNT; ++m)
          for (int v = 0; v < VECTORS; ++v)
            sums[m][v] = add_products(sums[m][v], pairs_of<BITS>(words[v], j), (vw)splat(x[j * COUNT + m]));
    }
    for (int v = 0; v < VECTORS; ++v) {
      const vf by = load_scales(scales, v);
      for (int m = 0; m < COUNT; ++m)
        y[m][v] = fma(__builtin_convertvector(sums[m][v], vf), by * row_scales[m], y[m][v]);
    }
  }
}

// A chunk for many rows: float32, or of integers all scales and all pairs.
union Wide {
  alignas(64) float numbers[CHUNK][PANEL];
  struct {
    alignas(64) float scales[CHUNK / 32][PANEL];
    alignas(64) int16_t pairs[CHUNK / 2][2 * PANEL];
  };
};

static void widen_bf16(Wide& wide, const Part& p) {
  const float* w = reinterpret_cast<const float*>(p.w);
  for (int64_t k = 0; k < p.k; k += 2, w += PANEL)
    for (int v = 0; v < VECTORS; ++v) {
      const vu pairs = (vu)load(w + v * LANES);
      store(wide.numbers[k] + v * LANES, (vf)(pairs << 16));
      store(wide.numbers[k + 1] + v * LANES, (vf)(pairs & 0xffff0000u));
    }
}

template <int BITS>
static void widen_words(Wide& wide, const Part& p) {
  constexpr int PAIRS = 16 / BITS;
  const char *w = p.w, *scales = p.scales;
  int16_t* to = wide.pairs[0];
  for (int64_t begin = 0, b = 0; begin < p.k; begin += p.block, ++b) {
    const int64_t steps = lesser(p.block, p.k - begin) / (2 * PAIRS);
    if (p.grouped) scales = w, w += 2 * PANEL;
    for (int v = 0; v < VECTORS; ++v) store(wide.scales[b] + v * LANES, load_scales(scales, v));
    for (int64_t i = 0; i < steps; ++i, w += 4 * PANEL) {
      for (int v = 0; v < VECTORS; ++v) {
        const vw words = load_words(w + v * LANES * 4);
        for (int j = 0; j < PAIRS; ++j) {
          const vw pairs = pairs_of<BITS>(words, j);
          memcpy(to + j * 2 * PANEL + v * 2 * LANES, &pairs, sizeof pairs);
        }
      }
      to += PAIRS * 2 * PANEL;
    }
  }
}

template <int COUNT>
HT_INLINE void multiply_wide(const Part& p, vf (&y)[COUNT][VECTORS]) {
  const Wide& wide = *reinterpret_cast<const Wide*>(p.w);
  const int16_t* w = wide.pairs[0];
  const float* x = p.x;
  const char* next = p.next;
  for (int64_t begin = 0, b = 0; begin < p.k; begin += p.block, ++b) {
    const int64_t pairs = lesser(p.block, p.k - begin) / 2;
    const float* row_scales = x;
    x += COUNT;
    vi sums[COUNT][VECTORS] = {};
    for (int64_t i = 0; i < pairs; ++i, w += 2 * PANEL, x += COUNT, next += p.next_step) {
      __builtin_prefetch(next);
      vw words[VECTORS];
      for (int v = 0; v < VECTORS; ++v) words[v] = load_words(reinterpret_cast<const char*>(w + v * 2 * LANES));
      for (int m = 0; m < COUNT; ++m)
        for (int v = 0; v < VECTORS; ++v) sums[m][v] = add_products(sums[m][v], words[v], (vw)splat(x[m]));
    }
    for (int v = 0; v < VECTORS; ++v) {
      const vf by = load(wide.scales[b] + v * LANES);
      for (int m = 0; m < COUNT; ++m)
        y[m][v] = fma(__builtin_convertvector(sums[m][v], vf), by * row_scales[m], y[m][v]);
    }
  }
}

constexpr int64_t WIDE = -1;  // beside the formats: integers that were widened

template <int64_t FORMAT, int COUNT>
static void multiply_part(const Part& p) {
  vf sums[COUNT][VECTORS] = {};
  if (!p.first)
    for (int m = 0; m < COUNT; ++m) __builtin_prefetch(p.y + m * p.y_stride, 1);
  if constexpr (FORMAT == PANEL_F32) multiply_f32(p, sums);
  if constexpr (FORMAT == PANEL_BF16) multiply_bf16(p, sums);
  if constexpr (FORMAT == PANEL_I8) multiply_words<8>(p, sums);
  if constexpr (FORMAT == PANEL_I4) multiply_words<4>(p, sums);
  if constexpr (FORMAT == WIDE) multiply_wide(p, sums);
  for (int v = 0; v < VECTORS; ++v) {
    const int64_t left = p.columns - v * LANES, n = left < 0 ? 0 : lesser(left, LANES);
    vf bias = {};
    if (p.bias) bias = load_part(p.bias + v * LANES, n);
    for (int m = 0; m < COUNT; ++m) {
      float* to = p.y + m * p.y_stride + v * LANES;
      vf y = sums[m][v];
      if (n == LANES) {
        if (!p.first) y = load(to) + y;
        store(to, p.bias ? y + bias : y);
      } else {
        if (!p.first) y = load_part(to, n) + y;
        store_part(to, p.bias ? y + bias : y, n);
      }
    }
  }
}

using PartKernel = void (*)(const Part&);

template <int64_t FORMAT, int MOST>
HT_INLINE PartKernel part_kernel(int64_t rows) {
  switch (rows) {
#define CASE(n) \
  case n: return multiply_part<FORMAT, n <= MOST ? n : 1>;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
  __builtin_unreachable();
}
HT_INLINE PartKernel part_kernel(int64_t format, int64_t rows) {
  switch (format) {
    case PANEL_F32: return part_kernel<PANEL_F32, ROWS>(rows);
    case PANEL_BF16: return part_kernel<PANEL_BF16, ROWS>(rows);
    case PANEL_I8: return part_kernel<PANEL_I8, ROWS>(rows);
    case PANEL_I4: return part_kernel<PANEL_I4, ROWS>(rows);
    default: return part_kernel<WIDE, ROWS>(rows);
  }
}

// The columns of these panels of y [rows, n], for packed rows.
static void multiply_panels(const Matrix& w, Range panels, const float* packed, int64_t rows, float* y,
                            int64_t y_stride, const float* bias) {
  const int64_t k = padded_k(w), bytes = panel_bytes(w), tiles = tiles_of(rows), chunk_width = packed_width(w, CHUNK);
  const bool integers = !is_float(w.format);
  const bool many = w.format == PANEL_BF16 ? (rows + tiles - 1) / tiles > ROWS_BF16 : integers;
  const bool widened = tiles > 1 && many;
  const int64_t format = !widened ? w.format : integers ? WIDE : PANEL_F32;
  const int64_t head = integers && !w.group ? 2 * PANEL : 0;  // scales of the whole of K
  Matrix chunk = w;
  chunk.k = CHUNK;
  const int64_t chunk_bytes = panel_bytes(chunk) - head;
  Part part{nullptr, nullptr, nullptr, 0, nullptr, 0, block_of(w), w.group, nullptr, y_stride, 0, false, nullptr};
  Wide wide;
  const int64_t at_once = IN_CACHE / (packed_width(w) * 4 * ROWS) + 1;
  for (int64_t tile0 = 0; tile0 < tiles; tile0 += at_once) {
    const int64_t tile1 = lesser(tile0 + at_once, tiles);
    // The chunk after this one is prefetched by the first tiles, each its share.
    const int64_t spread = lesser(tile1 - tile0, 8), ahead = tile1 - tile0 == 1 ? AHEAD : chunk_bytes;
    const int64_t steps = CHUNK / (format == WIDE ? 2 : step_of(format));
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      const int64_t n = p * PANEL;
      part.columns = lesser(PANEL, w.n - n);
      for (int64_t begin = 0; begin < k; begin += CHUNK) {
        const char* from = w.data + p * bytes + head + begin / CHUNK * chunk_bytes;
        const float* x = packed + begin / CHUNK * chunk_width * rows;
        part.k = lesser(CHUNK, k - begin);
        part.first = begin == 0;
        part.bias = bias && begin + part.k == k ? bias + n : nullptr;
        part.w = from;
        part.scales = w.data + p * bytes;
        if (widened) {
          if (w.format == PANEL_BF16) widen_bf16(wide, part);
          if (w.format == PANEL_I8) widen_words<8>(wide, part);
          if (w.format == PANEL_I4) widen_words<4>(wide, part);
          part.w = reinterpret_cast<const char*>(&wide);
        }
        const int64_t x_width = packed_width(w, part.k);
        for (int64_t tile = tile0; tile < tile1; ++tile) {
          const int64_t first = tile_begin(rows, tile), turn = tile - tile0;
          part.x = x + first * x_width;
          part.y = y + first * y_stride + n;
          part.next = from + (turn < spread ? ahead + turn * chunk_bytes / spread : 0);
          part.next_step = turn < spread ? lesser(chunk_bytes / (spread * steps), 4 * PANEL) : 0;
          part_kernel(format, tile_begin(rows, tile + 1) - first)(part);
        }
      }
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
