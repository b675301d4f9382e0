// Vectors of float32 of the widest registers there are, written once for every instruction set with the compiler's
// vector extension.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernel.h"

namespace hybridtrt {
namespace HT_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

HT_INLINE vf splat(float x) { return x - vf{}; }  // a broadcast alone: x + 0 would be an addition for x = -0
HT_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
HT_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
// The first n <= LANES numbers, the rest zero; nothing beyond them is read or written.
#if defined(__AVX2__) && !defined(__AVX512F__)
HT_INLINE __m256i first_lanes(int64_t n) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (__m256i)(lane < (vi{} + int32_t(n)));
}
#endif
HT_INLINE vf load_part(const float* p, int64_t n) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
#elif defined(__AVX2__)
  return (vf)_mm256_maskload_ps(p, first_lanes(n));
#else
  vf v = {};
  memcpy(&v, p, size_t(n) * 4);
  return v;
#endif
}
HT_INLINE void store_part(float* p, vf v, int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)v);
#elif defined(__AVX2__)
  if (n == LANES) return store(p, v);  // a masked store takes many cycles on some machines
  _mm256_maskstore_ps(p, first_lanes(n), (__m256)v);
#else
  memcpy(p, &v, size_t(n) * 4);
#endif
}

// a * b + c, rounded once where the machine can.
HT_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
HT_INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
// b where either is NaN.
HT_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
HT_INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

HT_INLINE vf vsqrt(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < LANES; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// The lanes folded in halves, always in the same order.
template <class F>
HT_INLINE float fold(vf v, F with) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 half = with(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 half = (__m256)v;
#endif
  const __m128 four = with(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 two = with(four, _mm_movehl_ps(four, four));
  return with(two, _mm_movehdup_ps(two))[0];
#else
  float x[LANES];
  store(x, v);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) x[i] = with(x[i], x[i + n]);
  return x[0];
#endif
}
HT_INLINE float sum(vf v) {
  return fold(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
HT_INLINE float largest(vf v) {
  return fold(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// 16-bit numbers.
HT_INLINE float from_bf16(uint16_t b) {
  const uint32_t u = uint32_t(b) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
// Rounded to the nearest, ties to even; NaN stays NaN.
HT_INLINE uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
HT_INLINE vf load_bf16(const uint16_t* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
HT_INLINE void store_bf16(uint16_t* p, vf v) {
  const vu u = (vu)v, rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40;
  const vh h = __builtin_convertvector((vu)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded), vh);
  memcpy(p, &h, sizeof h);
}
HT_INLINE float from_f16(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
  uint32_t u;
  float f;
  if (exponent == 0) {
    f = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    memcpy(&u, &f, 4);
    u |= sign;
  } else {
    u = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  }
  memcpy(&f, &u, 4);
  return f;
#endif
}
HT_INLINE uint16_t to_f16(float f) {
#if defined(__F16C__)
  return _cvtss_sh(f, 0);
#else
  uint32_t u;
  memcpy(&u, &f, 4);
  const uint32_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
  if (u < 0x38800000) {                                // below the normal numbers: let an addition round
    float magnitude;
    memcpy(&magnitude, &u, 4);
    magnitude += 0.5f;
    memcpy(&u, &magnitude, 4);
    return uint16_t(sign | (u - 0x3f000000));
  }
  return uint16_t(sign | ((u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13));
#endif
}

// n numbers of a pool as float32, and back.
HT_INLINE void widen(float* to, const void* from, int64_t format, int64_t n) {
  if (format == F32) {
    memcpy(to, from, size_t(n) * 4);
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(from);
  int64_t i = 0;
  if (format == BF16) {
    for (; i + LANES <= n; i += LANES) store(to + i, load_bf16(p + i));
    for (; i < n; ++i) to[i] = from_bf16(p[i]);
  } else {
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i))));
#endif
    for (; i < n; ++i) to[i] = from_f16(p[i]);
  }
}
HT_INLINE void narrow(void* to, const float* from, int64_t format, int64_t n) {
  if (format == F32) {
    memcpy(to, from, size_t(n) * 4);
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(to);
  int64_t i = 0;
  if (format == BF16) {
    for (; i + LANES <= n; i += LANES) store_bf16(p + i, load(from + i));
    for (; i < n; ++i) p[i] = to_bf16(from[i]);
  } else {
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i*)(p + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < n; ++i) p[i] = to_f16(from[i]);
  }
}
HT_INLINE int64_t bytes_of(int64_t format) { return format == F32 ? 4 : 2; }

}  // namespace HT_ISA
}  // namespace hybridtrt
