// Causal softmax attention over a paged cache.
#include "self.h"

namespace hybridtrt {
namespace HT_ISA {

void attention(const Step& step, const Call& call, Team& team) {
  const int64_t window = int64_t(attribute(call, 2, double(EVERYTHING)));
  self_attention(step, call, team, int64_t(call.attributes[0]), float(call.attributes[1]), window,
                 float(attribute(call, 3, 0.0)), floats(call.weights[0]), EVERYTHING);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
