// Low rank attention: k against the projection's rows read by q gives the scores, those rows against v read by the
// scores' softmax the result.
#include "chunks.h"
#include "elementwise.h"
#include "rows.h"
#include "states.h"

namespace hybridtrt {
namespace HT_ISA {
namespace {

// x = softmax(x), n numbers.
HT_INLINE void softmax_row(float* x, int64_t n) {
  float high = x[0];
  for (int64_t i = 1; i < n; ++i) high = x[i] > high ? x[i] : high;
  const vf shift = splat(high);
  map1(x, x, n, [&](vf y) { return vexp(y - shift); });
  vf total = {};
  for (int64_t i = 0; i < n; i += LANES) total += load_part(x + i, at_most(n - i, LANES));
  const vf by = splat(1.f / sum(total));
  map1(x, x, n, [&](vf y) { return y * by; });
}

struct LowRank {
  const Step& step;
  const Tensor *q, *k, *v, *out;
  const Weight& projection;
  const Cache *keys, *values;
  float scale = 0;
  int64_t dim = 0, rank = 0, kv_heads = 0, group = 0;

  // Rows have room for whole vectors.
  int64_t ld = 0, lde = 0;
  float *qs = nullptr, *ks = nullptr, *kt = nullptr, *e = nullptr, *et = nullptr, *e_panels = nullptr,
      *scores = nullptr, *raw = nullptr, *masked = nullptr, *u = nullptr, *row = nullptr, *key_panels = nullptr,
      *value_panels = nullptr, *ones = nullptr, *copy = nullptr;

  size_t lay_out(char* memory) {
    Pieces pieces{memory};
    const int64_t rows = CHUNK > group ? CHUNK : group;
    const int64_t wide = panels_of(rank) * TILE_COLUMNS, high = panels_of(dim) * TILE_COLUMNS;
    ld = padded(dim), lde = padded(rank);
    qs = pieces.take(rows * ld), ks = pieces.take(CHUNK * ld), kt = pieces.take(CHUNK * ld);
    e = pieces.take(CHUNK * lde), et = pieces.take(CHUNK * lde), e_panels = pieces.take(CHUNK * wide);
    scores = pieces.take(rows * lde), raw = pieces.take(CHUNK * CHUNK), masked = pieces.take(CHUNK * CHUNK);
    u = pieces.take(rows * (ld > TILE_COLUMNS ? ld : TILE_COLUMNS));
    row = pieces.take(wide + high);
    key_panels = pieces.take(dim * wide), value_panels = pieces.take(rank * high);
    ones = pieces.take(ld + lde), copy = pieces.take(keys->format == F32 ? 0 : dim * rank);
    return pieces.bytes;
  }

  void projection_row(float* to, int64_t t) const {
    const char* data = static_cast<const char*>(projection.data);
    widen(to, data + step.positions[t] * rank * bytes_of(projection.format), projection.format, rank);
  }
  void scaled_query(float* to, int64_t t, int64_t head) const {
    const vf by = splat(scale);
    map1(to, floats(*q, t) + head * dim, dim, [&](vf x) { return x * by; });
  }

  void one_token(int64_t r, int64_t kv) const {
    const int64_t t = step.cu_seqlens[r], src = step.state_src[r], dst = step.state_dst[r];
    projection_row(e, t);
    memcpy(ks, floats(*v, t) + kv * dim, size_t(dim) * 4);
    for (int64_t g = 0; g < group; ++g) scaled_query(qs + g * ld, t, kv * group + g);
    step_grouped(head_state(*keys, src, kv, false), head_state(*keys, dst, kv, false), floats(*k, t) + kv * dim, e, qs,
                 ld, scores, lde, group, ones, row, copy);
    for (int64_t g = 0; g < group; ++g) softmax_row(scores + g * lde, rank);
    step_grouped(head_state(*values, src, kv, false), head_state(*values, dst, kv, false), e, ks, scores, lde, u, ld,
                 group, ones, row, copy);
    for (int64_t g = 0; g < group; ++g)
      memcpy(floats(*out, t) + (kv * group + g) * dim, u + g * ld, size_t(dim) * 4);
  }

  void one_chunk(int64_t t, int64_t n, int64_t kv) const {
    for (int64_t i = 0; i < n; ++i) {
      memcpy(ks + i * ld, floats(*k, t + i) + kv * dim, size_t(dim) * 4);
      projection_row(e + i * lde, t + i);
    }
    transpose_to_panels(kt, ks, ld, n, dim);
    transpose_to_panels(et, e, lde, n, rank);
    for (int64_t p = 0; p < panels_of(rank); ++p)
      copy_panel(e_panels + p * CHUNK * TILE_COLUMNS, e + p * TILE_COLUMNS, lde, nullptr, n, rank - p * TILE_COLUMNS);
    const float* values_of = floats(*v, t) + kv * dim;
    for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
      for (int64_t i = 0; i < n; ++i) scaled_query(qs + i * ld, t + i, head);
      lower_scores(raw, qs, ld, kt, n, dim);
      masked_scores(masked, raw, nullptr, nullptr, false, n);
      for (int64_t p = 0; p < panels_of(rank); ++p)
        read_panel(scores + p * TILE_COLUMNS, lde, rank - p * TILE_COLUMNS, qs, ld, nullptr,
                   key_panels + p * dim * TILE_COLUMNS, masked, e_panels + p * CHUNK * TILE_COLUMNS, 0.f, nullptr, 0, n,
                   dim);
      for (int64_t i = 0; i < n; ++i) softmax_row(scores + i * lde, rank);
      lower_scores(raw, scores, lde, et, n, rank);
      masked_scores(masked, raw, nullptr, nullptr, false, n);
      for (int64_t p = 0; p < panels_of(dim); ++p) {
        copy_panel(u, values_of + p * TILE_COLUMNS, v->row_stride, nullptr, n, dim - p * TILE_COLUMNS);
        read_panel(floats(*out, t) + head * dim + p * TILE_COLUMNS, out->row_stride, dim - p * TILE_COLUMNS, scores,
                   lde, nullptr, value_panels + p * rank * TILE_COLUMNS, masked, u, 0.f, nullptr, 0, n, rank);
      }
    }
    for (int64_t p = 0; p < panels_of(rank); ++p)
      update_panel(key_panels + p * dim * TILE_COLUMNS, ks, ld, e_panels + p * CHUNK * TILE_COLUMNS, 1.f, nullptr, n,
                   dim);
    for (int64_t p = 0; p < panels_of(dim); ++p) {
      copy_panel(u, values_of + p * TILE_COLUMNS, v->row_stride, nullptr, n, dim - p * TILE_COLUMNS);
      update_panel(value_panels + p * rank * TILE_COLUMNS, e, lde, u, 1.f, nullptr, n, rank);
    }
  }

  void run(int64_t r, int64_t kv) const {
    const int64_t begin = step.cu_seqlens[r], end = step.cu_seqlens[r + 1];
    if (end - begin == 1) return one_token(r, kv);
    load_state(key_panels, head_state(*keys, step.state_src[r], kv, false), 0, panels_of(rank), row);
    load_state(value_panels, head_state(*values, step.state_src[r], kv, false), 0, panels_of(dim), row);
    for (int64_t t = begin; t < end; t += CHUNK) one_chunk(t, at_most(end - t, CHUNK), kv);
    store_state(head_state(*keys, step.state_dst[r], kv, false), key_panels, 0, panels_of(rank), row);
    store_state(head_state(*values, step.state_dst[r], kv, false), value_panels, 0, panels_of(dim), row);
  }
};

}  // namespace

void low_rank_attention(const Step& step, const Call& call, Team& team) {
  const Tensor *q = call.inputs, *k = call.inputs + 1;
  LowRank op{step, q, k, call.inputs + 2, call.outputs, call.weights[0], call.caches, call.caches + 1};
  op.scale = float(call.attributes[0]);
  op.dim = q->dims[1], op.rank = op.projection.dims[1], op.kv_heads = k->dims[0], op.group = q->dims[0] / k->dims[0];
  op.lay_out(static_cast<char*>(team_scratch(team, op.lay_out(nullptr))));
  for (int64_t i = team_take(team); i < step.num_sequences * op.kv_heads; i = team_take(team))
    if (length(step, i / op.kv_heads) > 0) op.run(i / op.kv_heads, i % op.kv_heads);
  team_finish(team);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
