// States of linear recurrences: between a pool's slots and panels, and one token's step over a slot.
#pragma once
#include "elementwise.h"
#include "panels.h"

namespace hybridtrt {
namespace HT_ISA {

// One head's state in a pool: [K, V], or transposed [V, K].
struct State {
  char* data;
  int64_t format, K, V;
  bool transposed;
};

HT_INLINE State head_state(const Cache& pool, int64_t slot, int64_t head, bool transposed) {
  const int64_t rows = pool.dims[2], columns = pool.dims[3];
  char* data = static_cast<char*>(pool.data) + (slot * pool.dims[1] + head) * rows * columns * bytes_of(pool.format);
  return {data, pool.format, transposed ? columns : rows, transposed ? rows : columns, transposed};
}

// Panels first..last-1 of the state, together; `row` has room for a panel's and for a row's numbers.
static void load_state(float* panels, const State& state, int64_t first, int64_t last, float* row) {
  const int64_t K = state.K, V = state.V, size = bytes_of(state.format), begin = first * TILE_COLUMNS;
  const bool wide = state.format == F32;
  if (state.transposed) {
    for (int64_t v = begin; v < last * TILE_COLUMNS; v += TILE_COLUMNS, panels += K * TILE_COLUMNS) {
      const int64_t n = V - v < TILE_COLUMNS ? V - v : TILE_COLUMNS;
      const char* from = state.data + v * K * size;
      if (!wide) widen(row, from, state.format, n * K);
      transpose_to_panels(panels, wide ? reinterpret_cast<const float*>(from) : row, K, n, K);
    }
    return;
  }
  const int64_t columns = (last * TILE_COLUMNS < V ? last * TILE_COLUMNS : V) - begin;
  for (int64_t k = 0; k < K; ++k) {
    const char* data = state.data + (k * V + begin) * size;
    if (!wide) widen(row, data, state.format, columns);
    const float* from = wide ? reinterpret_cast<const float*>(data) : row;
    for (int64_t v = 0; v < columns; v += TILE_COLUMNS) {
      vf y[2];
      load_panel_row(y, from + v, columns - v);
      store_panel_row(panels + v * K + k * TILE_COLUMNS, y, TILE_COLUMNS);
    }
  }
}
static void store_state(const State& state, const float* panels, int64_t first, int64_t last, float* row) {
  const int64_t K = state.K, V = state.V, size = bytes_of(state.format), begin = first * TILE_COLUMNS;
  const bool wide = state.format == F32;
  if (state.transposed) {
    for (int64_t v = begin; v < last * TILE_COLUMNS; v += TILE_COLUMNS, panels += K * TILE_COLUMNS) {
      const int64_t n = V - v < TILE_COLUMNS ? V - v : TILE_COLUMNS;
      char* to = state.data + v * K * size;
      transpose_from_panels(wide ? reinterpret_cast<float*>(to) : row, K, panels, n, K);
      if (!wide) narrow(to, row, state.format, n * K);
    }
    return;
  }
  const int64_t columns = (last * TILE_COLUMNS < V ? last * TILE_COLUMNS : V) - begin;
  for (int64_t k = 0; k < K; ++k) {
    char* data = state.data + (k * V + begin) * size;
    float* to = wide ? reinterpret_cast<float*>(data) : row;
    for (int64_t v = 0; v < columns; v += TILE_COLUMNS) {
      const float* from = panels + v * K + k * TILE_COLUMNS;
      const vf y[2] = {load(from), load(from + LANES)};
      store_panel_row(to + v, y, columns - v);
    }
    if (!wide) narrow(data, row, state.format, columns);
  }
}

// One token, S [K, V] in rows ld apart, columns 0..n-1 of it: sums over the rows in order, four rows at a time.

template <int R>
HT_INLINE void read_rows(const float* s, int64_t ld, const float* x, const float* y, float* xs, float* ys, int64_t n) {
  for (int64_t v = 0; v < n; v += LANES) {
    const int64_t part = n - v < LANES ? n - v : LANES;
    vf first = load(xs + v), second = load(ys + v);
    for (int r = 0; r < R; ++r) {
      const vf row = part == LANES ? load(s + r * ld + v) : load_part(s + r * ld + v, part);
      first = fma(splat(x[r]), row, first);
      second = fma(splat(y[r]), row, second);
    }
    store(xs + v, first);
    store(ys + v, second);
  }
}
// xs = x S and ys = y S.
static void read_state(const float* s, int64_t ld, const float* x, const float* y, float* xs, float* ys, int64_t K,
                       int64_t n) {
  for (int64_t v = 0; v < n; v += LANES) store(xs + v, vf{}), store(ys + v, vf{});
  int64_t k = 0;
  for (; k + 4 <= K; k += 4) read_rows<4>(s + k * ld, ld, x + k, y + k, xs, ys, n);
  for (; k < K; ++k) read_rows<1>(s + k * ld, ld, x + k, y + k, xs, ys, n);
}

template <int R>
HT_INLINE void step_rows(float* to, const float* from, int64_t ld, const float* a, const float* k, const float* q,
                         const float* u, float* o, int64_t n) {
  for (int64_t v = 0; v < n; v += LANES) {
    const int64_t part = n - v < LANES ? n - v : LANES;
    const vf by = load(u + v);
    vf read = load(o + v);
    for (int r = 0; r < R; ++r) {
      const vf old = part == LANES ? load(from + r * ld + v) : load_part(from + r * ld + v, part);
      const vf row = fma(splat(k[r]), by, old * a[r]);
      if (part == LANES)
        store(to + r * ld + v, row);
      else
        store_part(to + r * ld + v, row, part);
      read = fma(splat(q[r]), row, read);
    }
    store(o + v, read);
  }
}
// S' = a S + k u^T, o = q S'; u and o have room for whole vectors.
static void step_state(float* to, const float* from, int64_t ld, const float* a, const float* k, const float* q,
                       const float* u, float* o, int64_t K, int64_t n) {
  for (int64_t v = 0; v < n; v += LANES) store(o + v, vf{});
  int64_t j = 0;
  for (; j + 4 <= K; j += 4) step_rows<4>(to + j * ld, from + j * ld, ld, a + j, k + j, q + j, u, o, n);
  for (; j < K; ++j) step_rows<1>(to + j * ld, from + j * ld, ld, a + j, k + j, q + j, u, o, n);
}

// S' = a S + k u^T.
static void update_state(float* to, const float* from, int64_t ld, const float* a, const float* k, const float* u,
                         int64_t K, int64_t n) {
  for (int64_t j = 0; j < K; ++j) {
    const vf decay = splat(a[j]), key = splat(k[j]);
    map2(to + j * ld, from + j * ld, u, n, [&](vf s, vf x) { return fma(key, x, s * decay); });
  }
}

HT_INLINE float dot(const float* x, const float* y, int64_t n) {
  vf total = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const int64_t part = n - i < LANES ? n - i : LANES;
    total = fma(load_part(x + i, part), load_part(y + i, part), total);
  }
  return sum(total);
}

// One token with S transposed, R rows of it: S'_v = a S_v + u_v k, the lanes of sums[v] add up to S'_v . q.
template <int R>
HT_INLINE void step_transposed_rows(float* to, const float* from, int64_t ld, vf a, const float* k, const float* q,
                                    const float* u, vf* sums, int64_t K) {
  int64_t j = 0;
  for (; j + LANES <= K; j += LANES) {
    const vf key = load(k + j), query = load(q + j);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf row = fma(splat(u[r]), key, load(from + r * ld + j) * a);
      store(to + r * ld + j, row);
      sums[r] = fma(row, query, sums[r]);
    }
  }
  if (j == K) return;
  const vf key = load_part(k + j, K - j), query = load_part(q + j, K - j);
  for (int r = 0; r < R; ++r) {
    const vf row = fma(splat(u[r]), key, load_part(from + r * ld + j, K - j) * a);
    store_part(to + r * ld + j, row, K - j);
    sums[r] = fma(row, query, sums[r]);
  }
}
// Rows 0..n-1 of a transposed state, and o.
static void step_transposed(float* to, const float* from, int64_t ld, float a, const float* k, const float* q,
                            const float* u, float* o, int64_t K, int64_t n) {
  int64_t v = 0;
  for (; v + LANES <= n; v += LANES) {
    vf sums[LANES] = {};
    step_transposed_rows<LANES>(to + v * ld, from + v * ld, ld, splat(a), k, q, u + v, sums, K);
    store(o + v, sum_each(sums));
  }
  for (; v < n; ++v) {
    vf sums = {};
    step_transposed_rows<1>(to + v * ld, from + v * ld, ld, splat(a), k, q, u + v, &sums, K);
    o[v] = sum(sums);
  }
}

// One token of several queries, rows of q ldq apart and of o ldo: S' = S + k u^T, o_g = q_g S'. `ones` and `unused`
// have room for K and for V numbers, `copy` for a state of 16-bit numbers as float32.
static void step_grouped(const State& src, const State& dst, const float* k, const float* u, const float* q,
                         int64_t ldq, float* o, int64_t ldo, int64_t queries, float* ones, float* unused, float* copy) {
  const int64_t K = src.K, V = src.V;
  const float* from = reinterpret_cast<const float*>(src.data);
  float* to = reinterpret_cast<float*>(dst.data);
  if (src.format != F32) {
    widen(copy, src.data, src.format, K * V);
    from = to = copy;
  }
  for (int64_t j = 0; j < K; ++j) ones[j] = 1.f;
  step_state(to, from, V, ones, k, q, u, o, K, V);
  for (int64_t g = 1; g < queries; g += 2) {
    const bool both = g + 1 < queries;
    read_state(to, V, q + g * ldq, q + (g + both) * ldq, o + g * ldo, both ? o + (g + 1) * ldo : unused, K, V);
  }
  if (src.format != F32) narrow(dst.data, copy, dst.format, K * V);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
