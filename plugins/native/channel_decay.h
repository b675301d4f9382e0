// A chunk whose decay differs between the channels of a key (arXiv 2510.26692): the decay sits inside the products.
// Blocks of 16 tokens: scores inside a block by keys that decay on from token to token, scores with earlier blocks by
// queries decayed from the block's start and keys decayed to it. So no exponent is positive.
#pragma once
#include "chunks.h"

namespace hybridtrt {
namespace HT_ISA {

// The sums of four vectors.
HT_INLINE void sum_four(float* to, int64_t step, vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__)
#define HT_HALVES(x) _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1))
#elif defined(__AVX2__)
#define HT_HALVES(x) (__m256) x
#endif
#if defined(__AVX2__)
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(HT_HALVES(a), HT_HALVES(b)),
                                      _mm256_hadd_ps(HT_HALVES(c), HT_HALVES(d)));
  float x[4];
  _mm_storeu_ps(x, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  for (int i = 0; i < 4; ++i) to[i * step] = x[i];
#undef HT_HALVES
#else
  to[0] = sum(a), to[step] = sum(b), to[2 * step] = sum(c), to[3 * step] = sum(d);
#endif
}

// c[j] = x . y_j for j < n, rows of y ld apart.
HT_INLINE void dots(float* c, const float* x, const float* y, int64_t ld, int64_t n, int64_t K) {
  int64_t j = 0;
  for (; j < n; j += 4) {
    const float* rows[4];
    for (int64_t r = 0; r < 4; ++r) rows[r] = y + (j + r < n ? j + r : j) * ld;
    vf sums[4] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES)
      for (int r = 0; r < 4; ++r) sums[r] = fma(load(x + k), load(rows[r] + k), sums[r]);
    if (k < K)
      for (int r = 0; r < 4; ++r) sums[r] = fma(load_part(x + k, K - k), load_part(rows[r] + k, K - k), sums[r]);
    if (j + 4 <= n) {
      sum_four(c + j, 1, sums[0], sums[1], sums[2], sums[3]);
    } else {
      float few[4];
      sum_four(few, 1, sums[0], sums[1], sums[2], sums[3]);
      for (int64_t r = 0; j + r < n; ++r) c[j + r] = few[r];
    }
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
