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

// Products of both gates [TOKENS, COLUMNS], and -8 softplus(decay).
struct Gates {
  const float *inputs, *recurrences, *rates;
};

// The state through tokens begin..end-1 of one sequence, whose gates begin at token `first`.
static void advance(const Step& step, const Call& call, const Unit& unit, const Gates& gates, float* h, int64_t first,
                    int64_t begin, int64_t end) {
  const Tensor &x = call.inputs[0], &y = call.outputs[0];
  for (int64_t c = 0; c < unit.count; c += LANES) {
    const int64_t part = unit.count - c < LANES ? unit.count - c : LANES, channel = unit.first + c;
    const vf input_bias = load_part(floats(call.weights[1]) + channel, part);
    const vf recurrence_bias = load_part(floats(call.weights[3]) + channel, part);
    const vf rates = load_part(gates.rates + c, part);
    vf last = load_part(h + c, part);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t at = (t - first) * COLUMNS + c;
      const vf log_a = vsigmoid(load_part(gates.recurrences + at, part) + recurrence_bias) * rates;
      const vf input = vsigmoid(load_part(gates.inputs + at, part) + input_bias);
      const vf scale = step.positions[t] == 0 ? splat(1.f) : vsqrt(-vexpm1_fading(log_a + log_a));
      last = fma(vexp(log_a), last, scale * input * load_part(floats(x, t) + channel, part));
      store_part(floats(y, t) + channel, last, part);
    }
    store_part(h + c, last, part);
  }
}

static void recur(const Step& step, const Call& call, const Unit& unit, float* scratch) {
  const Tensor& x = call.inputs[0];
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
  const Gates gates{inputs, recurrences, rate};
  int64_t first = 0, known = 0;  // tokens first..known-1 have their gates, whatever rows they are of
  for (int64_t row = 0; row < step.num_sequences; ++row) {
    widen(h, state(step.state_src[row]), cache.format, unit.count);
    const int64_t end = step.cu_seqlens[row + 1];
    for (int64_t begin = step.cu_seqlens[row]; begin < end;) {
      if (begin >= known) {
        first = begin;
        known = step.num_tokens - begin < TOKENS ? step.num_tokens : begin + TOKENS;
        const Left from{floats(x, begin) + unit.head * width, x.row_stride, 1};
        const int64_t at = unit.head * width * width + column;
        multiply_gate(inputs, from, weight(0) + at, width, known - begin, unit.count);
        multiply_gate(recurrences, from, weight(2) + at, width, known - begin, unit.count);
      }
      const int64_t until = end < known ? end : known;
      advance(step, call, unit, gates, h, first, begin, until);
      begin = until;
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
