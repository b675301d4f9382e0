// Loops that do nothing but read memory, or nothing but multiply and add.
#include "limits.h"

#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

// Every byte once; the result only keeps the compiler from leaving it out.
static float read(const void* data, int64_t bytes) {
  const float* p = static_cast<const float*>(data);
  vi a = {}, b = {}, c = {}, d = {};
  for (int64_t i = 0; i < bytes / 4; i += 4 * LANES) {
    a ^= (vi)load(p + i);
    b ^= (vi)load(p + i + LANES);
    c ^= (vi)load(p + i + 2 * LANES);
    d ^= (vi)load(p + i + 3 * LANES);
  }
  return sum(__builtin_convertvector(a ^ b ^ c ^ d, vf));
}

constexpr int CHAINS = 12;  // more than two units with a latency of four or five need, fewer than there are registers

static float multiply_add(int64_t turns) {
  vf x[CHAINS];
  for (int i = 0; i < CHAINS; ++i) x[i] = splat(0.1f * float(i));
  const vf factor = splat(0.999f), term = splat(0.001f);
  for (int64_t turn = 0; turn < turns; ++turn)
    for (int i = 0; i < CHAINS; ++i) x[i] = fma(x[i], factor, term);
  for (int i = 1; i < CHAINS; ++i) x[0] += x[i];
  return sum(x[0]);
}

extern const Loops LOOPS;
const Loops LOOPS = {read, multiply_add, 2 * CHAINS * LANES};

}  // namespace HT_ISA
}  // namespace hybridtrt
