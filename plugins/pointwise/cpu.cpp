// Elementwise arithmetic, activations, and the moves between layouts.
#include "elementwise.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

template <class F>
HT_INLINE void for_pairs(const Call& call, Team& team, F f) {
  const Tensor &x = call.inputs[0], &y = call.inputs[1], &out = call.outputs[0];
  const Range rows = share(team, x.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t)
    broadcast2(floats(out, t), floats(x, t), floats(y, t), x.dims, y.dims, x.rank, f);
}

template <class F>
HT_INLINE void for_each_number(const Call& call, Team& team, F f) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const Range rows = share(team, x.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t) map1(floats(out, t), floats(x, t), width(x), f);
}

void add(const Step&, const Call& call, Team& team) {
  const vf by = splat(float(attribute(call, 0, 1.0)));
  for_pairs(call, team, [&](vf x, vf y) { return fma(y, by, x); });
}

void multiply(const Step&, const Call& call, Team& team) {
  for_pairs(call, team, [](vf x, vf y) { return x * y; });
}

void scale(const Step&, const Call& call, Team& team) {
  const vf by = splat(float(call.attributes[0]));
  for_each_number(call, team, [&](vf x) { return x * by; });
}

void affine(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const Weight &weight = call.weights[0], &bias = call.weights[1];
  const Range rows = share(team, x.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const float* from = floats(x, t);
    if (bias.data) {
      broadcast2(floats(out, t), from, floats(bias), x.dims, bias.dims, x.rank, [](vf a, vf b) { return a + b; });
      from = floats(out, t);
    }
    broadcast2(floats(out, t), from, floats(weight), x.dims, weight.dims, x.rank, [](vf a, vf b) { return a * b; });
  }
}

void mean_heads(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const int64_t groups = x.dims[0], heads = x.dims[1], n = x.dims[2];
  const Range rows = share(team, x.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t)
    for (int64_t g = 0; g < groups; ++g) {
      float* y = floats(out, t) + g * n;
      const float* from = floats(x, t) + g * heads * n;
      memcpy(y, from, size_t(n) * 4);
      for (int64_t h = 1; h < heads; ++h) map2(y, y, from + h * n, n, [](vf a, vf b) { return a + b; });
      const vf by = splat(1.f / float(heads));
      map1(y, y, n, [&](vf a) { return a * by; });
    }
}

void activation(const Step&, const Call& call, Team& team) {
  const int kind = int(call.attributes[0]);
  switch (kind) {  // so that the choice is made outside the loop
#define CASE(name) \
  case name: return for_each_number(call, team, [](vf x) { return activate(x, name); });
    CASE(GELU) CASE(GELU_TANH) CASE(RELU2) CASE(SIGMOID) CASE(SILU) CASE(TANH)
#undef CASE
  }
}

void gated_activation(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const int kind = int(call.attributes[0]);
  const vf gate_scale = splat(float(attribute(call, 1, 1.0)));
  int64_t leading = 1;
  for (int64_t i = 0; i + 1 < x.rank; ++i) leading *= x.dims[i];
  const int64_t n = out.dims[out.rank - 1];
  const Range rows = share(team, x.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t)
    for (int64_t i = 0; i < leading; ++i) {
      const float *gate = floats(x, t) + 2 * i * n, *up = gate + n;
      float* y = floats(out, t) + i * n;
      switch (kind) {
#define CASE(name) \
  case name: map2(y, gate, up, n, [&](vf g, vf u) { return gated(g * gate_scale, u, name); }); break;
        CASE(GELU) CASE(GELU_TANH) CASE(RELU2) CASE(SIGMOID) CASE(SILU) CASE(TANH) CASE(SWIGLU_OAI)
#undef CASE
      }
    }
}

void concat(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &y = call.inputs[1], &out = call.outputs[0];
  const int64_t n = x.dims[x.rank - 1], m = y.dims[y.rank - 1], leading = width(x) / n;
  const Range rows = share(team, x.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t)
    for (int64_t i = 0; i < leading; ++i) {
      float* to = floats(out, t) + i * (n + m);
      memcpy(to, floats(x, t) + i * n, size_t(n) * 4);
      memcpy(to + n, floats(y, t) + i * m, size_t(m) * 4);
    }
}

void gather_rows(const Step& step, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const Range rows = share(team, out.rows);
  for (int64_t r = rows.begin; r < rows.end; ++r)
    memcpy(floats(out, r), floats(x, step.logits_indices[r]), size_t(width(x)) * 4);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
