// Multi-head latent attention over compressed tokens.
#include "absorbed.h"

namespace hybridtrt {
namespace HT_ISA {

void mla(const Step& step, const Call& call, Team& team) {
  const Operands x = operands_of(call);
  store_tokens(step, call, team, x.page_group, *x.latent, *x.k_rope, EVERYTHING);
  Attend a = {};
  a.heads = a.group = x.heads;
  a.key_dim = x.rank + x.rope;
  a.value_dim = x.rank;
  a.q_stride = a.heads * a.key_dim;
  a.out_stride = a.heads * a.value_dim;
  a.page_group = x.page_group;
  a.window = EVERYTHING;
  a.scale = x.scale;
  a.compact = true;
  const auto tokens_of = [&](int64_t row) { return int64_t(step.cu_seqlens[row + 1] - step.cu_seqlens[row]); };
  float* memory = (float*)team_workspace(team, size_t(absorbed_numbers(step, a, tokens_of)) * 4);
  attend_absorbed(step, call, team, x, a, memory, step.num_tokens, tokens_of);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
