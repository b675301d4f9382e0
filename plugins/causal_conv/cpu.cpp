// Causal convolution: each tap reads a row of inputs before the token, of this step or of the state.
#include "grouped.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

// Threads share blocks of this many channels: some cache lines of a token's row.
constexpr int64_t CHANNELS = 64;
// Tokens from now that are fetched: rows lie too far apart for the machine to do so by itself.
constexpr int64_t AHEAD = 4;

// One block of channels. `before` are the inputs that the state holds, `rows` has room for a pointer for each tap.
struct Block {
  int64_t first, count, width;
  float *weight, *bias, *before;  // [width, CHANNELS], [CHANNELS], [width - 1, CHANNELS]
  const float** rows;
};

// Channels of input `i` of a sequence whose step begins at token `begin`.
HT_INLINE const float* input(const Block& block, const Tensor& x, int64_t begin, int64_t i) {
  return i < 0 ? block.before + (block.width - 1 + i) * CHANNELS : floats(x, begin + i) + block.first;
}

// Channels c.. of one token. WIDTH is the number of taps, or 0 for any.
template <int WIDTH, class F>
HT_INLINE vf sum_of_taps(const Block& block, int64_t c, F read) {
  vf sum = load(block.bias + c);
  for (int64_t w = 0; w < (WIDTH ? WIDTH : block.width); ++w)
    sum = fma(read(block.rows[w] + c), load(block.weight + w * CHANNELS + c), sum);
  return sum;
}

template <int WIDTH, class F>
HT_INLINE void convolve(const Block& block, const Tensor& x, const Tensor& y, int64_t begin, int64_t tokens, F f) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t w = 0; w < block.width; ++w) block.rows[w] = input(block, x, begin, t - block.width + 1 + w);
    if (t + AHEAD < tokens)
      for (int64_t c = 0; c < block.count; c += 16) {
        __builtin_prefetch(floats(x, begin + t + AHEAD) + block.first + c);
        __builtin_prefetch(floats(y, begin + t + AHEAD) + block.first + c, 1);
      }
    float* to = floats(y, begin + t) + block.first;
    int64_t c = 0;
    for (; c + LANES <= block.count; c += LANES)
      store(to + c, f(sum_of_taps<WIDTH>(block, c, [](const float* p) { return load(p); })));
    const int64_t part = block.count - c;
    const auto load_rest = [&](const float* p) { return load_part(p, part); };
    if (part) store_part(to + c, f(sum_of_taps<WIDTH>(block, c, load_rest)), part);
  }
}

template <class F>
static void convolve_row(const Block& block, const Tensor& x, const Tensor& y, int64_t begin, int64_t tokens, F f) {
  switch (block.width) {
    case 2: return convolve<2>(block, x, y, begin, tokens, f);
    case 3: return convolve<3>(block, x, y, begin, tokens, f);
    case 4: return convolve<4>(block, x, y, begin, tokens, f);
    default: return convolve<0>(block, x, y, begin, tokens, f);
  }
}

// from [count, N] as [N, CHANNELS].
template <int N>
HT_INLINE void columns_to_rows(float* __restrict to, const float* __restrict from, int64_t count) {
  for (int64_t c = 0; c < count; ++c)
    for (int k = 0; k < N; ++k) to[k * CHANNELS + c] = from[c * N + k];
}
static void to_rows(float* to, const float* from, int64_t count, int64_t n) {
  if (n == 3) return columns_to_rows<3>(to, from, count);
  if (n == 4) return columns_to_rows<4>(to, from, count);
  for (int64_t k = 0; k < n; ++k)
    for (int64_t c = 0; c < count; ++c) to[k * CHANNELS + c] = from[c * n + k];
}

static void depthwise(const Step& step, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &y = call.outputs[0];
  const Weight &weight = call.weights[0], &bias = call.weights[1];
  const Cache& cache = call.caches[0];
  const int64_t channels = x.dims[0], width = weight.dims[1], past = width - 1, numbers = 3 * width * CHANNELS;
  const Range mine = share(team, channels, CHANNELS);
  if (mine.begin >= mine.end) return;
  float* scratch = static_cast<float*>(team_scratch(team, size_t(numbers) * 4 + size_t(width) * sizeof(float*)));
  for (int64_t i = 0; i < numbers; ++i) scratch[i] = 0.f;  // beyond the channels
  float *taps = scratch, *biases = taps + width * CHANNELS, *before = biases + CHANNELS;
  float* lying = before + past * CHANNELS;  // [count, past]
  for (int64_t first = mine.begin; first < mine.end; first += CHANNELS) {
    const int64_t count = mine.end - first < CHANNELS ? mine.end - first : CHANNELS;
    const Block block{first, count, width, taps, biases, before, reinterpret_cast<const float**>(scratch + numbers)};
    const auto state = [&](int32_t slot) {
      return static_cast<char*>(cache.data) + (slot * channels + first) * past * bytes_of(cache.format);
    };
    to_rows(taps, floats(weight) + first * width, count, width);
    if (bias.data) memcpy(biases, floats(bias) + first, size_t(count) * 4);
    for (int64_t row = 0; row < step.num_sequences; ++row) {
      const int64_t begin = step.cu_seqlens[row], tokens = step.cu_seqlens[row + 1] - begin;
      widen(lying, state(step.state_src[row]), cache.format, count * past);
      to_rows(before, lying, count, past);
      if (given(call, 0))
        convolve_row(block, x, y, begin, tokens, [](vf v) { return v * vsigmoid(v); });
      else
        convolve_row(block, x, y, begin, tokens, [](vf v) { return v; });
      for (int64_t k = 0; k < past; ++k) {
        const float* from = input(block, x, begin, tokens - past + k);
        for (int64_t c = 0; c < count; ++c) lying[c * past + k] = from[c];
      }
      narrow(state(step.state_dst[row]), lying, cache.format, count * past);
    }
  }
}

void causal_conv(const Step& step, const Call& call, Team& team) {
  if (call.weights[0].rank == 2)
    depthwise(step, call, team);
  else
    convolve_groups(step, call, team);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
