// Sampling of one row: the functions that cpu.cpp has for every instruction set. The definition is reference.py.
#pragma once
#include "isa.h"
#include "kernel.h"

namespace hybridtrt {

// How a row is sampled; a temperature of 0 is greedy. `number` is the row's uniform number in [0, 1).
struct Draw {
  double temperature, top_p, min_p, number;
  int64_t top_k;
};

// Where `valid` is false the row holds a NaN or no finite maximum.
struct Choice {
  int64_t token;
  bool valid;
};

// `memory` has scratch_bytes(vocab) bytes, aligned to 8.
struct Sampler {
  size_t (*scratch_bytes)(int64_t vocab);
  Choice (*sample)(const float* logits, int64_t vocab, const Draw& draw, void* memory);
  double (*log_normalizer)(const float* logits, int64_t vocab, void* memory);  // NaN if the row is not valid
};

HT_IN_EACH_ISA(extern const Sampler SAMPLER;)

}  // namespace hybridtrt
