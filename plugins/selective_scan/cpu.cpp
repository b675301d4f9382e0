// Selective scan, token after token: what costs is one exponential for each channel, state number and token.
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

// Threads share blocks of this many channels: two cache lines of a token's row, whose states stay in the first cache.
constexpr int64_t CHANNELS = 32;

// Numbers of one block of channels; `wide` is N in whole vectors, behind whose end A and the states are 0.
struct Block {
  int64_t first, count, wide;
  float *A, *state;  // [CHANNELS, wide]; A times log2(e)
};

struct Operands {
  const float *x, *dt, *B, *C, *D, *dt_bias;  // of a token from the block's first channel, B and C [wide]
  float* y;
};

// One token; VECTORS of them are `wide`, or 0 for any number.
template <int VECTORS>
HT_INLINE void advance(const Block& block, const Operands& o) {
  const int64_t vectors = VECTORS ? VECTORS : block.wide / LANES;
  float steps[LANES], inputs[LANES];
  for (int64_t c = 0; c < block.count; c += LANES) {
    const int64_t part = block.count - c < LANES ? block.count - c : LANES;
    const vf x = load_part(o.x + c, part);
    const vf dt = vsoftplus(load_part(o.dt + c, part) + load_part(o.dt_bias + c, part));
    store(steps, dt);
    store(inputs, dt * x);
    vf products[LANES];
    for (int64_t i = 0; i < LANES; ++i) {
      if (i >= part) {
        products[i] = vf{};
        continue;
      }
      const float* A = block.A + (c + i) * block.wide;
      float* h = block.state + (c + i) * block.wide;
      const vf step = splat(steps[i]), input = splat(inputs[i]);
      vf product = {};
      for (int64_t v = 0; v < vectors; ++v) {
        const vf decay = vexp2_fading(load(A + v * LANES) * step);
        const vf next = fma(decay, load(h + v * LANES), load(o.B + v * LANES) * input);
        store(h + v * LANES, next);
        product = fma(next, load(o.C + v * LANES), product);
      }
      products[i] = product;
    }
    store_part(o.y + c, fma(load_part(o.D + c, part), x, sums(products)), part);
  }
}

static void advance(const Block& block, const Operands& o) {
  switch (block.wide / LANES) {
    case 1: return advance<1>(block, o);
    case 2: return advance<2>(block, o);
    case 4: return advance<4>(block, o);
    default: return advance<0>(block, o);
  }
}

// n numbers and zeros up to `wide`.
HT_INLINE void padded(float* to, const float* from, int64_t n, int64_t wide) {
  memcpy(to, from, size_t(n) * 4);
  for (int64_t i = n; i < wide; ++i) to[i] = 0.f;
}

static void scan_block(const Step& step, const Call& call, const Block& block, int64_t group, float* b_and_c) {
  const Tensor &x = call.inputs[0], &dt = call.inputs[1], &B = call.inputs[2], &C = call.inputs[3];
  const Cache& cache = call.caches[0];
  const int64_t channels = x.dims[0], n = B.dims[1];
  const auto state = [&](int32_t slot, int64_t c) {
    return static_cast<char*>(cache.data) + ((slot * channels + block.first + c) * n) * bytes_of(cache.format);
  };
  const bool whole = n == block.wide;
  for (int64_t row = 0; row < step.num_sequences; ++row) {
    if (whole)
      widen(block.state, state(step.state_src[row], 0), cache.format, block.count * n);
    else
      for (int64_t c = 0; c < block.count; ++c) {
        float* to = block.state + c * block.wide;
        widen(to, state(step.state_src[row], c), cache.format, n);
        for (int64_t i = n; i < block.wide; ++i) to[i] = 0.f;
      }
    for (int64_t t = step.cu_seqlens[row]; t < step.cu_seqlens[row + 1]; ++t) {
      const float *b = floats(B, t) + group * n, *c = floats(C, t) + group * n;
      if (!whole) {
        padded(b_and_c, b, n, block.wide);
        padded(b_and_c + block.wide, c, n, block.wide);
        b = b_and_c;
        c = b_and_c + block.wide;
      }
      advance(block, {floats(x, t) + block.first, floats(dt, t) + block.first, b, c,
                      floats(call.weights[1]) + block.first, floats(call.weights[2]) + block.first,
                      floats(call.outputs[0], t) + block.first});
    }
    if (whole)
      narrow(state(step.state_dst[row], 0), block.state, cache.format, block.count * n);
    else
      for (int64_t c = 0; c < block.count; ++c)
        narrow(state(step.state_dst[row], c), block.state + c * block.wide, cache.format, n);
  }
}

void selective_scan(const Step& step, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &B = call.inputs[2];
  const int64_t groups = B.dims[0], n = B.dims[1], size = x.dims[0] / groups;
  const int64_t wide = (n + LANES - 1) / LANES * LANES, blocks = (size + CHANNELS - 1) / CHANNELS;
  const Range mine = share(team, groups * blocks);
  if (mine.begin == mine.end) return;
  float* scratch = static_cast<float*>(team_scratch(team, size_t(2 * (CHANNELS + 1) * wide) * 4));
  Block block{0, 0, wide, scratch, scratch + CHANNELS * wide};
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t group = i / blocks, first = i % blocks * CHANNELS;
    block.first = group * size + first;
    block.count = size - first < CHANNELS ? size - first : CHANNELS;
    for (int64_t c = 0; c < block.count; ++c) {
      const float* A_log = floats(call.weights[0]) + (block.first + c) * n;
      for (int64_t k = 0; k < wide; k += LANES) {
        const int64_t part = n - k < LANES ? (n - k < 0 ? 0 : n - k) : LANES;
        store(block.A + c * wide + k, vexp(load_part(A_log + k, part)) * -1.44269504088896341f);
      }
    }
    scan_block(step, call, block, group, scratch + 2 * CHANNELS * wide);
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
