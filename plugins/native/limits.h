// What the machine can do at most: the loops that limits.cpp has for every instruction set.
#pragma once
#include "isa.h"
#include "kernel.h"

namespace hybridtrt {

struct Loops {
  float (*read)(const void* data, int64_t bytes);  // bytes: a multiple of 256
  float (*multiply_add)(int64_t turns);
  int64_t flops_per_turn;
};

HT_IN_EACH_ISA(extern const Loops LOOPS;)

}  // namespace hybridtrt
