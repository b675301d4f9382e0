// What the machine can do at most: the loops that limits.cpp has for every instruction set.
#pragma once
#include "kernel.h"

namespace hybridtrt {

struct Loops {
  float (*read)(const void* data, int64_t bytes);  // bytes: a multiple of 256
  float (*multiply_add)(int64_t turns);
  int64_t flops_per_turn;
};

namespace base {
extern const Loops LOOPS;
}
#if defined(HT_X86)
namespace avx2 {
extern const Loops LOOPS;
}
namespace avx512 {
extern const Loops LOOPS;
}
#endif

}  // namespace hybridtrt
