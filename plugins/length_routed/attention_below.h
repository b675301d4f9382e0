// Softmax attention of the tokens at positions below a limit; zero for the others, which are not cached.
#pragma once
#include "../attention/self.h"

namespace hybridtrt {
namespace HT_ISA {

void attention_below(const Step& step, const Call& call, Team& team) {
  const int64_t limit = int64_t(call.attributes[2]);
  const Tensor& out = call.outputs[0];
  const Range all = share(team, out.rows);
  for (int64_t t = all.begin; t < all.end; ++t)
    if (step.positions[t] >= limit) memset(floats(out, t), 0, size_t(width(out)) * 4);
  self_attention(step, call, team, int64_t(call.attributes[0]), float(call.attributes[1]), EVERYTHING, 0.f, nullptr,
                 limit);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
