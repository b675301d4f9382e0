// Layer norm: the mean; the sums of what is left and of its squares, since a mean is rounded; then one pass.
#include "elementwise.h"

namespace hybridtrt {
namespace HT_ISA {

void layer_norm(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const float *weight = floats(call.weights[0]), *bias = floats(call.weights[1]);
  const float eps = float(call.attributes[0]);
  const int64_t n = x.dims[x.rank - 1], groups = width(x) / n;
  const Range all = share(team, x.rows * groups);
  for (int64_t i = all.begin; i < all.end; ++i) {
    const float* from = floats(x, i / groups) + i % groups * n;
    float* y = floats(out, i / groups) + i % groups * n;
    vf total = {}, squares = {};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) total += load(from + k);
    if (k < n) total += load_part(from + k, n - k);
    const vf mean = splat(sum(total) / float(n));
    total = vf{};
    for (k = 0; k + LANES <= n; k += LANES) {
      const vf d = load(from + k) - mean;
      total += d;
      squares = fma(d, d, squares);
    }
    float square = sum(squares), left = sum(total);
    for (; k < n; ++k) {
      const float d = from[k] - mean[0];
      left += d;
      square = fma1(d, d, square);
    }
    left /= float(n);
    const vf by = splat(1.f / __builtin_sqrtf(square / float(n) - left * left + eps)), rest = splat(left);
    map2(y, from, weight, n, [&](vf a, vf w) { return (a - mean - rest) * by * w; });
    map2(y, y, bias, n, [](vf a, vf b) { return a + b; });
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
