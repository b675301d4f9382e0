// Dense projection: the rows are packed, then each thread computes the outputs of its panels.
#include "multiply_panels.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t ALONE = 4096;  // numbers that every thread packs for itself rather than wait for the others

void linear(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &out = call.outputs[0];
  const Matrix w = matrix_of(call.weights[0]);
  const int64_t rows = x.rows, x_width = packed_width(w), tiles = tiles_of(rows);
  if (!rows) return;
  const auto pack = [&](float* to, Range range) {
    for (int64_t tile = range.begin; tile < range.end; ++tile)
      pack_tile(to, w, rows, tile, [&](int64_t i) { return floats(x, i); });
  };
  const float* packed;
  if (rows == 1 && (w.format == PANEL_F32 || w.format == PANEL_BF16) && x_width == w.k) {
    packed = floats(x);
  } else if (rows * x_width <= ALONE) {
    float* to = static_cast<float*>(team_scratch(team, size_t(rows * x_width) * 4));
    pack(to, {0, tiles});
    packed = to;
  } else {
    float* to = static_cast<float*>(team_workspace(team, size_t(rows * x_width) * 4));
    pack(to, share(team, tiles));
    team_wait(team);
    packed = to;
  }
  const Weight& bias = call.weights[1];
  multiply_panels(w, share(team, panels_of(w)), packed, rows, floats(out), out.row_stride,
                  bias.data ? floats(bias) : nullptr);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
