// One query against many keys, near the speed of memory: cached tokens are read once, in the order in which they lie,
// into a small block in the cache, and there attended to by all heads that share them.
#pragma once
#include "paged.h"
#include "shuffle.h"
#include "softmax.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t STREAM_BLOCK = 32;  // tokens of a block

// scores[i] = q . rows[i] for LANES keys, `stride` numbers apart.
HT_INLINE void score_keys(float* scores, const float* q, const float* rows, int64_t stride, int64_t padded) {
  vf sums[LANES] = {};
  for (int64_t d = 0; d < padded; d += LANES) {
    const vf x = load(q + d);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) sums[i] = fma(x, load(rows + i * stride + d), sums[i]);
  }
  store(scores, sum_each(sums));
}

// o[h] += sum of weights[h][i] rows[i] over n values, for HEADS heads, from column `from` on while VECTORS fit; returns
// the column after them.
template <int HEADS, int VECTORS>
HT_INLINE int64_t add_values(float* o, const float* weights, const float* rows, int64_t stride, int64_t n, int64_t from,
                             int64_t padded) {
  int64_t d = from;
  for (; d + VECTORS * LANES <= padded; d += VECTORS * LANES) {
    vf sums[HEADS][VECTORS];
#pragma GCC unroll 8
    for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[h][v] = load(o + h * padded + d + v * LANES);
    const float* row = rows + d;
    for (int64_t i = 0; i < n; ++i, row += stride) {
      vf x[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) x[v] = load(row + v * LANES);
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

template <int HEADS, int VECTORS>
HT_INLINE void add_all_values(float* o, const float* weights, const float* rows, int64_t stride, int64_t n,
                              int64_t padded) {
  const int64_t d = add_values<HEADS, VECTORS>(o, weights, rows, stride, n, 0, padded);
  add_values<HEADS, 1>(o, weights, rows, stride, n, d, padded);
}

// Where the keys and values of some heads lie in a cached token, in bytes, and how long they are, in numbers.
struct StreamHeads {
  int64_t count, group;  // heads of keys, and of queries for each
  int64_t key_at, key_step, key_dim, value_at, value_step, value_dim;
};

// In a block each token has its keys, padded with zeros, then its values where they are not the beginning of the keys.
struct StreamBlock {
  int64_t key_padded, value_padded, values, value_next, stride;  // values: where the first begins
};

HT_INLINE StreamBlock stream_block(const StreamHeads& s) {
  const int64_t key_padded = round_up(s.key_dim, LANES), value_padded = round_up(s.value_dim, LANES);
  const bool same = s.key_at == s.value_at;
  const int64_t keys = s.count * key_padded, all = keys + (same ? 0 : s.count * value_padded);
  // Not a power of two apart, or the rows would share few places of the cache.
  return {key_padded, value_padded, same ? 0 : keys, same ? key_padded : value_padded, round_up(all, 16) + 16};
}

// Numbers of scratch that stream_keys needs.
HT_INLINE int64_t stream_numbers(const StreamHeads& s) {
  return STREAM_BLOCK * (s.group + stream_block(s).stride) + 16;
}

HT_INLINE void copy_padded(float* to, const char* from, int64_t format, int64_t n, int64_t padded) {
  if (format == F32 && n == padded) {
#pragma GCC unroll 4
    for (int64_t d = 0; d < n; d += LANES) store(to + d, load((const float*)from + d));
  } else {
    widen(to, from, format, n);
    for (int64_t d = n; d < padded; ++d) to[d] = 0.f;
  }
}

// Queries q [count * group, key_padded], scaled and padded with zeros, against the keys at positions begin..end-1.
// o [count * group, value_padded] and running [count * group] begin from nothing.
static void stream_keys(float* o, Running* running, const float* q, const Pages& pages, int64_t begin, int64_t end,
                        const StreamHeads& s, float softcap, float* scratch) {
  const StreamBlock b = stream_block(s);
  const int64_t group = s.group;
  float *block = scratch, *scores = scratch + STREAM_BLOCK * b.stride;
  const char* tokens[STREAM_BLOCK];
  for (int64_t i = 0; i < s.count * group * b.value_padded; i += LANES) store(o + i, vf{});
  for (int64_t h = 0; h < s.count * group; ++h) running[h] = {NOTHING, 0.f};
  for (int64_t from = begin; from < end; from += STREAM_BLOCK) {
    const int64_t n = least(STREAM_BLOCK, end - from);
    find_tokens(tokens, pages, from, n, 0);
    for (int64_t i = 0; i < n; ++i) {
      float* to = block + i * b.stride;
      for (int64_t kv = 0; kv < s.count; ++kv)
        copy_padded(to + kv * b.key_padded, tokens[i] + s.key_at + kv * s.key_step, pages.format, s.key_dim,
                    b.key_padded);
      for (int64_t kv = 0; b.values && kv < s.count; ++kv)
        copy_padded(to + b.values + kv * b.value_padded, tokens[i] + s.value_at + kv * s.value_step, pages.format,
                    s.value_dim, b.value_padded);
    }
    for (int64_t kv = 0; kv < s.count; ++kv) {
      const float *heads = q + kv * group * b.key_padded, *keys = block + kv * b.key_padded;
      const float* values = block + b.values + kv * b.value_next;
      float* results = o + kv * group * b.value_padded;
      for (int64_t i = 0; i < n; i += LANES)
        for (int64_t h = 0; h < group; ++h)
          score_keys(scores + h * STREAM_BLOCK + i, heads + h * b.key_padded, keys + i * b.stride, b.stride,
                     b.key_padded);
      for (int64_t h = 0; h < group; ++h) {
        const float factor = soften(scores + h * STREAM_BLOCK, n, 0, n, softcap, running[kv * group + h]);
        if (factor != 1.f) scale_row(results + h * b.value_padded, factor, b.value_padded);
      }
      int64_t h = 0;
      for (; h + 4 <= group; h += 4)
        add_all_values<4, 2>(results + h * b.value_padded, scores + h * STREAM_BLOCK, values, b.stride, n,
                             b.value_padded);
      for (; h < group; ++h)
        add_all_values<1, 8>(results + h * b.value_padded, scores + h * STREAM_BLOCK, values, b.stride, n,
                             b.value_padded);
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
