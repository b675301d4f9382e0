// Attention of a step's queries to cached tokens: the work of all rows as one list of units, which the threads take in
// turn. What a unit computes depends on its row alone.
#pragma once
#include "stream.h"
#include "tiles.h"

namespace hybridtrt {
namespace HT_ISA {

// Queries [tokens, heads, key_dim] and results [tokens, heads, value_dim] of the tokens of some rows, in the rows'
// order. Head h reads the key and value of head h / group, which lie at numbers `key_at + head * key_step` and
// `value_at + head * value_step` of a cached token.
struct Attend {
  const float* q;
  float* out;
  int64_t q_stride, out_stride, heads, group, key_dim, value_dim;
  int64_t key_step, value_at, value_step, page_group, window;
  const float* sinks;  // [heads] or null
  float scale, softcap;
  bool compact;  // q and out have the rows' attending tokens only
};

// The part of the list that is one row's: tiles of queries, chunks of keys, heads of keys (`kv_heads` a unit).
struct RowWork {
  int64_t row, start, context, tokens, queries, tiles, chunk_size, first_chunk, chunks, kv_heads, units, parts;
};

constexpr int64_t STREAM_CHUNK = 256, TILE_CHUNK = 512;
constexpr int64_t STREAM_HEADS = 32;  // where more heads share a key it pays to transpose keys

HT_INLINE StreamHeads stream_heads(const Attend& a, int64_t count, int64_t bytes) {
  return {count, a.group, 0, a.key_step * bytes, a.key_dim, a.value_at * bytes, a.value_step * bytes, a.value_dim};
}

HT_INLINE bool streams(const Attend& a, int64_t tokens) { return tokens == 1 && a.group <= STREAM_HEADS; }

HT_INLINE RowWork row_work(const Attend& a, const TileShape& shape, int64_t row, int64_t start, int64_t context,
                           int64_t tokens, bool whole) {
  RowWork w = {row, start, context, tokens, most(1, least(tokens, shape.rows / shape.group)), 0, 0, 0, 1, 1, 0, 0};
  w.tiles = (tokens + w.queries - 1) / w.queries;
  const int64_t last = context + tokens - 1, first = most(0, context - a.window + 1);
  if (w.tiles <= 2) {  // few units: the keys are cut, at places that positions alone decide
    w.chunk_size = streams(a, tokens) ? STREAM_CHUNK : TILE_CHUNK;
    w.first_chunk = first / w.chunk_size;
    w.chunks = last / w.chunk_size - w.first_chunk + 1;
  }
  if (whole && streams(a, tokens)) w.kv_heads = a.heads / a.group;
  w.units = w.tiles * w.chunks * (a.heads / a.group / w.kv_heads);
  w.parts = w.chunks > 1 ? tokens * a.heads * w.chunks : 0;
  return w;
}

// A query and head's result of one chunk: [value_padded] numbers, then Running.
HT_INLINE int64_t part_numbers(const TileShape& s) { return value_padded(s) + 16; }
HT_INLINE float* part_at(float* parts, const Attend& a, const TileShape& s, const RowWork& w, int64_t token,
                         int64_t head, int64_t chunk) {
  return parts + ((token * a.heads + head) * w.chunks + chunk) * part_numbers(s);
}

HT_INLINE void run_unit(const Step& step, const Call& call, const Attend& a, const TileShape& s, const TileMemory& m,
                        const RowWork& w, int64_t unit, float* parts) {
  const int64_t splits = a.heads / a.group / w.kv_heads, chunk = unit / splits % w.chunks;
  const int64_t kv_head = unit % splits * w.kv_heads, head = kv_head * a.group, heads = w.kv_heads * a.group;
  const int64_t tile = w.tiles - 1 - unit / splits / w.chunks;  // the longest first
  const int64_t token = tile * w.queries, queries = least(w.queries, w.tokens - token), rows = queries * heads;
  const Pages pages = pages_of(step, call, a.page_group, w.row);
  const int64_t bytes = bytes_of(pages.format);
  const int64_t key_at = kv_head * a.key_step * bytes, value_at = (a.value_at + kv_head * a.value_step) * bytes;
  const int64_t first_query = w.context + token;
  int64_t begin = most(0, first_query - a.window + 1), end = first_query + queries;
  if (w.chunk_size) {
    begin = most(begin, (w.first_chunk + chunk) * w.chunk_size);
    end = least(end, (w.first_chunk + chunk + 1) * w.chunk_size);
  }
  const bool stream = streams(a, w.tokens);
  const int64_t key_padded = stream ? round_up(a.key_dim, LANES) : a.key_dim;
  const int64_t result_padded = stream ? round_up(a.value_dim, LANES) : value_padded(s);
  const vf scale = splat(a.scale);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = a.q + (w.start + token + r / heads) * a.q_stride + (head + r % heads) * a.key_dim;
    float* to = m.q + r * key_padded;
    int64_t d = 0;
    for (; d + LANES <= a.key_dim; d += LANES) store(to + d, load(from + d) * scale);
    if (d == a.key_dim) continue;
    const vf rest = load_part(from + d, a.key_dim - d) * scale;
    if (stream)
      store(to + d, rest);
    else
      store_part(to + d, rest, a.key_dim - d);
  }
  if (stream) {
    StreamHeads part = stream_heads(a, w.kv_heads, bytes);
    part.key_at = key_at, part.value_at = value_at;
    stream_keys(m.o, m.running, m.q, pages, begin, end, part, a.softcap, m.scores);
  } else {
    const TileView view = {queries, first_query, a.window, begin, end, a.softcap};
    attend_tile(s, m, view, [&](int64_t from, int64_t n) {
      pack_keys(m.keys, m.widened, pages, from, n, key_at, a.key_dim);
      pack_values(m.values, m.widened, pages, from, n, value_at, a.value_dim);
    });
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t t = token + r / heads, h = head + r % heads;
    const float* o = m.o + r * result_padded;
    if (w.chunks == 1) {
      float* to = a.out + (w.start + t) * a.out_stride + h * a.value_dim;
      finish_row(to, o, m.running[r], a.sinks ? a.sinks + h : nullptr, a.value_dim);
    } else {
      float* part = part_at(parts, a, s, w, t, h, chunk);
      memcpy(part, o, size_t(result_padded) * 4);
      memcpy(part + value_padded(s), m.running + r, sizeof(Running));
    }
  }
}

// The chunks of one query and head together, in their order.
HT_INLINE void merge_parts(float* to, float* o, const float* parts, const Attend& a, const TileShape& s, int64_t chunks,
                           const float* sink) {
  const int64_t padded = round_up(a.value_dim, LANES), next = part_numbers(s);
  Running all = {NOTHING, 0.f}, part;
  for (int64_t d = 0; d < padded; d += LANES) store(o + d, vf{});
  for (int64_t c = 0; c < chunks; ++c) {
    memcpy(&part, parts + c * next + value_padded(s), sizeof part);
    if (part.maximum > all.maximum) all.maximum = part.maximum;
  }
  for (int64_t c = 0; c < chunks; ++c) {
    memcpy(&part, parts + c * next + value_padded(s), sizeof part);
    if (!(part.sum > 0.f)) continue;
    const float by = exp_negative1(part.maximum - all.maximum);
    all.sum = fma1(by, part.sum, all.sum);
    for (int64_t d = 0; d < padded; d += LANES) store(o + d, fma(splat(by), load(parts + c * next + d), load(o + d)));
  }
  finish_row(to, o, all, sink, a.value_dim);
}

// `visit(work)` for the rows of which `tokens_of(row)` tokens attend, from the row's first on.
template <class TokensOf, class Visit>
HT_INLINE void for_rows(const Step& step, const Attend& a, const TileShape& s, bool whole, TokensOf tokens_of,
                        Visit visit) {
  int64_t counted = 0;
  for (int64_t row = 0; row < step.num_sequences; ++row) {
    const int64_t tokens = tokens_of(row);
    if (tokens <= 0) continue;
    visit(row_work(a, s, row, a.compact ? counted : step.cu_seqlens[row], step.context_lens[row], tokens,
                   whole));
    counted += tokens;
  }
}

// Numbers of the workspace that attend needs.
template <class TokensOf>
HT_INLINE int64_t attend_numbers(const Step& step, const Attend& a, TokensOf tokens_of) {
  const TileShape s = tile_shape(a.group, a.key_dim, a.value_dim);
  int64_t parts = 0;
  for_rows(step, a, s, true, tokens_of, [&](const RowWork& w) { parts += w.parts; });
  return parts * part_numbers(s);
}

// Every thread calls it with the same `workspace`; results are complete when all have returned.
template <class TokensOf>
HT_INLINE void attend(const Step& step, const Call& call, Team& team, const Attend& a, float* workspace,
                      TokensOf tokens_of) {
  const TileShape s = tile_shape(a.group, a.key_dim, a.value_dim);
  TileShape room = s;
  room.rows = most(s.rows, a.heads);
  const int64_t numbers = tile_numbers(room) + stream_numbers(stream_heads(a, a.heads / a.group, 1));
  const TileMemory m = tile_memory(room, (float*)team_scratch(team, size_t(numbers) * 4));
  // A cached token is read as a whole where there is enough for every thread to do.
  int64_t chunks = 0;
  for_rows(step, a, s, true, tokens_of, [&](const RowWork& w) { chunks += streams(a, w.tokens) ? w.chunks : 0; });
  const bool whole = chunks >= 4 * team.size;
  int64_t unit = team_take(team), before = 0;
  float* parts = workspace;
  for_rows(step, a, s, whole, tokens_of, [&](const RowWork& w) {
    for (; unit < before + w.units; unit = team_take(team)) run_unit(step, call, a, s, m, w, unit - before, parts);
    before += w.units;
    parts += w.parts * part_numbers(s);
  });
  team_finish(team);
  parts = workspace;
  for_rows(step, a, s, whole, tokens_of, [&](const RowWork& w) {
    if (w.chunks == 1) return;
    const Range all = share(team, w.tokens * a.heads);
    for (int64_t i = all.begin; i < all.end; ++i) {
      const int64_t token = i / a.heads, head = i % a.heads;
      merge_parts(a.out + (w.start + token) * a.out_stride + head * a.value_dim, m.o,
                  part_at(parts, a, s, w, token, head, 0), a, s, w.chunks, a.sinks ? a.sinks + head : nullptr);
    }
    parts += w.parts * part_numbers(s);
  });
}

}  // namespace HT_ISA
}  // namespace hybridtrt
