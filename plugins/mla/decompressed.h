// Attention over decompressed keys and values, head by head: expanding a cached token costs many operations, but each
// pair of a query and a key then takes fewer of them than in the latent space. That pays for rows of many tokens.
#pragma once
#include "../attention/tiles.h"
#include "operands.h"

namespace hybridtrt {
namespace HT_ISA {

// Whether a row of so many tokens behind so many takes fewer operations this way.
HT_INLINE bool decompresses(const Operands& x, int64_t context, int64_t tokens) {
  const int64_t expand = (x.nope + x.value_dim) * x.rank, pairs = tokens * context + tokens * (tokens + 1) / 2;
  const int64_t here = (context + tokens) * expand + pairs * (x.nope + x.rope + x.value_dim);
  return tokens > 1 && here < tokens * expand + pairs * (2 * x.rank + x.rope);
}

namespace {
// Of one head: up as panels, some latents, and all keys without rope beside their values.
struct Expansion {
  static constexpr int64_t BLOCK = 96;  // latents that are expanded together
  int64_t width;
  float *up, *latents, *expanded;  // [width / PANEL, rank, PANEL], [BLOCK, rank], [keys, width]

  static int64_t numbers(const Operands& x, int64_t keys) {
    const int64_t width = x.nope + x.value_dim;
    return (round_up(width, PANEL) + BLOCK) * x.rank + keys * width;
  }
  Expansion(const Operands& x, float* memory) : width(x.nope + x.value_dim), up(memory) {
    latents = up + round_up(width, PANEL) * x.rank;
    expanded = latents + BLOCK * x.rank;
  }

  void expand(const Operands& x, int64_t head, const Pages& pages, int64_t keys, float* widened) const {
    for (int64_t c = 0; c < width; c += PANEL)
      transpose(up + c * x.rank, PANEL, up_key(x, head) + c * x.rank, x.rank, least(PANEL, width - c), x.rank);
    const char* at[BLOCK];
    for (int64_t from = 0; from < keys; from += BLOCK) {
      const int64_t n = least(BLOCK, keys - from);
      find_tokens(at, pages, from, n, 0);
      for (int64_t i = 0; i < n; ++i) {
        if (pages.format != F32) widen(widened, at[i], pages.format, x.rank);
        memcpy(latents + i * x.rank, pages.format == F32 ? at[i] : (const char*)widened, size_t(x.rank) * 4);
      }
      for (int64_t c = 0; c < width; c += PANEL)
        multiply_tiles(expanded + from * width + c, width, {latents, x.rank, 1}, up + c * x.rank, PANEL, n,
                       least(PANEL, width - c), x.rank);
    }
  }

  // Keys from..from+n-1 for attend_tile.
  void pack(const Operands& x, const TileMemory& m, const Pages& pages, int64_t from, int64_t n) const {
    const char* at[PANEL];
    const float* rows[PANEL];
    float* keys = m.keys;
    for (int64_t c = 0; c < n; c += PANEL, keys += (x.nope + x.rope) * PANEL) {
      const int64_t count = least(PANEL, n - c);
      transpose(keys, PANEL, expanded + (from + c) * width, width, count, x.nope);
      find_tokens(at, pages, from + c, count, x.rank * bytes_of(pages.format));
      widen_rows(rows, m.widened, at, pages.format, count, x.rope);
      for (int64_t d = 0; d < x.rope; ++d)
        for (int64_t i = 0; i < count; ++i) keys[(x.nope + d) * PANEL + i] = rows[i][d];
      for (int64_t d = 0; d < x.nope + x.rope; ++d)
        for (int64_t i = count; i < PANEL; ++i) keys[d * PANEL + i] = 0.f;
    }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < round_up(x.value_dim, PANEL); d += LANES) {
        const int64_t left = x.value_dim - d;
        const float* value = expanded + (from + i) * width + x.nope + d;
        const vf v = left >= LANES ? load(value) : left > 0 ? load_part(value, left) : vf{};
        store(m.values + (d / PANEL * n + i) * PANEL + d % PANEL, v);
      }
  }
};
}  // namespace

// The rows of which `decompresses` is true. Every thread calls it.
static void attend_decompressed(const Step& step, const Call& call, Team& team, const Operands& x) {
  const auto keys_of = [&](int64_t row) {
    const int64_t tokens = step.cu_seqlens[row + 1] - step.cu_seqlens[row], context = step.context_lens[row];
    return decompresses(x, context, tokens) ? context + tokens : 0;
  };
  int64_t longest = 0;
  for (int64_t row = 0; row < step.num_sequences; ++row) longest = most(longest, keys_of(row));
  if (!longest) return;
  team_wait(team);  // the tokens are stored
  const TileShape s = tile_shape(1, x.nope + x.rope, x.value_dim);
  const int64_t tile = tile_numbers(s), widened = round_up(x.rank, LANES);
  float* memory = (float*)team_scratch(team, size_t(tile + widened + Expansion::numbers(x, longest)) * 4);
  const TileMemory m = tile_memory(s, memory);
  const Expansion expansion(x, memory + tile + widened);
  int64_t unit = team_take(team), before = 0;
  for (int64_t row = 0; row < step.num_sequences; ++row) {
    const int64_t keys = keys_of(row), start = step.cu_seqlens[row], context = step.context_lens[row];
    if (!keys) continue;
    const Pages pages = pages_of(step, call, x.page_group, row);
    for (; unit < before + x.heads; unit = team_take(team)) {
      const int64_t head = unit - before;
      expansion.expand(x, head, pages, keys, memory + tile);
      for (int64_t first = context; first < keys; first += s.rows) {
        const int64_t queries = least(s.rows, keys - first), t = start + first - context;
        for (int64_t i = 0; i < queries; ++i) {
          float* q = m.q + i * s.key_dim;
          for (int64_t d = 0; d < x.nope; ++d) q[d] = floats(*x.q_nope, t + i)[head * x.nope + d] * x.scale;
          for (int64_t d = 0; d < x.rope; ++d) q[x.nope + d] = floats(*x.q_rope, t + i)[head * x.rope + d] * x.scale;
        }
        attend_tile(s, m, {queries, first, EVERYTHING, 0, first + queries, 0.f},
                    [&](int64_t from, int64_t n) { expansion.pack(x, m, pages, from, n); });
        for (int64_t i = 0; i < queries; ++i)
          finish_row(floats(*x.out, t + i) + head * x.value_dim, m.o + i * value_padded(s), m.running[i], nullptr,
                     x.value_dim);
      }
    }
    before += x.heads;
  }
  team_finish(team);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
