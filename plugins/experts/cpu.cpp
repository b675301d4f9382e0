// Experts: pairs of token and choice sorted by expert, two products for each expert that has any, and each token's sum
// in the order of its choices, so that it does not depend on the other tokens.
#include "../linear/multiply_panels.h"
#include "elementwise.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

// Pairs by expert: pairs begins[e] to begins[e + 1] of the order are expert e's, a pair being token * choices + choice.
// Numbers beyond the last expert stand for none: such pairs are in no one's part.
struct Sorted {
  int32_t *order, *begins, *places;  // places: where a pair is in the order, -1: nowhere
  int64_t experts, pairs;            // pairs that have an expert
};

static Sorted sort_pairs(const Tensor& chosen, int64_t experts, int32_t* memory) {
  const int64_t choices = chosen.dims[0], all = chosen.rows * choices;
  Sorted s{memory, memory + all, memory + all + experts + 2, experts, 0};
  int32_t* next = s.begins + 1;
  memset(s.begins, 0, size_t(experts + 2) * 4);
  const auto expert_of = [&](int64_t pair) { return int64_t(uint32_t(ints(chosen, pair / choices)[pair % choices])); };
  for (int64_t i = 0; i < all; ++i)
    if (expert_of(i) < experts) ++next[expert_of(i) + 1];
  for (int64_t e = 0; e < experts; ++e) next[e + 1] += next[e];
  s.pairs = next[experts];
  for (int64_t i = 0; i < all; ++i) {
    s.places[i] = -1;
    if (expert_of(i) >= experts) continue;
    s.places[i] = next[expert_of(i)]++;
    s.order[s.places[i]] = int32_t(i);
  }
  return s;
}
HT_INLINE int64_t sort_bytes(const Tensor& chosen, int64_t experts) {
  return (2 * chosen.rows * chosen.dims[0] + experts + 2) * 4;
}

// Call f(first, rows, tile) for each of this thread's tiles: that tile of an expert's `rows` rows from `first` on.
template <class F>
HT_INLINE void share_tiles(const Sorted& s, const Team& team, F f) {
  int64_t all = 0, at = 0;
  for (int64_t e = 0; e < s.experts; ++e) all += tiles_of(s.begins[e + 1] - s.begins[e]);
  const Range mine = share(team, all);
  for (int64_t e = 0; e < s.experts && at < mine.end; ++e) {
    const int64_t first = s.begins[e], rows = s.begins[e + 1] - first;
    for (int64_t tile = 0; tile < tiles_of(rows); ++tile, ++at)
      if (at >= mine.begin && at < mine.end) f(first, rows, tile);
  }
}

// y = W_e x for all pairs; threads take panels, of which those with more rows cost more.
static void multiply_experts(const Sorted& s, const Weight& weight, const Weight& bias, const float* packed,
                             int64_t packed_stride, float* y, int64_t y_stride, const Team& team) {
  const Matrix shape = matrix_of(weight);
  const int64_t panels = panels_of(shape);
  const auto cost = [](int64_t rows) { return rows + 4; };
  int64_t all = 0;
  for (int64_t e = 0; e < s.experts; ++e)
    if (s.begins[e + 1] > s.begins[e]) all += panels * cost(s.begins[e + 1] - s.begins[e]);
  const int64_t begin = all * team.rank / team.size, end = all * (team.rank + 1) / team.size;
  int64_t at = 0;
  for (int64_t e = 0; e < s.experts && at < end; ++e) {
    const int64_t first = s.begins[e], rows = s.begins[e + 1] - first;
    if (!rows) continue;
    const auto panel_at = [&](int64_t c) {
      const int64_t p = (c - at + cost(rows) - 1) / cost(rows);
      return c <= at ? 0 : p < panels ? p : panels;
    };
    const Range mine{panel_at(begin), panel_at(end)};
    if (mine.begin < mine.end)
      multiply_panels(matrix_of(weight, e), mine, packed + first * packed_stride, rows, y + first * y_stride, y_stride,
                      bias.data ? floats(bias) + e * shape.n : nullptr);
    at += panels * cost(rows);
  }
}

template <int KIND>
static void activate_row(float* y, const float* x, int64_t n, bool with_gate, float limit) {
  const vf high = splat(limit), low = splat(-limit);
  if (with_gate)
    map2(y, x, x + n, n, [&](vf gate, vf up) {
      return gated(gate > high ? high : gate, up > high ? high : up < low ? low : up, KIND);
    });
  else
    map1(y, x, n, [&](vf a) { return activate(a, KIND); });
}

void experts(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &scales = call.inputs[1], &chosen = call.inputs[2], &out = call.outputs[0];
  const Weight &up = call.weights[0], &down = call.weights[1], &up_bias = call.weights[2], &down_bias = call.weights[3];
  const int kind = int(call.attributes[0]);
  const bool with_gate = attribute(call, 1, 1) != 0;
  const float limit = float(attribute(call, 2, double(__builtin_inff())));
  const Matrix wide = matrix_of(up), narrow_again = matrix_of(down);
  const int64_t hidden = narrow_again.n, inner = narrow_again.k, choices = chosen.dims[0], all = x.rows * choices;
  if (!x.rows) return;
  const Sorted sorted =
      sort_pairs(chosen, up.dims[0], static_cast<int32_t*>(team_scratch(team, size_t(sort_bytes(chosen, up.dims[0])))));

  const int64_t x_width = packed_width(wide), h_width = packed_width(narrow_again);
  float* packed_x = static_cast<float*>(team_workspace(team, size_t(all * (x_width + wide.n + h_width + hidden)) * 4));
  float *h = packed_x + all * x_width, *packed_h = h + all * wide.n, *y = packed_h + all * h_width;

  bool same = x.rows == 1;  // one row for different experts
  for (int64_t e = 0; same && e < sorted.experts; ++e) same = sorted.begins[e + 1] - sorted.begins[e] < 2;
  if (same) {
    if (team.rank == 0) pack_tile(packed_x, wide, 1, 0, [&](int64_t) { return floats(x); });
  } else {
    share_tiles(sorted, team, [&](int64_t first, int64_t rows, int64_t tile) {
      pack_tile(packed_x + first * x_width, wide, rows, tile,
                [&](int64_t i) { return floats(x, sorted.order[first + i] / choices); });
    });
  }
  team_wait(team);
  multiply_experts(sorted, up, up_bias, packed_x, same ? 0 : x_width, h, wide.n, team);
  team_wait(team);
  share_tiles(sorted, team, [&](int64_t first, int64_t rows, int64_t tile) {
    for (int64_t i = first + tile_begin(rows, tile); i < first + tile_begin(rows, tile + 1); ++i) {
      float* row = h + i * wide.n;
      switch (kind) {
#define CASE(name) \
  case name: activate_row<name>(row, row, inner, with_gate, limit); break;
        CASE(GELU) CASE(GELU_TANH) CASE(RELU2) CASE(SIGMOID) CASE(SILU) CASE(TANH) CASE(SWIGLU_OAI)
#undef CASE
      }
    }
    pack_tile(packed_h + first * h_width, narrow_again, rows, tile,
              [&](int64_t i) { return h + (first + i) * wide.n; });
  });
  team_wait(team);
  multiply_experts(sorted, down, down_bias, packed_h, h_width, y, hidden, team);
  team_wait(team);
  // Few tokens have many numbers each: columns are shared.
  const Range columns = share(team, hidden, 64);
  for (int64_t t = 0; t < x.rows; ++t) {
    float* to = floats(out, t) + columns.begin;
    const int64_t n = columns.end - columns.begin;
    if (n > 0) memset(to, 0, size_t(n) * 4);
    for (int64_t j = 0; j < choices; ++j) {
      const int64_t place = sorted.places[t * choices + j];
      if (place < 0) continue;
      const vf by = splat(floats(scales, t)[j]);
      map2(to, y + place * hidden + columns.begin, to, n, [&](vf a, vf sum) { return fma(by, a, sum); });
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
