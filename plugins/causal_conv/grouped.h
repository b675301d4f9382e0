// Convolution where each channel sees all channels of its group: products of windows [channels of a group, width] with
// rows of the weight, which lie alike.
#pragma once
#include "shuffle.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t WINDOWS = 16;  // tokens whose windows are laid out together

// Products of M windows with R rows of the weight, n numbers each, before the sum of their lanes.
template <int M, int R>
HT_INLINE void multiply_rows(vf (*products)[LANES], int64_t at, const float* windows, int64_t stride, const float* rows,
                             int64_t n) {
  vf totals[M][R] = {};
  int64_t k = 0;
  const auto add = [&](const auto& read) {
    vf b[R];
    for (int r = 0; r < R; ++r) b[r] = read(rows + r * n + k);
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < R; ++r) totals[m][r] = fma(load(windows + m * stride + k), b[r], totals[m][r]);
  };
  for (; k + LANES <= n; k += LANES) add([](const float* p) { return load(p); });
  if (k < n) add([&](const float* p) { return load_part(p, n - k); });
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) products[m][at + r] = totals[m][r];
}

// out[m] for M windows and `count` <= LANES rows of the weight; windows are zero up to whole vectors.
template <int M>
HT_INLINE void window_products(vf* out, const float* windows, int64_t stride, const float* rows, int64_t n,
                               int64_t count) {
  vf products[M][LANES] = {};
  int64_t r = 0;
  for (; r + 2 <= count; r += 2) multiply_rows<M, 2>(products, r, windows, stride, rows + r * n, n);
  if (r < count) multiply_rows<M, 1>(products, r, windows, stride, rows + r * n, n);
  for (int m = 0; m < M; ++m) out[m] = sum_each(products[m]);
}

static void convolve_groups(const Step& step, const Call& call, Team& team) {
  const Tensor &x = call.inputs[0], &y = call.outputs[0];
  const Weight &weight = call.weights[0], &bias = call.weights[1];
  const Cache& cache = call.caches[0];
  const int64_t channels = x.dims[0], size = weight.dims[1], width = weight.dims[2], past = width - 1;
  const int64_t n = size * width, stride = (n + LANES - 1) / LANES * LANES;
  const bool silu = given(call, 0);
  const Range mine = share(team, channels / size);
  if (mine.begin == mine.end) return;
  float* windows = static_cast<float*>(team_scratch(team, size_t(WINDOWS * stride + size * past) * 4));
  float* recent = windows + WINDOWS * stride;  // [size, past]: the inputs before the next token
  for (int64_t i = 0; i < WINDOWS; ++i)
    for (int64_t k = n; k < stride; ++k) windows[i * stride + k] = 0.f;
  for (int64_t group = mine.begin; group < mine.end; ++group) {
    const int64_t first = group * size;
    const auto state = [&](int32_t slot) {
      return static_cast<char*>(cache.data) + (slot * channels + first) * past * bytes_of(cache.format);
    };
    for (int64_t row = 0; row < step.num_sequences; ++row) {
      const int64_t end = step.cu_seqlens[row + 1];
      widen(recent, state(step.state_src[row]), cache.format, size * past);
      for (int64_t begin = step.cu_seqlens[row]; begin < end; begin += WINDOWS) {
        const int64_t tokens = end - begin < WINDOWS ? end - begin : WINDOWS;
        for (int64_t t = 0; t < tokens; ++t) {
          const float* inputs = floats(x, begin + t) + first;
          for (int64_t c = 0; c < size; ++c) {
            float *window = windows + t * stride + c * width, *before = recent + c * past;
            for (int64_t w = 0; w < past; ++w) window[w] = before[w];
            window[past] = inputs[c];
            for (int64_t w = 0; w < past; ++w) before[w] = window[w + 1];
          }
        }
        for (int64_t c = 0; c < size; c += LANES) {
          const int64_t count = size - c < LANES ? size - c : LANES;
          const float* rows = floats(weight) + (first + c) * n;
          const vf added = bias.data ? load_part(floats(bias) + first + c, count) : vf{};
          const auto put = [&](int64_t t, vf v) {
            v += added;
            store_part(floats(y, begin + t) + first + c, silu ? v * vsigmoid(v) : v, count);
          };
          vf out[4];
          int64_t t = 0;
          for (; t + 4 <= tokens; t += 4) {
            window_products<4>(out, windows + t * stride, stride, rows, n, count);
            for (int k = 0; k < 4; ++k) put(t + k, out[k]);
          }
          for (; t < tokens; ++t) {
            window_products<1>(out, windows + t * stride, stride, rows, n, count);
            put(t, out[0]);
          }
        }
      }
      narrow(state(step.state_dst[row]), recent, cache.format, size * past);
    }
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
