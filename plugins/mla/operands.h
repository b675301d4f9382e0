// The operands of multi-head latent attention.
#pragma once
#include "kernel.h"

namespace hybridtrt {
namespace HT_ISA {

struct Operands {
  const Tensor *q_nope, *q_rope, *latent, *k_rope, *out;
  const float* up;  // [heads, nope + value_dim, rank]
  int64_t heads, nope, rope, rank, value_dim, page_group;
  float scale;
};

HT_INLINE const float* up_key(const Operands& x, int64_t head) { return x.up + head * (x.nope + x.value_dim) * x.rank; }
HT_INLINE const float* up_value(const Operands& x, int64_t head) { return up_key(x, head) + x.nope * x.rank; }

HT_INLINE Operands operands_of(const Call& call) {
  const Tensor* in = call.inputs;
  return {in,
          in + 1,
          in + 2,
          in + 3,
          call.outputs,
          floats(call.weights[0]),
          in[0].dims[0],
          in[0].dims[1],
          in[1].dims[1],
          in[2].dims[0],
          call.outputs[0].dims[1],
          int64_t(call.attributes[0]),
          float(call.attributes[1])};
}

}  // namespace HT_ISA
}  // namespace hybridtrt
