// Selective scan, token after token: what costs is one exponential for each channel, state number and token.
#include "elementwise.h"
#include "shuffle.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

// Threads share blocks of this many channels: two cache lines of a token's row, whose states stay in the first cache.
constexpr int64_t CHANNELS = 32;
// Tokens whose steps are computed together.
constexpr int64_t TOKENS = 8;

// `count` channels of one group from `first` on, and zeros up to whole vectors: of channels `rows`, of N `wide`.
struct Block {
  int64_t group, first, count, rows, wide;
  float *A, *state, *decays;  // [rows, wide]; A times log2(e)
  float *B, *C;               // [wide] of a token, where N is not `wide`
};

// What a tile of tokens brings: softplus(dt + dt_bias) and that times x.
struct Tile {
  float steps[TOKENS][CHANNELS], inputs[TOKENS][CHANNELS];
};

// from [count, n] as [rows, wide].
HT_INLINE void pad(const Block& block, float* to, const float* from, int64_t n) {
  for (int64_t c = 0; c < block.rows; ++c)
    for (int64_t k = 0; k < block.wide; k += LANES) {
      const int64_t left = c < block.count ? n - k : 0;
      store(to + c * block.wide + k, load_part(from + c * n + k, left < LANES ? left : LANES));
    }
}

static void read_tile(const Call& call, const Block& block, int64_t begin, int64_t tokens, int64_t end, Tile& tile) {
  const Tensor &x = call.inputs[0], &dt = call.inputs[1], &y = call.outputs[0];
  const float* bias = floats(call.weights[2]) + block.first;
  for (int64_t t = 0; t < tokens; ++t) {
    const float *from_x = floats(x, begin + t) + block.first, *from_dt = floats(dt, begin + t) + block.first;
    const int64_t later = begin + t + TOKENS;
    if (later < end)  // rows lie far apart: nothing else fetches them ahead
      for (int64_t c = 0; c < block.count; c += 16) {
        __builtin_prefetch(floats(x, later) + block.first + c);
        __builtin_prefetch(floats(dt, later) + block.first + c);
        __builtin_prefetch(floats(y, later) + block.first + c, 1);
      }
    for (int64_t c = 0; c < block.rows; c += LANES) {
      const int64_t part = block.count - c < LANES ? block.count - c : LANES;
      const vf step = vsoftplus(load_part(from_dt + c, part) + load_part(bias + c, part));
      store(tile.steps[t] + c, step);
      store(tile.inputs[t] + c, step * load_part(from_x + c, part));
    }
  }
}

// h = exp(step A) h + input B and h C for one token; VECTORS of them are `wide`, or 0 for any number.
template <int VECTORS>
HT_INLINE void advance(const Block& block, float* y, const float* steps, const float* inputs, const float* B,
                       const float* C) {
  const int64_t vectors = VECTORS ? VECTORS : block.wide / LANES;
  for (int64_t c = 0; c < block.rows; ++c)
    for (int64_t at = c * block.wide; at < (c + 1) * block.wide; at += LANES)
      store(block.decays + at, vexp2_fading(load(block.A + at) * steps[c]));
  for (int64_t c = 0; c < block.rows; c += LANES) {
    vf products[LANES];
    for (int64_t i = 0; i < LANES; ++i) {
      const vf input = splat(inputs[c + i]);
      vf product = {};
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t at = ((c + i) * vectors + v) * LANES;
        const vf h = fma(load(block.decays + at), load(block.state + at), load(B + v * LANES) * input);
        store(block.state + at, h);
        product = fma(h, load(C + v * LANES), product);
      }
      products[i] = product;
    }
    store(y + c, sum_each(products));
  }
}

static void advance(const Block& block, float* y, const float* steps, const float* inputs, const float* B,
                    const float* C) {
  switch (block.wide / LANES) {
    case 1: return advance<1>(block, y, steps, inputs, B, C);
    case 2: return advance<2>(block, y, steps, inputs, B, C);
    case 4: return advance<4>(block, y, steps, inputs, B, C);
    default: return advance<0>(block, y, steps, inputs, B, C);
  }
}

// n numbers, and zeros up to whole vectors.
HT_INLINE const float* padded(float* to, const float* from, int64_t n, int64_t wide) {
  if (n == wide) return from;
  for (int64_t k = 0; k < wide; k += LANES) store(to + k, load_part(from + k, n - k < LANES ? n - k : LANES));
  return to;
}

static void scan_row(const Step& step, const Call& call, const Block& block, int64_t row) {
  const Tensor &x = call.inputs[0], &B = call.inputs[2], &C = call.inputs[3];
  const float* D = floats(call.weights[1]) + block.first;
  const int64_t n = B.dims[1], end = step.cu_seqlens[row + 1];
  for (int64_t begin = step.cu_seqlens[row]; begin < end; begin += TOKENS) {
    const int64_t tokens = end - begin < TOKENS ? end - begin : TOKENS;
    Tile tile;
    read_tile(call, block, begin, tokens, end, tile);
    for (int64_t t = 0; t < tokens; ++t) {
      float y[CHANNELS];
      const float* b = padded(block.B, floats(B, begin + t) + block.group * n, n, block.wide);
      const float* c = padded(block.C, floats(C, begin + t) + block.group * n, n, block.wide);
      advance(block, y, tile.steps[t], tile.inputs[t], b, c);
      const int64_t at = block.first;
      map3(floats(call.outputs[0], begin + t) + at, D, floats(x, begin + t) + at, y, block.count,
           [](vf a, vf b, vf c) { return fma(a, b, c); });
    }
  }
}

void selective_scan(const Step& step, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &B = call.inputs[2];
  const Cache& cache = call.caches[0];
  const int64_t channels = x.dims[0], groups = B.dims[0], n = B.dims[1], size = channels / groups;
  const int64_t wide = (n + LANES - 1) / LANES * LANES, blocks = (size + CHANNELS - 1) / CHANNELS;
  const Range mine = share(team, groups * blocks);
  if (mine.begin == mine.end) return;
  float* scratch = static_cast<float*>(team_scratch(team, size_t((4 * CHANNELS + 2) * wide) * 4));
  const auto array = [&](int i) { return scratch + i * CHANNELS * wide; };
  float *B_wide = array(4), *C_wide = B_wide + wide;
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t group = i / blocks, begin = i % blocks * CHANNELS;
    const int64_t count = size - begin < CHANNELS ? size - begin : CHANNELS, rows = (count + LANES - 1) / LANES * LANES;
    const Block block{group, group * size + begin, count, rows, wide, array(0), array(1), array(2), B_wide, C_wide};
    float* lying = n == wide && count == rows ? block.state : array(3);  // [count, n]
    const auto state = [&](int32_t slot) {
      return static_cast<char*>(cache.data) + (slot * channels + block.first) * n * bytes_of(cache.format);
    };
    pad(block, block.A, floats(call.weights[0]) + block.first * n, n);
    map1(block.A, block.A, rows * wide, [](vf v) { return vexp(v) * -1.44269504088896341f; });
    for (int64_t row = 0; row < step.num_sequences; ++row) {
      widen(lying, state(step.state_src[row]), cache.format, count * n);
      if (lying != block.state) pad(block, block.state, lying, n);
      scan_row(step, call, block, row);
      if (lying != block.state)
        for (int64_t c = 0; c < count; ++c) memcpy(lying + c * n, block.state + c * wide, size_t(n) * 4);
      narrow(state(step.state_dst[row]), lying, cache.format, count * n);
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
