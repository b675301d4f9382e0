// The best experts of each token and their weights. Among equals the expert of the lower number comes first.
#include "elementwise.h"
#include "sort.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

enum Scoring { SOFTMAX, SOFTMAX_TOPK, SIGMOID_SCORES, SPARSEMIXER };
enum GroupScore { TOP2, BEST };

struct Rule {
  int64_t experts, top_k, ranked, groups, top_groups;
  Scoring scoring;
  GroupScore group_score;
  bool renormalize;
  float renormalize_eps, scaling, jitter;
  const float* selection_bias;  // or null
};

// The first of the largest of n numbers. They are no NaN.
HT_INLINE int64_t first_largest(const float* x, int64_t n) {
  vf best = splat(-__builtin_inff());
  vi at = vi{} + INT32_MAX;
  vi lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  for (int64_t i = 0; i < n; i += LANES) {
    const vi number = lane + int32_t(i);
    vf v = load_part(x + i, n - i < LANES ? n - i : LANES);
    v = number < int32_t(n) ? v : splat(-__builtin_inff());
    const vi better = v > best;
    best = better ? v : best;
    at = better ? number : at;
  }
  const float most = largest(best);
  int32_t first = INT32_MAX;
  for (int i = 0; i < LANES; ++i)
    if (best[i] == most && at[i] < first) first = at[i];
  return first;
}

constexpr int64_t SORTED_FROM = 24;  // so many are sooner found by sorting all

// Numbers of the k best of n, best first. `left` loses them; `taken` are n flags, `items` room to sort. NaN counts as
// the largest.
static void best_of(int32_t* chosen, int64_t k, float* left, char* taken, Keyed* items, int64_t n) {
  map1(left, left, n, [](vf v) { return v == v ? v : splat(__builtin_inff()); });
  memset(taken, 0, size_t(n));
  if (k >= SORTED_FROM) {
    for (int64_t i = 0; i < n; ++i) items[i] = Keyed{descending(left[i]), int32_t(i)};
    sort_keyed(items, items + n, n);
    for (int64_t i = 0; i < k; ++i) {
      chosen[i] = items[i].number;
      taken[chosen[i]] = 1;
    }
    return;
  }
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = first_largest(left, n);
    if (best >= n)  // nothing but minus infinity is left
      for (best = 0; taken[best];) ++best;
    taken[best] = 1;
    left[best] = -__builtin_inff();
    chosen[i] = int32_t(best);
  }
}

static void softmax(float* y, const float* x, int64_t n) {
  vf vectors = splat(x[0]);
  for (int64_t i = 0; i + LANES <= n; i += LANES) vectors = vmax(vectors, load(x + i));
  float most = largest(vectors);
  for (int64_t i = n / LANES * LANES; i < n; ++i) most = x[i] > most ? x[i] : most;
  const vf top = splat(most);
  map1(y, x, n, [&](vf v) { return vexp(v - top); });
  vf total = {};
  for (int64_t i = 0; i < n; i += LANES) total += load_part(y + i, n - i < LANES ? n - i : LANES);
  const vf by = splat(1.f / sum(total));
  map1(y, y, n, [&](vf v) { return v * by; });
}

struct Scratch {
  float *scores, *preference, *merits;
  Keyed* items;
  int32_t* groups;
  char* taken;
};

// Minus infinity for the experts of all but the best groups.
static void keep_groups(const Rule& rule, const Scratch& s) {
  const int64_t size = rule.experts / rule.groups;
  for (int64_t g = 0; g < rule.groups; ++g) {
    const float* x = s.preference + g * size;
    float first = -__builtin_inff(), second = first;
    for (int64_t i = 0; i < size; ++i) {
      if (x[i] > first) {
        second = first;
        first = x[i];
      } else if (x[i] > second) {
        second = x[i];
      }
    }
    s.merits[g] = rule.group_score == TOP2 ? first + second : first;
  }
  best_of(s.groups, rule.top_groups, s.merits, s.taken, s.items, rule.groups);
  for (int64_t g = 0; g < rule.groups; ++g)
    if (!s.taken[g])
      for (int64_t i = 0; i < size; ++i) s.preference[g * size + i] = -__builtin_inff();
}

// The weight of each ranked expert: its softmax over the logits then left that are near it.
static void sparsemixer(const Rule& rule, const float* logits, float* left, float* weights, const int32_t* chosen) {
  memcpy(left, logits, size_t(rule.experts) * 4);
  for (int64_t k = 0; k < rule.ranked; ++k) {
    const float most = logits[chosen[k]];
    float total = 0.f;
    for (int64_t i = 0; i < rule.experts; ++i) {
      const float size = __builtin_fabsf(logits[i]), norm = size > most ? size : most;
      const bool far = (most - logits[i]) / norm > 2.f * rule.jitter;
      if (!far) total += exp1(left[i] - most);
    }
    weights[k] = 1.f / total;
    left[chosen[k]] = -__builtin_inff();
  }
}

static void route(const Rule& rule, const float* logits, float* weights, int32_t* chosen, const Scratch& s) {
  if (rule.scoring == SPARSEMIXER) {
    memcpy(s.preference, logits, size_t(rule.experts) * 4);
    best_of(chosen, rule.ranked, s.preference, s.taken, s.items, rule.experts);
    sparsemixer(rule, logits, s.preference, weights, chosen);
  } else {
    if (rule.scoring == SOFTMAX)
      softmax(s.scores, logits, rule.experts);
    else if (rule.scoring == SIGMOID_SCORES)
      map1(s.scores, logits, rule.experts, [](vf v) { return vsigmoid(v); });
    else
      memcpy(s.scores, logits, size_t(rule.experts) * 4);
    // Probabilities may be equal where logits differ.
    const bool by_logits = rule.scoring == SOFTMAX && !rule.selection_bias && rule.groups == 1;
    memcpy(s.preference, by_logits ? logits : s.scores, size_t(rule.experts) * 4);
    if (rule.selection_bias)
      map2(s.preference, s.scores, rule.selection_bias, rule.experts, [](vf a, vf b) { return a + b; });
    if (rule.groups > 1) keep_groups(rule, s);
    best_of(chosen, rule.ranked, s.preference, s.taken, s.items, rule.experts);
    for (int64_t k = 0; k < rule.ranked; ++k) weights[k] = s.scores[chosen[k]];
    if (rule.scoring == SOFTMAX_TOPK) {
      softmax(weights, weights, rule.top_k);
      const float first = s.scores[chosen[0]];  // the largest; the rest by the same sum
      for (int64_t k = rule.top_k; k < rule.ranked; ++k) weights[k] = weights[0] * exp1(weights[k] - first);
    }
  }
  float by = rule.scaling;
  if (rule.renormalize) {
    float total = 0.f;
    for (int64_t k = 0; k < rule.top_k; ++k) total += weights[k];
    by /= total + rule.renormalize_eps;
  }
  for (int64_t k = 0; k < rule.ranked; ++k) weights[k] *= by;
}

void router(const Step&, const Call& call, Team& team) {
  const Tensor& logits = call.inputs[0];
  const int64_t experts = logits.dims[0];
  const Rule rule{experts,
                  int64_t(call.attributes[0]),
                  call.outputs[0].dims[0],
                  int64_t(attribute(call, 5, 1)),
                  int64_t(attribute(call, 6, 1)),
                  Scoring(int(call.attributes[1])),
                  GroupScore(int(attribute(call, 7, TOP2))),
                  attribute(call, 2, 0) != 0,
                  float(attribute(call, 3, 0)),
                  float(attribute(call, 4, 1)),
                  float(attribute(call, 8, 0)),
                  floats(call.weights[0])};
  auto* items = static_cast<Keyed*>(team_scratch(team, size_t(experts) * (2 * sizeof(Keyed) + 17)));
  auto* numbers = reinterpret_cast<float*>(items + 2 * experts);
  auto* groups = reinterpret_cast<int32_t*>(numbers + 3 * experts);
  auto* taken = reinterpret_cast<char*>(numbers + 4 * experts);
  const Scratch scratch{numbers, numbers + experts, numbers + 2 * experts, items, groups, taken};
  const Range mine = share(team, logits.rows);
  for (int64_t t = mine.begin; t < mine.end; ++t)
    route(rule, floats(logits, t), floats(call.outputs[0], t), ints(call.outputs[1], t), scratch);
}

}  // namespace HT_ISA
}  // namespace hybridtrt
