// The recurrence of RecurrentGemma: both gates of some tokens as products of small matrices, then token after token.
#include "tile.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t COLUMNS = 64;  // channels of a unit of work
constexpr int64_t TOKENS = 32;   // whose gates are computed together
constexpr float SHARPNESS = 8.f;

struct Unit {
  int64_t head, first, count;  // channels first..first+count-1, all of one head
};

// Tokens times columns of a gate. One token is multiplied with whole rows of them, which lie together in memory.
static void multiply_gate(float* to, Left x, const float* gate, int64_t width, int64_t tokens, int64_t count) {
  if (tokens == 1 && count == COLUMNS)
    tile_block<1, COLUMNS / LANES, false>(to, COLUMNS, x, gate, width, width, LANES, false, 1.f);
  else
    multiply_tiles(to, COLUMNS, x, gate, width, tokens, count, width);
}

static void recur(const Step& step, const Call& call, const Unit& unit, float* scratch) {
  const Tensor &x = call.inputs[0], &y = call.outputs[0];
  const Cache& cache = call.caches[0];
  const int64_t channels = x.dims[0], width = call.weights[0].dims[1], column = unit.first - unit.head * width;
  const auto weight = [&](int i) { return floats(call.weights[i]); };
  const auto state = [&](int32_t slot) {
    return static_cast<char*>(cache.data) + (slot * channels + unit.first) * bytes_of(cache.format);
  };
  float *inputs = scratch, *recurrences = inputs + TOKENS * COLUMNS, *h = recurrences + TOKENS * COLUMNS;
  float* rate = h + COLUMNS;
  for (int64_t c = 0; c < unit.count; c += LANES) {
    const int64_t part = unit.count - c < LANES ? unit.count - c : LANES;
    store_part(rate + c, vsoftplus(load_part(weight(4) + unit.first + c, part)) * -SHARPNESS, part);
  }
  for (int64_t row = 0; row < step.num_sequences; ++row) {
    widen(h, state(step.state_src[row]), cache.format, unit.count);
    const int64_t end = step.cu_seqlens[row + 1];
    for (int64_t begin = step.cu_seqlens[row]; begin < end; begin += TOKENS) {
      const int64_t tokens = end - begin < TOKENS ? end - begin : TOKENS;
      const Left from{floats(x, begin) + unit.head * width, x.row_stride, 1};
      const int64_t at = unit.head * width * width + column;
      multiply_gate(inputs, from, weight(0) + at, width, tokens, unit.count);
      multiply_gate(recurrences, from, weight(2) + at, width, tokens, unit.count);
      for (int64_t c = 0; c < unit.count; c += LANES) {
        const int64_t part = unit.count - c < LANES ? unit.count - c : LANES, channel = unit.first + c;
        const vf input_bias = load_part(weight(1) + channel, part), recurrence_bias = load_part(weight(3) + channel, part);
        const vf rates = load_part(rate + c, part);
        vf last = load_part(h + c, part);
        for (int64_t t = 0; t < tokens; ++t) {
          const vf recurrence = load_part(recurrences + t * COLUMNS + c, part) + recurrence_bias;
          const vf log_a = vsigmoid(recurrence) * rates;
          const vf input = vsigmoid(load_part(inputs + t * COLUMNS + c, part) + input_bias);
          const bool start = step.positions[begin + t] == 0;
          const vf scale = start ? splat(1.f) : vsqrt(-vexpm1_fading(log_a + log_a));
          const vf added = scale * input * load_part(floats(x, begin + t) + channel, part);
          last = fma(vexp(log_a), last, added);
          store_part(floats(y, begin + t) + channel, last, part);
        }
        store_part(h + c, last, part);
      }
    }
    narrow(state(step.state_dst[row]), h, cache.format, unit.count);
  }
}

void rg_lru(const Step& step, const Call& call, Team& team) {
  const int64_t heads = call.weights[0].dims[0], width = call.weights[0].dims[1];
  const int64_t blocks = (width + COLUMNS - 1) / COLUMNS;
  const Range mine = share(team, heads * blocks);
  if (mine.begin == mine.end) return;
  float* scratch = static_cast<float*>(team_scratch(team, size_t((2 * TOKENS + 2) * COLUMNS) * 4));
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t head = i / blocks, column = i % blocks * COLUMNS;
    recur(step, call, {head, head * width + column, width - column < COLUMNS ? width - column : COLUMNS}, scratch);
  }
}

}  // namespace HT_ISA
}  // namespace hybridtrt
