// A tile of packed rows times a chunk of one panel, in each format.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "panels.h"

namespace hybridtrt {
namespace HT_ISA {

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

// A pair in each lane, broadcast as an integer: what reads it is one third faster than after a broadcast of a float.
HT_INLINE vi splat_pair(const float& pair) {
  int32_t bits;
  memcpy(&bits, &pair, 4);
  return bits - vi{};
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
  bool first;          // the first chunk of K
  float* sums;         // of the chunks before, which this one is added to
  float* y;            // where the sums go with the last chunk, before that null
  int64_t y_stride, columns;
  const float* bias;   // with the last chunk
};

// Weights are read once a step: streamed, they are kept from where they would drive out what is read again.
template <bool STREAMED>
HT_INLINE void prefetch(const char* p) {
  __builtin_prefetch(p, 0, STREAMED ? 0 : 3);
}

template <bool STREAMED, int COUNT>
HT_INLINE void multiply_f32(const Part& p, vf (&sums)[COUNT][VECTORS]) {
  const float *w = reinterpret_cast<const float*>(p.w), *x = p.x;
  const char* next = p.next;
  for (int64_t k = 0; k < p.k; ++k, w += PANEL, x += COUNT, next += p.next_step) {
    prefetch<STREAMED>(next);
    vf v[VECTORS];
    for (int i = 0; i < VECTORS; ++i) v[i] = load(w + i * LANES);
    for (int m = 0; m < COUNT; ++m)
      for (int i = 0; i < VECTORS; ++i) sums[m][i] = fma(v[i], splat(x[m]), sums[m][i]);
  }
}

template <bool STREAMED, int COUNT>
HT_INLINE void multiply_bf16(const Part& p, vf (&sums)[COUNT][VECTORS]) {
  const float *w = reinterpret_cast<const float*>(p.w), *x = p.x;
  const char* next = p.next;
  for (int64_t k = 0; k < p.k; k += 2, w += PANEL, x += 2 * COUNT, next += p.next_step) {
    prefetch<STREAMED>(next);
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

#if defined(__AVX512BF16__)
// Pairs of x and of w: the product of the odd k is added, then that of the even one.
template <bool STREAMED, int COUNT>
HT_INLINE void multiply_bf16_pairs(const Part& p, vf (&sums)[COUNT][VECTORS]) {
  const float *w = reinterpret_cast<const float*>(p.w), *x = p.x;
  const char* next = p.next;
  for (int64_t k = 0; k < p.k; k += 2, w += PANEL, x += COUNT, next += p.next_step) {
    prefetch<STREAMED>(next);
    vf v[VECTORS];
    for (int i = 0; i < VECTORS; ++i) v[i] = load(w + i * LANES);
    for (int m = 0; m < COUNT; ++m)
      for (int i = 0; i < VECTORS; ++i)
        sums[m][i] = (vf)_mm512_dpbf16_ps((__m512)sums[m][i], (__m512bh)v[i], (__m512bh)splat_pair(x[m]));
  }
}
#endif

// Pair j of the words that are read in a step.
template <int BITS>
HT_INLINE vw pairs_of(vw words, int j) {
  return (vw)((vw)(words << (16 - BITS * (j + 1))) >> (16 - BITS));
}
HT_INLINE vw load_words(const char* p) { return (vw)load(reinterpret_cast<const float*>(p)); }
HT_INLINE vf load_scales(const char* p, int v) { return load_bf16(reinterpret_cast<const uint16_t*>(p) + v * LANES); }

// With few rows: each word is read once.
template <bool STREAMED, int BITS, int COUNT>
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
      prefetch<STREAMED>(next);
      vw words[VECTORS];
      for (int v = 0; v < VECTORS; ++v) words[v] = load_words(w + v * LANES * 4);
      for (int j = 0; j < PAIRS; ++j)
        for (int m = 0; m < COUNT; ++m)
          for (int v = 0; v < VECTORS; ++v)
            sums[m][v] = add_products(sums[m][v], pairs_of<BITS>(words[v], j), (vw)splat_pair(x[j * COUNT + m]));
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

template <bool STREAMED, int COUNT>
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
      prefetch<STREAMED>(next);
      vw words[VECTORS];
      for (int v = 0; v < VECTORS; ++v) words[v] = load_words(reinterpret_cast<const char*>(w + v * 2 * LANES));
      for (int m = 0; m < COUNT; ++m)
        for (int v = 0; v < VECTORS; ++v) sums[m][v] = add_products(sums[m][v], words[v], (vw)splat_pair(x[m]));
    }
    for (int v = 0; v < VECTORS; ++v) {
      const vf by = load(wide.scales[b] + v * LANES);
      for (int m = 0; m < COUNT; ++m)
        y[m][v] = fma(__builtin_convertvector(sums[m][v], vf), by * row_scales[m], y[m][v]);
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
