// Instruction sets: which there are, and what was compiled for one of them.
#pragma once
#include <cstdint>

#define HT_API __attribute__((visibility("default")))

namespace hybridtrt {

enum Isa : int64_t { BASE = 0, AVX2 = 1, AVX512 = 2, AVX512BF16 = 3 };  // in the order of ISAS in library.py

// 1 if this machine runs the instruction set and the library holds it.
extern "C" HT_API int ht_supported(int64_t isa);

// What has this name in the namespace of a supported instruction set, and a declaration in each of them.
#if defined(HT_X86)
#define HT_OF_ISA(isa, name)              \
  ((isa) == AVX512BF16 ? avx512bf16::name \
   : (isa) == AVX512   ? avx512::name     \
   : (isa) == AVX2     ? avx2::name       \
                       : base::name)
#define HT_IN_EACH_ISA(declaration)   \
  namespace base { declaration }       \
  namespace avx2 { declaration }       \
  namespace avx512 { declaration }     \
  namespace avx512bf16 { declaration }
#else
#define HT_OF_ISA(isa, name) ((void)(isa), base::name)
#define HT_IN_EACH_ISA(declaration) \
  namespace base { declaration }
#endif

}  // namespace hybridtrt
