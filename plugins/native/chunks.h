// The parts of one chunk of a linear recurrence S_t = exp(g_t) S_{t-1} + k_t u_t^T, o_t = q_t S_t, as products of
// matrices (plugins/chunked.py has the formulae): scores of its tokens, the delta rule's u, o, and the next S.
#pragma once
#include "panels.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t CHUNK = 32;  // tokens

HT_INLINE vf lane_numbers() {
  vf v;
  for (int i = 0; i < LANES; ++i) v[i] = float(i);
  return v;
}

// c[i][j] = x_i . y_j for j <= i, rows CHUNK apart: x [n, K] in rows ld apart, y by the panels of its transpose. What
// is beyond the diagonal is not defined.
static void lower_scores(float* c, const float* x, int64_t ld, const float* y, int64_t n, int64_t K) {
  for (int64_t p = 0; p < panels_of(n); ++p) {
    const int64_t first = p * TILE_COLUMNS / TILE_ROWS * TILE_ROWS;  // in tiles of the rows from 0 on
    for_tiles(n - first, HT_TILES(tile, at) {
      constexpr int R = decltype(tile)::count;
      const int64_t m = first + at;
      Sums<R> sums = {};
      add_product<R>(sums, x + m * ld, ld, 1, y + p * K * TILE_COLUMNS, K);
      for (int r = 0; r < R; ++r) store_panel_row(c + (m + r) * CHUNK + p * TILE_COLUMNS, sums.at[r], TILE_COLUMNS);
    });
  }
}

namespace {
// Log decays summed from the chunk's start, and what follows from them; one decay a token.
struct Decays {
  float from_start[CHUNK], to_end[CHUNK], between[CHUNK * CHUNK];  // between[i][j]: from j to i, 0 for j > i

  // The sums may be large and their differences small: they are taken in double. No exponent is positive: from an
  // earlier block of LANES tokens the decay is that to this block's start times that from there.
  void set(const float* g, int64_t n) {
    double total[CHUNK];
    for (int64_t i = 0; i < CHUNK; ++i) total[i] = (i ? total[i - 1] : 0.0) + (i < n ? double(g[i]) : 0.0);
    const vf lanes = lane_numbers();
    for (int64_t s = 0; s < n; s += LANES) {
      const double border = s ? total[s - 1] : 0.0;
      store(from_start + s, exponentials(total + s, 1.0, 0.0));
      float since[LANES];
      store(since, exponentials(total + s, 1.0, border));
      for (int64_t j = 0; j < s; j += LANES) {
        const vf before = exponentials(total + j, -1.0, -border);
        for (int64_t i = s; i < n && i < s + LANES; ++i) store(between + i * CHUNK + j, before * since[i - s]);
      }
      for (int64_t i = s; i < n && i < s + LANES; ++i) {
        const vf inside = exponentials(total + s, -1.0, -total[i]);
        store(between + i * CHUNK + s, lanes <= float(i - s) ? inside : vf{});
      }
    }
    memcpy(to_end, between + (n - 1) * CHUNK, size_t(n) * 4);
  }

 private:
  // exp(sign * x - less) of LANES numbers, 1 where that is above 0.
  static inline __attribute__((always_inline)) vf exponentials(const double* x, double sign, double less) {
    float y[LANES];
    for (int i = 0; i < LANES; ++i) y[i] = float(sign * x[i] - less);
    const vf exponent = load(y);
    return vexp(exponent > vf{} ? vf{} : exponent);
  }
};
}  // namespace

// a[i][j] = by_i * between[i][j] * c[i][j] for j <= i, or j < i where `strict`; 0 up to the end of a tile. Without
// `by` or `between` they are 1.
static void masked_scores(float* a, const float* c, const float* between, const float* by, bool strict, int64_t n) {
  const vf lanes = lane_numbers();
  for (int64_t i = 0; i < n; ++i) {
    const vf factor = splat(by ? by[i] : 1.f), end = splat(float(strict ? i : i + 1));
    const int64_t stop = i + TILE_ROWS < CHUNK ? i + TILE_ROWS : CHUNK;
    for (int64_t j = 0; j < stop; j += LANES) {
      vf y = load(c + i * CHUNK + j) * factor;
      if (between) y *= load(between + i * CHUNK + j);
      store(a + i * CHUNK + j, lanes + float(j) < end ? y : vf{});
    }
  }
}

// Rows [n, up to TILE_COLUMNS] of v, each by its factor, as one panel.
static void copy_panel(float* u, const float* v, int64_t ld, const float* by, int64_t n, int64_t columns) {
  for (int64_t i = 0; i < n; ++i) {
    vf y[2];
    load_panel_row(y, v + i * ld, columns);
    const vf factor = splat(by ? by[i] : 1.f);
    store(u + i * TILE_COLUMNS, y[0] * factor);
    store(u + i * TILE_COLUMNS + LANES, y[1] * factor);
  }
}

// The delta rule: u = beta (v - from_start k S) + corrections u, the corrections being strictly lower triangular.
static void solve_panel(float* u, const float* v, int64_t ldv, int64_t columns, const float* beta, const float* k,
                        int64_t ldk, const float* from_start, const float* state, const float* corrections, int64_t n,
                        int64_t K) {
  for_tiles(n, HT_TILES(tile, m) {
    constexpr int R = decltype(tile)::count;
    Sums<R> sums = {};
    add_product<R>(sums, k + m * ldk, ldk, 1, state, K);
    for (int r = 0; r < R; ++r) {
      vf y[2];
      load_panel_row(y, v + (m + r) * ldv, columns);
      const vf factor = splat(beta[m + r]), decay = splat(from_start ? from_start[m + r] : 1.f);
      for (int i = 0; i < 2; ++i) sums.at[r][i] = factor * (y[i] - decay * sums.at[r][i]);
    }
    add_product<R>(sums, corrections + m * CHUNK, CHUNK, 1, u, m);
    for (int r = 0; r < R; ++r) {
      for (int s = 0; s < r; ++s) {
        const vf x = splat(corrections[(m + r) * CHUNK + m + s]);
        for (int i = 0; i < 2; ++i) sums.at[r][i] = fma(x, sums.at[s][i], sums.at[r][i]);
      }
      store_panel_row(u + (m + r) * TILE_COLUMNS, sums.at[r], TILE_COLUMNS);
    }
  });
}

// o = from_start q S + scores u + skip x, in rows ldo apart.
static void read_panel(float* o, int64_t ldo, int64_t columns, const float* q, int64_t ldq, const float* from_start,
                       const float* state, const float* scores, const float* u, float skip, const float* x, int64_t ldx,
                       int64_t n, int64_t K) {
  for_tiles(n, HT_TILES(tile, m) {
    constexpr int R = decltype(tile)::count;
    Sums<R> sums = {};
    add_product<R>(sums, q + m * ldq, ldq, 1, state, K);
    if (from_start)
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < 2; ++i) sums.at[r][i] *= from_start[m + r];
    add_product<R>(sums, scores + m * CHUNK, CHUNK, 1, u, m + R);
    for (int r = 0; r < R; ++r) {
      if (x) {
        vf y[2];
        load_panel_row(y, x + (m + r) * ldx, columns);
        for (int i = 0; i < 2; ++i) sums.at[r][i] = fma(splat(skip), y[i], sums.at[r][i]);
      }
      store_panel_row(o + (m + r) * ldo, sums.at[r], columns);
    }
  });
}

// S = decay S + (decayed k)^T u: one decay, or one for each of S's rows.
static void update_panel(float* state, const float* k, int64_t ldk, const float* u, float decay, const float* decays,
                         int64_t n, int64_t K) {
  for_tiles(K, HT_TILES(tile, m) {
    constexpr int R = decltype(tile)::count;
    Sums<R> sums;
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2; ++i)
        sums.at[r][i] = load(state + (m + r) * TILE_COLUMNS + i * LANES) * (decays ? decays[m + r] : decay);
    add_product<R>(sums, k + m, 1, ldk, u, n);
    for (int r = 0; r < R; ++r) store_panel_row(state + (m + r) * TILE_COLUMNS, sums.at[r], TILE_COLUMNS);
  });
}

HT_INLINE void scale_panel(float* u, const float* by, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < TILE_COLUMNS; j += LANES) {
      float* at = u + i * TILE_COLUMNS + j;
      store(at, load(at) * by[i]);
    }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
