// Sampling as Python calls it (native.py): rows one after another, in the calling thread.
#include <new>
#include <vector>

#include "isa.h"
#include "philox.h"
#include "sampler.h"

namespace hybridtrt {

// Kept between calls: fresh pages would cost more than the work on them.
static void* scratch(size_t bytes) {
  static thread_local std::vector<double> memory;
  if (memory.size() * sizeof(double) < bytes) memory.resize(bytes / sizeof(double) + 1);
  return memory.data();
}

extern "C" {

// A row's SampleParams (params.py), and its token. Mirrored in native.py.
struct HtSampleRow {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  uint64_t seed;
  int64_t position;
  int64_t token, valid;  // the result
};

// Choose a token for each row of logits [num_rows, vocab]. 0, or -1 where the instruction set or the memory is missing.
HT_API int ht_sample(int64_t isa, const float* logits, int64_t vocab, HtSampleRow* rows, int64_t num_rows) {
  if (!ht_supported(isa)) return -1;
  try {
    const Sampler& one = HT_OF_ISA(isa, SAMPLER);
    void* memory = scratch(one.scratch_bytes(vocab));
    for (int64_t i = 0; i < num_rows; ++i) {
      HtSampleRow& row = rows[i];
      const double number = uniform(row.seed, uint64_t(row.position));
      const Draw draw = {row.temperature, row.top_p, row.min_p, number, row.top_k};
      const Choice choice = one.sample(logits + i * vocab, vocab, draw, memory);
      row.token = choice.token;
      row.valid = choice.valid;
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// The logarithm of the sum of the exponentials of logits [vocab]; returns as ht_sample does.
HT_API int ht_log_normalizer(int64_t isa, const float* logits, int64_t vocab, double* result) {
  if (!ht_supported(isa)) return -1;
  try {
    const Sampler& one = HT_OF_ISA(isa, SAMPLER);
    *result = one.log_normalizer(logits, vocab, scratch(one.scratch_bytes(vocab)));
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
}

}  // namespace hybridtrt
