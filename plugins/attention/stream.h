// One query against many keys, at the speed of memory: every key and value is read once for all heads that share it,
// straight from its page.
#pragma once
#include "paged.h"
#include "softmax.h"
#include "tile.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t STREAM_BLOCK = 32;  // keys whose scores are held at once; they and their values stay in the L1 cache

// The keys or values of a block: in their pages where they are whole vectors of float32, else widened and padded with
// zeros into `wide` [STREAM_BLOCK, padded].
HT_INLINE void find_rows(const float** rows, float* wide, const Pages& pages, int64_t from, int64_t n, int64_t offset,
                         int64_t dim, int64_t padded) {
  const char* at[STREAM_BLOCK];
  find_tokens(at, pages, from, n, offset);
  const bool direct = pages.format == F32 && dim == padded;
  for (int64_t i = 0; i < n; ++i) {
    rows[i] = direct ? (const float*)at[i] : wide + i * padded;
    if (direct) continue;
    widen(wide + i * padded, at[i], pages.format, dim);
    for (int64_t d = dim; d < padded; ++d) wide[i * padded + d] = 0.f;
  }
  for (int64_t i = n; i < round_up(n, LANES); ++i) rows[i] = rows[n - 1];
}

// o[h] += sum of weights[h][i] rows[i] over n values, for HEADS heads.
template <int HEADS, int VECTORS>
HT_INLINE int64_t add_values(float* o, const float* weights, const float* const* rows, int64_t n, int64_t from,
                             int64_t padded) {
  int64_t d = from;
  for (; d + VECTORS * LANES <= padded; d += VECTORS * LANES) {
    vf sums[HEADS][VECTORS];
#pragma GCC unroll 8
    for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[h][v] = load(o + h * padded + d + v * LANES);
    for (int64_t i = 0; i < n; ++i) {
      vf x[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) x[v] = load(rows[i] + d + v * LANES);
#pragma GCC unroll 8
      for (int h = 0; h < HEADS; ++h) {
        const vf w = splat(weights[h * STREAM_BLOCK + i]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[h][v] = fma(w, x[v], sums[h][v]);
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) store(o + h * padded + d + v * LANES, sums[h][v]);
  }
  return d;
}

HT_INLINE void add_all_values(float* o, const float* weights, const float* const* rows, int64_t n, int64_t heads,
                              int64_t padded) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4)
    add_values<4, 1>(o + h * padded, weights + h * STREAM_BLOCK, rows, n,
                     add_values<4, 2>(o + h * padded, weights + h * STREAM_BLOCK, rows, n, 0, padded), padded);
  for (; h < heads; ++h)
    add_values<1, 1>(o + h * padded, weights + h * STREAM_BLOCK, rows, n,
                     add_values<1, 8>(o + h * padded, weights + h * STREAM_BLOCK, rows, n, 0, padded), padded);
}

// Numbers of scratch that stream_keys needs.
HT_INLINE int64_t stream_scratch(int64_t heads, int64_t key_padded, int64_t value_padded) {
  return STREAM_BLOCK * (heads + most(key_padded, value_padded));
}

// The heads' queries q [heads, key_padded], scaled and padded with zeros, against the keys at positions begin..end-1.
// o [heads, value_padded] and running [heads] begin from nothing.
static void stream_keys(float* o, Running* running, const float* q, const Pages& pages, int64_t begin, int64_t end,
                        int64_t heads, int64_t key_at, int64_t key_dim, int64_t value_at, int64_t value_dim,
                        float softcap, float* scratch) {
  const int64_t key_padded = round_up(key_dim, LANES), value_padded = round_up(value_dim, LANES);
  float *scores = scratch, *wide = scratch + heads * STREAM_BLOCK;
  const float* rows[STREAM_BLOCK];
  for (int64_t i = 0; i < heads * value_padded; i += LANES) store(o + i, vf{});
  for (int64_t h = 0; h < heads; ++h) running[h] = {NOTHING, 0.f};
  for (int64_t from = begin; from < end; from += STREAM_BLOCK) {
    const int64_t n = least(STREAM_BLOCK, end - from);
    find_rows(rows, wide, pages, from, n, key_at, key_dim, key_padded);
    for (int64_t i = 0; i < n; i += LANES)
      for (int64_t h = 0; h < heads; ++h) dot_rows(scores + h * STREAM_BLOCK + i, q + h * key_padded, rows + i, key_padded);
    for (int64_t h = 0; h < heads; ++h) {
      const float factor = soften(scores + h * STREAM_BLOCK, n, 0, n, softcap, running[h]);
      if (factor != 1.f) scale_row(o + h * value_padded, factor, value_padded);
    }
    find_rows(rows, wide, pages, from, n, value_at, value_dim, value_padded);
    add_all_values(o, scores, rows, n, heads, value_padded);
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
