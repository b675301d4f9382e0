// Token embedding from rows, or from the panels of a matrix that is also the head's.
#include "simd.h"

namespace hybridtrt {
namespace HT_ISA {

void embedding(const Step&, const Call& call, Team& team) {
  const Tensor &ids = call.inputs[0], &out = call.outputs[0];
  const Weight& table = call.weights[0];
  const int64_t n = table.dims[1];
  const Range rows = share(team, out.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const int64_t id = *ints(ids, t);
    if (table.format < PANEL_F32) {
      widen(floats(out, t), static_cast<const char*>(table.data) + id * n * bytes_of(table.format), table.format, n);
      continue;
    }
    const int64_t lane = id % 16;
    for (int64_t k = 0; k < n; ++k) {
      if (table.format == PANEL_F32) {
        floats(out, t)[k] = static_cast<const float*>(table.data)[(id / 16 * n + k) * 16 + lane];
      } else {
        const int64_t pairs = (n + 1) / 2;
        const auto* panel = static_cast<const uint16_t*>(table.data) + id / 16 * pairs * 32;
        floats(out, t)[k] = from_bf16(panel[(k / 2 * 16 + lane) * 2 + k % 2]);
      }
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
