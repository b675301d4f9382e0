// Sorting by float keys.
#pragma once
#include "kernel.h"

#include <cstring>

namespace hybridtrt {
namespace HT_ISA {

struct Keyed {
  uint32_t key;
  int32_t number;
};

// Ascending keys are descending numbers. As everywhere in a step, denormal numbers are zero; NaN is minus infinity.
HT_INLINE uint32_t descending(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (bits << 1 > 0xff000000u) bits = 0xff800000u;
  if (bits << 1 < 0x01000000u) bits = 0;
  return bits >> 31 ? bits : 0x7fffffffu - bits;
}

// Sort n items by key, equals in the order they have; `other` is room for as many.
HT_INLINE void sort_keyed(Keyed* items, Keyed* other, int64_t n) {
  for (int shift = 0; shift < 32; shift += 8) {
    int64_t begins[257] = {};
    for (int64_t i = 0; i < n; ++i) ++begins[(items[i].key >> shift & 255) + 1];
    for (int i = 0; i < 256; ++i) begins[i + 1] += begins[i];
    for (int64_t i = 0; i < n; ++i) other[begins[items[i].key >> shift & 255]++] = items[i];
    memcpy(items, other, size_t(n) * sizeof(Keyed));
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
