// Runs the loops of limits.cpp in a number of threads, each on its own, and looks at what they did together in every
// few milliseconds: on a machine with other work there are some in which all of them ran.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "isa.h"
#include "limits.h"

namespace hybridtrt {

using Clock = std::chrono::steady_clock;
constexpr double READ_BIN = 5e-3;   // seconds; shorter ones may see bursts that memory does not keep up
constexpr double SUM_BIN = 1e-3;
constexpr double SECONDS = 0.25;    // for each of the two
constexpr int64_t CHUNK = 1 << 16;  // bytes read between two looks at the clock
constexpr int64_t TURNS = 1 << 12;  // of multiplying and adding, the same
constexpr size_t LEAST_BYTES = 128 << 20, MOST_BYTES = size_t(2) << 30;

struct Rates {
  double best, median;  // calls a second of all threads
};

// Every thread calls work(rank, call) with call 0, 1, 2 ... until the time is over.
template <typename Work>
static Rates rates(int threads, double bin_seconds, Work work) {
  const auto bins = size_t(SECONDS / bin_seconds);
  std::vector<std::vector<int64_t>> calls(size_t(threads), std::vector<int64_t>(bins, 0));
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  Clock::time_point started;
  auto run = [&](int rank) {
    std::vector<int64_t>& mine = calls[size_t(rank)];
    for (int64_t call = 0;; ++call) {
      work(rank, call);
      const auto bin = size_t(std::chrono::duration<double>(Clock::now() - started).count() / bin_seconds);
      if (bin >= bins) return;
      ++mine[bin];
    }
  };
  std::vector<std::thread> others;
  for (int rank = 1; rank < threads; ++rank)
    others.emplace_back([&, rank] {
      ++ready;
      while (!go) std::this_thread::yield();
      run(rank);
    });
  while (ready < threads - 1) std::this_thread::yield();
  started = Clock::now();
  go = true;
  run(0);
  for (auto& thread : others) thread.join();
  std::vector<int64_t> sums(bins, 0);
  for (const auto& mine : calls)
    for (size_t bin = 0; bin < bins; ++bin) sums[bin] += mine[bin];
  std::sort(sums.begin(), sums.end());
  return {double(sums[bins - 1]) / bin_seconds, double(sums[bins / 2]) / bin_seconds};
}

static size_t cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? size_t(bytes) : 0;
#else
  return 0;
#endif
}

// out: bytes a second that the threads read from memory together, in the best few milliseconds and in the median ones;
// then the same of floating point operations. 0, or -1 where the instruction set or the memory is missing.
extern "C" HT_API int ht_limits(int64_t threads, int64_t isa, double* out) {
  if (!ht_supported(isa) || threads < 1) return -1;
  try {
    const Loops& loop = HT_OF_ISA(isa, LOOPS);
    constexpr size_t huge = 1 << 21;
    const size_t bytes = std::min(std::max(LEAST_BYTES, 4 * cache_bytes()), MOST_BYTES) / huge * huge;
    const size_t unread = (cache_bytes() / huge + 1) * huge;  // written last, and so what is cached at first
    char* data = static_cast<char*>(std::aligned_alloc(huge, bytes + unread));
    if (!data) return -1;
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes + unread, MADV_HUGEPAGE);
#endif
    std::memset(data, 1, bytes + unread);
    std::vector<float> kept(size_t(threads) * 16, 0);  // each thread its own cache line
    const int64_t part = int64_t(bytes) / threads / CHUNK;
    const Rates reads = rates(int(threads), READ_BIN, [&](int rank, int64_t call) {
      kept[size_t(rank) * 16] += loop.read(data + (rank * part + call % part) * CHUNK, CHUNK);
    });
    std::free(data);
    const Rates sums = rates(
        int(threads), SUM_BIN, [&](int rank, int64_t) { kept[size_t(rank) * 16] += loop.multiply_add(TURNS); });
    const double flops = double(TURNS * loop.flops_per_turn);
    const double found[] = {reads.best * CHUNK, reads.median * CHUNK, sums.best * flops, sums.median * flops};
    std::copy(found, found + 4, out);
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace hybridtrt
