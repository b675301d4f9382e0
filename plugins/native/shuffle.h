// Moves between vectors: blocks of LANES vectors transposed, or summed each into its own lane.
#pragma once
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

// Lanes of a where bit D of the number is not set, and beside them b's from D lanes before.
template <int D>
HT_INLINE vf low_blocks(vf a, vf b);
// b's lanes where bit D is set, and a's from D lanes behind in the others.
template <int D>
HT_INLINE vf high_blocks(vf a, vf b);

#if defined(__clang__)
template <int... I>
struct Numbers {};
template <int D, int... I>
HT_INLINE vf low_of(vf a, vf b, Numbers<I...>) {
  return __builtin_shufflevector(a, b, (I & D ? LANES + I - D : I)...);
}
template <int D, int... I>
HT_INLINE vf high_of(vf a, vf b, Numbers<I...>) {
  return __builtin_shufflevector(a, b, (I & D ? LANES + I : I + D)...);
}
#if defined(__AVX512F__)
typedef Numbers<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> AllLanes;
#elif defined(__AVX2__)
typedef Numbers<0, 1, 2, 3, 4, 5, 6, 7> AllLanes;
#else
typedef Numbers<0, 1, 2, 3> AllLanes;
#endif
template <int D>
HT_INLINE vf low_blocks(vf a, vf b) {
  return low_of<D>(a, b, AllLanes());
}
template <int D>
HT_INLINE vf high_blocks(vf a, vf b) {
  return high_of<D>(a, b, AllLanes());
}
#else
#if defined(__AVX512F__)
#define HT_LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
#define HT_LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define HT_LANE_NUMBERS {0, 1, 2, 3}
#endif
template <int D>
HT_INLINE vf low_blocks(vf a, vf b) {
  const vi lane = HT_LANE_NUMBERS;
  return __builtin_shuffle(a, b, (lane & D) != 0 ? lane + (LANES - D) : lane);
}
template <int D>
HT_INLINE vf high_blocks(vf a, vf b) {
  const vi lane = HT_LANE_NUMBERS;
  return __builtin_shuffle(a, b, (lane & D) != 0 ? lane + LANES : lane + D);
}
#endif

template <int D>
HT_INLINE void swap_blocks(vf* v) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & D)) {
      const vf a = v[i], b = v[i + D];
      v[i] = low_blocks<D>(a, b);
      v[i + D] = high_blocks<D>(a, b);
    }
}

// Lane j of vector i to lane i of vector j, for LANES vectors.
HT_INLINE void transpose_lanes(vf* v) {
#if defined(__AVX512F__)
  swap_blocks<8>(v);
#endif
#if defined(__AVX2__)
  swap_blocks<4>(v);
#endif
  swap_blocks<2>(v);
  swap_blocks<1>(v);
}

template <int D>
HT_INLINE void add_blocks(vf* v) {
#pragma GCC unroll 16
  for (int i = 0; i < D; ++i) v[i] = low_blocks<D>(v[i], v[i + D]) + high_blocks<D>(v[i], v[i + D]);
}

// Lane i is the sum of the lanes of vector i, for LANES vectors, which are lost.
HT_INLINE vf sum_each(vf* v) {
#if defined(__AVX512F__)
  add_blocks<8>(v);
#endif
#if defined(__AVX2__)
  add_blocks<4>(v);
#endif
  add_blocks<2>(v);
  add_blocks<1>(v);
  return v[0];
}

}  // namespace HT_ISA
}  // namespace hybridtrt
