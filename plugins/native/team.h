// What the threads of one program share.
#pragma once
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernel.h"

namespace hybridtrt {

// Memory that only grows; what was in it is lost when it does.
struct Buffer {
  char* data = nullptr;
  size_t bytes = 0;

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }

  char* at_least(size_t wanted) {
    if (wanted > bytes) {
      constexpr size_t huge = 1 << 21;
      const size_t alignment = wanted >= huge ? huge : 64;
      wanted = (wanted + alignment - 1) / alignment * alignment;
      std::free(data);
      data = static_cast<char*>(std::aligned_alloc(alignment, wanted));
      if (!data) {
        bytes = 0;
        throw std::bad_alloc();
      }
#if defined(__linux__)
      if (alignment == huge) madvise(data, wanted, MADV_HUGEPAGE);
#endif
      bytes = wanted;
    }
    return data;
  }
};

constexpr int SPINS = 4096;  // before a waiting thread gives its core away: some tens of microseconds

static inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

struct Shared {
  explicit Shared(int threads) : threads(threads), scratch(size_t(threads)) {}

  const int threads;
  std::atomic<int> arrived{0};
  std::atomic<uint64_t> round{0};
  std::atomic<int64_t> counters[3] = {{0}, {0}, {0}};
  std::vector<Buffer> scratch;
  Buffer workspace;
  bool poison = false;
};

void fill_nan(char* data, size_t bytes);

}  // namespace hybridtrt
