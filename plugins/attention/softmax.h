// A softmax that goes on from one part of the keys to the next (Milakov and Gimelshein, arXiv 1805.02867): the maximum
// so far, and sums relative to it.
#pragma once
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr float NOTHING = -__builtin_inff();  // the maximum of no scores

HT_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
HT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
HT_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// e^x for x <= 0, as exact as vexp; e^-87 for all below.
HT_INLINE vf exp_negative(vf x) {
  const vf clamped = vmax(x, splat(-87.f));
  const vf n = round_to_int(clamped * 1.44269504088896341f);
  vf r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.f);
  return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}
HT_INLINE float exp_negative1(float x) { return exp_negative(splat(x))[0]; }

#if defined(__AVX512F__)
constexpr vi LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
constexpr vi LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr vi LANE = {0, 1, 2, 3};
#endif

// What is known of one query and head: the maximum of its scores and the sum of their exponentials below it.
struct Running {
  float maximum, sum;
};

// The scores of one query, of which begin..end-1 count, become e^(score - maximum), and 0 in the others among
// 0..round_up(n, LANES)-1, which are never read. Returns the factor that earlier sums shrink by.
HT_INLINE float soften(float* scores, int64_t n, int64_t begin, int64_t end, float softcap, Running& running) {
  const vf zero = {};
  if (begin >= end) {
    for (int64_t i = 0; i < n; i += LANES) store(scores + i, zero);
    return 1.f;
  }
  const int64_t from = begin / LANES * LANES;
  vf top = splat(NOTHING);
  for (int64_t i = from; i < end; i += LANES) {
    vf x = load(scores + i);
    if (softcap > 0.f) x = softcap * vtanh(x / softcap);
    if (i < begin || i + LANES > end) {
      const vi lane = LANE + int32_t(i);
      x = lane < int32_t(begin) ? splat(NOTHING) : x;
      x = lane >= int32_t(end) ? splat(NOTHING) : x;
      store(scores + i, x);
    } else if (softcap > 0.f) {
      store(scores + i, x);
    }
    top = vmax(top, x);
  }
  const float here = largest(top), maximum = here > running.maximum ? here : running.maximum;
  vf total = {};
  for (int64_t i = 0; i < from; i += LANES) store(scores + i, zero);
  int64_t i = from;
  for (; i < end; i += LANES) {
    vf y = exp_negative(load(scores + i) - maximum);
    if (i < begin || i + LANES > end) {
      const vi lane = LANE + int32_t(i);
      y = lane < int32_t(begin) ? zero : y;
      y = lane >= int32_t(end) ? zero : y;
    }
    store(scores + i, y);
    total += y;
  }
  for (; i < n; i += LANES) store(scores + i, zero);
  const float factor = running.sum > 0.f ? exp_negative1(running.maximum - maximum) : 0.f;
  running.sum = fma1(running.sum, factor, sum(total));
  running.maximum = maximum;
  return factor;
}

// y *= by, n a multiple of LANES.
HT_INLINE void scale_row(float* y, float by, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(y + i, load(y + i) * by);
}

// to = y / (sum of all exponentials), with the score `sink` among them where it is given.
HT_INLINE void finish_row(float* to, const float* y, Running running, const float* sink, int64_t n) {
  float by = 1.f;
  if (sink) {
    const float maximum = *sink > running.maximum ? *sink : running.maximum;
    by = exp_negative1(running.maximum - maximum);
    running.sum = fma1(running.sum, by, exp_negative1(*sink - maximum));
  }
  by /= running.sum;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(y + i) * by);
  if (i < n) store_part(to + i, load_part(y + i, n - i) * by, n - i);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
