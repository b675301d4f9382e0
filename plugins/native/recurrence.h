// A linear recurrence over the rows of a step (plugins/chunked.py has the formulae): chunks for rows of several tokens,
// one pass over the state for rows of one. An operator says by a struct what q, k, v and the gates are:
//
//   Shape shape;
//   void load_q(float* to, int64_t t, int64_t key_head) const;  likewise load_k: K numbers
//   const Tensor *v, *out;
//   void gates(Gates&, int64_t t, int64_t n, int64_t head) const;  of tokens t..t+n-1
//   void channel_decays(float* g, int64_t t, int64_t head) const;  K log decays
//   float skip(int64_t head) const;  o += skip v
#pragma once
#include "channel_decay.h"
#include "rows.h"
#include "states.h"

namespace hybridtrt {
namespace HT_ISA {
namespace {

enum class Decay { NONE, HEAD, CHANNEL };

struct Shape {
  int64_t K, V, key_heads, heads;
  Decay decay;
  bool delta, factor, skip, transposed;  // factor: u = v_by v
  const Cache* state;
  const int32_t* token_slots = nullptr;  // the step's, where the operator reads them
};

struct Gates {
  float log_decay[CHUNK], beta[CHUNK], v_by[CHUNK];
};

struct Work {
  int64_t ld;
  float *q, *k, *kt, *qk, *kk, *g, *u, *row, *states;
  Decays* decays;
  Gates* gates;
  ChannelChunk channels;

  size_t lay_out(char* memory, const Shape& s, int64_t num_states) {
    Pieces pieces{memory};
    const bool channel = s.decay == Decay::CHANNEL;
    const int64_t rows = CHUNK * (ld = padded(s.K)), wide = channel ? rows : 0, square = CHUNK * CHUNK;
    q = pieces.take(rows), k = pieces.take(rows), kt = pieces.take(rows);
    qk = pieces.take(square), kk = pieces.take(square);
    channels.scores = pieces.take(square), channels.corrections = pieces.take(square);
    g = pieces.take(wide), channels.q_start = pieces.take(wide), channels.k_start = pieces.take(wide);
    channels.k_end = pieces.take(wide);
    channels.decay = pieces.take(ld), channels.e = pieces.take(ld);
    channels.total = pieces.take<double>(ld), channels.before = pieces.take<double>(ld);
    decays = pieces.take<Decays>(1), gates = pieces.take<Gates>(1);
    u = pieces.take(CHUNK * TILE_COLUMNS);
    row = pieces.take(TILE_COLUMNS * s.K + panels_of(s.V) * TILE_COLUMNS);
    states = pieces.take(num_states * s.K * TILE_COLUMNS);
    return pieces.bytes;
  }
};

// Some value heads of one key head, and some panels of their values.
struct Part {
  int64_t row, key_head, first_head, last_head, first_panel, last_panel;
};

template <class Op>
void one_chunk(const Op& op, const Part& part, const Work& w, int64_t t, int64_t n) {
  const Shape& s = op.shape;
  const bool channel = s.decay == Decay::CHANNEL;
  for (int64_t i = 0; i < n; ++i) {
    op.load_q(w.q + i * w.ld, t + i, part.key_head);
    op.load_k(w.k + i * w.ld, t + i, part.key_head);
  }
  if (!channel) {
    transpose_to_panels(w.kt, w.k, w.ld, n, s.K);
    lower_scores(w.qk, w.q, w.ld, w.kt, n, s.K);
    if (s.delta) lower_scores(w.kk, w.k, w.ld, w.kt, n, s.K);
  }
  float* state = w.states;
  for (int64_t h = part.first_head; h < part.last_head; ++h) {
    op.gates(*w.gates, t, n, h);
    const float *q = w.q, *k = w.k, *k_end = w.k, *from_start = nullptr;
    const float *beta = w.gates->beta, *factor = s.factor ? w.gates->v_by : nullptr;
    float decay = 1.f;
    if (channel) {
      for (int64_t i = 0; i < n; ++i) op.channel_decays(w.g + i * w.ld, t + i, h);
      w.channels.set(w.q, w.k, w.g, s.delta ? beta : nullptr, w.ld, n, s.K);
      q = w.channels.q_start, k = w.channels.k_start, k_end = w.channels.k_end;
    } else {
      const float* between = nullptr;
      if (s.decay == Decay::HEAD) {
        w.decays->set(w.gates->log_decay, n);
        from_start = w.decays->from_start, between = w.decays->between;
        decay = from_start[n - 1];
      }
      masked_scores(w.channels.scores, w.qk, between, nullptr, false, n);
      if (s.delta) {
        float minus[CHUNK];
        for (int64_t i = 0; i < n; ++i) minus[i] = -beta[i];
        masked_scores(w.channels.corrections, w.kk, between, minus, true, n);
      }
    }
    for (int64_t p = part.first_panel; p < part.last_panel; ++p, state += s.K * TILE_COLUMNS) {
      const int64_t at = h * s.V + p * TILE_COLUMNS, columns = s.V - p * TILE_COLUMNS;
      const float* v = floats(*op.v, t) + at;
      if (s.delta)
        solve_panel(w.u, v, op.v->row_stride, columns, beta, k, w.ld, from_start, state, w.channels.corrections, n,
                    s.K);
      else
        copy_panel(w.u, v, op.v->row_stride, factor, n, columns);
      read_panel(floats(*op.out, t) + at, op.out->row_stride, columns, q, w.ld, from_start, state, w.channels.scores,
                 w.u, s.skip ? op.skip(h) : 0.f, s.skip ? v : nullptr, op.v->row_stride, n, s.K);
      if (from_start) scale_panel(w.u, w.decays->to_end, n);
      update_panel(state, k_end, w.ld, w.u, decay, channel ? w.channels.decay : nullptr, n, s.K);
    }
  }
}

// Of n tokens the number up to the first one that has a slot: chunks end where a state is asked for.
HT_INLINE int64_t through_slot(const int32_t* token_slots, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (token_slots[i]) return i + 1;
  return n;
}

template <class Op>
void many_tokens(const Step& step, const Op& op, const Part& part, const Work& w) {
  const Shape& s = op.shape;
  const int64_t src = step.state_src[part.row], dst = step.state_dst[part.row];
  const int64_t size = (part.last_panel - part.first_panel) * s.K * TILE_COLUMNS;
  const auto keep = [&](int64_t slot) {
    for (int64_t h = part.first_head; h < part.last_head; ++h)
      store_state(head_state(*s.state, slot, h, s.transposed), w.states + (h - part.first_head) * size, part.first_panel,
                  part.last_panel, w.row);
  };
  for (int64_t h = part.first_head; h < part.last_head; ++h)
    load_state(w.states + (h - part.first_head) * size, head_state(*s.state, src, h, s.transposed), part.first_panel,
               part.last_panel, w.row);
  const int64_t end = step.cu_seqlens[part.row + 1];
  for (int64_t t = step.cu_seqlens[part.row], n; t < end; t += n) {
    n = at_most(end - t, CHUNK);
    if (s.token_slots) n = through_slot(s.token_slots + t, n);
    one_chunk(op, part, w, t, n);
    if (s.token_slots && s.token_slots[t + n - 1]) keep(s.token_slots[t + n - 1]);
  }
  keep(dst);
}

// What a step over one token needs; `state` is a float32 copy of a pool's 16-bit numbers.
struct StepWork {
  float *q, *k, *a, *decayed_q, *decayed_k, *u, *predicted, *o, *state;
  Gates* gates;

  size_t lay_out(char* memory, const Shape& s) {
    Pieces pieces{memory};
    const int64_t K = padded(s.K), V = padded(s.V);
    q = pieces.take(K), k = pieces.take(K), a = pieces.take(K);
    decayed_q = pieces.take(K), decayed_k = pieces.take(K);
    u = pieces.take(V), predicted = pieces.take(V), o = pieces.take(V);
    state = pieces.take(s.state->format == F32 ? 0 : s.K * s.V);
    gates = pieces.take<Gates>(1);
    return pieces.bytes;
  }
};
// One token of one head, values first..last-1.
template <class Op>
void one_token(const Step& step, const Op& op, int64_t row, int64_t h, int64_t first, int64_t last, StepWork& w) {
  const Shape& s = op.shape;
  const int64_t t = step.cu_seqlens[row], key_head = h / (s.heads / s.key_heads), K = s.K, n = last - first;
  const State src = head_state(*s.state, step.state_src[row], h, s.transposed);
  const State dst = head_state(*s.state, step.state_dst[row], h, s.transposed);
  const int64_t ld = s.transposed ? K : s.V, rows = s.transposed ? n : K, columns = s.transposed ? K : n;
  const int64_t at = s.transposed ? first * K : first, size = bytes_of(src.format);
  const bool wide = src.format == F32;
  const float* from = wide ? reinterpret_cast<const float*>(src.data) + at : w.state;
  float* to = wide ? reinterpret_cast<float*>(dst.data) + at : w.state;
  const int64_t row_step = wide ? ld : columns;
  if (!wide)
    for (int64_t i = 0; i < rows; ++i)
      widen(w.state + i * columns, src.data + (at + i * ld) * size, src.format, columns);
  op.load_q(w.q, t, key_head);
  op.load_k(w.k, t, key_head);
  op.gates(*w.gates, t, 1, h);
  float a = 1.f;
  if (s.decay == Decay::HEAD) a = exp1(w.gates->log_decay[0]);
  if (s.decay == Decay::CHANNEL) op.channel_decays(w.a, t, h);
  for (int64_t j = 0; j < K; j += LANES)
    store(w.a + j, s.decay == Decay::CHANNEL ? vexp(load(w.a + j)) : splat(a));
  const float* v = floats(*op.v, t) + h * s.V + first;
  float* out = floats(*op.out, t) + h * s.V + first;
  const float factor = s.factor ? w.gates->v_by[0] : 1.f;
  for (int64_t i = 0; i < n; ++i) w.u[i] = v[i] * factor;
  for (int64_t i = n; i % LANES; ++i) w.u[i] = 0.f;
  if (s.transposed) {
    step_transposed(to, from, row_step, a, w.k, w.q, w.u, w.o, K, n);
  } else {
    if (s.delta) {
      // o = q S' = (a q) S + (q k) u: both products with the old state are one pass.
      for (int64_t j = 0; j < K; j += LANES) {
        store(w.decayed_k + j, load(w.k + j) * load(w.a + j));
        store(w.decayed_q + j, load(w.q + j) * load(w.a + j));
      }
      read_state(from, row_step, w.decayed_k, w.decayed_q, w.predicted, w.o, K, n);
      const vf beta = splat(w.gates->beta[0]), qk = splat(dot(w.q, w.k, K));
      for (int64_t i = 0; i < n; i += LANES) {
        const vf u = beta * (load(w.u + i) - load(w.predicted + i));
        store(w.u + i, u);
        store(w.o + i, fma(qk, u, load(w.o + i)));
      }
      update_state(to, from, row_step, w.a, w.k, w.u, K, n);
    } else {
      step_state(to, from, row_step, w.a, w.k, w.q, w.u, w.o, K, n);
    }
  }
  const float skip = s.skip ? op.skip(h) : 0.f;
  for (int64_t i = 0; i < n; ++i) out[i] = s.skip ? fma1(skip, v[i], w.o[i]) : w.o[i];
  if (!wide)
    for (int64_t i = 0; i < rows; ++i)
      narrow(dst.data + (at + i * ld) * size, w.state + i * columns, dst.format, columns);
  if (s.token_slots && s.token_slots[t]) {
    const State kept = head_state(*s.state, s.token_slots[t], h, s.transposed);
    for (int64_t i = 0; i < rows; ++i)
      memcpy(kept.data + (at + i * ld) * size, dst.data + (at + i * ld) * size, size_t(columns * size));
  }
}

template <class Op>
void run_recurrence(const Step& step, const Op& op, Team& team) {
  const Shape& s = op.shape;
  const int64_t longer = count_rows(step, false), single = count_rows(step, true);
  // Parts enough for all threads: of the value heads of a key head, which share the scores, and then of the values.
  const int64_t each = s.heads / s.key_heads, panels = panels_of(s.V), wanted = team.size == 1 ? 1 : 2 * team.size;
  int64_t head_parts = 1, panel_parts = 1, step_parts = 1;
  if (longer) {
    head_parts = at_most((wanted + longer * s.key_heads - 1) / (longer * s.key_heads), each);
    const int64_t parts = longer * s.key_heads * head_parts;
    if (parts < team.size) panel_parts = at_most((team.size + parts - 1) / parts, panels);
  }
  if (single && single * s.heads < team.size) step_parts = at_most((team.size + s.heads - 1) / s.heads, panels);
  Work work{};
  StepWork step_work{};
  const int64_t num_states = (each + head_parts - 1) / head_parts * ((panels + panel_parts - 1) / panel_parts);
  const size_t bytes = longer ? work.lay_out(nullptr, s, num_states) : 0, step_bytes = step_work.lay_out(nullptr, s);
  char* memory = static_cast<char*>(team_scratch(team, bytes + step_bytes));
  if (longer) work.lay_out(memory, s, num_states);
  step_work.lay_out(memory + bytes, s);

  const int64_t parts = longer * s.key_heads * head_parts * panel_parts;
  const auto step_once = [&](int64_t i) {
    const int64_t piece = i % step_parts, h = i / step_parts % s.heads;
    const int64_t row = nth_row(step, i / step_parts / s.heads, true);
    const int64_t first = panels * piece / step_parts * TILE_COLUMNS;
    const int64_t last = panels * (piece + 1) / step_parts * TILE_COLUMNS;
    one_token(step, op, row, h, first, at_most(last, s.V), step_work);
  };
  const int64_t steps = single * s.heads * step_parts;
  if (!longer) {
    const Range range = share(team, steps);
    for (int64_t i = range.begin; i < range.end; ++i) step_once(i);
    return;
  }
  for (int64_t i = team_take(team); i < parts + steps; i = team_take(team)) {
    if (i >= parts) {
      step_once(i - parts);
      continue;
    }
    const int64_t panel = i % panel_parts, head = i / panel_parts % head_parts, key = i / panel_parts / head_parts;
    const int64_t kh = key % s.key_heads;
    const Part part{nth_row(step, key / s.key_heads, false),
                    kh,
                    kh * each + each * head / head_parts,
                    kh * each + each * (head + 1) / head_parts,
                    panels * panel / panel_parts,
                    panels * (panel + 1) / panel_parts};
    many_tokens(step, op, part, work);
  }
  team_finish(team);
}

}  // namespace
}  // namespace HT_ISA
}  // namespace hybridtrt
