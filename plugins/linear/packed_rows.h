// Rows of x packed for products with panels: chunk by chunk, tile by tile (panels.h).
#pragma once
#include "panels.h"
#include "shuffle.h"

namespace hybridtrt {
namespace HT_ISA {

// n <= BLOCK numbers as int16 times the scale that is returned; numbers up to `padded` are 0. A number that is not
// finite makes the scale NaN.
HT_INLINE float quantise(int16_t* q, const float* x, int64_t n, int64_t padded) {
  vf top = {}, none = {};
  const auto look = [&](vf v) {
    top = vmax(top, (vf)((vu)v & 0x7fffffffu));
    none = fma(v, vf{}, none);
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) look(load(x + i));
  if (i < n) look(load_part(x + i, n - i));
  const float most = largest(top), by = most > 1e-30f ? 32767.f / most : 0.f;
  const vf magic = splat(12582912.f);  // rounds to whole numbers
  const auto round = [&](vf v, int16_t* to) {
    typedef int16_t half __attribute__((vector_size(LANES * 2)));
    const half h = __builtin_convertvector((vi)(v * by + magic) - (vi)magic, half);
    memcpy(to, &h, sizeof h);
  };
  for (i = 0; i + LANES <= n; i += LANES) round(load(x + i), q + i);
  if (i < n) round(load_part(x + i, n - i), q + i);
  for (i = n; i < padded; ++i) q[i] = 0;
  return (most > 1e-30f ? most * (1.f / 32767.f) : 0.f) + sum(none);
}

// n <= CHUNK numbers rounded to bfloat16: in pairs, the last one filled up with 0, or as float32.
HT_INLINE const float* round_bf16(float* to, const float* x, int64_t n) {
  auto* pairs = reinterpret_cast<uint16_t*>(to);
  for (int64_t i = 0; i < n; i += LANES) {
    const int64_t left = lesser(LANES, n - i);
    const vf v = left == LANES ? load(x + i) : load_part(x + i, left);
    uint16_t halves[LANES];
    store_bf16(BF16_PAIRS ? pairs + i : halves, v);
    if (!BF16_PAIRS) store(to + i, load_bf16(halves));
  }
  return to;
}

// to[i][m] = rows[m][i] for n numbers or pairs, of 4 bytes each.
template <int COUNT>
static void interleave(float* to, const void* const* rows, int64_t n) {
  const char* from[COUNT];
  for (int m = 0; m < COUNT; ++m) from[m] = static_cast<const char*>(rows[m]);
  int64_t i = 0;
  // A vector for each i, with lanes that the next one's numbers take the place of: not the last ones.
  if constexpr (COUNT > 2)
    for (; i + 2 * LANES <= n; i += LANES) {
      vf v[LANES] = {};
#pragma GCC unroll 16
      for (int m = 0; m < COUNT; ++m) memcpy(&v[m], from[m] + 4 * i, sizeof v[m]);
      transpose_lanes(v);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; ++j) store(to + (i + j) * COUNT, v[j]);
    }
  for (; i < n; ++i)
    for (int m = 0; m < COUNT; ++m) memcpy(to + i * COUNT + m, from[m] + 4 * i, 4);
}
HT_INLINE void interleave(float* to, const void* const* rows, int64_t count, int64_t n) {
  switch (count) {
#define CASE(c) \
  case c: return interleave<c <= ROWS ? c : 1>(to, rows, n);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

// Pack tile `tile` of `rows` rows to its places in `to`; row(i) is where row i lies.
template <class Row>
HT_INLINE void pack_tile(float* to, const Matrix& w, int64_t rows, int64_t tile, Row row) {
  const int64_t k = padded_k(w), block = block_of(w), width = packed_width(w, CHUNK);
  const int64_t first = tile_begin(rows, tile), count = tile_begin(rows, tile + 1) - first;
  const void* from[ROWS];
  int16_t q[ROWS][BLOCK + 16];
  float rounded[ROWS][CHUNK];
  for (int64_t begin = 0; begin < k; begin += CHUNK, to += rows * width) {
    const int64_t end = lesser(begin + CHUNK, k), filled = lesser(end, w.k);
    float* at = to + first * (end - begin < CHUNK ? packed_width(w, end - begin) : width);
    if (is_float(w.format)) {
      for (int64_t m = 0; m < count; ++m) {
        const float* x = row(first + m) + begin;
        from[m] = w.format == PANEL_BF16_ROUNDED ? round_bf16(rounded[m], x, filled - begin) : x;
      }
      const int64_t pairs = in_pairs(w.format) ? 2 : 1, n = (filled - begin + pairs - 1) / pairs;
      interleave(at, from, count, n);
      for (int64_t i = n * count; i < (end - begin) / pairs * count; ++i) at[i] = 0;
      continue;
    }
    for (int64_t b = begin; b < end; b += block) {
      const int64_t padded = lesser(block, end - b), n = filled < b ? 0 : lesser(padded, filled - b);
      for (int64_t m = 0; m < count; ++m) {
        at[m] = quantise(q[m], row(first + m) + b, n, padded);
        from[m] = q[m];
      }
      interleave(at + count, from, count, padded / 2);
      at += count * (1 + padded / 2);
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
