// Linear attention with raw gates: q and k normalised, decays and betas made of them, and the recurrence.
#include "elementwise.h"
#include "recurrence.h"

namespace hybridtrt {
namespace HT_ISA {
namespace {

enum Rule { LINEAR, GATED, DELTA, GATED_DELTA };  // RULES

struct LinearAttention {
  Shape shape;
  const Tensor *q, *k, *v, *out, *a, *b;
  const float *A_log, *dt_bias;
  float scale, decay_bound, beta_scale;
  bool l2_norm, bounded;

  void load_q(float* to, int64_t t, int64_t key_head) const {
    normalised(to, floats(*q, t) + key_head * shape.K, scale);
  }
  void load_k(float* to, int64_t t, int64_t key_head) const { normalised(to, floats(*k, t) + key_head * shape.K, 1.f); }
  void normalised(float* to, const float* x, float by) const {
    const vf factor = splat(l2_norm ? by / __builtin_sqrtf(dot(x, x, shape.K) + 1e-6f) : by);
    map1(to, x, shape.K, [&](vf y) { return y * factor; });
  }

  // Log decays of n gates at a rate.
  inline __attribute__((always_inline)) vf decay(vf gate, vf rate) const {
    return bounded ? decay_bound * vsigmoid(rate * gate) : -rate * vsoftplus(gate);
  }
  void gates(Gates& gates, int64_t t, int64_t n, int64_t h) const {
    if (shape.decay == Decay::HEAD) {
      const vf rate = splat(exp1(A_log[h]));
      if (dt_bias) {
        for (int64_t i = 0; i < n; ++i) gates.log_decay[i] = floats(*a, t + i)[h] + dt_bias[h];
        map1(gates.log_decay, gates.log_decay, n, [&](vf x) { return decay(x, rate); });
      } else {
        map1(gates.log_decay, gates.log_decay, n, [&](vf) { return -rate; });
      }
    }
    if (shape.delta) {
      for (int64_t i = 0; i < n; ++i) gates.beta[i] = floats(*b, t + i)[h];
      map1(gates.beta, gates.beta, n, [&](vf x) { return beta_scale * vsigmoid(x); });
    }
  }
  void channel_decays(float* g, int64_t t, int64_t h) const {
    const vf rate = splat(exp1(A_log[h]));
    const int64_t at = h * shape.K;
    map2(g, floats(*a, t) + at, dt_bias + at, shape.K, [&](vf x, vf bias) { return decay(x + bias, rate); });
  }
  float skip(int64_t) const { return 0.f; }
};

}  // namespace

void linear_attention(const Step& step, const Call& call, Team& team) {
  const Tensor *q = call.inputs, *v = call.inputs + 2;
  const int rule = int(call.attributes[0]);
  const bool delta = rule == DELTA || rule == GATED_DELTA;
  LinearAttention op{};
  op.q = q, op.k = q + 1, op.v = v, op.out = call.outputs;
  op.A_log = floats(call.weights[0]), op.dt_bias = floats(call.weights[1]);
  const Tensor* gate = call.inputs + 3;
  if (op.dt_bias) op.a = gate++;
  if (delta) op.b = gate;
  op.scale = float(call.attributes[1]);
  op.l2_norm = attribute(call, 2, 0) != 0;
  op.bounded = given(call, 3), op.decay_bound = float(attribute(call, 3, 0));
  op.beta_scale = float(attribute(call, 4, 1));
  const Decay decay = !op.A_log ? Decay::NONE : op.a && op.a->rank == 2 ? Decay::CHANNEL : Decay::HEAD;
  op.shape = {q->dims[1], v->dims[1], q->dims[0], v->dims[0], decay, delta, false, false, false, call.caches,
              step.token_slots};
  run_recurrence(step, op, team);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
