// Multi-head latent attention over compressed tokens: where they lie, or decompressed.
#include "absorbed.h"
#include "decompressed.h"

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
  int64_t tokens = 0;
  const auto tokens_of = [&](int64_t row) -> int64_t {
    const int64_t n = step.cu_seqlens[row + 1] - step.cu_seqlens[row];
    return decompresses(x, step.context_lens[row], n) ? 0 : n;
  };
  for (int64_t row = 0; row < step.num_sequences; ++row) tokens += tokens_of(row);
  if (tokens) {
    float* memory = (float*)team_workspace(team, size_t(absorbed_numbers(step, a, tokens_of)) * 4);
    attend_absorbed(step, call, team, x, a, memory, tokens, tokens_of);
  }
  attend_decompressed(step, call, team, x);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
