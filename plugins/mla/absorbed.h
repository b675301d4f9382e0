// Attention in the latent space, where all heads share one head of keys: up_k is absorbed into the queries and up_v
// into the result, so nothing but the cache is read for a token.
#pragma once
#include "../attention/attend.h"
#include "operands.h"

namespace hybridtrt {
namespace HT_ISA {

// Tokens of rows that attend here, a run of them after another: `visit(first token, tokens before, tokens)`.
template <class TokensOf, class Visit>
HT_INLINE void for_runs(const Step& step, TokensOf tokens_of, Visit visit) {
  int64_t first = 0, count = 0, before = 0;
  for (int64_t row = 0; row < step.num_sequences; ++row) {
    const int64_t tokens = tokens_of(row);
    if (tokens <= 0) continue;
    if (first + count != step.cu_seqlens[row]) {
      if (count) visit(first, before, count);
      before += count;
      first = step.cu_seqlens[row];
      count = 0;
    }
    count += tokens;
  }
  if (count) visit(first, before, count);
}

// Memory of this path: queries [tokens, heads, rank + rope], results [tokens, heads, rank], and that of attend.
template <class TokensOf>
HT_INLINE int64_t absorbed_numbers(const Step& step, const Attend& a, TokensOf tokens_of) {
  int64_t tokens = 0;
  for (int64_t row = 0; row < step.num_sequences; ++row) tokens += tokens_of(row);
  return tokens * a.heads * (a.key_dim + a.value_dim) + attend_numbers(step, a, tokens_of);
}

// Each head's part of all heads' queries, `columns` latent channels at a time.
template <class TokensOf>
static void absorb_queries(const Step& step, Team& team, const Operands& x, float* q, TokensOf tokens_of) {
  constexpr int64_t COLUMNS = 4 * TILE_COLUMNS;
  const int64_t blocks = (x.rank + COLUMNS - 1) / COLUMNS, key_dim = x.rank + x.rope;
  const Range all = share(team, x.heads * (blocks + 1));
  for (int64_t i = all.begin; i < all.end; ++i) {
    const int64_t head = i / (blocks + 1), block = i % (blocks + 1), from = block * COLUMNS;
    for_runs(step, tokens_of, [&](int64_t first, int64_t before, int64_t tokens) {
      float* to = q + (before * x.heads + head) * key_dim;
      if (block == blocks) {
        for (int64_t t = 0; t < tokens; ++t)
          memcpy(to + t * x.heads * key_dim + x.rank, floats(*x.q_rope, first + t) + head * x.rope, size_t(x.rope) * 4);
      } else {
        multiply_tiles(to + from, x.heads * key_dim,
                       {floats(*x.q_nope, first) + head * x.nope, x.q_nope->row_stride, 1},
                       up_key(x, head) + from, x.rank, tokens, least(COLUMNS, x.rank - from), x.nope);
      }
    });
  }
}

// [tokens, heads, rank] to values.
template <class TokensOf>
static void expand_results(const Step& step, Team& team, const Operands& x, const float* results, TokensOf tokens_of) {
  const int64_t blocks = (x.value_dim + LANES - 1) / LANES;
  const Range all = share(team, x.heads * blocks);
  for (int64_t i = all.begin; i < all.end; ++i) {
    const int64_t head = i / blocks, from = i % blocks * LANES, n = least(LANES, x.value_dim - from);
    const float* rows[LANES];
    for (int64_t v = 0; v < LANES; ++v) rows[v] = up_value(x, head) + (from + least(v, n - 1)) * x.rank;
    for_runs(step, tokens_of, [&](int64_t first, int64_t before, int64_t tokens) {
      for (int64_t t = 0; t < tokens; ++t) {
        float values[LANES];
        dot_rows(values, results + ((before + t) * x.heads + head) * x.rank, rows, x.rank);
        memcpy(floats(*x.out, first + t) + head * x.value_dim + from, values, size_t(n) * 4);
      }
    });
  }
}

// The tokens of the rows must be stored. `memory` holds absorbed_numbers.
template <class TokensOf>
HT_INLINE void attend_absorbed(const Step& step, const Call& call, Team& team, const Operands& x, Attend a,
                               float* memory, int64_t tokens, TokensOf tokens_of) {
  float *q = memory, *results = q + tokens * a.heads * a.key_dim, *rest = results + tokens * a.heads * a.value_dim;
  absorb_queries(step, team, x, q, tokens_of);
  team_wait(team);
  a.q = q;
  a.out = results;
  attend(step, call, team, a, rest, tokens_of);
  team_wait(team);
  expand_results(step, team, x, results, tokens_of);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
