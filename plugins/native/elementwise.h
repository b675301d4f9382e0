// Loops over the numbers of rows, the same function for whole vectors and for the end of a row.
#pragma once
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

// y[i] = f(x[i]) for n numbers.
template <class F>
HT_INLINE void map1(float* y, const float* x, int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, f(load(x + i)));
  if (i < n) store_part(y + i, f(load_part(x + i, n - i)), n - i);
}
// y[i] = f(a[i], b[i]).
template <class F>
HT_INLINE void map2(float* y, const float* a, const float* b, int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, f(load(a + i), load(b + i)));
  if (i < n) store_part(y + i, f(load_part(a + i, n - i), load_part(b + i, n - i)), n - i);
}
// y[i] = f(a[i], b[i], c[i]).
template <class F>
HT_INLINE void map3(float* y, const float* a, const float* b, const float* c, int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, f(load(a + i), load(b + i), load(c + i)));
  if (i < n) store_part(y + i, f(load_part(a + i, n - i), load_part(b + i, n - i), load_part(c + i, n - i)), n - i);
}

// y = f(a, b) over one row of a's dimensions, b's being the same or 1.
template <class F>
HT_INLINE void broadcast2(float* y, const float* a, const float* b, const int64_t* dims, const int64_t* b_dims,
                          int64_t rank, F f) {
  int64_t n[3] = {1, 1, 1}, m[3] = {1, 1, 1};
  for (int64_t i = 0; i < rank; ++i) n[3 - rank + i] = dims[i], m[3 - rank + i] = b_dims[i];
  if (n[0] == m[0] && n[1] == m[1] && n[2] == m[2]) {
    map2(y, a, b, n[0] * n[1] * n[2], f);
    return;
  }
  for (int64_t i = 0; i < n[0]; ++i)
    for (int64_t j = 0; j < n[1]; ++j) {
      const int64_t at = (i * n[1] + j) * n[2];
      const float* from = b + ((m[0] == 1 ? 0 : i) * m[1] + (m[1] == 1 ? 0 : j)) * m[2];
      if (m[2] == 1) {
        const vf same = splat(*from);
        map1(y + at, a + at, n[2], [&](vf x) { return f(x, same); });
      } else {
        map2(y + at, a + at, from, n[2], f);
      }
    }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
