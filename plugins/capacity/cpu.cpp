// Places at the experts, handed out by weight. One thread does it: sorting some thousand pairs is little beside the
// experts' products.
#include "sort.h"

namespace hybridtrt {
namespace HT_ISA {

enum Overflow { DROP, NEXT_BEST };
constexpr int32_t NONE = -1;  // of a pair that has no expert yet

static bool holds_memory(const Step& step, int64_t row) {
  if (step.state_dst[row]) return true;
  for (int64_t table = 0; table < step.num_tables; ++table)
    for (int64_t i = 0, pages = step.table_widths[table]; i < pages; ++i)
      if (step.block_tables[table][row * pages + i]) return true;
  return false;
}

// Which rows are not padding; returns the tokens of those.
static int64_t find_real(const Step& step, char* real) {
  int64_t tokens = 0;
  for (int64_t row = 0; row < step.num_sequences; ++row) {
    real[row] = holds_memory(step, row);
    if (real[row]) tokens += step.cu_seqlens[row + 1] - step.cu_seqlens[row];
  }
  if (tokens) return tokens;
  memset(real, 1, size_t(step.num_sequences));  // a model that has no caches
  return step.num_tokens;
}

struct Places {
  const Tensor &weights, &experts, &kept, &numbers;
  int32_t* load;
  int64_t top_k, num_experts, most;
};

// Give a choice of a token the expert at that place of the token's order, if it has room.
static bool take(const Places& p, int64_t token, int64_t choice, int64_t place) {
  const int32_t expert = ints(p.experts, token)[place];
  if (expert < p.num_experts) {
    if (p.load[expert] == p.most) return false;
    ++p.load[expert];
  }
  floats(p.kept, token)[choice] = floats(p.weights, token)[place];
  ints(p.numbers, token)[choice] = expert;
  return true;
}

// The same with the first place beyond the choices that has room and is not the token's already.
static void go_on(const Places& p, int64_t token, int64_t choice) {
  const int32_t *order = ints(p.experts, token), *own = ints(p.numbers, token);
  for (int64_t place = p.top_k; place < p.experts.dims[0]; ++place) {
    bool has = false;
    for (int64_t j = 0; j < p.top_k; ++j) has |= own[j] == order[place];
    if (!has && take(p, token, choice, place)) return;
  }
}

void capacity(const Step& step, const Call& call, Team& team) {
  const Tensor &weights = call.inputs[0], &kept = call.outputs[0], &numbers = call.outputs[1];
  const int64_t top_k = int64_t(call.attributes[0]), experts = int64_t(call.attributes[1]), all = weights.rows * top_k;
  if (team.rank) return;
  Keyed* pairs = static_cast<Keyed*>(team_scratch(team, size_t(2 * all) * sizeof(Keyed) + size_t(step.num_sequences)));
  char* real = reinterpret_cast<char*>(pairs + 2 * all);
  const double tokens = double(find_real(step, real));
  const double most = call.attributes[2] * tokens * double(top_k) / double(experts) * (1 - 1e-12);
  int32_t *load = ints(call.outputs[2]), *refused = ints(call.outputs[3]);
  const Places places{weights, call.inputs[1], kept, numbers, load,
                      top_k, experts, int64_t(__builtin_ceil(most < tokens ? most : tokens))};
  memset(load, 0, size_t(experts) * 4);
  memset(refused, 0, size_t(experts) * 4);

  int64_t asking = 0;
  for (int64_t t = 0; t < weights.rows; ++t)
    for (int64_t j = 0; j < top_k; ++j) {
      floats(kept, t)[j] = 0.f;
      ints(numbers, t)[j] = NONE;
      if (real[step.token_rows[t]]) pairs[asking++] = Keyed{descending(floats(weights, t)[j]), int32_t(t * top_k + j)};
    }
  sort_keyed(pairs, pairs + all, asking);
  int64_t lost = 0;
  for (int64_t i = 0; i < asking; ++i) {
    const int64_t token = pairs[i].number / top_k, choice = pairs[i].number % top_k;
    if (take(places, token, choice, choice)) continue;
    ++refused[ints(places.experts, token)[choice]];
    pairs[lost++] = pairs[i];
  }
  if (Overflow(int(call.attributes[3])) == NEXT_BEST)
    for (int64_t i = 0; i < lost; ++i) go_on(places, pairs[i].number / top_k, pairs[i].number % top_k);
  for (int64_t t = 0; t < weights.rows; ++t)
    for (int64_t j = 0; j < top_k; ++j)
      if (ints(numbers, t)[j] == NONE) ints(numbers, t)[j] = int32_t(experts);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
