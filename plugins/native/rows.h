// Rows of a step by their length, and working memory in pieces.
#pragma once
#include "kernel.h"

namespace hybridtrt {
namespace HT_ISA {
namespace {

// Working memory, handed out piece by piece; without memory it only counts.
struct Pieces {
  char* at;
  size_t bytes = 0;

  template <class T = float>
  T* take(int64_t n) {
    T* piece = at ? reinterpret_cast<T*>(at + bytes) : nullptr;
    bytes += (size_t(n) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

HT_INLINE int64_t length(const Step& step, int64_t row) { return step.cu_seqlens[row + 1] - step.cu_seqlens[row]; }

// The i-th row of one token, or of more.
HT_INLINE int64_t nth_row(const Step& step, int64_t i, bool single) {
  int64_t row = 0;
  for (;; ++row)
    if (single ? length(step, row) == 1 : length(step, row) > 1)
      if (i-- == 0) return row;
}

HT_INLINE int64_t count_rows(const Step& step, bool single) {
  int64_t n = 0;
  for (int64_t row = 0; row < step.num_sequences; ++row)
    n += single ? length(step, row) == 1 : length(step, row) > 1;
  return n;
}

HT_INLINE int64_t at_most(int64_t n, int64_t limit) { return n < limit ? n : limit; }

}  // namespace
}  // namespace HT_ISA
}  // namespace hybridtrt
