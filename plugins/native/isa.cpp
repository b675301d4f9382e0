// What this machine runs.
#include "isa.h"

namespace hybridtrt {

int ht_supported(int64_t isa) {
  if (isa == BASE) return 1;
#if defined(HT_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // f16c comes with avx2
  if (isa == AVX2) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (isa == AVX512) return avx512;
  if (isa == AVX512BF16) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return 0;
}

}  // namespace hybridtrt
