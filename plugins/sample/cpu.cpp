// One row without a sort. The largest logit of each group of tokens says which groups can hold a token that counts;
// the few that do are collected in the order of ids and cut by radix selection.
#include "elementwise.h"
#include "sampler.h"
#include "vector_math.h"

namespace hybridtrt {
namespace HT_ISA {

constexpr int64_t GROUP = 64;
constexpr int BITS[] = {11, 10, 10};  // of a key, looked at one after another
constexpr int64_t BINS = 1 << 11;
constexpr float FAR = -87.f;      // vexp is 0 below: such a token is never chosen
constexpr double MARGIN = 0.999;  // by which bounds that only save work keep clear of what they bound

// Tokens in the order of their ids: id, logit less the best over the temperature, and its exponential.
struct Tokens {
  int32_t* ids;
  float *scaled, *weights;
};

// Every array has room for whole vectors.
struct Scratch {
  double *bins, *sums;      // [BINS]; the weights of each group
  float *maxima, *last;     // the largest logit of each group; the last group, filled up with minus infinity
  Tokens candidates, left;  // those that may be chosen; those among which a cut still looks
};

HT_INLINE int64_t groups_of(int64_t vocab) { return (vocab + GROUP - 1) / GROUP; }

static size_t scratch_bytes(int64_t vocab) {
  return size_t(BINS * 8 + groups_of(vocab) * (8 + 4 + 6 * 4 * GROUP) + 2 * 4 * GROUP);
}

static Scratch divide(void* memory, int64_t vocab) {
  const int64_t groups = groups_of(vocab), tokens = groups * GROUP;
  double* bins = static_cast<double*>(memory);
  double* sums = bins + BINS;
  float* last = reinterpret_cast<float*>(sums + groups);
  const auto tokens_at = [&](float* p) { return Tokens{reinterpret_cast<int32_t*>(p), p + tokens, p + 2 * tokens}; };
  const Tokens candidates = tokens_at(last + GROUP), left = tokens_at(last + GROUP + 3 * tokens);
  return {bins, sums, last + GROUP + 6 * tokens, last, candidates, left};
}

// A row in whole groups.
struct Row {
  const float *logits, *last;
  int64_t groups;
};

static Row in_groups(const float* logits, int64_t vocab, float* last) {
  const int64_t groups = groups_of(vocab), begin = (groups - 1) * GROUP;
  for (int64_t i = 0; i < GROUP; ++i) last[i] = begin + i < vocab ? logits[begin + i] : -__builtin_inff();
  return {logits, last, groups};
}

HT_INLINE const float* group(const Row& row, int64_t g) {
  return g + 1 < row.groups ? row.logits + g * GROUP : row.last;
}

// The largest logit, and of each group; NaN if the row holds one.
static float find_maxima(const Row& row, float* maxima) {
  vi strange = {};
  float best = -__builtin_inff();
  for (int64_t g = 0; g < row.groups; ++g) {
    const float* x = group(row, g);
    vf most = load(x);
    strange |= most != most;
    for (int64_t i = LANES; i < GROUP; i += LANES) {
      const vf v = load(x + i);
      strange |= v != v;
      most = vmax(most, v);
    }
    maxima[g] = largest(most);
    best = maxima[g] > best ? maxima[g] : best;
  }
  for (int i = 0; i < LANES; ++i)
    if (strange[i]) return __builtin_nanf("");
  return best;
}

// The first token of the logit `best`, or the first NaN.
static int64_t first_of(const Row& row, const float* maxima, float best) {
  int64_t g = 0;
  if (best == best)
    while (maxima[g] != best) ++g;
  for (int64_t token = g * GROUP;; ++token) {
    const float x = group(row, token / GROUP)[token % GROUP];
    if (x == best || x != x) return token;
  }
}

// (x - best) / temperature, as the definition rounds it.
struct Scale {
  vf best, temperature;
};

HT_INLINE Scale scale_by(float best, double temperature) {
  const double least = __FLT_MIN__, most = __FLT_MAX__;
  return {splat(best), splat(float(temperature < least ? least : temperature > most ? most : temperature))};
}
HT_INLINE vf scaled(const Scale& scale, vf x) { return (x - scale.best) / scale.temperature; }

typedef double vd __attribute__((vector_size(LANES * 4)));  // half as many lanes
typedef float vf_half __attribute__((vector_size(LANES * 2)));

HT_INLINE vd widen_half(const float* p) {
  vf_half half;
  memcpy(&half, p, sizeof half);
  return __builtin_convertvector(half, vd);
}

HT_INLINE double sum(vd v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_pd((__m512d)v);
#else
  double x[LANES / 2];
  memcpy(x, &v, sizeof v);
  for (int n = LANES / 4; n; n /= 2)
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  return x[0];
#endif
}

// The weights of one group.
HT_INLINE void weigh(const float* x, const Scale& scale, float* weights) {
  for (int64_t i = 0; i < GROUP; i += LANES) store(weights + i, vexp(scaled(scale, load(x + i))));
}

// The sum of all weights, and of each group.
static double sum_weights(const Row& row, const Scale& scale, double* sums) {
  double total = 0;
  for (int64_t g = 0; g < row.groups; ++g) {
    float weights[GROUP];
    weigh(group(row, g), scale, weights);
    vd a = {}, b = {};
    for (int64_t i = 0; i < GROUP; i += LANES) {
      a += widen_half(weights + i);
      b += widen_half(weights + i + LANES / 2);
    }
    sums[g] = sum(a + b);
    total += sums[g];
  }
  return total;
}

// Below it nothing is exceeded by the total, to which number * total may round up.
HT_INLINE double target_of(double number, double total) {
  const double target = number * total, below = __builtin_nextafter(total, 0.0);
  return target < below ? target : below;
}

// The first of n weights at which their sum, from `before` on, exceeds the target; if rounding kept it from that, the
// last that counts.
static int64_t first_beyond(const float* weights, int64_t n, double before, double target) {
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    before += double(weights[i]);
    if (before > target) return i;
    if (weights[i] > 0) last = i;
  }
  return last;
}

// The token, where all may be chosen.
static int64_t pick_of_all(const Row& row, const Scale& scale, double number, double* sums) {
  const double target = target_of(number, sum_weights(row, scale, sums));
  double before = 0;
  int64_t g = 0;
  while (before + sums[g] <= target) before += sums[g++];
  float weights[GROUP];
  weigh(group(row, g), scale, weights);
  return g * GROUP + first_beyond(weights, GROUP, before, target);
}

// Scaled logits are at most 0, so that their bits without the sign rank them, the best first.
HT_INLINE uint32_t key_of(float scaled) {
  uint32_t bits;
  memcpy(&bits, &scaled, 4);
  return bits & 0x7fffffffu;
}
HT_INLINE vi keys_of(vf scaled) { return (vi)scaled & 0x7fffffff; }
HT_INLINE float scaled_of(int32_t key) {
  const uint32_t bits = uint32_t(key) | 0x80000000u;
  float scaled;
  memcpy(&scaled, &bits, 4);
  return scaled;
}

// The lanes where the mask is set, side by side, to memory for a whole vector.
HT_INLINE void pack_lanes(float* to, vf v, vi mask) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)v));
#elif defined(__AVX2__)
  const uint64_t bytes = _pdep_u64(uint64_t(_mm256_movemask_ps((__m256)mask)), 0x0101010101010101u) * 0xff;
  const __m128i lanes = _mm_cvtsi64_si128(int64_t(_pext_u64(0x0706050403020100u, bytes)));
  _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)v, _mm256_cvtepu8_epi32(lanes)));
#else
  for (int i = 0, n = 0; i < LANES; n -= mask[i++]) to[n] = v[i];
#endif
}
HT_INLINE int64_t count(vi mask) {
#if defined(__AVX512F__)
  return __builtin_popcount(_mm512_movepi32_mask((__m512i)mask));
#elif defined(__AVX2__)
  return __builtin_popcount(unsigned(_mm256_movemask_ps((__m256)mask)));
#else
  int64_t n = 0;
  for (int i = 0; i < LANES; ++i) n -= mask[i];
  return n;
#endif
}

HT_INLINE vi lane_numbers() {
  vi lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  return lane;
}

// Move those of n tokens for which keep(ids, scaled, weights) holds; `to` may be `from`. Returns how many they are.
template <class F>
HT_INLINE int64_t filter(const Tokens& to, const Tokens& from, int64_t n, F keep) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += LANES) {
    const vf ids = load((const float*)from.ids + i), scaled = load(from.scaled + i), weights = load(from.weights + i);
    const vi mask = keep((vi)ids, scaled, weights) & (lane_numbers() < vi{} + int32_t(n - i < LANES ? n - i : LANES));
    pack_lanes((float*)to.ids + kept, ids, mask);
    pack_lanes(to.scaled + kept, scaled, mask);
    pack_lanes(to.weights + kept, weights, mask);
    kept += count(mask);
  }
  return kept;
}

// The tokens that rank highest: those of smaller keys, and of this key up to this id.
struct Cut {
  int32_t key, id;
};

// The fewest of n tokens, the best first, that reach the target by their weights or by their number: at least one, and
// all where rounding keeps them below it. Radix selection: the class of keys in which the run ends, and of that
// class the same by the next bits.
static Cut cut_at(const Tokens& tokens, int64_t n, double target, bool by_weight, const Scratch& s) {
  Tokens left = tokens;  // those that agree in the bits so far
  double before = 0;     // the amount of those that rank higher
  uint32_t key = 0;
  int shift = 31;
  for (const int bits : BITS) {
    shift -= bits;
    const uint32_t mask = (1u << bits) - 1;
    memset(s.bins, 0, sizeof(double) << bits);
    for (int64_t i = 0; i < n; ++i)
      s.bins[key_of(left.scaled[i]) >> shift & mask] += by_weight ? double(left.weights[i]) : 1.0;
    double reached = before;
    uint32_t last = 0;
    for (uint32_t bin = 0; bin <= mask; ++bin) {
      if (s.bins[bin] == 0) continue;
      last = bin;
      before = reached;
      reached += s.bins[bin];
      if (reached >= target) break;
    }
    key = key << bits | last;
    const int32_t same = int32_t(key);
    n = filter(s.left, left, n, [&](vi, vf scaled, vf) { return (keys_of(scaled) >> shift) == same; });
    left = s.left;
  }
  const double ties = __builtin_ceil((target - before) / (by_weight ? double(left.weights[0]) : 1.0));
  return {int32_t(key), left.ids[ties < 1 ? 0 : ties < double(n) ? int64_t(ties) - 1 : n - 1]};
}

static int64_t keep_best(const Tokens& tokens, int64_t n, Cut cut) {
  return filter(tokens, tokens, n, [&](vi ids, vf scaled, vf) {
    const vi keys = keys_of(scaled);
    return (keys < cut.key) | ((keys == cut.key) & (ids <= cut.id));
  });
}

// The tokens at or above the floor; returns how many they are.
static int64_t collect(const Row& row, const Scale& scale, float floor, const Scratch& s) {
  int64_t n = 0;
  for (int64_t g = 0; g < row.groups; ++g) {
    if (s.maxima[g] < floor) continue;
    const float* x = group(row, g);
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const vf v = scaled(scale, load(x + i));
      const vi mask = v >= floor;
      pack_lanes((float*)s.candidates.ids + n, (vf)(lane_numbers() + int32_t(g * GROUP + i)), mask);
      pack_lanes(s.candidates.scaled + n, v, mask);
      n += count(mask);
    }
  }
  return n;
}

HT_INLINE double sum_of(const float* x, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += double(x[i]);
  return total;
}

HT_INLINE float raised(float floor, double weight) {
  const float bound = float(__builtin_log(MARGIN * weight));
  return bound > floor ? bound : floor;
}

// The token, where top_k, top_p or min_p leaves some out.
static int64_t pick_within(const Row& row, int64_t vocab, const Scale& scale, const Draw& draw, const Scratch& s) {
  const bool top_k = draw.top_k > 0 && draw.top_k < vocab, top_p = draw.top_p < 1;
  const Tokens& tokens = s.candidates;
  double total = top_p && !top_k ? sum_weights(row, scale, s.sums) : 0;
  float floor = FAR;
  if (top_k && draw.top_k <= row.groups) {  // as many groups have a token as good as this one
    const Tokens maxima = {tokens.ids, s.maxima, tokens.weights};  // ids and weights are not looked at
    const float bound = scaled_of(cut_at(maxima, row.groups, double(draw.top_k), false, s).key);
    floor = bound > floor ? bound : floor;
  }
  if (top_p && !top_k)  // lighter ones hold less than 1 - top_p together
    floor = raised(floor, (1 - draw.top_p) * total / double(vocab));
  if (draw.min_p > 0 && !(top_k && top_p))  // those would count in the sum of what top-k keeps
    floor = raised(floor, draw.min_p);

  int64_t n = collect(row, scale, floor, s);
  map1(tokens.weights, tokens.scaled, n, [](vf v) { return vexp(v); });
  if (top_k && draw.top_k < n) n = keep_best(tokens, n, cut_at(tokens, n, double(draw.top_k), false, s));
  if (top_p) {
    if (top_k) total = sum_of(tokens.weights, n);
    n = keep_best(tokens, n, cut_at(tokens, n, draw.top_p * total, true, s));
  }
  if (draw.min_p > 0) n = filter(tokens, tokens, n, [&](vi, vf, vf weights) { return weights >= float(draw.min_p); });
  return tokens.ids[first_beyond(tokens.weights, n, 0, target_of(draw.number, sum_of(tokens.weights, n)))];
}

static Choice sample(const float* logits, int64_t vocab, const Draw& draw, void* memory) {
  const Scratch s = divide(memory, vocab);
  const Row row = in_groups(logits, vocab, s.last);
  const float best = find_maxima(row, s.maxima);
  if (!__builtin_isfinite(best) || !(draw.temperature > 0))
    return {first_of(row, s.maxima, best), bool(__builtin_isfinite(best))};
  const Scale scale = scale_by(best, draw.temperature);
  map1(s.maxima, s.maxima, row.groups, [&](vf v) { return scaled(scale, v); });
  const bool limited = (draw.top_k > 0 && draw.top_k < vocab) || draw.top_p < 1 || draw.min_p > 0;
  return {limited ? pick_within(row, vocab, scale, draw, s) : pick_of_all(row, scale, draw.number, s.sums), true};
}

static double log_normalizer(const float* logits, int64_t vocab, void* memory) {
  const Scratch s = divide(memory, vocab);
  const Row row = in_groups(logits, vocab, s.last);
  const float best = find_maxima(row, s.maxima);
  if (!__builtin_isfinite(best)) return __builtin_nan("");
  return double(best) + __builtin_log(sum_weights(row, scale_by(best, 1), s.sums));
}

extern const Sampler SAMPLER;
const Sampler SAMPLER = {scratch_bytes, sample, log_normalizer};

}  // namespace HT_ISA
}  // namespace hybridtrt
