// Root mean square norm: the sum of squares of a group, then one pass.
#include "elementwise.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

HT_INLINE float sum_of_squares(const float* x, int64_t n) {
  vf a = {}, b = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    const vf u = load(x + i), v = load(x + i + LANES);
    a = fma(u, u, a);
    b = fma(v, v, b);
  }
  for (; i < n; i += LANES) {
    const vf u = load_part(x + i, n - i < LANES ? n - i : LANES);
    a = fma(u, u, a);
  }
  return sum(a + b);
}

void rms_norm(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const Tensor* gate = call.num_inputs > 1 ? &call.inputs[1] : nullptr;
  const Weight& weight = call.weights[0];
  const float eps = float(call.attributes[0]);
  const bool gate_first = attribute(call, 1, 0) != 0, silu = attribute(call, 2, 1) == 1;  // GATES: sigmoid, silu
  const int64_t n = x.dims[x.rank - 1], groups = width(x) / n;
  const int64_t weight_step = weight.data && weight.rank == x.rank && x.rank > 1 ? n : 0;  // or one weight for all
  const auto open = [&](vf g) { return silu ? g * vsigmoid(g) : vsigmoid(g); };
  const Range all = share(team, x.rows * groups);
  for (int64_t i = all.begin; i < all.end; ++i) {
    const int64_t t = i / groups, g = i % groups;
    const float* from = floats(x, t) + g * n;
    const float* closed = gate ? floats(*gate, t) + g * n : nullptr;
    float* y = floats(out, t) + g * n;
    if (gate && gate_first) {
      map2(y, from, closed, n, [&](vf a, vf b) { return a * open(b); });
      from = y;
    }
    const vf by = splat(1.f / __builtin_sqrtf(sum_of_squares(from, n) / float(n) + eps));
    if (weight.data)
      map2(y, from, floats(weight) + g * weight_step, n, [&](vf a, vf w) { return w * (a * by); });
    else
      map1(y, from, n, [&](vf a) { return a * by; });
    if (gate && !gate_first) map2(y, y, closed, n, [&](vf a, vf b) { return a * open(b); });
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
