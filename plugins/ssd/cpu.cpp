// State space duality: the linear recurrence with q = C, k = B, v = dt x, its state transposed.
#include "elementwise.h"
#include "recurrence.h"

namespace hybridtrt {
namespace HT_ISA {
namespace {

struct Ssd {
  Shape shape;
  const Tensor *v, *out, *dt, *B, *C;
  const float *A_log, *D, *dt_bias;
  float dt_min, dt_max;

  void load_q(float* to, int64_t t, int64_t group) const {
    memcpy(to, floats(*C, t) + group * shape.K, size_t(shape.K) * 4);
  }
  void load_k(float* to, int64_t t, int64_t group) const {
    memcpy(to, floats(*B, t) + group * shape.K, size_t(shape.K) * 4);
  }
  void gates(Gates& gates, int64_t t, int64_t n, int64_t h) const {
    for (int64_t i = 0; i < n; ++i) gates.v_by[i] = floats(*dt, t + i)[h] + dt_bias[h];
    const vf low = splat(dt_min), high = splat(dt_max), A = splat(-exp1(A_log[h]));
    map1(gates.v_by, gates.v_by, n, [&](vf x) { return vmin(vmax(vsoftplus(x), low), high); });
    map1(gates.log_decay, gates.v_by, n, [&](vf x) { return x * A; });
  }
  void channel_decays(float*, int64_t, int64_t) const {}
  float skip(int64_t h) const { return D[h]; }
};

}  // namespace

void ssd(const Step& step, const Call& call, Team& team) {
  const Tensor *x = call.inputs, *B = call.inputs + 2;
  Ssd op{};
  op.v = x, op.out = call.outputs, op.dt = call.inputs + 1, op.B = B, op.C = call.inputs + 3;
  op.A_log = floats(call.weights[0]), op.D = floats(call.weights[1]), op.dt_bias = floats(call.weights[2]);
  op.dt_min = float(attribute(call, 0, 0)), op.dt_max = float(attribute(call, 1, __builtin_inf()));
  op.shape = {B->dims[1], x->dims[1], B->dims[0], x->dims[0], Decay::HEAD, false, true, true, true, call.caches};
  run_recurrence(step, op, team);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
