// What a kernel sees: the step, its operands and its team of threads. Mirrored by ctypes in library.py.
//
// Every source that includes this file is compiled once for each instruction set, into the namespace HT_ISA. Nothing
// here or in a kernel may become a weak symbol, or the linker would merge code of different instruction sets: inline
// functions are HT_INLINE, and containers and algorithms of the standard library stay out of kernels.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tactics.h"

#define HT_INLINE static inline __attribute__((always_inline))

namespace hybridtrt {

// How numbers are stored. PANEL_* are the layouts of plugins/linear/panel_layout.py.
enum Format : int64_t {
  F32 = 0,
  BF16 = 1,
  F16 = 2,
  PANEL_F32 = 16,
  PANEL_BF16 = 17,
  PANEL_I8 = 18,
  PANEL_I4 = 19,
  PANEL_BF16_ROUNDED = 20
};

// A value [rows, dims...] of float32 (of int32: token ids, positions, expert numbers, counts). One row's numbers lie
// together; from row to row it is row_stride numbers.
struct Tensor {
  void* data;
  int64_t rows, row_stride, rank, dims[3];
};

// A weight, [dims...]. Where the node has no such weight, data is null.
struct Weight {
  const void* data;
  int64_t format, group, rank, dims[3];  // group: numbers along the last axis that share a scale, 0: the whole axis
  int64_t tactics[TACTIC_RANGES];        // of products with it, by their rows
};

// A pool, [pages or slots, ...].
struct Cache {
  void* data;
  int64_t format, rank, dims[5];
};

// The step contract (plugins/step.py); block table i is that of page group i, [num_sequences, table_widths[i]].
struct Step {
  int64_t num_tokens, num_sequences, num_logits, num_tables;
  const int32_t *input_ids, *positions, *cu_seqlens, *context_lens, *state_src, *state_dst, *logits_indices;
  const int32_t* const* block_tables;
  const int64_t* table_widths;
  const int32_t* token_slots;  // [num_tokens], or null
  const int32_t* token_rows;   // [num_tokens] the sequence of each token; filled in by the executor
};

// One node with its operands, each list in the order of its OpSpec: inputs then optional inputs, weights then optional
// weights. Attributes are numbers: NaN stands for None or not given, a name for its index among the spec's choices.
struct Call {
  const Tensor* inputs;
  int64_t num_inputs;
  const Tensor* outputs;
  const Weight* weights;
  const Cache* caches;
  const double* attributes;
};

struct Shared;  // of the threads of one program

// One thread among those that run a kernel together. All of them call the kernel; the executor waits for all after it.
struct Team {
  int rank, size;
  Shared* shared;
  uint64_t turns;         // of dynamic loops so far
  char* scratch;          // of this thread
  size_t scratch_bytes;
  size_t workspace_bytes;  // of the workspace, as this thread knows it
};

using Kernel = void (*)(const Step&, const Call&, Team&);

// Wait until all threads of the team are here.
void team_wait(Team& team);
// Memory of this thread, 64-byte aligned, until the kernel ends; a second call gives the same memory.
void* team_scratch(Team& team, size_t bytes);
// Memory of the team, 64-byte aligned, until the kernel ends; all threads must ask for the same number of bytes.
void* team_workspace(Team& team, size_t bytes);
// The next number of a loop that the threads share, counted from 0. When one has had a number beyond the loop's end it
// calls team_finish, which waits for all; afterwards another loop may begin.
int64_t team_take(Team& team);
void team_finish(Team& team);

namespace HT_ISA {

struct Range {
  int64_t begin, end;
};

// This thread's part of 0..n-1, in multiples of grain.
HT_INLINE Range share(const Team& team, int64_t n, int64_t grain = 1) {
  const int64_t blocks = (n + grain - 1) / grain;
  const int64_t begin = blocks * team.rank / team.size * grain, end = blocks * (team.rank + 1) / team.size * grain;
  return {begin, end < n ? end : n};
}

HT_INLINE float* floats(const Tensor& t, int64_t row = 0) { return static_cast<float*>(t.data) + row * t.row_stride; }
HT_INLINE int32_t* ints(const Tensor& t, int64_t row = 0) { return static_cast<int32_t*>(t.data) + row * t.row_stride; }
HT_INLINE const float* floats(const Weight& w) { return static_cast<const float*>(w.data); }

// Numbers in one row.
HT_INLINE int64_t width(const Tensor& t) {
  int64_t n = 1;
  for (int64_t i = 0; i < t.rank; ++i) n *= t.dims[i];
  return n;
}

HT_INLINE double attribute(const Call& call, int i, double otherwise) {
  const double value = call.attributes[i];
  return value == value ? value : otherwise;
}
HT_INLINE bool given(const Call& call, int i) { return call.attributes[i] == call.attributes[i]; }

}  // namespace HT_ISA
}  // namespace hybridtrt
