// The attention operators: queries, keys and values of whole heads, stored and attended to.
#pragma once
#include "attend.h"

namespace hybridtrt {
namespace HT_ISA {

// inputs q, k, v, cache kv; the tokens at positions from `limit` on neither are stored nor attend.
static void self_attention(const Step& step, const Call& call, Team& team, int64_t page_group, float scale,
                           int64_t window, float softcap, const float* sinks, int64_t limit) {
  const Tensor &q = call.inputs[0], &k = call.inputs[1], &v = call.inputs[2], &out = call.outputs[0];
  store_tokens(step, call, team, page_group, k, v, limit);
  team_wait(team);
  Attend a = {};
  a.q = floats(q);
  a.out = floats(out);
  a.q_stride = q.row_stride;
  a.out_stride = out.row_stride;
  a.heads = q.dims[0];
  a.group = q.dims[0] / k.dims[0];
  a.key_dim = a.value_dim = a.key_step = a.value_step = q.dims[1];
  a.value_at = k.dims[0] * q.dims[1];
  a.page_group = page_group;
  a.window = window;
  a.sinks = sinks;
  a.scale = scale;
  a.softcap = softcap;
  const auto tokens_of = [&](int64_t row) {
    const int64_t tokens = step.cu_seqlens[row + 1] - step.cu_seqlens[row], below = limit - step.context_lens[row];
    return tokens < below ? tokens : below;
  };
  float* workspace = (float*)team_workspace(team, size_t(attend_numbers(step, a, tokens_of)) * 4);
  attend(step, call, team, a, workspace, tokens_of);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
