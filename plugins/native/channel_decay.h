// A chunk whose decay differs between the channels of a key (arXiv 2510.26692): the decay sits inside the products.
// Blocks of 16 tokens: scores inside a block by keys that decay on from token to token, scores with earlier blocks by
// queries decayed from the block's start and keys decayed to it. So no exponent is positive.
#pragma once
#include "chunks.h"

namespace hybridtrt {
namespace HT_ISA {

// c[j] = x . y_j for j < n, rows of y ld apart.
HT_INLINE void dots(float* c, const float* x, const float* y, int64_t ld, int64_t n, int64_t K) {
  for (int64_t j = 0; j < n; j += LANES) {
    const float* rows[LANES];
    for (int r = 0; r < LANES; ++r) rows[r] = y + (j + r < n ? j + r : j) * ld;
    vf sums[LANES] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
      const vf a = load(x + k);
#pragma GCC unroll 16
      for (int r = 0; r < LANES; ++r) sums[r] = fma(a, load(rows[r] + k), sums[r]);
    }
    if (k < K)
      for (int r = 0; r < LANES; ++r) sums[r] = fma(load_part(x + k, K - k), load_part(rows[r] + k, K - k), sums[r]);
    store_part(c + j, sum_each(sums), n - j < LANES ? n - j : LANES);
  }
}

namespace {
// What a chunk makes of its q, k and log decays g, each [n, K] in rows ld apart: scores and corrections, q and k
// decayed from the chunk's start, k decayed to its end (in place of g's working copy), and the state's decay.
struct ChannelChunk {
  float *scores, *corrections;         // [CHUNK, CHUNK]; corrections only with beta
  float *q_start, *k_start, *k_end;    // [CHUNK, ld]
  float *decay, *e;                    // [K]
  double *total, *before;              // [K]

  void set(const float* q, const float* k, float* g, const float* beta, int64_t ld, int64_t n, int64_t K) const {
    constexpr int64_t BLOCK = 16;
    for (int64_t c = 0; c < K; ++c) total[c] = 0.0;
    for (int64_t s = 0; s < n; s += BLOCK) {
      const int64_t end = s + BLOCK < n ? s + BLOCK : n;
      for (int64_t c = 0; c < K; ++c) before[c] = total[c];
      for (int64_t t = s; t < end; ++t) {
        for (int64_t c = 0; c < K; ++c) total[c] += double(g[t * ld + c]);
        for_channels(K, [&](int64_t c) __attribute__((always_inline)) {
          const vf a = vexp(load(g + t * ld + c)), since = t > s ? load(e + c) * a : a;
          store(e + c, since);
          store(q_start + t * ld + c, load(q + t * ld + c) * since);
          store(k_start + t * ld + c, load(k + t * ld + c) * since);
          store(k_end + t * ld + c, load(k + t * ld + c));
          for (int64_t j = s; j < t; ++j) store(k_end + j * ld + c, load(k_end + j * ld + c) * a);
        });
        dots(scores + t * CHUNK + s, q + t * ld, k_end + s * ld, ld, t + 1 - s, K);
        if (beta) dots(corrections + t * CHUNK + s, k + t * ld, k_end + s * ld, ld, t - s, K);
        dots(scores + t * CHUNK, q_start + t * ld, k_end, ld, s, K);
        if (beta) dots(corrections + t * CHUNK, k_start + t * ld, k_end, ld, s, K);
      }
      exponentials(decay, before, nullptr, K);
      for (int64_t t = s; t < end; ++t)
        for_channels(K, [&](int64_t c) __attribute__((always_inline)) {
          store(q_start + t * ld + c, load(q_start + t * ld + c) * load(decay + c));
          store(k_start + t * ld + c, load(k_start + t * ld + c) * load(decay + c));
        });
      exponentials(e, total, before, K);
      for (int64_t j = 0; j < s; ++j)
        for_channels(K, [&](int64_t c) __attribute__((always_inline)) {
          store(k_end + j * ld + c, load(k_end + j * ld + c) * load(e + c));
        });
    }
    exponentials(decay, total, nullptr, K);
    masked_scores(scores, scores, nullptr, nullptr, false, n);
    if (!beta) return;
    float minus[CHUNK];
    for (int64_t t = 0; t < n; ++t) minus[t] = -beta[t];
    masked_scores(corrections, corrections, nullptr, minus, true, n);
  }

 private:
  // In whole vectors: rows have room for them.
  template <class F>
  static inline __attribute__((always_inline)) void for_channels(int64_t K, F f) {
    for (int64_t c = 0; c < K; c += LANES) f(c);
  }
  static inline __attribute__((always_inline)) void exponentials(float* y, const double* x, const double* less,
                                                                 int64_t K) {
    for (int64_t c = 0; c < K; ++c) y[c] = float(less ? x[c] - less[c] : x[c]);
    for_channels(K, [&](int64_t c) __attribute__((always_inline)) { store(y + c, vexp(load(y + c))); });
  }
};
}  // namespace

}  // namespace HT_ISA
}  // namespace hybridtrt
