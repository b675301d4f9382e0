// Rotary position embedding in halves.
#include "elementwise.h"

namespace hybridtrt {
namespace HT_ISA {

// Weight 0: inv_freq, from the attribute of that name.
void rotary_table(const Step&, const Call& call, Team& team) {
  const Tensor &cosines = call.outputs[0], &sines = call.outputs[1];
  const float* inv_freq = floats(call.weights[0]);
  const float factor = float(call.attributes[1]);
  const Range rows = share(team, cosines.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t)
    for (int64_t i = 0; i < cosines.dims[0]; ++i) {
      const float angle = float(*ints(call.inputs[0], t)) * inv_freq[i];
      floats(cosines, t)[i] = float(__builtin_cos(double(angle))) * factor;
      floats(sines, t)[i] = float(__builtin_sin(double(angle))) * factor;
    }
}

void rotary(const Step&, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &cosines = call.inputs[1], &sines = call.inputs[2], &out = call.outputs[0];
  const int64_t heads = x.dims[0], n = x.dims[1], half = cosines.dims[0];
  const Range rows = share(team, x.rows);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const float *cosine = floats(cosines, t), *sine = floats(sines, t);
    for (int64_t h = 0; h < heads; ++h) {
      const float* a = floats(x, t) + h * n;
      float* y = floats(out, t) + h * n;
      int64_t i = 0;
      for (; i < half; i += LANES) {  // y may be a
        const int64_t part = half - i < LANES ? half - i : LANES;
        const vf u = load_part(a + i, part), v = load_part(a + half + i, part);
        const vf c = load_part(cosine + i, part), s = load_part(sine + i, part);
        store_part(y + i, u * c - v * s, part);
        store_part(y + half + i, v * c + u * s, part);
      }
      memmove(y + 2 * half, a + 2 * half, size_t(n - 2 * half) * 4);
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
