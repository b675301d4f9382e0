// Causal convolution: each tap reads a row of inputs before the token, of this step or of the state.
#include "grouped.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

// Threads share blocks of this many channels: some cache lines of a token's row.
constexpr int64_t CHANNELS = 64;

// One block of channels of one sequence: its inputs by number, those before the step being -past..-1.
struct Inputs {
  const Tensor& x;
  int64_t first_token, first_channel, past;
  const float* before;  // [past, CHANNELS]
};

HT_INLINE const float* input(const Inputs& in, int64_t i) {
  return i < 0 ? in.before + (i + in.past) * CHANNELS : floats(in.x, in.first_token + i) + in.first_channel;
}

// Channels of one token; `taps` [width, CHANNELS]. WIDTH is the width, or 0 for any.
template <int WIDTH, class F>
HT_INLINE void convolve(float* y, const Inputs& inputs, int64_t token, const float* taps, const float* bias,
                        int64_t count, F f) {
  constexpr int MOST = WIDTH ? WIDTH : 1;
  const int64_t width = inputs.past + 1;
  const float* from[MOST];
  for (int w = 0; w < WIDTH; ++w) from[w] = input(inputs, token - WIDTH + 1 + w);
  for (int64_t c = 0; c < count; c += LANES) {
    const int64_t part = count - c < LANES ? count - c : LANES;
    vf sum = load(bias + c);
    if constexpr (WIDTH > 0) {
      for (int w = 0; w < WIDTH; ++w) sum = fma(load_part(from[w] + c, part), load(taps + w * CHANNELS + c), sum);
    } else {
      for (int64_t w = 0; w < width; ++w)
        sum = fma(load_part(input(inputs, token - width + 1 + w) + c, part), load(taps + w * CHANNELS + c), sum);
    }
    store_part(y + c, f(sum), part);
  }
}

template <class F>
static void convolve_row(const Tensor& y, const Inputs& inputs, int64_t tokens, const float* taps, const float* bias,
                         int64_t count, F f) {
  for (int64_t t = 0; t < tokens; ++t) {
    float* to = floats(y, inputs.first_token + t) + inputs.first_channel;
    switch (inputs.past + 1) {
      case 2: convolve<2>(to, inputs, t, taps, bias, count, f); break;
      case 3: convolve<3>(to, inputs, t, taps, bias, count, f); break;
      case 4: convolve<4>(to, inputs, t, taps, bias, count, f); break;
      default: convolve<0>(to, inputs, t, taps, bias, count, f);
    }
  }
}

// from [count, n] as [n, CHANNELS], the rest of each row zero; and back.
static void to_rows(float* to, const float* from, int64_t count, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    for (int64_t c = 0; c < count; ++c) to[k * CHANNELS + c] = from[c * n + k];
    for (int64_t c = count; c < CHANNELS; ++c) to[k * CHANNELS + c] = 0.f;
  }
}

static void depthwise(const Step& step, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &y = call.outputs[0];
  const Weight &weight = call.weights[0], &bias = call.weights[1];
  const Cache& cache = call.caches[0];
  const int64_t channels = x.dims[0], width = weight.dims[1], past = width - 1;
  const Range mine = share(team, channels, CHANNELS);
  if (mine.begin >= mine.end) return;
  float* taps = static_cast<float*>(team_scratch(team, size_t((3 * width + 1) * CHANNELS) * 4));
  float *biases = taps + width * CHANNELS, *before = biases + CHANNELS, *lying = before + past * CHANNELS;
  for (int64_t first = mine.begin; first < mine.end; first += CHANNELS) {
    const int64_t count = mine.end - first < CHANNELS ? mine.end - first : CHANNELS;
    const auto state = [&](int32_t slot) {
      return static_cast<char*>(cache.data) + (slot * channels + first) * past * bytes_of(cache.format);
    };
    to_rows(taps, floats(weight) + first * width, count, width);
    for (int64_t c = 0; c < CHANNELS; ++c) biases[c] = bias.data && c < count ? floats(bias)[first + c] : 0.f;
    for (int64_t row = 0; row < step.num_sequences; ++row) {
      const int64_t begin = step.cu_seqlens[row], tokens = step.cu_seqlens[row + 1] - begin;
      const Inputs inputs{x, begin, first, past, before};
      widen(lying, state(step.state_src[row]), cache.format, count * past);
      to_rows(before, lying, count, past);
      if (given(call, 0))
        convolve_row(y, inputs, tokens, taps, biases, count, [](vf v) { return v * vsigmoid(v); });
      else
        convolve_row(y, inputs, tokens, taps, biases, count, [](vf v) { return v; });
      for (int64_t k = 0; k < past; ++k) {
        const float* from = input(inputs, tokens - past + k);
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
