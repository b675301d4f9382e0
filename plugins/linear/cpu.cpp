// Dense projection.
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

void linear(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const Weight &weight = call.weights[0], &bias = call.weights[1];
  const int64_t k = weight.dims[1], n = weight.dims[0];
  const Range panels = share(team, (n + 15) / 16);
  for (int64_t p = panels.begin; p < panels.end; ++p)
    for (int64_t t = 0; t < x.rows; ++t)
      for (int64_t j = 0; j < 16 && p * 16 + j < n; ++j) {
        float y = 0;
        for (int64_t i = 0; i < k; ++i) y = fma1(floats(x, t)[i], floats(weight)[(p * k + i) * 16 + j], y);
        floats(out, t)[p * 16 + j] = y + (bias.data ? floats(bias)[p * 16 + j] : 0.f);
      }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
