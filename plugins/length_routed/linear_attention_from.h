// Linear attention of the tokens at positions from a limit on: f(q) S / f(q) z with f(x) = elu(x) + 1. z is one more
// column of the state, its v being 1. All tokens are summed.
#pragma once
#include "chunks.h"
#include "elementwise.h"
#include "rows.h"
#include "states.h"

namespace hybridtrt {
namespace HT_ISA {
namespace {

struct LinearFrom {
  const Step& step;
  const Tensor *y, *q, *k, *v, *out;
  const Cache* state;
  int64_t limit = 0, dim = 0, group = 0;

  int64_t ld = 0, ldo = 0;
  float *qs = nullptr, *ks = nullptr, *kt = nullptr, *raw = nullptr, *masked = nullptr, *u = nullptr, *o = nullptr,
      *row = nullptr, *panels = nullptr, *ones = nullptr, *copy = nullptr;

  size_t lay_out(char* memory) {
    Pieces pieces{memory};
    const int64_t rows = CHUNK > group ? CHUNK : group, wide = panels_of(dim + 1) * TILE_COLUMNS;
    ld = padded(dim), ldo = wide;
    qs = pieces.take(rows * ld), ks = pieces.take(CHUNK * ld), kt = pieces.take(CHUNK * ld);
    raw = pieces.take(CHUNK * CHUNK), masked = pieces.take(CHUNK * CHUNK);
    u = pieces.take(CHUNK * wide), o = pieces.take(rows * wide), row = pieces.take(wide);
    panels = pieces.take(dim * wide);
    ones = pieces.take(ld), copy = pieces.take(state->format == F32 ? 0 : dim * (dim + 1));
    return pieces.bytes;
  }

  void features(float* to, const float* x) const {
    map1(to, x, dim, [](vf a) { return a > splat(0.f) ? a + 1.f : vexp(a); });
  }
  // The result of a token's head: its sums by the last one of them, or y.
  void finish(int64_t t, int64_t head, const float* sums) const {
    float* to = floats(*out, t) + head * dim;
    if (step.positions[t] >= limit) {
      const vf by = splat(sums[dim]);
      map1(to, sums, dim, [&](vf a) { return a / by; });
    } else if (const float* from = floats(*y, t) + head * dim; from != to) {
      memcpy(to, from, size_t(dim) * 4);
    }
  }

  void one_token(int64_t r, int64_t kv) const {
    const int64_t t = step.cu_seqlens[r];
    features(ks, floats(*k, t) + kv * dim);
    memcpy(u, floats(*v, t) + kv * dim, size_t(dim) * 4);
    u[dim] = 1.f;
    for (int64_t g = 0; g < group; ++g) features(qs + g * ld, floats(*q, t) + (kv * group + g) * dim);
    step_grouped(head_state(*state, step.state_src[r], kv, false), head_state(*state, step.state_dst[r], kv, false), ks,
                 u, qs, ld, o, ldo, group, ones, row, copy);
    for (int64_t g = 0; g < group; ++g) finish(t, kv * group + g, o + g * ldo);
  }

  void one_chunk(int64_t t, int64_t n, int64_t kv) const {
    for (int64_t i = 0; i < n; ++i) features(ks + i * ld, floats(*k, t + i) + kv * dim);
    const int64_t count = panels_of(dim + 1);
    for (int64_t p = 0; p < count; ++p) {
      float* panel = u + p * CHUNK * TILE_COLUMNS;
      const int64_t columns = dim - p * TILE_COLUMNS;
      const float* values = floats(*v, t) + kv * dim + p * TILE_COLUMNS;
      if (columns > 0) copy_panel(panel, values, v->row_stride, nullptr, n, columns);
      if (columns < TILE_COLUMNS)
        for (int64_t i = 0; i < n; ++i) panel[i * TILE_COLUMNS + columns] = 1.f;
    }
    if (step.positions[t + n - 1] >= limit) {
      transpose_to_panels(kt, ks, ld, n, dim);
      for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        for (int64_t i = 0; i < n; ++i) features(qs + i * ld, floats(*q, t + i) + head * dim);
        lower_scores(raw, qs, ld, kt, n, dim);
        masked_scores(masked, raw, nullptr, nullptr, false, n);
        for (int64_t p = 0; p < count; ++p)
          read_panel(o + p * TILE_COLUMNS, ldo, TILE_COLUMNS, qs, ld, nullptr, panels + p * dim * TILE_COLUMNS, masked,
                     u + p * CHUNK * TILE_COLUMNS, 0.f, nullptr, 0, n, dim);
        for (int64_t i = 0; i < n; ++i) finish(t + i, head, o + i * ldo);
      }
    } else {
      for (int64_t i = 0; i < n; ++i)
        for (int64_t head = kv * group; head < (kv + 1) * group; ++head) finish(t + i, head, nullptr);
    }
    for (int64_t p = 0; p < count; ++p)
      update_panel(panels + p * dim * TILE_COLUMNS, ks, ld, u + p * CHUNK * TILE_COLUMNS, 1.f, nullptr, n, dim);
  }

  void run(int64_t r, int64_t kv) const {
    const int64_t begin = step.cu_seqlens[r], end = step.cu_seqlens[r + 1];
    if (end - begin == 1) return one_token(r, kv);
    load_state(panels, head_state(*state, step.state_src[r], kv, false), 0, panels_of(dim + 1), row);
    for (int64_t t = begin; t < end; t += CHUNK) one_chunk(t, at_most(end - t, CHUNK), kv);
    store_state(head_state(*state, step.state_dst[r], kv, false), panels, 0, panels_of(dim + 1), row);
  }
};

}  // namespace

void linear_attention_from(const Step& step, const Call& call, Team& team) {
  const Tensor *q = call.inputs + 1, *k = call.inputs + 2;
  const int64_t kv_heads = k->dims[0];
  LinearFrom op{step, call.inputs, q, k, call.inputs + 3, call.outputs, call.caches};
  op.limit = int64_t(call.attributes[0]), op.dim = q->dims[1], op.group = q->dims[0] / kv_heads;
  op.lay_out(static_cast<char*>(team_scratch(team, op.lay_out(nullptr))));
  for (int64_t i = team_take(team); i < step.num_sequences * kv_heads; i = team_take(team))
    if (length(step, i / kv_heads) > 0) op.run(i / kv_heads, i % kv_heads);
  team_finish(team);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
